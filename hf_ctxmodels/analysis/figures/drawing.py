"""SVG elements, scales and colors of the figures.

Colors are CSS classes with a light and a dark value; `sequential_color` returns colors that suit both. The
sequential colors are viridis (van der Walt and Smith 2015), whose lightness is monotone; the categorical colors follow
Okabe and Ito (2008), darkened for lines on white. No figure needs color to be read: cells hold numbers, and series
differ in dashes and markers.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

from hf_ctxmodels.core.console import format_number

FONT = 'system-ui, "Segoe UI", "DejaVu Sans", "Liberation Sans", "Noto Sans", sans-serif'
_VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_SERIES = (
    ("#0063a6", "#5db8f0"),
    ("#c24a00", "#ff9a57"),
    ("#007a56", "#43d1a1"),
    ("#a0408a", "#e99bd3"),
    ("#7a5c00", "#e8c95a"),
    ("#3d7f9e", "#a5d8ef"),
    ("#555555", "#bdbdbd"),
)
NUM_COLORS = len(_SERIES)
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "reversed-triangle", "bar")
_RULES: list[tuple[str, str, str, str]] = [  # class, property, light, dark
    ("canvas", "fill", "#ffffff", "#14171c"),
    ("ink", "fill", "#1b1f24", "#e8eaed"),
    ("muted", "fill", "#5a6270", "#a3abb8"),
    ("error", "fill", "#b3261e", "#ff8f86"),
    ("grid", "stroke", "#e3e6ea", "#2b313a"),
    ("axis", "stroke", "#8b93a0", "#6c7583"),
    ("ink-line", "stroke", "#1b1f24", "#e8eaed"),
    ("error-line", "stroke", "#b3261e", "#ff8f86"),
    ("empty", "fill", "#f0f2f4", "#20252c"),
    ("halo", "stroke", "#ffffff", "#14171c"),
]
for _number, (_light, _dark) in enumerate(_SERIES):
    _RULES += [(f"fill-{_number}", "fill", _light, _dark), (f"line-{_number}", "stroke", _light, _dark)]

_COMMON_STYLE = (
    f".figure text{{font-family:{FONT};font-size:12px;unicode-bidi:isolate}}.figure .title{{font-size:15px;"
    "font-weight:600}.figure .small{font-size:11px}.figure .tiny{font-size:10px}"
    ".figure .halo{paint-order:stroke;stroke-width:3px;stroke-linejoin:round}"
)


def figure_style(scheme: Literal["media", "function"] = "media") -> str:
    """CSS of all figures. Dark colors apply by a media query, as in a file of its own, or by the CSS function
    `light-dark()`, which follows the `color-scheme` of the page around an embedded figure."""
    if scheme == "function":
        rules = (f".figure .{name}{{{key}:light-dark({light},{dark})}}" for name, key, light, dark in _RULES)
        return _COMMON_STYLE + "".join(rules)
    light_rules = "".join(f".figure .{name}{{{key}:{light}}}" for name, key, light, _ in _RULES)
    dark_rules = "".join(f".figure .{name}{{{key}:{dark}}}" for name, key, _, dark in _RULES)
    return f"{_COMMON_STYLE}{light_rules}@media (prefers-color-scheme:dark){{{dark_rules}}}"


# Text


def escape_text(text: object) -> str:
    """Text for XML and HTML; characters that XML 1.0 does not allow become U+FFFD."""

    def is_allowed(character: str) -> bool:
        return character in "\t\n\r" or (character >= " " and not "\ud800" <= character <= "\udfff")

    allowed = (character if is_allowed(character) else "\ufffd" for character in str(text))
    return escape("".join(allowed).replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd"))


def text_width(text: str, size: float = 12) -> float:
    """Approximate width of a text in pixels, since fonts differ between readers."""
    return size * sum(_character_width(character) for character in text)


def _character_width(character: str) -> float:
    if unicodedata.combining(character):
        return 0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    return 0.7 if character.isupper() else 0.6


def shorten(text: str, length: int = 32) -> str:
    """The text on one line, at most `length` characters; a number at its end remains, as in "model-name… 3"."""
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    number = re.search(r" \d{1,4}$", text)
    tail = f"…{number[0] if number else ''}"
    return text[: length - len(tail)] + tail


def wrap(text: str, width: float, size: float) -> list[str]:
    """Lines of a text of at most `width` pixels; longer words stay whole."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def format_value(value: float | None, digits: int) -> str:
    """A number with a fixed number of digits, an integer without, and a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


# Elements


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """An SVG element with escaped attributes; `_` in their names becomes `-`, and `class_` is `class`."""
    pairs = []
    for name, value in attributes.items():
        if value is not None and value != "":
            text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape_text(value)
            pairs.append(f' {name.rstrip("_").replace("_", "-")}="{text}"')
    return f"<{tag}{''.join(pairs)}>{content}</{tag}>" if content else f"<{tag}{''.join(pairs)}/>"


def tooltip(text: object) -> str:
    """The text that a reader sees when pointing at the mark around it."""
    return f"<title>{escape_text(text)}</title>" if text else ""


def label(text: str, x: float, y: float, class_: str = "ink", *, anchor: str = "start", **attributes: object) -> str:
    """Text whose vertical center is at y."""
    return element(
        "text", escape_text(text), x=float(x), y=float(y) + 4, class_=class_, text_anchor=anchor, **attributes
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str, **attributes: object) -> str:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_, **attributes)


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """Path data through points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def marker(number: int, x: float, y: float, radius: float = 4, hover: object = "", **attributes: object) -> str:
    """Mark of a series, or a group, in its color and shape."""
    color = number % NUM_COLORS
    shape = MARKERS[number % len(MARKERS)]
    r, s = radius, radius * 0.9
    paths = {
        "square": f"M{-s} {-s}H{s}V{s}H{-s}Z",
        "triangle": f"M0 {-r * 1.15}L{r * 1.1} {s}H{-r * 1.1}Z",
        "reversed-triangle": f"M0 {r * 1.15}L{r * 1.1} {-s}H{-r * 1.1}Z",
        "diamond": f"M0 {-r * 1.25}L{r * 1.25} 0L0 {r * 1.25}L{-r * 1.25} 0Z",
        "cross": f"M{-s} {-s}L{s} {s}M{-s} {s}L{s} {-s}",
        "plus": f"M0 {-r * 1.15}V{r * 1.15}M{-r * 1.15} 0H{r * 1.15}",
        "bar": f"M0 {-r * 1.15}V{r * 1.15}",
    }
    if shape == "circle":
        return element(
            "circle", tooltip(hover), cx=float(x), cy=float(y), r=float(r), class_=f"fill-{color}", **attributes
        )
    is_open = shape in ("cross", "plus", "bar")
    return element(
        "path", tooltip(hover), d=paths[shape], transform=f"translate({x:.1f} {y:.1f})",
        class_=f"line-{color}" if is_open else f"fill-{color}", stroke_width=2 if is_open else None, **attributes,
    )  # fmt: skip


