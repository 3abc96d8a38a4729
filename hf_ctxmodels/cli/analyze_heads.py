"""Which attention heads a fine-tuned model needs: importance, ablation of single heads, removal of many.

    hf-ctxmodels analyze heads --model runs/sst2 --validation_file dev.tsv --output_dir runs/analysis

The score is the main metric of the task on the validation examples. Layers and heads are numbered from 0, as in
`--disabled_heads` of finetune. An interrupted analysis continues where it stopped if the command is repeated.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_ctxmodels.analysis.attention.importance import (
    Importance,
    RemovalStep,
    head_importance,
    removal_curve,
    single_head_scores,
)
from hf_ctxmodels.analysis.figures import Figure, Heatmap, LineChart
from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.results import AnalysisResult, PartialResults, Table
from hf_ctxmodels.core.attention_heads import attention_layers
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.inference.prediction import Predictor
from hf_ctxmodels.inference.task_heads import run_head
from hf_ctxmodels.layers.attention.head_gates import DisabledMode


@dataclass
class HeadsArguments(OutputArguments):
    """Model, examples and output."""

    model: str = flag(REQUIRED, "Directory or Hub id of a fine-tuned Transformer, with its tokenizer.")
    validation_file: str = flag(REQUIRED, "Labeled examples, as --validation_file of finetune.")
    mode: DisabledMode = flag(
        "zero", "How heads are disabled: no output (Michel et al.), or uniform attention (Kovaleva et al.)."
    )
    max_length: int | None = flag(None, "Longest input in tokens; by default as in fine-tuning.")
    max_examples: int | None = flag(None, "Use the first N examples for the scores; by default all.")
    importance_examples: int = flag(200, "Examples for the importance of heads, one gradient each.")
    curve_step: float = flag(0.1, "Fraction of the heads that each step of the curve disables; 0 for no curve.")
    single_heads: bool = flag(True, "Also score the model without each single head and each layer's attention.")
    batch_size: int = flag(32, "Examples per batch.")

    def __post_init__(self) -> None:
        check_range(self, "max_length", "max_examples", "importance_examples", "batch_size", at_least=1)
        check_range(self, "curve_step", at_least=0, at_most=1)


class ScoredModel:
    """A fine-tuned model with its validation examples."""

    def __init__(self, arguments: HeadsArguments, task_arguments: TaskArguments, placement: DeviceArguments) -> None:
        predictor = Predictor.open(arguments.model, task_arguments, max_length=arguments.max_length)
        self.model, self.tokenizer = predictor.model, predictor.tokenizer
        self.task = predictor.task.for_file(arguments.validation_file, predictor.columns)
        if self.task.is_generative:
            raise CtxError(
                f"The task {self.task.name} has no score without generation.",
                location=f"--model {arguments.model}",
                hint="use a classifier, a regressor, a tagger or a model that answers questions.",
            )
        attention_layers(self.model)  # raises CtxError for a model without attention heads
        placement.place_for_inference(self.model)
        self.examples = self.task.read(arguments.validation_file, "validation")[: arguments.max_examples]
        self.encoded = self.task.encode(self.examples, self.tokenizer)
        self.batch_size, self.num_gradients = arguments.batch_size, arguments.importance_examples
        self.metric, self.baseline = next(iter(self._scores().items()))

    def _scores(self) -> dict[str, float]:
        outputs = run_head(self.model, self.tokenizer, self.task, self.encoded, self.batch_size)
        return self.task.score(self.examples, self.task.decode(self.examples, self.encoded, outputs))

    def score(self) -> float:
        """The main metric."""
        return self._scores()[self.metric]

    def importance(self) -> Importance:
        """Importance of the heads on the first examples."""
        collate = self.task.collator(self.tokenizer)
        features = self.encoded.features[: self.num_gradients]
        return head_importance(
            self.model, (CollatedBatch(collate([feature])).to(self.model.device) for feature in features)
        )


def main() -> None:
    """Score the model without heads, and save tables and figures."""
    arguments, task_arguments, placement = parse_arguments(
        HeadsArguments,
        (TaskArguments, ("text_columns", "label_column", "choice_columns")),
        DeviceArguments,
        description=__doc__,
        essential=("model", "validation_file", "output_dir"),
    )
    arguments.check_output("heads")
    scored = ScoredModel(arguments, task_arguments, placement)
    identity = [arguments.options(), asdict(scored.task.arguments), weights_digest(scored.model.state_dict())]
    file = Path(arguments.output_dir) / "heads-partial.json"
    partial = PartialResults(file, identity, [arguments.validation_file])
    print_status(f"{type(scored.model).__name__}: {scored.metric} on {len(scored.examples):,} examples")
    arguments.save(analyze(arguments, scored, partial))
    partial.file.unlink(missing_ok=True)


def analyze(arguments: HeadsArguments, scored: ScoredModel, partial: PartialResults) -> AnalysisResult:
    """All tables and figures."""
    baseline = scored.baseline
    importance = scored.importance()
    layers = attention_layers(scored.model)
    values: dict[str, Any] = {
        "metric": scored.metric,
        "score": baseline,
        "importance": {name: value.tolist() for name, value in importance.items()},
        "heads": {name: layer.heads for name, layer in layers.items()},
    }
    caption = (
        "Mean absolute gradient of the loss with respect to a gate on the head, divided by the L2 norm of its layer."
    )
    numbers, rows = list(values["heads"].values()), list(values["importance"].values())
    title = "Importance of the heads"
    figures: list[Figure] = [Heatmap.of_heads("importance", title, numbers, rows, layers=list(layers), caption=caption)]
    tables = []
    if arguments.single_heads:
        single_heads = partial.results.setdefault("single_heads", {})
        steps = single_head_scores(scored.model, scored.score, arguments.mode, dict(single_heads))
        for name, scores in progress_bar(steps, "single heads", unit="layers", total=len(layers)):
            single_heads[name] = scores
            partial.save()
        values["single_heads"] = single_heads
        changes = {name: [score - baseline for score in scores] for name, scores in single_heads.items()}
        tables.append(_single_head_table(changes, baseline, scored, values["heads"]))
        rows = [change[:-1] for change in changes.values()]
        title = f"Change of {scored.metric} without a head"
        caption = "Above 0, the model is better without the head."
        figures.append(
            Heatmap.of_heads("single-heads", title, numbers, rows, layers=list(layers), digits=3, caption=caption)
        )
    if arguments.curve_step:
        saved_steps = partial.results.setdefault("curve", [])
        curve = [RemovalStep(**step) for step in saved_steps]
        new_steps = removal_curve(
            scored.model,
            scored.score,
            scored.importance,
            fraction=arguments.curve_step,
            mode=arguments.mode,
            steps=list(curve),
        )
        for step in progress_bar(new_steps, "removal of heads", unit="steps"):
            curve.append(step)
            saved_steps.append(asdict(step))
            partial.save()
        values["curve"] = [{**asdict(step), "num_removed": step.num_removed} for step in curve]
        figures.append(
            LineChart(
                "curve",
                f"{scored.metric} by the number of disabled heads",
                [step.num_removed for step in curve],
                {scored.metric: [step.score for step in curve]},
                x_label="disabled heads, least important first",
                y_label=scored.metric,
                caption="The importance of the remaining heads is computed again after each step.",
            )
        )
        tables.append(
            Table(
                "Disabled heads",
                ["heads", scored.metric],
                [f"{step.num_removed / curve[-1].num_removed:.0%}" for step in curve],
                [[step.num_removed, step.score] for step in curve],
            )
        )
    settings = {**asdict(arguments), "examples": len(scored.examples)}
    return AnalysisResult("heads", [arguments.model], settings, tables, figures, values)


def _single_head_table(
    changes: dict[str, list[float]], baseline: float, scored: ScoredModel, heads: dict[str, tuple[int, ...]]
) -> Table:
    rows: list[str] = []
    cells: list[list[object]] = []
    for name, change in changes.items():
        single = change[:-1]
        low, high = (single.index(value) for value in (min(single), max(single)))
        rows.append(f"layer {name}")
        cells.append(
            [
                *(f"{name}:{heads[name][low]}", single[low], f"{name}:{heads[name][high]}", single[high]),
                *(sum(value > 0 for value in single), change[-1]),
            ]
        )
    return Table(
        f"Change of {scored.metric} without one head",
        ["worst head", "change", "best head", "change", "heads above 0", "without the layer's heads"],
        rows,
        cells,
        digits=4,
        note=f"{scored.metric} of the whole model: {baseline:.4f} on {len(scored.examples):,} examples. Changes of a "
        "few examples are noise; confirm a head on other examples and seeds.",
    )
