"""Cases of the suite `recurrent`: shapes, and targets set before the first run."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

ForwardPair = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""Forward passes of the model and of the reference."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        architecture: "lstm", "encoder", "stack" or "sentences"; or a family, for its sentence encoder or pretraining.
        batch_size, length: Shape of the batch; sentences of the demo text are truncated to `length` words.
        has_backward: Whether the backward pass is included.
        min_speedup: Target for the reference's time divided by the model's.
        size: Name of the configuration in the sizes of the family.
    """

    architecture: str
    batch_size: int
    length: int
    has_backward: bool
    min_speedup: float
    size: str = "base"

    @property
    def name(self) -> str:
        """Architecture, workload and shape, as shown in the table."""
        workload = "forward and backward" if self.has_backward else "inference"
        return f"{self.architecture}, {workload}, B={self.batch_size}, T={self.length}"


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