def document(body: Sequence[str], width: float, height: float, title: str, caption: str, embedded: bool) -> str:
    """An SVG document of elements in (0, 0) to (width, height), with title, caption, style and background unless it is
    embedded in a page that has them."""
    lines = [] if embedded else wrap(title, width - 24, 15)
    caption_lines = [] if embedded else wrap(caption, width - 24, 11)
    top = 20 * len(lines) + 12 if lines else 0
    body = [*body, *(label(text, 12, height + 16 * row + 6, "muted small") for row, text in enumerate(caption_lines))]
    height += 16 * len(caption_lines) + 8 if caption_lines else 0
    attributes = {
        "class": "figure",
        "viewBox": f"0 {-top} {width:.0f} {height + top:.0f}",
        "width": f"{width:.0f}",
        "height": f"{height + top:.0f}",
        "role": "img",
        "aria-label": f"{title}. {caption}" if caption else title,
    }
    head = []
    if not embedded:
        attributes = {"xmlns": "http://www.w3.org/2000/svg", **attributes}
        head = [
            f"<style>{figure_style()}</style>",
            element("rect", y=-top, width=float(width), height=float(height + top), class_="canvas"),
            *(label(text, 12, 20 * number + 18 - top, "ink title") for number, text in enumerate(lines)),
        ]
    return element("svg", "\n".join(["", *head, *body, ""]), **attributes)


