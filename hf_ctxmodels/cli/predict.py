"""Predict labels, numbers, tags of words, answers, choices, ranks or target texts for the examples of a file.

    hf-ctxmodels predict --model runs/reviews-classifier --input new_reviews.txt
    hf-ctxmodels predict --model runs/squad --input questions.jsonl --output answers.jsonl
    hf-ctxmodels predict --model runs/multitask --all_tasks --input sentences.jsonl --output labels.jsonl
    hf-ctxmodels predict --model runs/t5 --text_task tasks.yaml --input reviews.tsv --output labels.jsonl

The input has the format of `hf-ctxmodels finetune`. A .txt file has one text per line, for models of single texts. The
output is one JSON object per example, in the order of the input; its numbers have 4 significant digits on the screen
and 6 in a file. Labels are not needed; if the input has labels, the metrics are printed as well.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig

from hf_ctxmodels.cli.generate import generation_head
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, print_status
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.data.files import require_file
from hf_ctxmodels.data.hub_datasets import is_dataset, with_default_split
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.multitask.task_list import KINDS
from hf_ctxmodels.downstream.tasks import QuestionAnswering, Seq2Seq, TaskArguments
from hf_ctxmodels.downstream.tasks.base import check_unused_arguments
from hf_ctxmodels.downstream.tasks.metrics import metric_range
from hf_ctxmodels.downstream.tasks.text_metrics import NormalizedReferences
from hf_ctxmodels.downstream.text2text import TextTask
from hf_ctxmodels.downstream.text2text.metrics import PERCENTAGES
from hf_ctxmodels.downstream.text2text.text_to_text import (
    decoded_label_strings,
    most_likely_choices,
    text_to_text_class,
)
from hf_ctxmodels.inference.generation import generate_texts
from hf_ctxmodels.inference.prediction import Predictor, finetuning_summary, invalid_label_reason, saved_kinds
from hf_ctxmodels.training.model_loading import load_config

_SCREEN_DIGITS, _FILE_DIGITS = 4, 6  # significant digits
_TASK_FLAGS = (
    *("text_columns", "label_column", "choice_columns", "doc_stride", "max_answer_length", "head_column"),
    *("both_orders", "max_target_length", "num_beams", "target_language", "metrics", "label_delimiter"),
)


@dataclass
class PredictionArguments:
    """Model, input and output."""

    model: str = flag(REQUIRED, "Directory or Hub id of a fine-tuned model, with its tokenizer.")
    input: str = flag(
        REQUIRED,
        "File or dataset with the examples, as for `finetune` with or without labels (the default split is test), or a "
        ".txt file of texts.",
    )
    output: str | None = flag(
        None, "JSONL file for the predictions, optionally .gz or .zst; by default they are printed."
    )
    overwrite: bool = flag(False, "Replace --output if it exists.")
    task: str | None = flag(None, "Task of the model; by default of its fine-tuning, or of its head.", choices=KINDS)
    task_name: str | None = flag(None, "Task of a multi-task model.")
    all_tasks: bool = flag(
        False,
        "Predict all tasks of a multi-task model, which read the same input; results are keyed by task name.",
        conflicts=("task", "task_name"),
    )
    text_task: str | None = flag(
        None,
        "Task as text of a model of `finetune text2text`: a YAML file with one task, or the name of a packaged task.",
        conflicts=("task", "task_name", "all_tasks", "may_be_unanswerable"),
    )
    prediction: Literal["generate", "rank"] = flag(
        "generate", "With --text_task: generate the output, or choose the label string with the highest likelihood."
    )
    max_length: int | None = flag(None, "Longest input in tokens; by default as in fine-tuning.")
    may_be_unanswerable: bool = flag(False, 'Question answering: answer "" if no answer is more probable.')
    per_device_batch_size: int = flag(32, "Examples per batch.")

    def __post_init__(self) -> None:
        check_range(self, "max_length", "per_device_batch_size", at_least=1)
        if self.prediction == "rank" and self.text_task is None:
            raise CtxError(
                "Only outputs of a task as text are ranked.",
                location="--prediction rank",
                hint="add --text_task, or remove it.",
            )


def main() -> None:
    """Predict, and print or write the results."""
    arguments, task_arguments, placement = parse_arguments(
        PredictionArguments,
        (TaskArguments, _TASK_FLAGS),
        DeviceArguments,
        description=__doc__,
        essential=("model", "input", "output"),
    )
    if arguments.output is not None:
        inputs = (arguments.input, arguments.text_task)
        check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=inputs)
    arguments = replace(arguments, input=with_default_split(arguments.input, "test"))
    if not is_dataset(arguments.input):
        require_file(arguments.input)
    score_lines = []
    if arguments.all_tasks:
        _check_may_be_unanswerable(arguments, *saved_kinds(arguments.model).values())
        predictors = Predictor.open_tasks(arguments.model, task_arguments, max_length=arguments.max_length)
        results_by_task = {}
        for name, predictor in predictors:
            results_by_task[name], lines = _predict(predictor, arguments, placement)
            score_lines += [f"{name}: {line}" for line in lines]
        rows = zip(*results_by_task.values(), strict=True)
        results = [dict(zip(results_by_task, row, strict=True)) for row in rows]
    elif arguments.text_task is not None:
        results, score_lines = _predict_texts(arguments, task_arguments, placement)
    elif _has_seq2seq_head(load_config(arguments.model)):
        _check_may_be_unanswerable(arguments, Seq2Seq.name)
        results, score_lines = _predict_targets(arguments, task_arguments, placement)
    else:
        options = {name: getattr(arguments, name) for name in ("task", "task_name", "max_length")}
        predictor = Predictor.open(arguments.model, task_arguments, **options)
        predictor.task.check_unused_arguments()
        _check_may_be_unanswerable(arguments, predictor.task.name)
        results, score_lines = _predict(predictor, arguments, placement)
    digits = _SCREEN_DIGITS if arguments.output is None else _FILE_DIGITS
    text = "".join(json.dumps(_rounded(result, digits), ensure_ascii=False) + "\n" for result in results)
    if arguments.output is None:
        print(text, end="")
    else:
        write_text_file(arguments.output, text)
        print(f"{len(results):,} predictions in {arguments.output}")
    for line in score_lines:
        print(line, file=sys.stderr if arguments.output is None else sys.stdout)  # apart from printed predictions


def _check_may_be_unanswerable(arguments: PredictionArguments, *tasks: str) -> None:
    """Raise CtxError if `may_be_unanswerable` is set without a task of question answering."""
    if arguments.may_be_unanswerable and QuestionAnswering.name not in tasks:
        message = f"The task {tasks[0]} does not use it." if len(tasks) == 1 else "No task of the model uses it."
        raise CtxError(message, location="--may_be_unanswerable", hint="remove it.")


def _predict(
    predictor: Predictor, arguments: PredictionArguments, placement: DeviceArguments
) -> tuple[list[dict[str, Any]], list[str]]:
    """The results of all examples of the input, and a line for each metric if they have labels."""
    task = predictor.task
    if isinstance(task, QuestionAnswering):
        task.has_unanswerable = arguments.may_be_unanswerable
    placement.place(predictor.model)
    predictions = predictor.predict_file(arguments.input, arguments.per_device_batch_size, progress=True)
    return predictions.results, _score_lines(predictions.scores, task.is_percentage)


def _score_lines(scores: dict[str, float], is_percentage: bool) -> list[str]:
    return [f"{name:<24}{value:>13.4f}  {metric_range(name, is_percentage)}" for name, value in scores.items()]


def _has_seq2seq_head(config: PreTrainedConfig) -> bool:
    """Whether the saved model has the head of AutoModelForSeq2SeqLM, and not, for example, of a classifier."""
    if type(config) not in AutoModelForSeq2SeqLM._model_mapping:
        return False
    return AutoModelForSeq2SeqLM._model_mapping[type(config)].__name__ in (config.architectures or ())


def _predict_targets(
    arguments: PredictionArguments, task_arguments: TaskArguments, placement: DeviceArguments
) -> tuple[list[dict[str, Any]], list[str]]:
    """The generated target of each source, and lines of metrics as `_predict`."""
    if arguments.task not in (None, Seq2Seq.name) or arguments.task_name is not None:
        flag_name = "task" if arguments.task_name is None else "task_name"
        raise CtxError("The model's head is for the task seq2seq.", location=f"--{flag_name}", hint="remove it.")
    task = Seq2Seq(task_arguments)
    task.check_unused_arguments()
    summary = finetuning_summary(arguments.model)
    task = task.for_file(arguments.input, {} if summary is None else summary.columns)
    examples, is_labeled = _read_examples(
        task,
        arguments.input,
        read_labeled=task.read_file,
        read_unlabeled=task.read_unlabeled,
        require_labels=task_arguments.label_column is not None,
    )
    model, tokenizer = load_model_and_tokenizer(arguments.model, AutoModelForSeq2SeqLM.__name__)
    placement.place(model)
    print_status(f"{type(model).__name__} predicts {format_count(len(examples), 'example')}")
    predictions = generate_texts(
        model,
        tokenizer,
        [example.source for example in examples],
        locations=[example.location for example in examples],
        max_new_tokens=task_arguments.max_target_length,
        max_length=arguments.max_length,
        batch_size=arguments.per_device_batch_size,
        language=task_arguments.target_language,
        num_beams=task_arguments.num_beams,
        progress=True,
    )
    results = [
        {"source": example.source, "prediction": prediction}
        for example, prediction in zip(examples, predictions, strict=True)
    ]
    return results, _score_lines(task.score(examples, predictions) if is_labeled else {}, task.is_percentage)


def _predict_texts(
    arguments: PredictionArguments, task_arguments: TaskArguments, placement: DeviceArguments
) -> tuple[list[dict[str, Any]], list[str]]:
    """The output and the label of each example of a task as text, and lines of metrics as `_predict`."""
    names = ("max_target_length", "num_beams") if arguments.prediction == "generate" else ("max_target_length",)
    check_unused_arguments(task_arguments, names, "A task as text does not use it.")
    tasks = TextTask.from_yaml(str(arguments.text_task))
    if len(tasks) != 1:
        raise CtxError(
            f"The file has several tasks: {', '.join(tasks)}.",
            location=f"--text_task {arguments.text_task}",
            hint="use a file with one task, or the name of a packaged task.",
        )
    (task,) = tasks.values()
    examples, is_labeled = _read_examples(
        task,
        arguments.input,
        read_labeled=partial(task.read, is_training=False, labeled=True),
        read_unlabeled=partial(task.read, is_training=False, labeled=False),
        require_labels=False,
    )
    model, tokenizer = load_model_and_tokenizer(arguments.model, generation_head)
    placement.place(model)
    max_length, batch_size = arguments.max_length, arguments.per_device_batch_size
    max_target_length = task_arguments.max_target_length
    if arguments.prediction == "rank":
        outputs = most_likely_choices(
            model,
            tokenizer,
            task,
            examples,
            max_length=max_length,
            max_target_length=max_target_length,
            batch_size=batch_size,
            progress=True,
        )
    else:
        label_strings = decoded_label_strings(task, examples, NormalizedReferences(tokenizer, ()))
        separator = text_to_text_class(model.config).separator
        generated = generate_texts(
            model,
            tokenizer,
            [example.input + separator for example in examples],
            locations=[example.location for example in examples],
            max_new_tokens=max_target_length,
            max_length=max_length,
            batch_size=batch_size,
            num_beams=task_arguments.num_beams,
            progress=True,
        )
        outputs = [label_strings.get(text, text) for text in generated]
    results = [
        {"input": example.input, "output": output, "prediction": task.label_value(task.parse(example, output))}
        for example, output in zip(examples, outputs, strict=True)
    ]
    scores = task.score(examples, outputs) if is_labeled else {}
    return results, _score_lines(scores, task.metrics[0] in PERCENTAGES)


def _read_examples(
    task: Seq2Seq | TextTask,
    file: str,
    *,
    read_labeled: Callable[[str], list[Any]],
    read_unlabeled: Callable[[str], list[Any]],
    require_labels: bool,
) -> tuple[list[Any], bool]:
    """The examples of a file, and whether they have labels; if they are missing or invalid, a message says why. Raises
    CtxError for invalid inputs, and for invalid labels if `require_labels`."""
    reason = "the file has no labels"
    try:
        if task.has_labels(file):
            return read_labeled(file), True
    except CtxError as error:
        if require_labels:
            raise
        reason = invalid_label_reason(error)
    examples = read_unlabeled(file)
    print_status(f"no score: {reason}")
    return examples, False


def _rounded(value: Any, digits: int) -> Any:
    """A JSON value with its floating-point numbers rounded to significant digits."""
    if isinstance(value, dict):
        return {name: _rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
