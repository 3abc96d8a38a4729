"""Fine-tuning on a mixture of tasks as text (Raffel et al. 2020, "T5", section 3.5.2)."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import format_count, format_next_commands, print_status
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.data import SampledMixture
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningLoopArguments, StartingModelArguments
from hf_ctxmodels.downstream.finetuning.finetuning_run import (
    load_config_and_tokenizer,
    open_model,
    prepare_for_tasks,
    require_full_weights,
)
from hf_ctxmodels.downstream.finetuning.task_evaluation import BestModel, TaskEvaluation, mean_score
from hf_ctxmodels.downstream.finetuning.task_loss import TaskLoss
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.downstream.tasks.seq2seq import Seq2Seq
from hf_ctxmodels.downstream.text2text.metrics import deca_score
from hf_ctxmodels.downstream.text2text.mixture import MixtureArguments, TaskMixture, describe_rates, summarize_rates
from hf_ctxmodels.downstream.text2text.scores import ScoreTable, read_compared_runs
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.accelerator import make_accelerator, restore_determinism
from hf_ctxmodels.training.checkpoint_files import check_run_directory, replacing_model
from hf_ctxmodels.training.loop import TrainingLoop, TrainingResult
from hf_ctxmodels.training.model_loading import prepare_for_training

BEST_FOLDER = "best"
_UNKNOWN_OUTPUTS = {"classification": "none of the labels", "number": "not a number", "text": "empty"}


@dataclass(kw_only=True)
class TextToTextArguments(MixtureArguments):
    """Tasks and mixing."""

    tasks: list[str] = flag(
        REQUIRED, "YAML files of tasks as text, and names of packaged files (glue) and tasks (sst2)."
    )
    keep_best: bool = flag(False, "Also save the best model of each task, in OUTPUT_DIR/best/TASK.")
    predictions_file: str | None = flag(None, "JSONL file for the final predictions on the validation examples.")
    preview: bool = flag(False, "Print three training examples of each task with their numbers of tokens, and stop.")
    compare: list[str] = flag(
        (),
        "Further rows of the score table: NAME=DIR for a run on several tasks, NAME:TASK=DIR for a run on one task, "
        "such as a classification head; several directories of one NAME share the row.",
    )


class BestTaskModel(BestModel):
    """The best model of a task, as a directory that opens like the final model."""

    def __init__(
        self, output_dir: str | Path, resume: bool, task: str, metric: str, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.directory, self.tokenizer = Path(output_dir) / BEST_FOLDER / task, tokenizer
        super().__init__(output_dir, resume, f"eval_{task}_{metric}")

    def save(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Write model, tokenizer and metrics, each file atomically."""
        assert isinstance(model, PreTrainedModel)
        with replacing_model(self.directory) as temporary:
            model.save_pretrained(temporary, state_dict=weights)
            self.tokenizer.save_pretrained(temporary)
            (temporary / "metrics.json").write_text(json.dumps(self.metrics), encoding="utf-8")

    def saved_metrics(self) -> dict[str, float]:
        """The metrics of the saved model; none if there is no model."""
        file = self.directory / "metrics.json"
        return read_json(file, hint="delete the directory.") if file.is_file() else {}