# Color


def sequential_color(fraction: float) -> tuple[str, str]:
    """The color of a fraction of a range, and the color of text on it with the higher contrast."""
    position = min(max(fraction, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    index = min(int(position), len(_VIRIDIS) - 2)
    ends = ([int(color[i : i + 2], 16) for i in (0, 2, 4)] for color in _VIRIDIS[index : index + 2])
    channels = [round(first + (second - first) * (position - index)) for first, second in zip(*ends)]
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#" + "".join(f"{c:02x}" for c in channels), "#ffffff" if luminance < 0.179 else "#101010"


def value_range(
    values: Iterable[float | None], low: float | None = None, high: float | None = None
) -> tuple[float, float]:
    """Ends of the color scale, by default the lowest and the highest value; they differ."""
    present = [value for value in values if value is not None] or [0.0, 1.0]
    low, high = min(present) if low is None else low, max(present) if high is None else high
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def value_cell(
    value: float | None, limits: tuple[float, float], text: str, hover: str, *, x: float, y: float, width: float,
    height: float,
) -> str:  # fmt: skip
    """A rectangle in the color of a value, with the value as text; an empty one for None. `limits` are the ends of the
    color scale."""
    box = {"x": x, "y": y, "width": width, "height": height, "rx": 2}
    if value is None:
        return element("rect", tooltip(hover), class_="empty", **box)
    low, high = limits
    color, text_color = sequential_color((value - low) / (high - low))
    number = label(text, x + width / 2, y + height / 2, "small", anchor="middle", fill=text_color)
    return element("g", element("rect", fill=color, **box) + number + tooltip(hover))


def color_bar(x: float, y: float, width: float, low: float, high: float, digits: int) -> list[str]:
    """Scale of the sequential colors from `low` to `high`, 24 pixels high."""
    steps = 40
    cells = [
        element(
            "rect",
            x=x + width * i / steps,
            y=float(y),
            width=width / steps + 0.5,
            height=9.0,
            fill=sequential_color(i / (steps - 1))[0],
        )
        for i in range(steps)
    ]
    ends = [(low, x, "start"), ((low + high) / 2, x + width / 2, "middle"), (high, x + width, "end")]
    return cells + [label(format_value(float(v), digits), end, y + 18, "muted small", anchor=a) for v, end, a in ends]


# Scales


class Scale:
    """Maps values of an axis to pixels.

    Args:
        values: Values to show; None is skipped.
        start, end: Pixels of the lowest and the highest value.
        log: A logarithmic axis; values must be positive.
        pad: Extend the axis to multiples of the tick interval.
        reverse: Put the lowest value at the end.
    """

    def __init__(
        self,
        values: Iterable[float | None],
        start: float,
        end: float,
        *,
        log: bool = False,
        pad: bool = True,
        reverse: bool = False,
    ) -> None:
        finite = [value for value in values if value is not None] or [0.0, 1.0]
        if log and min(finite) <= 0:
            raise ValueError(f"A logarithmic axis shows positive values, not {min(finite)}.")
        self.log = log
        low, high = (self._transform(value) for value in (min(finite), max(finite)))
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
            margin = abs(low) / 10 or 0.5
            low, high = low - margin, high + margin
        self.step = _tick_interval(high - low)
        if pad and not log:
            low, high = math.floor(low / self.step + 1e-9) * self.step, math.ceil(high / self.step - 1e-9) * self.step
        self.low, self.high = (high, low) if reverse else (low, high)
        self.start, self.end = start, end

    def _transform(self, value: float) -> float:
        return math.log10(value) if self.log else float(value)

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        fraction = (self._transform(value) - self.low) / (self.high - self.low)
        return self.start + fraction * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Values and their labels."""
        if self.log:
            exponents = range(math.floor(self.low), math.ceil(self.high) + 1)
            factors = (1,) if self.high - self.low > 2 else (1, 2, 5)
            values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
            values = [v for v in values if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]
            return [(value, _tick_label(value, None)) for value in values]
        low, high = sorted((self.low, self.high))
        first = math.ceil(low / self.step - 1e-9)
        values = [index * self.step for index in range(first, math.floor(high / self.step + 1e-9) + 1)]
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return [(value, _tick_label(value, digits)) for value in values]


def _tick_label(value: float, digits: int | None) -> str:
    if abs(value) >= 1e6:
        return format_number(value)
    return f"{value:,g}" if digits is None or abs(value) >= 1000 else f"{value:.{digits}f}"


def _tick_interval(span: float) -> float:
    """1, 2 or 5 times a power of ten, with four to ten intervals in the span."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return max(factor * power for factor in (1, 2, 5) if span / (factor * power) >= 4)


def axes(x_scale: Scale, y_scale: Scale, x_label: str, y_label: str, *, x_grid: bool = False) -> list[str]:
    """Grid, ticks and labels of both axes; the label of the y axis is above it, horizontal."""
    left, right, top, bottom = x_scale.start, x_scale.end, y_scale.end, y_scale.start
    elements = []
    for value, text in y_scale.ticks():
        y = y_scale(value)
        elements += [line(left, y, right, y, "grid"), label(text, left - 8, y, "muted small", anchor="end")]
    for value, text in x_scale.ticks():
        x = x_scale(value)
        elements += [
            line(x, top if x_grid else bottom, x, bottom + 4, "grid" if x_grid else "axis"),
            label(text, x, bottom + 14, "muted small", anchor="middle"),
        ]
    elements.append(line(left, bottom, right, bottom, "axis"))
    elements.append(label(x_label, (left + right) / 2, bottom + 34, anchor="middle"))
    elements.append(label(y_label, 12, top - 16))
    return elements


def legend(
    names: Sequence[str],
    x: float,
    y: float,
    right: float,
    symbol: Literal["line", "rule", "point", "bar"],
    first_number: int = 0,
) -> tuple[list[str], float]:
    """Names of the series with their symbols, in lines of 20 pixels, and the y below them; a "rule" is a line without
    markers, and `first_number` is the number of the first series."""
    elements, column = [], x
    for number, name in enumerate(names, first_number):
        text = shorten(name, 40)
        width = text_width(text) + 46
        if column > x and column + width > right:
            column, y = x, y + 20
        if symbol in ("line", "rule"):
            elements.append(series_line(number, f"M{column:.1f} {y + 10:.1f}H{column + 26:.1f}"))
        if symbol == "bar":
            elements.append(series_bar(number, column + 4, y + 4, 20, 12))
        elif symbol != "rule":
            elements.append(marker(number, column + 13, y + 10, 3.5))
        elements.append(label(text, column + 32, y + 10))
        column += width
    return elements, y + 24 if names else y


def series_line(number: int, path: str) -> str:
    """A line in the color and the dashes of a series."""
    return element(
        "path", d=path, class_=f"line-{number % NUM_COLORS}", fill="none", stroke_width=2,
        stroke_dasharray=DASHES[number % len(DASHES)], stroke_linejoin="round",
    )  # fmt: skip


def series_bar(number: int, x: float, y: float, width: float, height: float, hover: object = "") -> str:
    """A bar of a series: its color, opacity and outline differ from its neighbors'."""
    color, style = number % NUM_COLORS, number % 3
    return element(
        "rect", tooltip(hover), x=float(x), y=float(y), width=max(float(width), 0.5), height=float(height),
        class_=f"fill-{color} line-{color}", fill_opacity=(1, 0.45, 0.12)[style], stroke_width=1.2,
        stroke_dasharray=("", "", "3 2")[style],
    )  # fmt: skip
