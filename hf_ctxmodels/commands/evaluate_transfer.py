r"""Zero-shot transfer between languages: train a tagger in one language, test it in others.

    hf-ctxmodels evaluate-transfer --model runs/xlm --task pos --train en --test de,fr,es --data_dir ud \
        --output_dir runs/xlm-pos

A language is given by its code, with files named as Universal Dependencies (pos) or WikiANN (ner) name them anywhere in
--data_dir, or as CODE=FILE. The baseline is the most frequent tag of a word in the training file; for words that do not
occur there, the most frequent tag of all. A model with language embeddings is told the language of each file. With
`--adapter tagger --adapters en=DIR,de=DIR,fr=DIR` a task adapter is trained on that of the training language, which is
exchanged for a test (MAD-X). Leaves the model and transfer.json in the output directory.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig

from hf_ctxmodels.adapters.arguments import AdapterArguments, exchange_lowest
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.outputs import writing
from hf_ctxmodels.data.files import check_file
from hf_ctxmodels.data.tasks import TaskArguments
from hf_ctxmodels.data.tasks.languages import LanguageFile
from hf_ctxmodels.training.finetuning_arguments import FinetuningMethodArguments
from hf_ctxmodels.training.finetuning_run import (
    FinetuneArguments,
    Finetuned,
    FinetuneLoopArguments,
    HowToFinetune,
    finetune,
)
from hf_ctxmodels.training.loading import load_config
from hf_ctxmodels.training.metrics.task_evaluation import TaskEvaluation
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class TransferArguments:
    """Which model, and which languages."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id of a multilingual encoder."})
    task: Literal["pos", "ner"] = field(metadata={"help": "Parts of speech (CoNLL-U), or entities (CoNLL columns)."})
    test: str = field(metadata={"help": "Languages to test in, separated by commas: de,fr or de=FILE,fr=FILE."})
    train: str = flag("en", "Language to train in: en or en=FILE.")
    data_dir: str | None = flag(None, "Folder with the files of languages that are given by their code alone.")
    validation_file: str | None = flag(None, "Held-out examples of the training language; by default its dev file.")
    freeze: Literal["encoder"] | None = flag(None, "`encoder`: train the tagger alone, on the encoder's states.")
    train_examples: int | None = flag(None, "Train on a sample of so many sentences, the same one whatever the seed.")


def language_number(config: PreTrainedConfig, language: str) -> int | None:
    """The number of a language in a model with language embeddings; None for others.

    Raises:
        CtxError: The model does not know the language.
    """
    numbers = getattr(config, "lang2id", None)
    if not numbers:
        return None
    if language not in numbers:
        raise CtxError(
            f"The model has no embedding of the language {language!r}.",
            location="--train, --test",
            hint=f"use some of {', '.join(numbers)}, with these names: NAME=FILE.",
        )
    return numbers[language]


def measure(found: Finetuned, source: LanguageFile, batch_size: int, folders: dict[str, str]) -> dict[str, Any]:
    """The metrics in a language, with its adapter if `folders` has it, beside those of the baseline."""
    task = found.task
    if source.language in folders:
        exchange_lowest(found.model, f"language_{source.language}", folders[source.language])
    examples = task.read(str(source.file), "test")
    if (number := language_number(found.model.config, source.language)) is not None:
        found.model.config.default_lang = number
    encoded = task.encode(examples, found.tokenizer)
    evaluation = TaskEvaluation(task, examples, encoded, task.collator(found.tokenizer), batch_size)
    metrics = evaluation(found.model.eval(), found.accelerator)
    baseline = task.score(examples, task.baseline(found.training, examples))
    return {
        "language": source.language,
        "file": source.file.name,
        "examples": len(examples),
        "metrics": {name: metrics[f"eval_{name}"] for name in baseline},
        "baseline": baseline,
    }


def table(rows: list[dict[str, Any]], trained_in: str) -> str:
    """The main metric in each language, and its mean over the languages without training examples."""
    name = next(iter(rows[0]["metrics"]))
    lines = [f"{'language':<12}{name:>10}{'baseline':>10}{'sentences':>11}"]
    values = [(row["language"], row["metrics"][name], row["baseline"][name], row["examples"]) for row in rows]
    lines += [f"{language:<12}{own:>10.4f}{base:>10.4f}{size:>11,}" for language, own, base, size in values]
    others = [value for value in values if value[0] != trained_in]
    if len(others) > 1:
        means = [sum(column) / len(others) for column in list(zip(*others, strict=True))[1:3]]
        lines.append(f"{'mean of others':<14}{means[0]:>8.4f}{means[1]:>10.4f}")
    return "\n".join(lines)


def main() -> None:
    """Fine-tune in one language, test in all; print and save the table."""
    arguments, task_arguments, loop_arguments, adapters = parse_arguments(
        TransferArguments, TaskArguments, FinetuneLoopArguments, AdapterArguments, description=__doc__
    )
    train = LanguageFile.find(arguments.train, arguments.task, "train", arguments.data_dir)
    tests = [
        LanguageFile.find(language.strip(), arguments.task, "test", arguments.data_dir)
        for language in arguments.test.split(",")
    ]
    for each in (train, *tests):  # all, before training
        check_file(each.file)
    validation = arguments.validation_file or str(train.split("dev").file)
    config = load_config(arguments.model)
    number, *_ = [language_number(config, each.language) for each in (train, *tests)]  # all, before training
    folders = adapters.of_languages(train.language, [each.language for each in tests])
    found = finetune(
        FinetuneArguments(
            task="token-classification",
            train_file=str(train.file),
            validation_file=validation,
            model=arguments.model,
            config_options=[] if number is None else [f"default_lang={number}"],
            train_examples=arguments.train_examples,
        ),
        task_arguments,
        loop_arguments,
        HowToFinetune(
            FinetuningMethodArguments(freeze=arguments.freeze), adapters.on_language(folders, train.language)
        ),
    )
    rows = [measure(found, source, loop_arguments.per_device_batch_size, folders) for source in tests]
    if found.accelerator.is_main_process:
        summary = Path(loop_arguments.output_dir) / "transfer.json"
        result = {"task": arguments.task, "train": train.language, "train_file": train.file.name, "languages": rows}
        with writing(summary):
            summary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(table(rows, train.language))
        print(
            f"trained on {len(found.training)} sentences in {train.language}; model and table saved in {summary.parent}"
        )
