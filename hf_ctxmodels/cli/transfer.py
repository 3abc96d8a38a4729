r"""Measure zero-shot transfer between languages: train a tagger in one language and test it in others.

    hf-ctxmodels evaluate transfer --model runs/xlm --task pos --train en --test de,fr,es --data_dir ud \
        --output_dir runs/xlm-pos

A language is CODE=FILE, or a code whose files are found in --data_dir by the names of Universal Dependencies (pos) or
WikiANN (ner). The baseline is the most frequent tag of each word in the training file. With `--adapter madx-task
--language_adapters en=DIR,de=DIR` the adapter of the language is replaced in each test (MAD-X), with `--freeze
embeddings --language_embeddings de=DIR` the token embeddings (Artetxe et al. 2020). The output directory contains the
model and transfer.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.data.files import check_file
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments, check_adapters, replace_lowest_adapter
from hf_ctxmodels.downstream.finetuning.arguments import (
    FinetuningArguments,
    FinetuningLoopArguments,
    FinetuningMethodArguments,
    FinetuningMethods,
)
from hf_ctxmodels.downstream.finetuning.finetuning_run import FinetuningResult, finetune
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.tasks.languages import (
    LanguageFile,
    directories_of_languages,
    set_language,
    supported_languages,
)
from hf_ctxmodels.downstream.tasks.metrics import range_note
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.checkpoint_files import check_run_directory
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.token_embeddings import check_embedding_compatibility, replace_token_embeddings

TASK = "token-classification"
ESSENTIAL = ("model", "task", "train", "test", "data_dir", "output_dir", "num_train_epochs", "learning_rate")


@dataclass
class TransferArguments:
    """Model and languages."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id of a multilingual encoder.")
    task: Literal["pos", "ner"] = flag(REQUIRED, "Parts of speech (CoNLL-U) or named entities (CoNLL columns).")
    test: str = flag(REQUIRED, "Test languages, separated by commas: de,fr or de=FILE,fr=FILE.")
    train: str = flag("en", "Training language: en or en=FILE.")
    data_dir: str | None = flag(None, "Directory with the files of the languages.")
    validation_file: str | None = flag(None, "Validation file of the training language; by default its dev file.")
    train_examples: int | None = flag(None, "Train on a fixed subset of N sentences.")
    freeze: Literal["encoder", "embeddings"] | None = flag(None, "Weights to freeze.")
    language_adapters: str | None = flag(
        None, "Adapter of each language for --adapter: LANGUAGE=DIR, separated by commas."
    )
    language_embeddings: str | None = flag(
        None, "Checkpoint with the token embeddings of each test language: LANGUAGE=DIR, separated by commas."
    )


