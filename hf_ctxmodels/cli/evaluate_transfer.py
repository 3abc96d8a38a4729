r"""Zero-shot transfer between languages: train a tagger in one language, test it in others.

    hf-ctxmodels evaluate-transfer --model runs/xlm --task pos --train en --test de,fr,es --data_dir ud \
        --output_dir runs/xlm-pos

A language is given by its code, with files named as Universal Dependencies (pos) or WikiANN (ner) name them anywhere in
--data_dir, or as CODE=FILE. The baseline is the most frequent tag of a word in the training file; for words that do not
occur there, the most frequent tag of all. A model with language embeddings is told the language of each file. With
`--adapter tagger --adapters en=DIR,de=DIR,fr=DIR` a task adapter is trained on that of the training language, which is
exchanged for a test (MAD-X); with `--freeze embeddings --embeddings de=DIR,fr=DIR` the embeddings of tokens are
exchanged for those of `pretrain --train embeddings` (Artetxe et al. 2020). Leaves the model and transfer.json in the
output directory.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.data.text_files import check_file
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments, check_adapters, replace_lowest_adapter
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningMethodArguments
from hf_ctxmodels.downstream.finetuning.configuration import FinetuningConfig
from hf_ctxmodels.downstream.finetuning.finetuning_run import (
    FinetuningArguments,
    FinetuningLoopArguments,
    FinetuningResult,
    finetune,
)
from hf_ctxmodels.downstream.finetuning.language import set_language, supported_languages
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.downstream.tasks.language_files import LanguageFile, directories_of_languages
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments
from hf_ctxmodels.training.token_embeddings import check_embedding_compatibility, replace_token_embeddings


@dataclass
class TransferArguments:
    """Which model, and which languages."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id of a multilingual encoder."})
    task: Literal["pos", "ner"] = field(metadata={"help": "Parts of speech (CoNLL-U), or entities (CoNLL columns)."})
    test: str = field(metadata={"help": "Languages to test in, separated by commas: de,fr or de=FILE,fr=FILE."})
    train: str = flag("en", "Language to train in: en or en=FILE.")
    data_dir: str | None = flag(None, "Folder with the files of languages that are given by their code alone.")
    validation_file: str | None = flag(None, "Held-out examples of the training language; by default its dev file.")
    freeze: Literal["encoder", "embeddings"] | None = flag(
        None,
        "`encoder`: train the tagger alone, on the encoder's states; `embeddings`: all but the embeddings of tokens.",
    )
    embeddings: str | None = flag(
        None, "Embeddings of the languages of tests, and their tokenizers: LANGUAGE=DIR, separated by commas."
    )
    train_examples: int | None = flag(None, "Train on a sample of so many sentences, the same one whatever the seed.")


@dataclass(frozen=True)
class Exchanged:
    """What is put in the place of the training language's for a test.

    Attributes:
        adapters: Language -> directory of its adapter.
        embeddings: Language -> directory of a checkpoint with its embeddings of tokens, and the tokenizer.
    """

    adapters: dict[str, str]
    embeddings: dict[str, str]

    @classmethod
    def read(
        cls, arguments: TransferArguments, adapters: AdapterArguments, train: str, tests: list[str], saved: str
    ) -> Self:
        """Both, from the flags; all is opened or compared with the model, before training.

        Args:
            arguments, adapters: The flags.
            train: The language of training.
            tests: Those of tests.
            saved: Where the fine-tuned model will lie.

        Raises:
            CtxError: One is missing, or for another model.
        """
        config, others = load_config(arguments.model), [each for each in tests if each != train]
        folders = adapters.directories_by_language(train, tests)
        check_adapters(config, folders)
        found = directories_of_languages(arguments.embeddings, others, "checkpoint with embeddings", "--embeddings")
        for source in found.values():
            check_embedding_compatibility(config, source)
            check_tokenizer_matches_model(load_tokenizer(source), load_config(source), location=source)
        return cls(folders, found | {train: saved} if found else {})

    def put(self, found: FinetuningResult, language: str) -> PreTrainedTokenizerBase:
        """Exchange what there is of a language; gives the tokenizer that goes with the model then."""
        tokenizer = found.tokenizer
        if language in self.adapters:
            replace_lowest_adapter(found.model, f"language_{language}", self.adapters[language])
        if language in self.embeddings:
            replace_token_embeddings(found.model, self.embeddings[language])
            tokenizer = load_tokenizer(self.embeddings[language], split_words=found.task.split_words)
        if supported_languages(found.model.config, tokenizer):
            set_language(found.model.config, tokenizer, language, "--test")
        return tokenizer


def measure(found: FinetuningResult, source: LanguageFile, batch_size: int, exchanged: Exchanged) -> dict[str, Any]:
    """The metrics in a language, with what is exchanged for it, beside those of the baseline."""
    task, tokenizer = found.task, exchanged.put(found, source.language)
    examples = task.read(str(source.file), "test")
    encoded = task.encode(examples, tokenizer)
    evaluation = TaskEvaluation(task, examples, encoded, task.collator(tokenizer), batch_size)
    metrics = evaluation(found.model.eval(), found.accelerator)
    baseline = task.score(examples, task.baseline(found.training, examples))
    return {
        "language": source.language,
        "file": source.file.name,
        "examples": len(examples),
        "metrics": {name: metrics[f"eval_{name}"] for name in baseline},
        "baseline": baseline,
    }


def check_languages(model: str, languages: list[str]) -> bool:
    """Whether a model is told the language of a text.

    Raises:
        CtxError: It does not know one of these.
    """
    config, tokenizer = load_config(model), load_tokenizer(model)
    known = supported_languages(config, tokenizer)
    for language in languages if known else ():
        set_language(config, tokenizer, language, "--train, --test")
    return bool(known)


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
        TransferArguments, TaskArguments, FinetuningLoopArguments, AdapterArguments, description=__doc__
    )
    train = LanguageFile.find(arguments.train, arguments.task, "train", arguments.data_dir)
    tests = [
        LanguageFile.find(language.strip(), arguments.task, "test", arguments.data_dir)
        for language in arguments.test.split(",")
    ]
    for each in (train, *tests):  # all, before training
        check_file(each.file)
    validation = arguments.validation_file or str(train.split("dev").file)
    known = check_languages(arguments.model, [train.language, *(each.language for each in tests)])
    languages = [each.language for each in tests]
    exchanged = Exchanged.read(arguments, adapters, train.language, languages, loop_arguments.output_dir)
    found = finetune(
        FinetuningArguments(
            task="token-classification",
            train_file=str(train.file),
            validation_file=validation,
            model=arguments.model,
            language=train.language if known else None,
            train_examples=arguments.train_examples,
        ),
        task_arguments,
        loop_arguments,
        FinetuningConfig(
            FinetuningMethodArguments(freeze=arguments.freeze),
            adapters.for_language(exchanged.adapters, train.language),
        ),
    )
    rows = [measure(found, source, loop_arguments.per_device_batch_size, exchanged) for source in tests]
    if found.accelerator.is_main_process:
        summary = Path(loop_arguments.output_dir) / "transfer.json"
        result = {"task": arguments.task, "train": train.language, "train_file": train.file.name, "languages": rows}
        with wrap_write_errors(summary):
            summary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(table(rows, train.language))
        print(
            f"trained on {len(found.training)} sentences in {train.language}; model and table saved in {summary.parent}"
        )
