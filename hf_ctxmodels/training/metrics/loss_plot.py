"""Plots of loss curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any


def plot_losses(
    curve: Sequence[dict[str, float]], file: Path, baselines: Mapping[str, float] = MappingProxyType({})
) -> bool:
    """Plot the losses of a training log; False without matplotlib.

    Args:
        curve: Records with "step" and entries named "loss" or "..._loss".
        file: The PNG to write.
        baselines: Loss -> frequency baseline on held-out text, a horizontal line.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats)")
    names = dict.fromkeys(name for record in curve for name in record if name == "loss" or name.endswith("_loss"))
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(map(_term, names)))}
    for name in names:
        points = [(record["step"], record[name]) for record in curve if name in record]
        held_out = name != _term(name)
        style: dict[str, Any] = {"marker": "o", "linestyle": "--"} if held_out else {}
        axes.plot(*zip(*points, strict=True), label=name, color=colours[_term(name)], **style)
    for name in [name for name in colours if name in baselines]:
        axes.axhline(baselines[name], label=f"{name}, by frequency", color=colours[name], linestyle=":")
    if names:
        figure.legend(loc="outside right upper")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return True


def _term(name: str) -> str:
    """The name of the training loss for a held-out loss; they share a colour."""
    return name.removeprefix("eval_")
