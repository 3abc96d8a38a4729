"""Tables of results of prompt tasks, in the format of lm-evaluation-harness."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_ctxmodels.evaluation.prompts.evaluation import MetricValue

_HEADERS = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
_RIGHT_ALIGNED = ("Version", "n-shot", "Value", "Stderr")
_LOWER_IS_BETTER = ("perplexity",)


@dataclass(frozen=True)
class TableRow:
    """Metrics of a task with a number of examples per context."""

    task: str
    version: int
    num_shots: int
    metrics: dict[str, MetricValue]


def format_table(rows: Sequence[TableRow]) -> str:
    """A Markdown table with the columns of lm-evaluation-harness: task, version, filter (none), examples per context,
    metric, arrow to the better values, value and standard error. Metrics are in alphabetical order."""
    cells = []
    for row in rows:
        first_cells = [row.task, str(row.version)]
        for name, metric in sorted(row.metrics.items()):
            arrow = "↓" if name in _LOWER_IS_BETTER else "↑"
            error = "N/A" if metric.standard_error is None else f"{metric.standard_error:.4f}"
            value = f"{metric.value:.4f}"
            cells.append([*first_cells, "none", str(row.num_shots), name, arrow, value, "±", error])
            first_cells = ["", ""]
    columns = list(zip(_HEADERS, *cells))
    widths = [max(3, *map(len, column)) for column in columns]
    header = "|".join(f"{name:^{width}}" for name, width in zip(_HEADERS, widths))
    is_right = [name in _RIGHT_ALIGNED for name in _HEADERS]
    rules = ["-" * (width - right) + ":" * right for width, right in zip(widths, is_right)]
    return "\n".join([f"|{header}|", _line(rules, widths, is_right), *(_line(row, widths, is_right) for row in cells)])


def _line(cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> str:
    texts = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(cells, widths, is_right)]
    return f"|{'|'.join(texts)}|"
