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

    def add_runs(self, name: str, summaries: Iterable[TrainingSummary], files: Mapping[str, str]) -> None:
        """Add the scores of runs of `finetune`: of several tasks by their names, of one task by its training file.

        Args:
            files: Task -> name of its training file.
        """
        for summary in summaries:
            self.add_row(name, summary.metrics, "eval")
            for task, metric in self.columns.items():
                if summary.dataset == files[task] and f"eval_{metric}" in summary.metrics:
                    self.rows[name][task] = summary.metrics[f"eval_{metric}"]

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


def read_compared_runs(entries: Iterable[str]) -> dict[str, list[TrainingSummary]]:
    """Row name -> summaries of its runs, from entries NAME=DIR; raises CtxError if a directory has no summary."""
    summaries: dict[str, list[TrainingSummary]] = {}
    for entry in entries:
        name, equals, directory = entry.partition("=")
        if not (name and equals and directory):
            raise CtxError(f"Expected NAME=DIR, got {entry!r}.", location="--compare", hint="write heads=runs/sst2.")
        summaries.setdefault(name, []).append(TrainingSummary.load(directory))
    return summaries
