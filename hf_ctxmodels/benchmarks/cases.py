"""What the suite `encoders` runs: shapes, and the figures that were expected before the first run."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

FILL = 0.36  # share of real tokens in a padded batch: what sentences of mixed length give

Work = Literal[
    "inference",
    "pretraining",
    "encoder training",
    "evaluation",
    "gradients",
    "compiled inference",
    "pretrain.py, the peer is its bare step",
    "pretrain.py, the peer is Trainer",
]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        family: The family that is run.
        work: "pretrain.py" from end to end against a peer; "inference" of the bare encoder, also "compiled"; "encoder
            training", a step of the bare encoder; with the pretraining head "pretraining" (a step), "evaluation"
            (forward) and "gradients" (forward and backward).
        layers, width, length, batch: Shape of the model and the batch.
        fill: Share of the batch that is not padding.
        speed: Least ratio of the peer's time to ours that was expected before the run, if any.
        memory: Largest ratio of our peak memory to the peer's that was expected before the run, if any.
        config: Further fields of the configuration.
        wiring: How the peer of a generator/discriminator pair is wired, see `pair`.
        busy_speed: As `speed`, while a second process spins on one core.
        busy: Whether one does.
    """

    family: str
    work: Work
    layers: int
    width: int
    length: int
    batch: int
    fill: float
    speed: float | None
    memory: float | None
    config: dict[str, Any] = field(default_factory=dict)
    wiring: Literal["everywhere", "at masks", "at masks, logits too"] | None = None
    busy_speed: float | None = None
    busy: bool = False

    @property
    def name(self) -> str:
        """What is run, for the table."""
        shape = f"{self.layers}x{self.width}, B={self.batch}, T={self.length}, {self.fill:.0%} filled"
        peer = "" if self.wiring is None else f", the peer draws {self.wiring}"
        return f"{self.work}, {shape}{peer}{', busy' if self.busy else ''}"

    def when(self, busy: bool) -> "Case":
        """This case on a quiet machine, or while a second process spins on one core."""
        return replace(self, busy=True, speed=self.busy_speed) if busy else self

    def chosen_by(self, only: str | None) -> bool:
        """Whether `only` stands in the family and name, from the beginning of a word; None chooses every case."""
        return only is None or f" {only}" in f" {self.family} {self.name}"

    @property
    def end_to_end(self) -> bool:
        """Whether `pretrain.py` is run; times are then those of a token."""
        return self.work.startswith("pretrain.py")

    @property
    def pretrains(self) -> bool:
        """Whether the pretraining head is run."""
        return self.work in ("pretraining", "evaluation", "gradients")

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.work in ("pretraining", "encoder training", "gradients")


_ALBERT = {"embedding_size": 128}
_ELECTRA_SMALL = {"embedding_size": 128, "generator_size": 0.25}

CASES = [
    Case("bert", "inference", 4, 256, 128, 32, FILL, 2.5, 0.5, busy_speed=2.0),
    Case("bert", "inference", 4, 256, 512, 32, FILL, 3.3, 0.5),
    Case("bert", "inference", 12, 768, 128, 32, FILL, 2.5, 0.5),
    Case("bert", "inference", 12, 768, 512, 32, FILL, 3.3, 0.5),
    Case("bert", "inference", 4, 256, 128, 32, 1.0, 0.97, None),
    Case("bert", "inference", 12, 768, 128, 32, 1.0, 0.97, None),
    Case("bert", "pretraining", 4, 256, 128, 32, 1.0, 4.0, 0.3),
    Case("bert", "pretraining", 8, 512, 128, 16, 1.0, 2.3, 0.55),
    Case("roberta", "inference", 4, 256, 128, 32, FILL, 2.5, 0.5),
    Case("roberta", "inference", 12, 768, 128, 32, FILL, 2.5, 0.5),
    Case("roberta", "pretraining", 4, 256, 128, 32, 1.0, 4.0, 0.3),
    Case("xlm_roberta", "inference", 4, 256, 128, 32, FILL, 2.5, 0.5),
    Case("albert", "inference", 12, 768, 128, 32, FILL, 3.2, None, _ALBERT),
    Case("albert", "inference", 12, 768, 512, 32, FILL, 3.5, None, _ALBERT),
    Case("albert", "pretraining", 12, 256, 128, 16, 1.0, 3.0, 0.4, _ALBERT),
    Case("albert", "encoder training", 12, 768, 128, 32, FILL, 2.0, 0.3, _ALBERT),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, 4.5, 0.45, _ELECTRA_SMALL, "everywhere"),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, 1.6, None, _ELECTRA_SMALL, "at masks"),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, None, None, _ELECTRA_SMALL, "at masks, logits too"),
    Case("xlnet", "evaluation", 4, 256, 128, 16, 1.0, 2.2, 0.6),
    Case("xlnet", "gradients", 4, 256, 128, 16, 1.0, 1.9, 0.6),
    Case("xlnet", "evaluation", 4, 256, 256, 8, 1.0, 2.2, 0.6),
    Case("xlnet", "gradients", 4, 256, 256, 8, 1.0, 1.9, 0.6),
    Case("xlnet", "inference", 4, 256, 128, 32, FILL, 3.8, None),
    Case("xlnet", "inference", 4, 256, 512, 32, FILL, 6.0, None),
    Case("xlnet", "compiled inference", 4, 256, 128, 32, 1.0, None, None),
]
