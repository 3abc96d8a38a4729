r"""Measure zero-shot transfer between languages: fine-tune on a task in one language and test in others.

    hf-ctxmodels evaluate transfer --model runs/xlm --task pos --train en --test de,fr,es --data_dir ud \
        --output_dir runs/xlm-pos
    hf-ctxmodels evaluate transfer --model runs/xlm --task sequence-classification --train en=mnli.tsv \
        --validation_file xnli.dev.en.tsv --test en,de,fr --data_dir xnli --text_columns 1,2 --label_column 3 \
        --output_dir runs/xlm-xnli
    hf-ctxmodels evaluate transfer --model runs/xlm --task retrieval --pooling mean --train en --test de,fr \
        --data_dir tatoeba --text_columns 1,2 --output_dir runs/xlm-tatoeba

A language is CODE=FILE, or a code whose files are found in --data_dir: by the names of Universal Dependencies (pos) and
WikiANN (ner), or by the codes in their names, such as xnli.test.de.tsv, xquad.de.json and tatoeba.en-de.tsv. FILE may
be a dataset, as in de=facebook/xnli:config=de. The table has the score, the gap to the training language, a baseline,
the overlap of subwords with the training data, and the script. With `--adapter madx-task --language_adapters
en=DIR,de=DIR` the adapter of the language is replaced in each test (MAD-X), with `--freeze embeddings
--language_embeddings de=DIR` the token embeddings (Artetxe et al. 2020). The output directory contains the model and
transfer.json. Retrieval of translations, from tables with two columns, needs no training.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from transformers import AutoModel, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.data.files import require_file
from hf_ctxmodels.data.hub_datasets import is_dataset, source_name, with_default_split
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
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
from hf_ctxmodels.downstream.tasks.base import get_texts
from hf_ctxmodels.downstream.tasks.languages import (
    LanguageFile,
    directories_of_languages,
    set_language,
    split_entries,
    supported_languages,
)
from hf_ctxmodels.downstream.tasks.metrics import metric_range
from hf_ctxmodels.evaluation import retrieval
from hf_ctxmodels.evaluation.languages import SubwordOverlap, count_subwords, example_texts, main_script
from hf_ctxmodels.evaluation.mining import lexical_vectors
from hf_ctxmodels.layers.pooling import Pooling
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.checkpoint_files import check_run_directory
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.token_embeddings import check_embedding_compatibility, replace_token_embeddings

TransferTask = Literal[
    "pos",
    "ner",
    "sequence-classification",
    "regression",
    "question-answering",
    "semantic-role-labeling",
    "retrieval",
]
TAGGING = "token-classification"
OVERLAPS = ("types", "tokens")
ESSENTIAL = (
    *("model", "task", "train", "test", "data_dir", "text_columns", "label_column", "output_dir"),
    *("num_train_epochs", "learning_rate"),
)
TASK_FLAGS = {
    name for task in (TAGGING, *get_args(TransferTask)) if task in TASKS for name in TASKS[task].argument_names
}


@dataclass
class TransferArguments:
    """Model and languages."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id of a multilingual encoder.")
    task: TransferTask = flag(
        REQUIRED,
        "Parts of speech (CoNLL-U), named entities (CoNLL columns), another task of `finetune`, or retrieval of "
        "translations.",
    )
    test: str = flag(
        REQUIRED,
        "Test languages, separated by commas: de,fr or de=FILE,fr=FILE; a dataset has by default split=test.",
    )
    train: str = flag("en", "Training language: en or en=FILE.")
    data_dir: str | None = flag(None, "Directory with the files of the languages.")
    validation_file: str | None = flag(
        None, "Validation file of the training language; by default its dev file or split."
    )
    train_examples: int | None = flag(None, "Train on a fixed subset of N examples.")
    translated_train: str | None = flag(
        None, "Train also on translations of the training file (translate-train): LANGUAGE=FILE, separated by commas."
    )
    freeze: Literal["encoder", "embeddings", "language-layers"] | None = flag(None, "Weights to freeze.")
    language_adapters: str | None = flag(
        None, "Adapter of each language for --adapter: LANGUAGE=DIR, separated by commas."
    )
    language_embeddings: str | None = flag(
        None, "Checkpoint with the token embeddings of each test language: LANGUAGE=DIR, separated by commas."
    )
    pooling: Pooling | None = flag(None, "Pooling of the hidden states for retrieval; by default the model's.")

    def __post_init__(self) -> None:
        unused = ("pooling",) if self.task != "retrieval" else (
            *("validation_file", "train_examples", "translated_train", "freeze"),
            *("language_adapters", "language_embeddings"),
        )  # fmt: skip
        for name in unused:
            if getattr(self, name) is not None:
                raise CtxError(f"The task {self.task} does not use it.", location=f"--{name}", hint="remove it.")
        if self.task == "retrieval" and "=" in self.train:
            raise CtxError(
                "Retrieval has no training file.",
                location=f"--train {self.train}",
                hint="pass only the code of the language, such as en.",
            )
        if self.translated_train and (self.language_adapters or self.language_embeddings):
            raise CtxError(
                "Adapters and embeddings of languages are for training in one language.",
                location="--translated_train with --language_adapters or --language_embeddings",
                hint="use only one of them.",
            )

    def find(self, entry: str, split: str) -> LanguageFile:
        """The file of an entry CODE or CODE=FILE of the task; see `LanguageFile.find`."""
        source = LanguageFile.find(entry, self.task, split, self.data_dir)
        if not is_dataset(source.file):
            require_file(source.file)
        return source


