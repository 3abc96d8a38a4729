"""Plots of the demo."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_INK, _MUTED, _BLUE, _ORANGE = "#222222", "#767676", "#1f6fb4", "#d1620f"


def plot_learning_curve(
    curve: Sequence[Mapping[str, float]], final: float, baselines: Mapping[str, float], title: str, file: Path
) -> None:
    """Plot the masked-LM loss by training step at the masking rate of training, with horizontal lines for the
    baselines, and `final`, the loss of the trained model, on held-out text at 15% masking."""
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
    axes.set(xlabel="training step", ylabel="masked-LM loss (nats per token)")
    axes.set_xlim(left=0)
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(file, dpi=150)


def plot_word_map(vectors: np.ndarray, words: Sequence[str], groups: Sequence[str], title: str, file: Path) -> None:
    """Plot words on the first two principal components of their (words, width) vectors, in one color per group."""
    centered = vectors - vectors.mean(0)
    _, singular_values, directions = np.linalg.svd(centered, full_matrices=False)
    points = centered @ directions[:2].T
    variances = singular_values**2 / (singular_values**2).sum()
    figure, axes = _figure(8, 6, title)
    for number, group in enumerate(dict.fromkeys(groups)):
        is_member = [word_group == group for word_group in groups]
        axes.scatter(*points[is_member].T, s=14, color=f"C{number}", label=group)
    axes.set(
        xlabel=f"first principal component ({variances[0]:.0%} of the variance)",
        ylabel=f"second principal component ({variances[1]:.0%})",
    )
    axes.margins(0.12)
    axes.legend(frameon=False, loc="best")
    _add_labels(figure, axes, points, words)
    figure.savefig(file, dpi=150)


def _add_labels(figure: Any, axes: Any, points: np.ndarray, words: Sequence[str]) -> None:
    """Write every word next to its point, at the first position where it overlaps no other text or point."""
    figure.draw_without_rendering()  # fixes the layout, and thus the positions of the points on the page
    page_points = axes.transData.transform(points) * 72 / figure.dpi
    occupied = [(x - 3, x + 3, y) for x, y in page_points]  # left edge, right edge and center of drawn boxes
    for word, point, (x, y) in zip(words, points, page_points, strict=True):
        width = 4.8 * len(word)
        for is_right, offset in ((True, 4), (False, 4), (True, -8), (False, -8), (True, 13), (False, -17)):
            start = x + 4 if is_right else x - 4 - width
            box = (start, start + width, y + offset)
            if all(box[1] < left or box[0] > right or abs(box[2] - center) > 9 for left, right, center in occupied):
                break
        occupied.append(box)
        style = {"textcoords": "offset points", "ha": "left" if is_right else "right", "va": "center"}
        axes.annotate(word, point, (4 if is_right else -4, offset), fontsize=8, color=_INK, **style)


def _figure(width: float, height: float, title: str) -> tuple[Any, Any]:
    """Create a figure with one plot and its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
