"""The demo's pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_INK, _MUTED, _BLUE, _ORANGE = "#222222", "#767676", "#1f6fb4", "#d1620f"


def draw_learning_curve(
    curve: Sequence[Mapping[str, float]], final: float, baselines: Mapping[str, float], title: str, file: Path
) -> None:
    """The masked-word loss by training step, on training and held-out text, with baselines as horizontal lines.

    Args:
        curve: Records of a training log with "step", and "loss" or "eval_loss", at the masking rate of training.
        final: Loss of the trained model on held-out text, at the rate of the baselines.
        baselines: Name -> loss on held-out text.
        title: Above the picture.
        file: The PNG.
    """
    figure, axes = _figure(8, 4.5, title)
    for name, label, style in (
        ("loss", "training text, 40% masked", {"color": _BLUE, "alpha": 0.55}),
        ("eval_loss", "held-out text, 40% masked", {"color": _BLUE, "marker": "o", "linestyle": "--"}),
    ):
        points = [(record["step"], record[name]) for record in curve if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    last = max((record["step"] for record in curve), default=0)
    axes.plot([last], [final], "*", color=_INK, markersize=12, label=f"held-out text, 15% masked: {final:.2f}")
    for name, value in baselines.items():
        axes.axhline(value, color=_ORANGE, linewidth=1)
        axes.annotate(
            f"{name} {value:.2f}", (1, value), (-4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", color=_ORANGE,
        )  # fmt: skip
    axes.set(xlabel="training step", ylabel="loss of masked words (nats per word piece)")
    axes.set_xlim(left=0)
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(file, dpi=150)


def draw_word_map(vectors: np.ndarray, words: Sequence[str], groups: Sequence[str], title: str, file: Path) -> None:
    """Words on the plane of their vectors' two main directions.

    Args:
        vectors: (words, width).
        words: What is written at each point.
        groups: The group of each word, which has one colour.
        title: Above the picture.
        file: The PNG.
    """
    centred = vectors - vectors.mean(0)
    _, spread, directions = np.linalg.svd(centred, full_matrices=False)
    places = centred @ directions[:2].T
    shares = spread**2 / (spread**2).sum()
    figure, axes = _figure(8, 6, title)
    for number, group in enumerate(dict.fromkeys(groups)):
        chosen = [each == group for each in groups]
        axes.scatter(*places[chosen].T, s=14, color=f"C{number}", label=group)
    axes.set(
        xlabel=f"first principal component ({shares[0]:.0%} of the variance)",
        ylabel=f"second principal component ({shares[1]:.0%})",
    )
    axes.margins(0.12)
    axes.legend(frameon=False, loc="best")
    _label(figure, axes, places, words)
    figure.savefig(file, dpi=150)


def _label(figure: Any, axes: Any, places: np.ndarray, words: Sequence[str]) -> None:
    """Write each word beside its point, where it covers no other word if there is such a side."""
    figure.draw_without_rendering()  # fixes the layout, and so what the points are on the page
    scale = 72 / figure.dpi
    points = axes.transData.transform(places) * scale
    taken = [(x - 3, x + 3, y) for x, y in points]  # left, right and middle of what is drawn, in points
    for word, place, (x, y) in zip(words, places, points, strict=True):
        width = 4.8 * len(word)
        for right, up in ((True, 4), (False, 4), (True, -8), (False, -8), (True, 13), (False, -17)):
            start = x + 4 if right else x - 4 - width
            box = (start, start + width, y + up)
            if all(box[1] < left or box[0] > end or abs(box[2] - middle) > 9 for left, end, middle in taken):
                break
        taken.append(box)
        side = {"textcoords": "offset points", "ha": "left" if right else "right", "va": "center"}
        axes.annotate(word, place, (4 if right else -4, up), fontsize=8, color=_INK, **side)


def _figure(width: float, height: float, title: str) -> tuple[Any, Any]:
    """A figure with one plot and its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