def main() -> None:
    """Fine-tune in one language and test in all; print and save the table."""
    arguments, task_arguments, loop_arguments, adapters = parse_arguments(
        TransferArguments,
        (TaskArguments, TASK_FLAGS),
        FinetuningLoopArguments,
        AdapterArguments,
        description=__doc__,
        essential=ESSENTIAL,
    )
    check_run_directory(loop_arguments, arguments.model)
    if arguments.task == "retrieval":
        if adapters.adapter is not None:
            raise CtxError("Retrieval trains no adapter.", location="--adapter", hint="remove it.")
        save_table(arguments, evaluate_retrieval(arguments, task_arguments, loop_arguments), loop_arguments.output_dir)
        return
    if arguments.language_adapters and adapters.adapter is None:
        hint = "add --adapter madx-task."
        raise CtxError("Language adapters require a task adapter.", location="--language_adapters", hint=hint)
    task_name = arguments.task if arguments.task in TASKS else TAGGING
    train = arguments.find(arguments.train, "train")
    tests = [arguments.find(entry, "test") for entry in split_entries(arguments.test)]
    translations = [
        arguments.find(entry, "train") for entry in split_entries(arguments.translated_train or "") if entry
    ]
    validation_file = arguments.validation_file or train.validation_file

    # test files, the model's languages, and the modules of each language are checked before training
    reader = TASKS[task_name](task_arguments)
    test_examples = [reader.read(source.file, "test") for source in tests]
    config, tokenizer = load_config(arguments.model), load_tokenizer(arguments.model)
    languages = [train.language, *(source.language for source in tests)]
    has_languages = bool(supported_languages(config, tokenizer))
    for language in languages if has_languages else ():
        set_language(config, tokenizer, language, "--train, --test")
    if has_languages and translations:
        raise CtxError(
            "The model has language embeddings or tags, and is trained in one language.",
            location="--translated_train",
            hint="remove it, or use a model without them.",
        )
    language_adapters, embeddings = language_directories(arguments, config, languages)
    if embeddings:
        embeddings[train.language] = loop_arguments.output_dir
    if train.language in language_adapters:
        frozen_adapters = (language_adapters[train.language],)
        adapters = replace(adapters, adapter=replace(adapters.adapter, frozen_adapters=frozen_adapters))

    tuned = finetune(
        FinetuningArguments(
            task=task_name,
            train_file=[source.file for source in (train, *translations)],
            validation_file=validation_file,
            model=arguments.model,
            language=train.language if has_languages else None,
            train_examples=arguments.train_examples,
        ),
        task_arguments,
        loop_arguments,
        FinetuningMethods(FinetuningMethodArguments(freeze=arguments.freeze), adapters),
    )
    validation = {
        "language": f"{train.language} (dev)",
        "file": source_name(validation_file),
        "examples": len(tuned.validation),
        "metrics": {name: tuned.result.metrics[f"eval_{name}"] for name in tuned.baseline},
        "baseline": tuned.baseline,
        **language_similarity(tuned, tuned.tokenizer, tuned.validation, (train.language, train.language)),
    }
    results = []
    for source, examples in zip(tests, test_examples, strict=True):
        tokenizer = insert_language_modules(tuned, source.language, language_adapters, embeddings)
        result = evaluate(tuned, tokenizer, source, examples, loop_arguments.per_device_batch_size)
        similarity = language_similarity(tuned, tokenizer, examples, (train.language, source.language))
        results.append(result | similarity)
    if not tuned.accelerator.is_main_process:
        return
    source_result = next((result for result in results if result["language"] == train.language), validation)
    for result in results:
        result["gap"] = {name: source_result["metrics"][name] - value for name, value in result["metrics"].items()}
    record = {
        "task": arguments.task,
        "train": train.language,
        "train_file": train.name,
        "translated_train_files": {source.language: source.name for source in translations},
        "source": source_result,
        "languages": results,
    }
    save_table(arguments, record, loop_arguments.output_dir, tuned.task.is_percentage)
    trained_languages = ", ".join([train.language, *(source.language for source in translations)])
    print(f"trained on {len(tuned.training):,} examples in {trained_languages}")


