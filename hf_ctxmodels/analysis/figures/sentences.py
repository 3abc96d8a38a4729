"""Figures of the words of one sentence."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_ctxmodels.analysis.figures.base import Figure, plain, require_equal_lengths, require_shape
from hf_ctxmodels.analysis.figures.drawing import (
    document,
    element,
    format_value,
    label,
    shorten,
    text_width,
    tooltip,
    value_cell,
    value_range,
)

_LINE_WIDTH = 700


@dataclass
class ArcDiagram(Figure):
    """Words of a sentence with dependency arcs above and below, such as gold and predicted ones.

    Arcs point at the dependent. An arc below that is not above is dashed and thicker.

    Args:
        words: The words.
        arcs_above, arcs_below: Triples (head, dependent, label) of indices of words; head -1 is the root.
        above, below: Names of the arcs above and below.
    """

    words: Sequence[str]
    arcs_above: Sequence[Any]
    arcs_below: Sequence[Any] = ()
    above: str = "gold"
    below: str = "predicted"

    def validate(self) -> None:
        """Arcs join different words."""
        count = len(self.words)
        for head, dependent, _ in [*self.arcs_above, *self.arcs_below]:
            if not (-1 <= head < count and 0 <= dependent < count and head != dependent):
                raise ValueError(f"({head}, {dependent}) is not an arc between {count} words.")

    def svg(self, *, embedded: bool = False) -> str:
        """Words on a line with arcs; see `Figure.svg`."""
        words = [shorten(word, 24) for word in self.words]
        labels = [text for _, _, text in [*self.arcs_above, *self.arcs_below]]
        gap = 16 + max((text_width(shorten(text, 14), 10) for text in labels), default=0) / 3
        centers, x = [], 24.0
        for word in words:
            width = max(text_width(word), 18)
            centers.append(x + width / 2)
            x += width + gap
        levels_above, levels_below = arc_levels(self.arcs_above), arc_levels(self.arcs_below)
        baseline = 34.0 + 24 * (max(levels_above, default=0) + 1) if self.arcs_above else 40.0
        bottom = baseline + (40 + 24 * (max(levels_below, default=0) + 1) if self.arcs_below else 24)
        elements = [label(word, center, baseline, anchor="middle") for word, center in zip(words, centers)]
        gold = {(head, dependent) for head, dependent, _ in self.arcs_above}
        for arc, level in zip(self.arcs_above, levels_above):
            elements.append(self._arc(arc, level, centers, baseline - 13, -1, is_different=False))
        for arc, level in zip(self.arcs_below, levels_below):
            is_different = bool(gold) and (arc[0], arc[1]) not in gold
            elements.append(self._arc(arc, level, centers, baseline + 13, 1, is_different=is_different))
        if self.arcs_above:
            elements.append(label(f"above: {self.above}", 8, 10, "muted small"))
        if self.arcs_below:
            correct = sum((head, dependent) in gold for head, dependent, _ in self.arcs_below)
            share = f", {correct} of {len(self.arcs_below)} as above; others dashed" if gold else ""
            elements.append(label(f"below: {self.below}{share}", 8, bottom - 6, "muted small"))
        return document(elements, max(x + 8, 360), bottom + 6, self.title, self.caption, embedded)

    def _arc(
        self, arc: Sequence[Any], level: int, centers: list[float], y: float, side: int, *, is_different: bool
    ) -> str:
        head, dependent, text = arc
        names = ("error", "error-line") if is_different else ("ink", "ink-line")
        style = {"class_": names[1], "fill": "none", "stroke_width": 2.2 if is_different else 1.3}
        end = centers[dependent]
        head_word = "root" if head < 0 else self.words[head]
        height = y + side * 24 * (level + 1)
        if head < 0:
            data, middle = f"M{end:.1f} {height:.1f}V{y:.1f}", end
        else:
            start = centers[head] + (5 if end > centers[head] else -5)
            end -= 3 if end > start else -3
            bend = 10 if end > start else -10
            data = f"M{start:.1f} {y:.1f}Q{start:.1f} {height:.1f} {start + bend:.1f} {height:.1f}"
            data += f"H{end - bend:.1f}Q{end:.1f} {height:.1f} {end:.1f} {y:.1f}"
            middle = (start + end) / 2
        tip = element("path", d=f"M{end:.1f} {y:.1f}l-3.5 {side * 6}h7z", class_=names[0])
        path = element("path", d=data, stroke_dasharray="5 3" if is_different else "", **style)
        text = text or ("root" if head < 0 else "")
        name = label(shorten(text, 14), middle, height, f"{names[0]} halo tiny", anchor="middle")
        return element("g", path + tip + name + tooltip(f"{head_word} → {self.words[dependent]} ({text})"))


def arc_levels(arcs: Sequence[Any]) -> list[int]:
    """Height of each arc: arcs of overlapping spans have different heights, longer ones higher, the root's highest."""
    spans = {i: (min(arc[:2]), max(arc[:2])) for i, arc in enumerate(arcs) if arc[0] >= 0}
    levels: dict[int, int] = {}
    for i, (low, high) in sorted(spans.items(), key=lambda item: item[1][1] - item[1][0]):
        overlapping = (level for j, level in levels.items() if spans[j][0] < high and spans[j][1] > low)
        levels[i] = max(overlapping, default=-1) + 1
    highest = max(levels.values(), default=-1)
    return [levels.get(i, highest + 1) for i in range(len(arcs))]