def main() -> None:
    """Fine-tune in one language and test in all; print and save the table."""
    arguments, task_arguments, loop_arguments, adapters = parse_arguments(
        TransferArguments,
        (TaskArguments, TASKS[TASK].argument_names),
        FinetuningLoopArguments,
        AdapterArguments,
        description=__doc__,
        essential=ESSENTIAL,
    )
    check_run_directory(loop_arguments, arguments.model)
    if arguments.language_adapters and adapters.adapter is None:
        hint = "add --adapter madx-task."
        raise CtxError("Language adapters require a task adapter.", location="--language_adapters", hint=hint)
    train = LanguageFile.find(arguments.train, arguments.task, "train", arguments.data_dir)
    tests = [
        LanguageFile.find(language.strip(), arguments.task, "test", arguments.data_dir)
        for language in arguments.test.split(",")
    ]
    for source in (train, *tests):
        check_file(source.file)
    validation_file = arguments.validation_file or str(train.split("dev").file)

    # the model's languages, and the modules of each language, are checked before training
    config, tokenizer = load_config(arguments.model), load_tokenizer(arguments.model)
    languages = [train.language, *(source.language for source in tests)]
    has_languages = bool(supported_languages(config, tokenizer))
    for language in languages if has_languages else ():
        set_language(config, tokenizer, language, "--train, --test")
    language_adapters = directories_of_languages(
        arguments.language_adapters, languages, "adapter", "--language_adapters"
    )
    check_adapters(config, language_adapters)
    embeddings = directories_of_languages(
        arguments.language_embeddings,
        [language for language in languages if language != train.language],
        "checkpoint with embeddings",
        "--language_embeddings",
    )
    for checkpoint in embeddings.values():
        check_embedding_compatibility(config, checkpoint)
        check_tokenizer_matches_model(load_tokenizer(checkpoint), load_config(checkpoint), location=checkpoint)
    if embeddings:
        embeddings[train.language] = loop_arguments.output_dir
    if train.language in language_adapters:
        frozen_adapters = (language_adapters[train.language],)
        adapters = replace(adapters, adapter=replace(adapters.adapter, frozen_adapters=frozen_adapters))

    tuned = finetune(
        FinetuningArguments(
            task=TASK,
            train_file=str(train.file),
            validation_file=validation_file,
            model=arguments.model,
            language=train.language if has_languages else None,
            train_examples=arguments.train_examples,
        ),
        task_arguments,
        loop_arguments,
        FinetuningMethods(FinetuningMethodArguments(freeze=arguments.freeze), adapters),
    )
    results = []
    for source in tests:
        tokenizer = insert_language_modules(tuned, source.language, language_adapters, embeddings)
        results.append(evaluate(tuned, tokenizer, source, loop_arguments.per_device_batch_size))
    if not tuned.accelerator.is_main_process:
        return
    summary = Path(loop_arguments.output_dir) / "transfer.json"
    record = {"task": arguments.task, "train": train.language, "train_file": train.file.name, "languages": results}
    write_text_file(summary, json.dumps(record, indent=2) + "\n")
    print(table(results, train.language))
    print(f"trained on {len(tuned.training)} sentences in {train.language}; model and table saved in {summary.parent}")


def insert_language_modules(
    tuned: FinetuningResult, language: str, adapters: Mapping[str, str], embeddings: Mapping[str, str]
) -> PreTrainedTokenizerBase:
    """Insert the adapter and the embeddings of a language, from directories by language; returns its tokenizer."""
    tokenizer = tuned.tokenizer
    if language in adapters:
        replace_lowest_adapter(tuned.model, f"language_{language}", adapters[language])
    if language in embeddings:
        replace_token_embeddings(tuned.model, embeddings[language])
        tokenizer = load_tokenizer(embeddings[language], split_words=tuned.task.split_words)
    if supported_languages(tuned.model.config, tokenizer):
        set_language(tuned.model.config, tokenizer, language, "--test")
    return tokenizer


def evaluate(
    tuned: FinetuningResult, tokenizer: PreTrainedTokenizerBase, source: LanguageFile, batch_size: int
) -> dict[str, Any]:
    """Evaluate the model and the baseline in a language."""
    task = tuned.task
    examples = task.read(str(source.file), "test")
    encoded = task.encode(examples, tokenizer)
    evaluation = TaskEvaluation(task, examples, encoded, task.collator(tokenizer), batch_size)
    metrics = evaluation(tuned.model.eval(), tuned.accelerator)
    baseline = task.score(examples, task.baseline(tuned.training, examples))
    return {
        "language": source.language,
        "file": source.file.name,
        "examples": len(examples),
        "metrics": {name: metrics[f"eval_{name}"] for name in baseline},
        "baseline": baseline,
    }


def table(results: list[dict[str, Any]], training_language: str) -> str:
    """The main metric in each language, and its mean over the other languages."""
    name = next(iter(results[0]["metrics"]))
    lines = [f"{'language':<12}{name:>10}{'baseline':>10}{'sentences':>11}"]
    for result in results:
        metric, baseline = result["metrics"][name], result["baseline"][name]
        lines.append(f"{result['language']:<12}{metric:>10.4f}{baseline:>10.4f}{result['examples']:>11,}")
    target_results = [result for result in results if result["language"] != training_language]
    if len(target_results) > 1:
        mean_metric, mean_baseline = (
            fmean(result[side][name] for result in target_results) for side in ("metrics", "baseline")
        )
        lines.append(f"{'mean of others':<14}{mean_metric:>8.4f}{mean_baseline:>10.4f}")
    return "\n".join([*lines, range_note(name)])