def language_directories(
    arguments: TransferArguments, config: PreTrainedConfig, languages: list[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The directories of the adapters, and of the checkpoints with embeddings, by language; raises CtxError if they do
    not match the model. `languages` are the training language and the test languages."""
    adapters = directories_of_languages(arguments.language_adapters, languages, "adapter", "--language_adapters")
    check_adapters(config, adapters)
    embeddings = directories_of_languages(
        arguments.language_embeddings,
        [language for language in languages if language != languages[0]],
        "checkpoint with embeddings",
        "--language_embeddings",
    )
    for checkpoint in embeddings.values():
        check_embedding_compatibility(config, checkpoint)
        check_tokenizer_matches_model(load_tokenizer(checkpoint), load_config(checkpoint), location=checkpoint)
    return adapters, embeddings


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
    tuned: FinetuningResult,
    tokenizer: PreTrainedTokenizerBase,
    source: LanguageFile,
    examples: list[Any],
    batch_size: int,
) -> dict[str, Any]:
    """Evaluate the model and the baseline in a language."""
    task = tuned.task
    encoded = task.encode(examples, tokenizer)
    evaluation = TaskEvaluation(task, examples, encoded, task.collator(tokenizer), batch_size)
    metrics = evaluation(tuned.model.eval(), tuned.accelerator)
    baseline = task.score(examples, task.baseline(tuned.training, examples))
    return {
        "language": source.language,
        "file": source.name,
        "examples": len(examples),
        "metrics": {name: metrics[f"eval_{name}"] for name in baseline},
        "baseline": baseline,
    }


def language_similarity(
    tuned: FinetuningResult, tokenizer: PreTrainedTokenizerBase, examples: list[Any], languages: tuple[str, str]
) -> dict[str, Any]:
    """The script of examples in the second of the languages, and the overlap of their subwords with the training
    examples, in the first: None for a character-based model, and for another tokenizer than in training, whose tokens
    have other embeddings."""
    texts = example_texts(examples)
    overlap = None
    if tokenizer is tuned.tokenizer:
        overlap = subword_overlap(tokenizer, (example_texts(tuned.training), texts), languages)
    return {"script": main_script(texts), "overlap": overlap}


def subword_overlap(
    tokenizer: PreTrainedTokenizerBase, sides: tuple[Any, Any], languages: tuple[str, str]
) -> dict[str, float] | None:
    """`SubwordOverlap` of the texts in two languages as a dictionary; None for a character-based model."""
    training, test = (count_subwords(tokenizer, *side) for side in zip(sides, languages, strict=True))
    if training is None or test is None:
        return None
    return asdict(SubwordOverlap.between(training, test, tokenizer.unk_token_id))


def evaluate_retrieval(
    arguments: TransferArguments, task_arguments: TaskArguments, loop_arguments: FinetuningLoopArguments
) -> dict[str, Any]:
    """The accuracy of the retrieval of translations between the source language and each test language (as for Tatoeba,
    Artetxe & Schwenk 2019b, section 4.4): the nearest neighbor by cosine of each sentence."""
    columns = (task_arguments.text_columns or "1,2").split(",")
    if len(columns) != 2:
        raise CtxError(
            f"Expected the columns of two languages, got {len(columns)}.",
            location=f"--text_columns {task_arguments.text_columns}",
            hint=f"name the column of the language {arguments.train} first, for example 1,2.",
        )
    source_language = arguments.train
    tests = [arguments.find(entry, source_language) for entry in split_entries(arguments.test)]
    model, tokenizer = load_model_and_tokenizer(arguments.model, AutoModel.__name__)
    loop_arguments.place(model)
    has_languages = bool(supported_languages(model.config, tokenizer))
    encode = partial(
        encode_sentences,
        model,
        tokenizer,
        pooling=arguments.pooling,
        batch_size=loop_arguments.per_device_batch_size,
    )
    results = []
    for source in tests:
        rows = [get_texts(row, columns) for row in read_table(with_default_split(source.file, "test"), columns)]
        sides = [list(column) for column in zip(*rows, strict=True)]
        vectors = []
        for language, sentences in zip((source_language, source.language), sides, strict=True):
            if has_languages:
                set_language(model.config, tokenizer, language, "--train, --test")
            vectors.append(encode(sentences))
        scores, baseline = (
            {
                f"to_{source_language}": retrieval(target_vectors, source_vectors),
                f"from_{source_language}": retrieval(source_vectors, target_vectors),
                f"margin_to_{source_language}": retrieval(target_vectors, source_vectors, "margin"),
                f"margin_from_{source_language}": retrieval(source_vectors, target_vectors, "margin"),
            }
            for source_vectors, target_vectors in (vectors, lexical_vectors(*sides))
        )
        results.append(
            {
                "language": source.language,
                "file": source.name,
                "examples": len(rows),
                "metrics": scores,
                "baseline": baseline,
                "script": main_script(sides[1]),
                "overlap": subword_overlap(tokenizer, (sides[0], sides[1]), (source_language, source.language)),
            }
        )
    return {"task": arguments.task, "train": source_language, "languages": results}


def save_table(
    arguments: TransferArguments, record: dict[str, Any], output_dir: str, is_percentage: bool = False
) -> None:
    """Write transfer.json, and print the table."""
    file = Path(output_dir) / "transfer.json"
    write_text_file(file, json.dumps(record, indent=2) + "\n")
    print(table(record, is_percentage))
    print(f"{'table' if arguments.task == 'retrieval' else 'model and table'} saved in {file.parent}")


def table(record: dict[str, Any], is_percentage: bool = False) -> str:
    """The main metric in the source language and in each language, and its mean over the other languages."""
    results, source = record["languages"], record.get("source")
    name = next(iter(results[0]["metrics"]))
    titles = (name, "gap", "baseline", "subwords", "tokens", "examples")
    lines = [f"{'language':<12}{'script':<12}" + "".join(f"{title:>11}" for title in titles)]
    rows = results if source is None or source in results else [source, *results]
    for result in rows:
        overlap, gap = result["overlap"] or {}, result.get("gap", {})
        values = (result["metrics"][name], gap.get(name), result["baseline"][name], *map(overlap.get, OVERLAPS))
        cells = "".join(f"{'-' if value is None else format(value, '.4f'):>11}" for value in values)
        lines.append(f"{result['language']:<12}{result['script']:<12}{cells}{result['examples']:>11,}")
    target_results = [result for result in results if result["language"] != record["train"]]
    if len(target_results) > 1:
        means = [fmean(result[side][name] for result in target_results) for side in ("metrics", "baseline")]
        gap = "-" if source is None else format(source["metrics"][name] - means[0], ".4f")
        lines.append(f"{'mean of others':<24}{means[0]:>11.4f}{gap:>11}{means[1]:>11.4f}")
    if source is None:
        lines.append(f"{name}: share of sentences whose nearest neighbor in {record['train']} is the translation")
    notes = f"range: {name} {metric_range(name, is_percentage)}; subwords, tokens: overlap with "
    return "\n".join([*lines, notes + (record["train"] if source is None else "the training data") + ", 0 to 1"])
