r"""Loss landscapes of fine-tuning (Hao et al. 2019; Li et al. 2018), and the cost of resetting each layer.

    hf-ctxmodels analyze landscape --model runs/sst2 --pretrained runs/bert --validation_file dev.tsv \
        --output_dir runs/analysis
    hf-ctxmodels analyze landscape --model runs/sst2 --pretrained runs/bert --scratch runs/sst2-scratch \
        --validation_file dev.tsv --views line surface --output_dir runs/analysis
    hf-ctxmodels analyze landscape --model runs/sst2 --pretrained runs/bert --text wiki.txt --output_dir runs/analysis

The loss is the task's loss on labeled examples, or with --text the loss of the pretraining objective. Views:

    line           between the pretrained (0) and the fine-tuned weights (1), and beyond
    surface        also in a second direction, towards --other or a random one, with the checkpoints of the run
    neighborhood   around the fine-tuned weights, in two random directions with filter normalization
    trajectory     the plane of the two principal components of the checkpoints of the run
    rollback       the loss with each layer reset to its pretrained weights

An interrupted analysis continues where it stopped if the command is repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from hf_ctxmodels.analysis.figures import Figure, LineChart, Surface
from hf_ctxmodels.analysis.landscapes import (
    RANDOM,
    HeldOutLoss,
    Metrics,
    Plane,
    Trajectory,
    Weights,
    checkpoint_weights,
    current_weights,
    difference,
    random_direction,
    restrict,
    roll_back_layers,
    scaled_to,
    used_embedding_rows,
)
from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.results import AnalysisResult, PartialResults, Table
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.training.checkpoint_files import list_checkpoints

VIEWS = ("line", "surface", "neighborhood", "trajectory", "rollback")
_SAVE_INTERVAL = 20.0  # seconds
_PRETRAINED, _SCRATCH = "pretrained", "from scratch"


@dataclass
class LandscapeArguments(OutputArguments):
    """Models, data and output."""

    model: str = flag(REQUIRED, "Directory of a fine-tuned model; its checkpoints are the trajectory.")
    pretrained: str = flag(REQUIRED, "Directory or Hub id of the model that it was fine-tuned from.")
    validation_file: str | None = flag(None, "Labeled examples, as --validation_file of finetune.")
    text: list[str] = flag(
        (), "Documents for the loss of the pretraining objective of --pretrained.", conflicts=("validation_file",)
    )
    scratch: str | None = flag(
        None, "Directory of a model of the same task that was trained from scratch, which is plotted on the same scale."
    )
    other: str | None = flag(None, "Model of another task, fine-tuned from --pretrained: direction of --views surface.")
    views: list[str] = flag(("line", "rollback"), "Views.", choices=VIEWS)
    points: int = flag(21, "Points of a line.")
    plane_points: int = flag(11, "Points of each axis of a plane.")
    max_examples: int | None = flag(
        None, "Use the first N examples of --validation_file; by default all.", conflicts=("text",)
    )
    batch_size: int = flag(32, "Examples per batch.")
    seed: int = flag(0, "Seed of random directions, and of the random weights used as the origin for --scratch.")

    def __post_init__(self) -> None:
        check_range(self, "points", "plane_points", at_least=3)
        check_range(self, "batch_size", "max_examples", at_least=1)
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)
        if (self.validation_file is None) == (not self.text):
            raise CtxError(
                "Expected either labeled examples or text.",
                location="--validation_file",
                hint="use --validation_file or --text.",
            )
        if self.text and self.scratch is not None:
            raise CtxError("A model from scratch has no pretraining loss.", location="--scratch", hint="remove it.")
        if self.other is not None and "surface" not in self.views:
            raise CtxError(
                "Only the view surface has a direction towards another model.",
                location=f"--other {self.other}",
                hint="add surface to --views, or remove it.",
            )


@dataclass
class Run:
    """A model, its loss, and the weights at the start and at the end of training.

    Attributes:
        masks: Used rows of embeddings, see `used_embedding_rows`.
        checkpoints: Directories of the checkpoints between start and end.
    """

    name: str
    loss: HeldOutLoss
    start: Weights
    end: Weights
    checkpoints: list[Path]
    masks: dict[str, torch.Tensor] = field(default_factory=dict)

    def direction(self) -> Weights:
        """From start to end."""
        return restrict(difference(self.start, self.end), self.masks)


def _evaluate(
    partial: PartialResults, view: str, plane: Plane, loss: HeldOutLoss, points: Sequence[Sequence[float]]
) -> list[Metrics]:
    """The metrics of points, which are saved at intervals; see `Plane.evaluate`."""
    results = []
    evaluated = plane.evaluate(loss, points, partial.results.setdefault(view, {}))
    for metrics in progress_bar(evaluated, view, unit="points", total=len(points)):
        results.append(metrics)
        partial.save(_SAVE_INTERVAL)
    return results


def main() -> None:
    """Evaluate the views, and save tables and figures."""
    arguments, task_arguments, placement = parse_arguments(
        LandscapeArguments,
        (TaskArguments, ("text_columns", "label_column", "choice_columns")),
        DeviceArguments,
        description=__doc__,
        essential=("model", "pretrained", "validation_file", "text", "views", "output_dir"),
    )
    arguments.check_output("landscape")
    runs = open_runs(arguments, task_arguments, placement)
    digests = [weights_digest(weights) for run in runs for weights in (run.start, run.end)]
    file = Path(arguments.output_dir) / "landscape-partial.json"
    data_files = [arguments.validation_file] if arguments.validation_file else arguments.text
    partial = PartialResults(file, [arguments.options(), asdict(task_arguments), digests], data_files)
    tables: list[Table] = [_ends(runs, partial)]
    figures: list[Figure] = []
    drawings = {"line": _line, "surface": _surfaces, "neighborhood": _neighborhoods, "trajectory": _trajectories}
    for view, draw in drawings.items():
        if view in arguments.views:
            figures += draw(runs, arguments, partial)
    if "rollback" in arguments.views:
        tables.append(_rollback(runs[0], partial))
    settings = {**asdict(arguments), "examples": runs[0].loss.num_examples}
    models = [arguments.model, arguments.pretrained]
    result = AnalysisResult("landscape", models, settings, tables, figures, partial.results)
    arguments.save(result, summary=f"{runs[0].loss.num_examples:,} examples; results and figures")
    partial.file.unlink(missing_ok=True)


def open_runs(arguments: LandscapeArguments, task_arguments: TaskArguments, placement: DeviceArguments) -> list[Run]:
    """The runs of --model and, if given, --scratch."""
    if arguments.text:
        loss = HeldOutLoss.of_pretraining(arguments.pretrained, *arguments.text, batch_size=arguments.batch_size)
        placement.place(loss.model)
        end = checkpoint_weights(loss, arguments.model)
        runs = [Run(_PRETRAINED, loss, current_weights(loss.model), end, list_checkpoints(arguments.model))]
    else:
        runs = []
        for name, source in ((_PRETRAINED, arguments.model), (_SCRATCH, arguments.scratch)):
            if source is None:
                continue
            loss = HeldOutLoss.of_task(
                source,
                str(arguments.validation_file),
                task_arguments,
                batch_size=arguments.batch_size,
                max_examples=arguments.max_examples,
            )
            placement.place(loss.model)
            start = checkpoint_weights(loss, arguments.pretrained if name == _PRETRAINED else RANDOM, arguments.seed)
            runs.append(Run(name, loss, start, current_weights(loss.model), list_checkpoints(source)))
    for run in runs:
        run.masks = used_embedding_rows(run.loss)
        if not any(bool(change.any()) for change in run.direction().values()):
            raise CtxError(
                "The model has the weights of the pretrained model.",
                location=f"--model {arguments.model}",
                hint="use a model that was fine-tuned from --pretrained.",
            )
    return runs


def _ends(runs: Sequence[Run], partial: PartialResults) -> Table:
    rows, cells = [], []
    for run in runs:
        line = Plane(run.start, [run.direction()])
        metrics = _evaluate(partial, f"line, {run.name}", line, run.loss, [(0.0,), (1.0,)])
        start = "pretrained weights" if run.name == _PRETRAINED else "new weights"
        rows += [start, "fine-tuned weights" if run.name == _PRETRAINED else "weights trained from scratch"]
        cells += [list(values.values()) for values in metrics]
    return Table("Start and end of training", list(metrics[0]), rows, cells)


def _line(runs: Sequence[Run], arguments: LandscapeArguments, partial: PartialResults) -> list[Figure]:
    # 0 and 1 are among the coordinates
    coordinates = sorted({0.0, 1.0, *_axis(-0.5, 1.5, arguments.points)})
    metrics = {}
    for run in runs:
        line = Plane(run.start, [run.direction()])
        metrics[run.name] = _evaluate(
            partial, f"line, {run.name}", line, run.loss, [(coordinate,) for coordinate in coordinates]
        )
    names = list(metrics[_PRETRAINED][0])
    caption = f"Weights on the line through the start and the end of training; {runs[0].loss.num_examples:,} examples."
    return [
        LineChart(
            f"line-{name}", f"{name.replace('_', ' ').capitalize()} between start and end of training", coordinates,
            {run: [values[name] for values in points] for run, points in metrics.items()},
            x_label="from start (0) to end (1) of training", y_label=name.replace("_", " "), caption=caption,
        )
        for name in dict.fromkeys(("loss", next((name for name in names if "loss" not in name), "loss")))
    ]  # fmt: skip


@dataclass
class _Panel:
    """A surface that is drawn with the color scale of the others of its view."""

    run: Run
    plane: Plane
    x: list[float]
    y: list[float]
    paths: Mapping[str, Sequence[Sequence[float]]]
    labels: tuple[str, str]
    caption: str = ""


def _draw(view: str, title: str, panels: Sequence[_Panel], partial: PartialResults) -> list[Figure]:
    """Surfaces of one scale."""
    surfaces = []
    for panel in panels:
        grid = [(x, y) for y in panel.y for x in panel.x]
        losses = [values["loss"] for values in _evaluate(
            partial, f"{view}, {panel.run.name}", panel.plane, panel.run.loss, grid
        )]  # fmt: skip
        surfaces.append([losses[row : row + len(panel.x)] for row in range(0, len(losses), len(panel.x))])
    values = [loss for surface in surfaces for row in surface for loss in row]
    return [
        Surface(
            f"{view}-{panel.run.name.replace(' ', '-')}", f"{title}, {panel.run.name}", panel.x, panel.y, surface,
            dict(panel.paths), x_label=panel.labels[0], y_label=panel.labels[1], low=min(values), high=max(values),
            caption=f"Loss of {panel.run.loss.num_examples:,} examples. {panel.caption}".strip(),
        )
        for panel, surface in zip(panels, surfaces)
    ]  # fmt: skip


def _axis(low: float, high: float, size: int) -> list[float]:
    return torch.linspace(low, high, size, dtype=torch.float64).tolist()


def _surfaces(runs: Sequence[Run], arguments: LandscapeArguments, partial: PartialResults) -> list[Figure]:
    """Planes of two directions: the change by training, and the change by training on another task, scaled to the same
    length (Hao et al. 2019), or a random direction with filter normalization."""
    panels = []
    for run in runs:
        first = run.direction()
        if arguments.other is not None and run.name == _PRETRAINED:
            change = restrict(difference(run.start, checkpoint_weights(run.loss, arguments.other)), run.masks)
            second, label, low, high = scaled_to(change, first), "towards the model of another task", -0.5, 1.5
        else:
            generator = torch.Generator().manual_seed(arguments.seed)
            second, low, high = restrict(random_direction(run.start, generator), run.masks), -0.5, 0.5
            label = "random direction, in norms of the filters"
        plane = Plane(run.start, [first, second])
        path: list[tuple[float, ...]] = [(0.0, 0.0)]
        path += [plane.project(_restricted_weights(run, checkpoint)) for checkpoint in run.checkpoints]
        path.append(plane.project(run.end))
        axes = _axis(-0.5, 1.5, arguments.plane_points), _axis(low, high, arguments.plane_points)
        panels.append(_Panel(run, plane, *axes, {"training": path}, ("from start to end of training", label)))
    return _draw("surface", "Loss surface", panels, partial)


def _restricted_weights(run: Run, checkpoint: Path) -> Weights:
    """The weights of a checkpoint; embeddings of tokens that do not occur keep their initial values."""
    change = restrict(difference(run.start, checkpoint_weights(run.loss, checkpoint)), run.masks)
    return {name: weight + change[name] for name, weight in run.start.items()}


def _neighborhoods(runs: Sequence[Run], arguments: LandscapeArguments, partial: PartialResults) -> list[Figure]:
    """Random planes around the end of training (Li et al. 2018)."""
    panels = []
    for run in runs:
        generator = torch.Generator().manual_seed(arguments.seed)
        directions = [random_direction(run.end, generator) for _ in range(2)]
        axis = _axis(-1.0, 1.0, arguments.plane_points)
        labels = "random direction", "another random direction"
        caption = "Each filter is changed by up to its norm."
        panels.append(_Panel(run, Plane(run.end, directions), axis, axis, {"end": [(0.0, 0.0)]}, labels, caption))
    return _draw("neighborhood", "Loss around the end of training", panels, partial)


def _trajectories(runs: Sequence[Run], arguments: LandscapeArguments, partial: PartialResults) -> list[Figure]:
    """Planes of the two principal components of the checkpoints (Li et al. 2018)."""
    panels = []
    for run in runs:
        weights = [run.start, *(checkpoint_weights(run.loss, path) for path in run.checkpoints), run.end]
        trajectory = Trajectory.of_checkpoints(weights, run.masks)
        axes = []
        for values in zip(*trajectory.coordinates):
            margin = 0.25 * (max(values) - min(values))
            axes.append(_axis(min(values) - margin, max(values) + margin, arguments.plane_points))
        labels = [f"component {number}: {share:.1%} of the variance" for number, share in
                  enumerate(trajectory.explained, 1)]  # fmt: skip
        path = {"training": trajectory.coordinates}
        panels.append(_Panel(run, trajectory.plane, axes[0], axes[1], path, (labels[0], labels[1])))
    return _draw("trajectory", "Training trajectory", panels, partial)


def _rollback(run: Run, partial: PartialResults) -> Table:
    """The metrics with each layer reset, and the differences to the fine-tuned model."""
    [end] = Plane(run.end, []).evaluate(run.loss, [()])
    results = {}
    evaluated = roll_back_layers(run.loss, run.start, run.end, partial.results.setdefault("rollback", {}))
    for group, metrics in progress_bar(evaluated, "rollback", unit="layers"):
        results[group] = metrics
        partial.save(_SAVE_INTERVAL)
    return Table(
        title="Loss and metrics with one layer reset to its pretrained weights",
        columns=[*end, "change of the loss"],
        rows=["fine-tuned", *results],
        cells=[
            [*end.values(), 0.0],
            *([*metrics.values(), metrics["loss"] - end["loss"]] for metrics in results.values()),
        ],
    )
