"""What the suite `recurrent` runs: shapes, and the ratios that were expected before the first run."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Sides = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""What ours gives, and the peer."""


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        what: "lstm", "encoder", "stack" or "sentences"; or a family: its sentence encoder, or its pretraining.
        rows, length: Of the batch; rows of the demo text's sentences have at most so many words.
        trains: Whether there is a backward pass.
        speed: Least ratio of the peer's time to ours that was demanded before the run.
        size: In the family's table of sizes.
    """

    what: str
    rows: int
    length: int
    trains: bool
    speed: float
    size: str = "base"

    @property
    def name(self) -> str:
        """What is run, for the table."""
        work = "forward and backward" if self.trains else "inference"
        return f"{self.what}, {work}, B={self.rows}, T={self.length}"


CASES = [
    Case("lstm", 8, 128, False, 1 / 1.3),
    Case("lstm", 8, 128, True, 1 / 1.3),
    Case("encoder", 16, 40, False, 2.0),
    Case("encoder", 16, 40, True, 2.0),
    Case("stack", 16, 70, False, 0.9),
    Case("stack", 16, 70, True, 1.0),
    Case("sentences", 64, 60, False, 1.0),
    Case("sentences", 64, 60, True, 1.0),
    Case("infersent", 16, 60, False, 1.1),
    Case("infersent", 16, 60, True, 1.2),
    Case("laser", 16, 60, False, 1.1),
    Case("laser", 16, 60, True, 1.2),
    Case("gensen", 48, 60, False, 1.1),
    Case("gensen", 48, 60, True, 1.2),
    Case("seqae", 16, 60, True, 1.5, "small"),
    Case("lmseq2seq", 8, 60, True, 1.5, "small"),
]
