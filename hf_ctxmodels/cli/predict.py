"""Predict labels, numbers, tags of words, answers, choices or ranks for the examples of a file.

    hf-ctxmodels predict --model runs/reviews-classifier --input new_reviews.txt
    hf-ctxmodels predict --model runs/squad --input questions.jsonl --output answers.jsonl

The input has the format of `hf-ctxmodels finetune` without labels. A .txt file has one text per line, for models of
single texts. The output is one JSON object per example, in the order of the input; its numbers have 4 significant
digits on the screen and 6 in a file.
"""

import json
from dataclasses import dataclass
from typing import Any

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.downstream.multitask.task_list import KINDS
from hf_ctxmodels.downstream.tasks import QuestionAnswering, TaskArguments
from hf_ctxmodels.inference.prediction import Predictor

_SCREEN_DIGITS, _FILE_DIGITS = 4, 6  # significant digits
_TASK_FLAGS = ("text_columns", "choice_columns", "doc_stride", "max_answer_length", "both_orders")


@dataclass
class PredictionArguments:
    """Model, input and output."""

    model: str = flag(REQUIRED, "Directory or Hub id of a fine-tuned model, with its tokenizer.")
    input: str = flag(REQUIRED, "File with the examples, as for `finetune` but without labels, or a .txt of texts.")
    output: str | None = flag(None, "JSONL file for the predictions; by default they are printed.")
    overwrite: bool = flag(False, "Replace --output if it exists.")
    task: str | None = flag(None, "Task of the model; by default the task of its head.", choices=KINDS)
    task_name: str | None = flag(None, "Task of a multi-task model.")
    max_length: int | None = flag(None, "Longest input in tokens; by default as in fine-tuning.")
    may_be_unanswerable: bool = flag(False, 'Question answering: answer "" if no answer is more probable.')
    per_device_batch_size: int = flag(32, "Examples per batch.")

    def __post_init__(self) -> None:
        check_range(self, "max_length", "per_device_batch_size", at_least=1)


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
        check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=(arguments.input,))
    names = ("task", "task_name", "max_length")
    predictor = Predictor.open(arguments.model, task_arguments, **{name: getattr(arguments, name) for name in names})
    task = predictor.task
    task.check_unused_arguments()
    if isinstance(task, QuestionAnswering):
        task.has_unanswerable = arguments.may_be_unanswerable
    placement.place(predictor.model)
    examples = task.read_unlabeled(arguments.input)
    print_status(f"{type(predictor.model).__name__} predicts {len(examples):,} examples")
    results = predictor.predict(examples, arguments.per_device_batch_size, progress=True)
    digits = _SCREEN_DIGITS if arguments.output is None else _FILE_DIGITS
    text = "".join(json.dumps(_rounded(result, digits), ensure_ascii=False) + "\n" for result in results)
    if arguments.output is None:
        print(text, end="")
    else:
        write_text_file(arguments.output, text)
        print(f"{len(results):,} predictions in {arguments.output}")


def _rounded(value: Any, digits: int) -> Any:
    """A JSON value with its floating-point numbers rounded to significant digits."""
    if isinstance(value, dict):
        return {name: _rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
