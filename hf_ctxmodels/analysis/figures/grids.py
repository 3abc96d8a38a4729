"""Heat maps and surfaces."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Self

from hf_ctxmodels.analysis.figures.base import Figure, require_shape, same_type
from hf_ctxmodels.analysis.figures.drawing import (
    Scale,
    axes,
    color_bar,
    document,
    element,
    format_value,
    label,
    legend,
    marker,
    polyline,
    sequential_color,
    series_line,
    shorten,
    text_width,
    tooltip,
    value_cell,
    value_range,
)

_MAX_NUMBERED = 40  # rows or columns of a heat map whose cells hold numbers
_LEVELS = 64
Group = tuple[str, int, int]
"""Name of neighboring rows or columns, the first one, and the one after the last."""


class Cells(NamedTuple):
    """Pixels of the cells of a matrix: left and top edge, and the size of a cell."""

    left: float
    top: float
    width: float
    height: float

    def x(self, column: float) -> float:
        """Left edge of a column."""
        return self.left + column * self.width

    def y(self, row: float) -> float:
        """Top edge of a row."""
        return self.top + row * self.height


@dataclass
class Heatmap(Figure):
    """A matrix of numbers.

    Cells hold their numbers up to 40 rows and columns. Larger matrices are drawn in small cells without numbers; their
    rows and columns are labeled by groups, the labels up to the last space ("bert 0", "bert 1": "bert").

    Args:
        rows, columns: Labels.
        values: A list of numbers for each row; None is an empty cell.
        low, high: Ends of the color scale; by default the lowest and the highest value.
        digits: Digits of the numbers.
        row_label, column_label: Labels of the axes.
    """

    rows: Sequence[Any]
    columns: Sequence[Any]
    values: Sequence[Sequence[float | None]]
    low: float | None = None
    high: float | None = None
    digits: int = 2
    row_label: str = ""
    column_label: str = ""

    def validate(self) -> None:
        """There is a value for each row and column."""
        self.rows, self.columns = [str(name) for name in self.rows], [str(name) for name in self.columns]
        require_shape("Heat map", self.values, len(self.rows), len(self.columns))
        numbers = iter(same_type([value for row in self.values for value in row]))
        self.values = [[next(numbers) for _ in row] for row in self.values]

    @classmethod
    def of_heads(
        cls,
        name: str,
        title: str,
        heads: Sequence[Sequence[int]],
        values: Sequence[Sequence[float]],
        *,
        layers: Sequence[Any] | None = None,
        **options: Any,
    ) -> Self:
        """A value for each attention head, by layer and number of the head; pruned heads are empty cells.

        Args:
            heads: Numbers of the heads of each layer.
            values: A value for each of them.
            layers: Labels of the layers; by default their numbers.
            options: Further fields.
        """
        columns = list(range(1 + max(map(max, heads))))
        by_head = [dict(zip(*pair, strict=True)) for pair in zip(heads, values, strict=True)]
        cells = [[row.get(head) for head in columns] for row in by_head]
        rows = list(range(len(heads))) if layers is None else layers
        return cls(name, title, rows, columns, cells, row_label="layer", column_label="head", **options)

    @property
    def is_compact(self) -> bool:
        """Whether the cells are too many for numbers."""
        return max(len(self.rows), len(self.columns)) > _MAX_NUMBERED

    def svg(self, *, embedded: bool = False) -> str:
        """Colored cells; see `Figure.svg`."""
        limits = value_range((value for row in self.values for value in row), self.low, self.high)
        row_groups, column_groups = self._groups(self.rows), self._groups(self.columns)
        numbers = [format_value(value, self.digits) for row in self.values for value in row if value is not None]
        if self.is_compact:
            cell_width = cell_height = min(max(640 / max(len(self.rows), len(self.columns)), 3), 14)
        else:
            cell_width = max(max((text_width(text, 11) for text in numbers), default=0) + 12, 26)
            cell_height = 24.0
        left = 20 + max((text_width(name) for name, *_ in row_groups), default=0)
        is_rotated = any(text_width(name) + 6 > (end - start) * cell_width for name, start, end in column_groups)
        header = (max((text_width(name) for name, *_ in column_groups), default=0) if is_rotated else 12) + 12
        top = header + (20 if self.column_label or self.row_label else 4)
        cells = Cells(left, top, cell_width, cell_height)
        right, bottom = cells.x(len(self.columns)), cells.y(len(self.rows))
        elements = self._labels(cells, row_groups, column_groups, is_rotated)
        if self.is_compact:
            elements += self._merged_cells(cells, limits, row_groups, column_groups)
        else:
            elements += self._numbered_cells(cells, limits)
        bar_width = min(max(len(self.columns) * cell_width, 120), 260)
        elements += color_bar(left, bottom + 14, bar_width, *limits, self.digits)
        return document(elements, max(right + 20, left + 160, 320), bottom + 48, self.title, self.caption, embedded)

    def _groups(self, names: Sequence[str]) -> list[Group]:
        """Rows or columns with the same label; single ones if the cells hold numbers."""
        groups = label_groups(names) if self.is_compact else [(name, i, i + 1) for i, name in enumerate(names)]
        return [(shorten(name, 28), start, end) for name, start, end in groups]

    def _labels(self, cells: Cells, row_groups: list[Group], column_groups: list[Group], is_rotated: bool) -> list[str]:
        headings = [f"{text} {arrow}" for text, arrow in ((self.row_label, "↓"), (self.column_label, "→")) if text]
        elements = [label("   ".join(headings), 12, 12, "muted small")] if headings else []
        for name, start, end in row_groups:
            elements.append(label(name, cells.left - 8, cells.y((start + end) / 2), anchor="end"))
        for name, start, end in column_groups:
            x = cells.x((start + end) / 2)
            if is_rotated:
                rotation = f"translate({x:.1f} {cells.top - 8:.1f}) rotate(-90)"
                elements.append(label(name, 0, 0, transform=rotation))
            else:
                elements.append(label(name, x, cells.top - 12, anchor="middle"))
        return elements

    def _numbered_cells(self, cells: Cells, limits: tuple[float, float]) -> list[str]:
        elements = []
        for i, row in enumerate(self.values):
            for j, value in enumerate(row):
                hover = f"{self.rows[i]}, {self.columns[j]}: {format_value(value, max(self.digits, 3))}"
                x, y = cells.x(j) + 0.5, cells.y(i) + 0.5
                box = {"x": x, "y": y, "width": cells.width - 1, "height": cells.height - 1}
                elements.append(value_cell(value, limits, format_value(value, self.digits), hover, **box))
        return elements

    def _merged_cells(
        self, cells: Cells, limits: tuple[float, float], row_groups: list[Group], column_groups: list[Group]
    ) -> list[str]:
        """Cells without numbers, with lines between the groups of rows and columns unless they are many."""
        width, height = float(len(self.columns) * cells.width), float(len(self.rows) * cells.height)
        lines = []
        if len(row_groups) < 80:
            lines += [f"M{cells.left:.1f} {cells.y(start):.1f}h{width:.1f}" for _, start, _ in row_groups[1:]]
        if len(column_groups) < 80:
            lines += [f"M{cells.x(start):.1f} {cells.top:.1f}v{height:.1f}" for _, start, _ in column_groups[1:]]
        elements = merged_cells(self.values, cells, limits)
        elements += [element("path", d=data, class_="halo", stroke_width=0.8) for data in lines]
        area = {"x": float(cells.left), "y": float(cells.top), "width": width, "height": height}
        return [*elements, element("rect", class_="cells", fill="none", pointer_events="all", **area)]


def label_groups(names: Sequence[str]) -> list[Group]:
    """Runs of equal labels up to their last space."""
    groups: list[Group] = []
    for prefix, run in groupby(name.rpartition(" ")[0] or name for name in names):
        start = groups[-1][2] if groups else 0
        groups.append((prefix, start, start + len(list(run))))
    return groups


def merged_cells(values: Sequence[Sequence[float | None]], cells: Cells, limits: tuple[float, float]) -> list[str]:
    """Cells without numbers: one path per color, whose rectangles are runs of cells in units of cells."""
    low, high = limits
    paths: dict[int, list[str]] = defaultdict(list)
    for i, row in enumerate(values):
        levels = [-1 if v is None else round(min(max((v - low) / (high - low), 0), 1) * (_LEVELS - 1)) for v in row]
        start = 0
        for level, run in groupby(levels):
            length = len(list(run))
            paths[level].append(f"M{start} {i}h{length}v1h-{length}z")
            start += length
    colored_cells = [
        element(
            "path",
            d="".join(data),
            **({"class_": "empty"} if level < 0 else {"fill": sequential_color(level / (_LEVELS - 1))[0]}),
        )
        for level, data in sorted(paths.items())
    ]
    transform = f"translate({cells.left:.1f} {cells.top:.1f}) scale({cells.width:.4f} {cells.height:.4f})"
    return [element("g", "".join(colored_cells), transform=transform, shape_rendering="crispEdges")]


@dataclass
class Surface(Figure):
    """Values over a plane, such as losses: colors, contour lines with their values, and paths.

    Args:
        x, y: Coordinates of the columns and rows, ascending and evenly spaced.
        values: A list of numbers for each y, from its lowest to its highest value; None is empty.
        paths: Name -> pairs (x, y), such as the checkpoints of a run; a path of one pair is a point.
        x_label, y_label: Labels of the axes.
        low, high: Ends of the color scale; equal ones make several surfaces comparable.
        digits: Digits of the values.
    """

    x: Sequence[float]
    y: Sequence[float]
    values: Sequence[Sequence[float | None]]
    paths: Mapping[str, Sequence[Any]]
    x_label: str = ""
    y_label: str = ""
    low: float | None = None
    high: float | None = None
    digits: int = 2

    def validate(self) -> None:
        """There is a value for each x and y, and there are at least two of both."""
        require_shape("Surface", self.values, len(self.y), len(self.x))
        if min(len(self.x), len(self.y)) < 2:
            raise ValueError("A surface has at least two rows and columns.")
        for name, pairs in self.paths.items():
            if any(len(pair) != 2 for pair in pairs):
                raise ValueError(f"The path {name!r} consists of pairs (x, y).")

    def svg(self, *, embedded: bool = False) -> str:
        """Cells around the coordinates, with contour lines; see `Figure.svg`."""
        low, high = value_range((value for row in self.values for value in row), self.low, self.high)
        elements, top = legend(list(self.paths), 12, 4, 600, "line")
        top += 34
        left, right, bottom = 62.0, 520.0, top + 400.0
        steps = [(axis[-1] - axis[0]) / (len(axis) - 1) for axis in (self.x, self.y)]
        x_scale = Scale((self.x[0] - steps[0] / 2, self.x[-1] + steps[0] / 2), left, right, pad=False)
        y_scale = Scale((self.y[0] - steps[1] / 2, self.y[-1] + steps[1] / 2), bottom, top, pad=False)
        cells = Cells(left, top, (right - left) / len(self.x), (bottom - top) / len(self.y))
        elements += axes(x_scale, y_scale, self.x_label, self.y_label)
        elements += merged_cells(self.values[::-1], cells, (low, high))
        boxes: list[tuple[float, float, float]] = []
        for level in (low + (high - low) * step / 8 for step in range(1, 8)):
            elements += self._contour(level, x_scale, y_scale, boxes)
        for number, (name, pairs) in enumerate(self.paths.items()):
            points = [(x_scale(x), y_scale(y)) for x, y in pairs]
            if len(points) > 1:
                elements.append(element("path", d=polyline(points), class_="halo", fill="none", stroke_width=5))
                elements.append(series_line(number, polyline(points)))
            for step, (pair, (x, y)) in enumerate(zip(pairs, points)):
                hover = f"{name}, {step + 1} of {len(points)}: ({pair[0]:.3g}, {pair[1]:.3g})"
                elements.append(element("circle", cx=x, cy=y, r=6.0, class_="canvas"))
                elements.append(marker(number, x, y, 4, hover))
        elements += color_bar(left, bottom + 54, 260, low, high, self.digits)
        return document(elements, 600, bottom + 90, self.title, self.caption, embedded)

    def _contour(
        self, level: float, x_scale: Scale, y_scale: Scale, boxes: list[tuple[float, float, float]]
    ) -> list[str]:
        """Line of a value by marching squares, with the value near the vertical center line where it overlaps none of
        the `boxes` of other values (left edge, right edge, center), which receive its own."""
        segments = list(self._contour_segments(level))
        if not segments:
            return []
        data = "".join(polyline([(x_scale(x), y_scale(y)) for x, y in segment]) for segment in segments)
        text = format_value(float(level), self.digits)
        center = (self.x[0] + self.x[-1]) / 2
        path = element("path", tooltip(text), d=data, fill="none", stroke="#ffffff", stroke_width=1.1)
        half = text_width(text, 11) / 2 + 2
        for point in sorted((segment[0] for segment in segments), key=lambda point: (abs(point[0] - center), point[1])):
            x, y = x_scale(point[0]), y_scale(point[1])
            if all(x + half < left or x - half > right or abs(y - middle) > 15 for left, right, middle in boxes):
                boxes.append((x - half, x + half, y))
                box = element(
                    "rect", x=x - half, y=y - 7, width=2 * half, height=14.0, rx=3, fill="#101418", fill_opacity=0.8
                )
                return [path, box, label(text, x, y, "small", anchor="middle", fill="#ffffff")]
        return [path]

    def _contour_segments(self, level: float) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
        """Straight pieces of a contour line, one or two in each square of four values that it crosses."""
        for i in range(len(self.y) - 1):
            for j in range(len(self.x) - 1):
                corners = [(i, j), (i, j + 1), (i + 1, j + 1), (i + 1, j)]
                heights = [self.values[row][column] for row, column in corners]
                if any(height is None for height in heights):
                    continue
                crossings = []
                for k, (row, column) in enumerate(corners):
                    next_row, next_column = corners[(k + 1) % 4]
                    first, second = heights[k], heights[(k + 1) % 4]
                    if (first < level) != (second < level):  # type: ignore[operator]
                        fraction = (level - first) / (second - first)  # type: ignore[operator]
                        x = self.x[column] + fraction * (self.x[next_column] - self.x[column])
                        y = self.y[row] + fraction * (self.y[next_row] - self.y[row])
                        crossings.append((x, y))
                yield from zip(crossings[::2], crossings[1::2])
