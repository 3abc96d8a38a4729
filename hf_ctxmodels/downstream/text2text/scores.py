"""The score table of tasks as text: rows of models, columns of tasks."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.training.summary import TrainingSummary

SCORES_FILE = "scores"


@dataclass
class ScoreTable:
    """Scores of models on tasks.

    Attributes:
        columns: Task -> its metric.
        rows: Name -> task -> score.
    """

    columns: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    def add_row(self, name: str, metrics: Mapping[str, float], prefix: str) -> None:
        """Add the scores in `metrics`, named `<prefix>_<task>_<metric>`, without undefined ones (nan)."""
        scores = {task: metrics.get(f"{prefix}_{task}_{metric}", math.nan) for task, metric in self.columns.items()}
        self.rows.setdefault(name, {}).update({task: score for task, score in scores.items() if not math.isnan(score)})

    def as_markdown(self) -> str:
        """The table in Markdown, with an empty cell for a missing score."""
        header = ["", *(f"{task} ({metric})" for task, metric in self.columns.items())]
        lines = [
            [name, *(f"{scores[task]:.4f}" if task in scores else "" for task in self.columns)]
            for name, scores in self.rows.items()
        ]
        widths = [max(map(len, column)) for column in zip(header, *lines)]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        cells = [
            [cell.ljust(widths[0]) if not index else cell.rjust(widths[index]) for index, cell in enumerate(line)]
            for line in (header, rule, *lines)
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in cells)

    def save(self, directory: str | Path) -> None:
        """Write `scores.json` and `scores.md`, each atomically."""
        file = Path(directory) / SCORES_FILE
        content = {"metrics": self.columns, "rows": self.rows}
        write_text_file(file.with_suffix(".json"), json.dumps(content, indent=2) + "\n")
        write_text_file(file.with_suffix(".md"), self.as_markdown())


def read_compared_runs(entries: Iterable[str], metrics: Mapping[str, str]) -> list[tuple[str, dict[str, float]]]:
    """The runs of entries NAME=DIR (several tasks with the names of the table) and NAME:TASK=DIR (one task).

    Args:
        metrics: Task of the score table -> its metric.

    Returns:
        The name of each run, and its metrics, named `eval_<task>_<metric>`.

    Raises:
        CtxError: A directory has no summary or none of the scores of the table, or a task is unknown.
    """
    runs = []
    for entry in entries:
        key, _, directory = entry.partition("=")
        name, colon, task = key.partition(":")
        if not (name and directory) or (colon and task not in metrics):
            raise CtxError(
                f"Expected NAME=DIR or NAME:TASK=DIR, got {entry!r}.",
                location="--compare",
                hint=f"write heads:TASK=DIR with one of the tasks {', '.join(metrics)}.",
            )
        summary = TrainingSummary.load(directory)
        names = [f"eval_{metrics[task]}"] if colon else [f"eval_{task}_{metric}" for task, metric in metrics.items()]
        if not summary.metrics.keys() & set(names):
            raise CtxError(
                f"The run has none of the metrics {', '.join(names)}.",
                location=f"--compare {entry}",
                hint="use another run." if colon else "for a run on one task, write NAME:TASK=DIR.",
            )
        scores = {f"eval_{task}_{metrics[task]}": summary.metrics[names[0]]} if colon else summary.metrics
        runs.append((name, scores))
    return runs
