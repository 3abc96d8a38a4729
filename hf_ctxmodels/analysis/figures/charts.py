"""Lines, bars and points."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hf_ctxmodels.analysis.figures.base import Figure, require_equal_lengths, same_type
from hf_ctxmodels.analysis.figures.drawing import (
    NUM_COLORS,
    Scale,
    axes,
    document,
    element,
    format_value,
    label,
    legend,
    line,
    marker,
    polyline,
    series_bar,
    series_line,
    shorten,
    text_width,
    tooltip,
)

_WIDTH = 680
_ROW_HEIGHT = 17  # of a dot plot
_LOG_RATIO = 30  # of the highest to the lowest value of a panel with a logarithmic axis


@dataclass
class LineChart(Figure):
    """Values of several series over one axis.

    Args:
        x: Numbers, in ascending order.
        series: Name -> a value for each x; None is a gap.
        bands: Name of a series -> a pair (low, high) for each x, drawn as an area; None, also in a pair, is a gap.
        x_label, y_label: Labels of the axes.
        log_x: A logarithmic x axis.
        digits: Digits of values in tooltips.
        join_gaps: Draw lines and bands across missing values, for series with different x.
    """

    x: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    bands: Mapping[str, Sequence[Any]] | None = None
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    digits: int = 3
    join_gaps: bool = False

    def validate(self) -> None:
        """Every series and band has a value for each x, and every band is of a series."""
        for name, values in self.series.items():
            require_equal_lengths(f"x and the series {name!r}", self.x, values)
        for name, pairs in (self.bands or {}).items():
            require_equal_lengths(f"x and the band of {name!r}", self.x, pairs)
            if name not in self.series or any(pair is not None and len(pair) != 2 for pair in pairs):
                raise ValueError(f"The band {name!r} needs a series of this name and pairs (low, high).")

    def svg(self, *, embedded: bool = False) -> str:
        """Lines with markers; see `Figure.svg`."""
        elements, top = legend(list(self.series), 12, 4, _WIDTH, "line")
        bands = {
            name: [(None, None) if pair is None or None in pair else tuple(pair) for pair in pairs]
            for name, pairs in (self.bands or {}).items()
        }
        values = [value for series in self.series.values() for value in series]
        values += [value for pairs in bands.values() for pair in pairs for value in pair]
        top += 34
        y_scale = Scale(values, top + 290, top)
        left = 20 + max(text_width(text, 11) for _, text in y_scale.ticks())
        x_scale = Scale(self.x, left, _WIDTH - 26, log=self.log_x, pad=False)
        if not self.log_x and all(value == int(value) for value in self.x):
            x_scale.step = max(1.0, x_scale.step)
        elements += axes(x_scale, y_scale, self.x_label, self.y_label)
        for number, (name, series) in enumerate(self.series.items()):
            for indices in self._segments(bands.get(name, [])):
                columns = [x_scale(self.x[index]) for index in indices]
                lower, upper = ([y_scale(y) for y in ends] for ends in zip(*(bands[name][index] for index in indices)))
                outline = [*zip(columns, upper), *reversed(list(zip(columns, lower)))]
                path = f"{polyline(outline)}Z"
                elements.append(element("path", d=path, class_=f"fill-{number % NUM_COLORS}", opacity=0.15))
            for indices in self._segments(series):
                points = [(x_scale(self.x[index]), y_scale(y)) for index in indices if (y := series[index]) is not None]
                elements.append(series_line(number, polyline(points)))
        for number, (name, series) in enumerate(self.series.items()):
            if len(self.x) <= 60:
                elements += [
                    marker(number, x_scale(x), y_scale(y), 3.5, f"{name}, {x:g}: {format_value(y, self.digits)}")
                    for x, y in zip(self.x, series)
                    if y is not None
                ]
        return document(elements, _WIDTH, y_scale.start + 48, self.title, self.caption, embedded)

    def _segments(self, values: Sequence[Any]) -> list[list[int]]:
        """Indices of the values that are drawn as one line: runs without None, or all values to `join_gaps`."""
        indices = [index for index, value in enumerate(values) if value is not None and value != (None, None)]
        if self.join_gaps:
            return [indices] if indices else []
        segments: list[list[int]] = []
        for index in indices:
            if segments and segments[-1][-1] == index - 1:
                segments[-1].append(index)
            else:
                segments.append([index])
        return segments


@dataclass
class BarChart(Figure):
    """Horizontal bars with their values, grouped by label.

    Args:
        labels: Groups of bars, from the top.
        series: Name -> a value for each label; None is left out.
        x_label: Label of the axis.
        digits: Digits of the values.
    """

    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    x_label: str = ""
    digits: int = 3

    def validate(self) -> None:
        """Every series has a value for each label."""
        self.labels = [str(name) for name in self.labels]
        self.series = {name: same_type(values) for name, values in self.series.items()}
        for name, values in self.series.items():
            require_equal_lengths(f"the labels and the series {name!r}", self.labels, values)

    def svg(self, *, embedded: bool = False) -> str:
        """Bars from zero; see `Figure.svg`."""
        names = list(self.series)
        elements, top = legend(names if len(names) > 1 else [], 12, 4, _WIDTH, "bar")
        left = 22 + max((text_width(shorten(text)) for text in self.labels), default=0)
        height = 18 if len(names) == 1 else 14
        group_height = height * len(names) + 10
        bottom = top + 8 + group_height * len(self.labels)
        values = [value for series in self.series.values() for value in series if value is not None]
        number_width = max((text_width(format_value(value, self.digits), 11) for value in values), default=0) + 10
        negative_width = number_width if min(values, default=0) < 0 else 0
        scale = Scale([0, *values], left + negative_width, _WIDTH - number_width - 4)
        for tick, text in scale.ticks():
            x = scale(tick)
            elements.append(line(x, top + 4, x, bottom, "axis" if tick == 0 else "grid"))
            elements.append(label(text, x, bottom + 12, "muted small", anchor="middle"))
        for row, name in enumerate(self.labels):
            y = top + 13 + row * group_height
            middle = y + height * len(names) / 2
            elements.append(label(shorten(name), left - 8, middle, anchor="end"))
            for number, (series_name, series) in enumerate(self.series.items()):
                value = series[row]
                if value is None:
                    continue
                start, end = sorted((scale(0), scale(value)))
                text = format_value(value, self.digits)
                bar_y = y + number * height
                elements.append(
                    series_bar(number, start, bar_y + 1, end - start, height - 3, f"{name}, {series_name}: {text}")
                )
                side, anchor = (end + 5, "start") if value >= 0 else (start - 5, "end")
                elements.append(label(text, side, bar_y + height / 2, "muted small", anchor=anchor))
        elements.append(label(self.x_label, (scale.start + scale.end) / 2, bottom + 32, anchor="middle"))
        return document(elements, _WIDTH, bottom + 46, self.title, self.caption, embedded)


@dataclass
class DotPlot(Figure):
    """Values of the same rows in several panels next to one another, each with its own axis.

    An axis is logarithmic if its values are positive and the highest one is more than 30 times the lowest one.

    Args:
        labels: Rows, from the top.
        panels: Title of a panel -> series -> a list of values for each row, such as a value for each seed. A row can
            have any number of values; None is left out.
        references: Title of a panel -> name -> a value that is drawn as a vertical line, such as chance.
        digits: Digits of values in tooltips.
    """

    labels: Sequence[str]
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float | None]]]]
    references: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    digits: int = 3

    def validate(self) -> None:
        """Every series of a panel has a list for each row, and every reference is of a panel."""
        self.labels = [str(name) for name in self.labels]
        for title, panel in self.panels.items():
            for name, rows in panel.items():
                require_equal_lengths(f"the labels and the series {name!r} of {title!r}", self.labels, rows)
        if others := set(self.references) - set(self.panels):
            raise ValueError(f"There are references, but no panels with the titles {', '.join(sorted(others))}.")

    def svg(self, *, embedded: bool = False) -> str:
        """Markers of all values, and vertical lines; see `Figure.svg`."""
        series = list(dict.fromkeys(name for panel in self.panels.values() for name in panel))
        references = list(dict.fromkeys(name for values in self.references.values() for name in values))
        elements, top = legend(series, 12, 4, _WIDTH, "point")
        lines, top = legend(references, 12, top - 4 if series else top, _WIDTH, "rule", first_number=len(series))
        elements += lines
        left = 20 + max((text_width(shorten(text, 20)) for text in self.labels), default=0)
        width = (_WIDTH - 12 - left) / max(len(self.panels), 1)
        numbers = {name: number for number, name in enumerate([*series, *references])}
        top += 28
        for row, text in enumerate(self.labels):
            elements.append(label(shorten(text, 20), left - 8, _row_center(top, row), anchor="end"))
        for column, title in enumerate(self.panels):
            elements += self._panel(title, left + column * width, width - 16, top, numbers)
        return document(elements, _WIDTH, top + _ROW_HEIGHT * len(self.labels) + 28, self.title, self.caption, embedded)

    def _panel(self, title: str, left: float, width: float, top: float, numbers: Mapping[str, int]) -> list[str]:
        """A panel below its title; `numbers` are those of the series and references in the legend."""
        panel, references = self.panels[title], self.references.get(title, {})
        numbers_shown = chain(chain.from_iterable(chain.from_iterable(panel.values())), references.values())
        values = [value for value in numbers_shown if value is not None]
        log = bool(values) and min(values) > 0 and max(values) > _LOG_RATIO * min(values)
        scale = Scale(values, left + 6, left + width - 6, log=log, pad=False)
        bottom = top + _ROW_HEIGHT * len(self.labels)
        elements = [label(shorten(title, int(width / 7)), left, top - 14)]
        for row in range(len(self.labels)):
            y = _row_center(top, row)
            elements.append(line(left, y, left + width, y, "grid"))
        end = -math.inf  # of the last label
        for tick, text in scale.ticks():
            x, half_width = scale(tick), text_width(text, 11) / 2
            elements.append(line(x, bottom, x, bottom + 4, "axis"))
            if x - half_width > end + 4:
                elements.append(label(text, x, bottom + 12, "muted small", anchor="middle"))
                end = x + half_width
        elements.append(line(left, bottom, left + width, bottom, "axis"))
        for name, value in references.items():
            if value is None:
                continue
            elements.append(series_line(numbers[name], f"M{scale(value):.1f} {top:.1f}V{bottom:.1f}"))
        for name, rows in panel.items():
            for row, row_values in enumerate(rows):
                y = _row_center(top, row)
                for value in row_values:
                    if value is None:
                        continue
                    hover = f"{self.labels[row]}, {name}: {format_value(value, self.digits)}"
                    elements.append(marker(numbers[name], scale(value), y, 3.5, hover, fill_opacity=0.75))
        return elements


def _row_center(top: float, row: int) -> float:
    """The y of the center of a row of a dot plot."""
    return top + _ROW_HEIGHT * (row + 0.5)


@dataclass
class ScatterMap(Figure):
    """Points of a plane, with equal units on both axes.

    Args:
        points: Pairs (x, y).
        groups: Group of each point, which sets its color and marker.
        texts: Text of each point, on hover and by keyboard focus in a report, such as the sentence of a word.
        labels: Text next to each point; None or "" for none. Labels that would overlap are left out.
        x_label, y_label: Labels of the axes.
        edges: Triples (index, index, style) of lines between points; the style is "solid", "dashed" or "dotted".
        is_lattice: Coordinates are numbers of columns and rows, as in a heat map: row 0 is at the top.
    """

    points: Sequence[Sequence[float]]
    groups: Sequence[str]
    texts: Sequence[str]
    labels: Sequence[str | None] | None = None
    x_label: str = ""
    y_label: str = ""
    edges: Sequence[Any] | None = None
    is_lattice: bool = False

    def validate(self) -> None:
        """There is a pair of numbers, a group and a text for each point, and edges join points."""
        require_equal_lengths(
            "points, groups and texts", self.points, self.groups, self.texts, self.labels or self.points
        )
        if any(len(point) != 2 or None in point for point in self.points):
            raise ValueError("A point is a pair of finite numbers.")
        count = len(self.points)
        for first, second, style in self.edges or []:
            if not (0 <= first < count and 0 <= second < count and style in ("solid", "dashed", "dotted")):
                raise ValueError(f"({first}, {second}, {style!r}) is not an edge between {count} points.")

    def svg(self, *, embedded: bool = False) -> str:
        """Markers, lines and labels; see `Figure.svg`."""
        names = list(dict.fromkeys(self.groups))
        elements, top = legend(names if names != [""] else [], 12, 4, _WIDTH, "point")
        top += 34
        x_scale, y_scale = self._lattice_scales(62.0, top) if self.is_lattice else self._scales(62.0, top)
        right, bottom = x_scale.end, y_scale.start
        elements += axes(x_scale, y_scale, self.x_label, self.y_label, x_grid=True)
        pixels = [(x_scale(x), y_scale(y)) for x, y in self.points]
        dashes = {"solid": "", "dashed": "6 4", "dotted": "1.5 3"}
        elements += [
            element(
                "path", d=polyline([pixels[first], pixels[second]]), class_="axis", stroke_width=1.4,
                stroke_dasharray=dashes[style],
            )
            for first, second, style in self.edges or []
        ]  # fmt: skip
        radius = 4.5 if len(pixels) <= 300 else 3.0
        for index, ((x, y), group, text) in enumerate(zip(pixels, self.groups, self.texts)):
            mark = marker(names.index(group), x, y, radius, fill_opacity=0.85)
            hover = f"{group}: {text}" if group else text
            elements.append(element("g", mark + tooltip(hover), class_="point", data_index=str(index), data_text=hover))
        elements += self._place_labels(pixels, right)
        return document(elements, _WIDTH, bottom + 48, self.title, self.caption, embedded)

    def _lattice_scales(self, left: float, top: float) -> tuple[Scale, Scale]:
        """Scales with a tick for each column and row."""
        num_columns, num_rows = (max(numbers, default=0) + 1 for numbers in zip(*(self.points or [(0, 0)])))
        spacing = min(38.0, (_WIDTH - 26 - left) / num_columns)
        x_scale = Scale((-0.5, num_columns - 0.5), left, left + spacing * num_columns, pad=False)
        y_scale = Scale((-0.5, num_rows - 0.5), top + spacing * num_rows, top, pad=False, reverse=True)
        x_scale.step = y_scale.step = 1.0
        return x_scale, y_scale

    def _scales(self, left: float, top: float) -> tuple[Scale, Scale]:
        """Scales with the same number of pixels per unit, around the center of the points."""
        right, bottom = _WIDTH - 26.0, top + 420.0
        columns = list(zip(*self.points)) or [(0.0,), (0.0,)]
        centers = [(min(column) + max(column)) / 2 for column in columns]
        spans = [max(column) - min(column) for column in columns]
        unit = max(spans[0] / (right - left - 40), spans[1] / (bottom - top - 40)) or 1 / (right - left)
        halves = [unit * (right - left) / 2, unit * (bottom - top) / 2]
        x_scale, y_scale = (
            Scale((center - half, center + half), start, end, pad=False)
            for center, half, (start, end) in zip(centers, halves, ((left, right), (bottom, top)))
        )
        x_scale.step = y_scale.step = max(x_scale.step, y_scale.step)
        return x_scale, y_scale

    def _place_labels(self, pixels: list[tuple[float, float]], right: float) -> list[str]:
        """Each label at the first of six positions where it overlaps no point and no label."""
        occupied = [(x - 5, x + 5, y) for x, y in pixels]  # left edge, right edge, center
        elements = []
        for (x, y), text in zip(pixels, self.labels or []):
            if not text:
                continue
            text = shorten(text, 24)
            width = text_width(text)
            for is_right, offset in ((True, 0), (False, 0), (True, -11), (False, -11), (True, 12), (False, 12)):
                start = x + 7 if is_right else x - 7 - width
                box = (start, start + width, y + offset)
                is_inside = start > 0 and start + width < right + 16
                if is_inside and all(box[1] < a or box[0] > b or abs(box[2] - c) > 11 for a, b, c in occupied):
                    occupied.append(box)
                    elements.append(label(text, start, y + offset, "ink halo"))
                    break
        return elements