@dataclass
class AttentionView(Figure):
    """Attention weights of all heads on one sentence; a report shows one head at a time, larger.

    Args:
        words: Words or tokens.
        attention: (layers, heads, words, words): weight of the attention from a row's word to a column's word. Stored
            with four digits. Layers and heads are numbered from 0.
    """

    words: Sequence[str]
    attention: Sequence[Any]

    def validate(self) -> None:
        """All heads have a square of weights for the words."""
        self.attention = plain(self.attention, digits=4)
        for number, heads in enumerate(self.attention):
            for weights in heads:
                require_shape(f"Attention of layer {number}", weights, len(self.words), len(self.words))

    def svg(self, *, embedded: bool = False) -> str:
        """A small map for each layer (rows) and head (columns): stronger cells are larger weights; see `Figure.svg`."""
        heads = max((len(layer) for layer in self.attention), default=0)
        size = min(max(round(560 / max(heads, 1)), 44), 90)
        left, top = 62, 42
        elements = [label("layer ↓   head →", 12, 12, "muted small")]
        elements += [
            label(str(head), left + head * (size + 8) + size / 2, top - 12, anchor="middle") for head in range(heads)
        ]
        for row, layer in enumerate(self.attention):
            y = top + row * (size + 8)
            elements.append(label(str(row), left - 10, y + size / 2, anchor="end"))
            for head, weights in enumerate(layer):
                x = left + head * (size + 8)
                name = f"layer {row}, head {head}"
                frame = element(
                    "rect", x=float(x), y=float(y), width=float(size), height=float(size), class_="empty", rx=2
                )
                cells = "".join(self._cells(weights, x, y, size))
                elements.append(
                    element(
                        "g",
                        frame + cells + tooltip(name),
                        class_="head",
                        data_layer=str(row),
                        data_head=str(head),
                        aria_label=name,
                    )
                )
        bottom = top + len(self.attention) * (size + 8)
        legend = "Rows: attending words, from the top; columns: attended words, from the left; stronger: larger weight."
        elements.append(label(legend, 12, bottom + 8, "muted small"))
        width = max(left + heads * (size + 8) + 12, text_width(legend, 11) + 24)
        return document(elements, width, bottom + 24, self.title, self.caption, embedded)

    @staticmethod
    def _cells(weights: Sequence[Sequence[float]], x: float, y: float, size: float) -> list[str]:
        """One path for each of five ranges of weights; weights below 0.05 are not drawn."""
        step = size / max(len(weights), 1)
        paths: dict[float, list[str]] = defaultdict(list)
        for i, row in enumerate(weights):
            for j, weight in enumerate(row):
                opacity = next((level for limit, level in _OPACITIES if (weight or 0) >= limit), None)
                if opacity:
                    paths[opacity].append(f"M{x + j * step:.1f} {y + i * step:.1f}h{step:.1f}v{step:.1f}h-{step:.1f}z")
        return [element("path", d="".join(data), class_="ink", fill_opacity=level) for level, data in paths.items()]


_OPACITIES = ((0.6, 1.0), (0.4, 0.75), (0.2, 0.5), (0.1, 0.3), (0.05, 0.15))


@dataclass
class TokenComparison(Figure):
    """Numbers of the tokens of a text, such as log-probabilities and ranks under two models.

    Args:
        tokens: The tokens, or words.
        columns: Name -> a number for each token; None is empty. A report colors the text by a selected column.
        texts: Text of each token on hover, such as the predictions of the models.
        digits: Digits of numbers that are not integers.
    """

    tokens: Sequence[str]
    columns: Mapping[str, Sequence[float | None]]
    texts: Sequence[str] | None = None
    digits: int = 2

    def validate(self) -> None:
        """There is a number and a text for each token."""
        require_equal_lengths("tokens and texts", self.tokens, self.tokens if self.texts is None else self.texts)
        for name, values in self.columns.items():
            require_equal_lengths(f"tokens and the column {name!r}", self.tokens, values)

    def svg(self, *, embedded: bool = False) -> str:
        """Lines of tokens with a row of numbers for each column below; see `Figure.svg`."""
        left = 24 + max((text_width(shorten(name, 24), 11) for name in self.columns), default=0)
        tokens = [shorten(token, 20) or "␣" for token in self.tokens]
        numbers = {
            name: [format_value(value, self.digits) for value in values] for name, values in self.columns.items()
        }
        widths = [
            max(text_width(token), *(text_width(column[i], 11) for column in numbers.values()), 16) + 10
            for i, token in enumerate(tokens)
        ]
        ranges = {name: value_range(values) for name, values in self.columns.items()}
        line_height = 22 * (1 + len(self.columns)) + 14
        elements, x, y = [], left, 6.0
        for i, (token, width) in enumerate(zip(tokens, widths)):
            if x > left and x + width > _LINE_WIDTH:
                x, y = left, y + line_height
            if x == left:
                elements += [
                    label(shorten(name, 24), left - 8, y + 22 * row + 33, "muted small", anchor="end")
                    for row, name in enumerate(self.columns)
                ]
            hover = self.texts[i] if self.texts else ""
            elements.append(element("g", label(token, x + width / 2, y + 10, anchor="middle") + tooltip(hover)))
            for row, (name, values) in enumerate(self.columns.items()):
                text = numbers[name][i]
                box = {"x": x + 1, "y": y + 22 * row + 23, "width": width - 2, "height": 20.0}
                elements.append(value_cell(values[i], ranges[name], text, f"{token}, {name}: {text}\n{hover}", **box))
            x += width
        return document(elements, _LINE_WIDTH + 12, y + line_height, self.title, self.caption, embedded)