@restore_determinism()
def finetune_text2text(
    arguments: TextToTextArguments,
    start: StartingModelArguments,
    task_arguments: TaskArguments,
    loop: FinetuningLoopArguments,
) -> None:
    """Fine-tune an encoder-decoder or a decoder on a mixture of tasks, evaluate and save it, and print a score table.

    A batch has examples of several tasks, each sampled by the mixing rates; every example of a task is used once before
    one is repeated. The loss is the mean over the step's target tokens of all tasks.

    Raises:
        CtxError: Files, model, tokenizer and flags do not match each other.
    """
    check_run_directory(loop, start.tokenizer_source)
    predictions_file = arguments.predictions_file
    overwrite = loop.overwrite or bool(loop.resume)
    check_predictions = partial(check_output_file, flag="--predictions_file", overwrite=overwrite)
    if predictions_file is not None:
        check_predictions(predictions_file)
    accelerator = make_accelerator(loop)
    is_main = accelerator.is_main_process
    config, tokenizer = load_config_and_tokenizer(start, Seq2Seq(replace(task_arguments, metrics="exact_match")))
    check_tokenizer_matches_model(tokenizer, config, task_arguments.max_length, location=start.model or "--family")
    prepare_for_tasks(tokenizer, task_arguments.max_length)
    mixture = TaskMixture(arguments.tasks, arguments, task_arguments, config, tokenizer)
    tasks, trained, evaluated = mixture.tasks, mixture.trained, mixture.evaluated
    if predictions_file is not None:
        data_files = [file for task in tasks for files in task.text_task.files.values() for file in files]
        check_predictions(predictions_file, inputs=(*arguments.tasks, *data_files))
    if arguments.preview:
        if is_main:
            print(mixture.preview(tokenizer))
        return
    collate = mixture.training_collator(config, tokenizer, loop.seed)
    sizes = {name: len(run.training) for name, run in trained.items()}
    rates = arguments.rates(sizes)
    members = describe_rates(sizes, rates)
    number = format_count(len(trained), "task")
    print_status(f"tokenizing the training examples of {number}, mixed at the rates: {members}", is_main)
    for names, status in (
        (evaluated.keys() - trained.keys(), "evaluated, not trained (no train file)"),
        (trained.keys() - evaluated.keys(), "trained, not evaluated (no validation file)"),
    ):
        print_status(f"{status}: {', '.join(sorted(names))}", is_main and bool(names))
    mixture.encode(tokenizer)
    for name, run in evaluated.items():
        if target_warning := run.target_warning():
            print_status(f"warning: {name}: {target_warning}", is_main)
    main_metrics = {name: metric for name, (metric, _) in mixture.main_metrics.items()}
    compared_runs = read_compared_runs(arguments.compare, main_metrics)
    require_full_weights(tasks[0], accelerator)

    loop = replace(loop, is_new_model=start.model is None)
    model = open_model(start, tasks[0], config, tokenizer)
    prepare_for_training(model)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = config.eos_token_id
    best_models = [
        BestTaskModel(loop.output_dir, bool(loop.resume), name, run.main_metric[0], tokenizer)
        for name, run in evaluated.items()
        if arguments.keep_best
    ]
    features = [run.training_features for run in trained.values()]
    evaluate = mixture.evaluation(tokenizer, loop.per_device_batch_size, best_models)
    result = TrainingLoop(
        model,
        SampledMixture(features, probabilities=rates, is_per_example=True),
        collate,
        loop,
        accelerator,
        tokenizer=tokenizer,
        evaluate=evaluate,
        loss_function=TaskLoss(model, tasks[0].targets, tasks[0].label_smoothing(config)),
        identity={**mixture.identity, **asdict(task_arguments)},
    ).run()
    evaluations = evaluate.evaluations.values()
    if predictions_file is not None and not all(evaluation.predictions for evaluation in evaluations):
        replace(evaluate, best_models=())(model.eval(), accelerator)  # a resumed run that was already finished
    if is_main:
        if predictions_file is not None:
            _save_predictions(mixture, evaluate.evaluations, predictions_file)
        _report(mixture, evaluate.evaluations, result, best_models, compared_runs, summarize_rates(sizes, rates))


def _save_predictions(mixture: TaskMixture, evaluations: Mapping[str, TaskEvaluation], file: str) -> None:
    """Write a JSON object for each validation example of each task."""
    lines = [
        json.dumps({"task": name, **run.task.record(*example)}, ensure_ascii=False)
        for name, run in mixture.evaluated.items()
        for example in zip(run.validation, evaluations[name].predictions, strict=True)
    ]
    write_text_file(file, "\n".join(lines) + "\n")


def _report(
    mixture: TaskMixture,
    evaluations: Mapping[str, TaskEvaluation],
    result: TrainingResult,
    best_models: list[BestTaskModel],
    compared_runs: list[tuple[str, dict[str, float]]],
    mixing_rates: dict[str, float],
) -> None:
    """Save the `TrainingSummary` and the score table; print the table and the next commands."""
    trained, runs, metrics = mixture.trained, mixture.evaluated, dict(result.metrics)
    metrics |= {f"baseline_{name}_{key}": value for name, run in runs.items() for key, value in run.baseline.items()}
    main = mixture.main_metrics
    metrics["baseline_mean"] = mean_score(metrics, main, "baseline")
    result.metrics = metrics
    summary = result.summary(
        task=", ".join(f"{name} (text2text)" for name in trained),
        dataset=", ".join(run.train_file for run in trained.values()),
        max_length=next(iter(trained.values())).task.arguments.max_length,
        rates=mixing_rates,
        warnings=[f"{name}: {text}" for name in runs for text in evaluations[name].warnings({}, {})],
    )
    output = Path(result.arguments.output_dir)
    summary.save(output)

    table = ScoreTable({name: metric for name, (metric, _) in main.items()})
    table.add_row("model", metrics, "eval")
    for best in best_models:
        table.add_row("best model of each task", {best.metric: best.metrics.get(best.metric, math.nan)}, "eval")
    for name, scores in compared_runs:
        table.add_row(name, scores, "eval")
    table.add_row("baseline", metrics, "baseline")
    table.save(output)
    print(table.as_markdown(), end="")
    if all(name.startswith("deca_") for name in runs):
        task_metrics = {f"eval_{name}": run.task.text_task.metrics[0] for name, run in runs.items()}
        print(f"decaScore: {deca_score(task_metrics, metrics):.1f} of {100 * len(runs)}")
    for name, run in runs.items():
        if share := metrics.get(f"eval_{name}_unknown_outputs"):
            print(f"{name}: {share:.1%} of the outputs are {_UNKNOWN_OUTPUTS[run.task.text_task.kind]}")
    print(f"model, tokenizer, log, summary and scores saved in {output}")
    summary.print_warnings()
    again = ("finetune", "text2text", "--model", output, "--tasks", "FILE", "--only", next(iter(trained)))
    print(format_next_commands((*again, "--output_dir", "DIR"), ("generate", "--model", output, "--input", "FILE")))
