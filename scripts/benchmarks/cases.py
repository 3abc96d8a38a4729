"""The cases of the suites `encoders`, `decoders` and `seq2seq`: shapes, and results expected before the first run."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.architectures.transformer_decoder import TransformerDecoder
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.registry import FAMILIES

NEW_TOKENS = 64  # generated for each prompt
FILL = 0.36  # share of tokens in a padded batch of sentences of mixed lengths

Work = Literal[
    "inference",
    "pretraining",
    "encoder training",
    "training",
    "encoder states",
    "evaluation",
    "gradients",
    "compiled inference",
    "greedy generation",
    "generation with 4 beams",
    "pretrain.py, the peer is its bare step",
    "pretrain.py, the peer is Trainer",
]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        family: Name of the family.
        work: "pretrain.py" end to end; "inference" of the encoder, also "compiled"; "encoder training", a training
            step of the encoder; with the pretraining head "pretraining" (a step), "evaluation" (forward) and
            "gradients" (forward and backward). Of what writes a target, "training" (a step), "encoder states"
            (inference of the encoder) and "generation".
        layers, width, length, batch: Shape of the model and the batch.
        fill: Share of the batch that is not padding.
        speed: Expected minimum of the peer's time over ours, if any.
        memory: Expected maximum of our peak memory over the peer's, if any.
        config: Further fields of the configuration.
        wiring: Variant of the peer of a generator and discriminator, see `pair`.
        busy_speed: `speed` while a second process occupies one core.
        busy: Whether a second process occupies one core.
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
        """The work and its shape, for the table."""
        shape = f"{self.layers}x{self.width}, B={self.batch}, T={self.length}, {self.fill:.0%} filled"
        peer = "" if self.wiring is None else f", the peer draws {self.wiring}"
        return f"{self.work}, {shape}{peer}{', busy' if self.busy else ''}"

    def when(self, busy: bool) -> "Case":
        """This case on a quiet machine, or while a second process occupies one core."""
        return replace(self, busy=True, speed=self.busy_speed) if busy else self

    def chosen_by(self, only: str | None) -> bool:
        """Whether a word of the family and name begins with `only`; None for every case."""
        return only is None or f" {only}" in f" {self.family} {self.name}"

    @property
    def end_to_end(self) -> bool:
        """Whether `pretrain.py` is run; times are then per token."""
        return self.work.startswith("pretrain.py")

    @property
    def pretrains(self) -> bool:
        """Whether the pretraining head is run."""
        return self.work in ("pretraining", "evaluation", "gradients")

    @property
    def generates(self) -> bool:
        """Whether prompts are continued."""
        return "generation" in self.work

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.work in ("pretraining", "encoder training", "training", "gradients")


_PEERED = [name for name, spec in FAMILIES.items() if spec.reference and issubclass(spec.config, CtxTransformerConfig)]
# families of Transformer decoders and encoders with a peer in transformers, of the decoders a language model's
DECODERS = [
    name
    for name in _PEERED
    if issubclass(FAMILIES[name].models["AutoModel"], TransformerDecoder)
    and FAMILIES[name].models["AutoModelForCausalLM"].reference_model_type
]
ENCODERS = [
    name
    for name in _PEERED
    if name not in DECODERS and not issubclass(FAMILIES[name].models["AutoModel"], EncoderDecoder)
]

# cases with their own shapes or figures; they replace common cases of the same name
_FURTHER = [
    Case("bert", "inference", 4, 256, 128, 32, FILL, 2.5, 0.5, busy_speed=2.0),
    Case("bert", "inference", 4, 256, 512, 32, FILL, 3.3, 0.5),
    Case("bert", "inference", 12, 768, 128, 32, FILL, 2.5, 0.5),
    Case("bert", "inference", 12, 768, 512, 32, FILL, 3.3, 0.5),
    Case("bert", "inference", 4, 256, 128, 32, 1.0, 0.97, None),
    Case("bert", "inference", 12, 768, 128, 32, 1.0, 0.97, None),
    Case("bert", "pretraining", 4, 256, 128, 32, 1.0, 4.0, 0.3),
    Case("bert", "pretraining", 8, 512, 128, 16, 1.0, 2.3, 0.55),
    Case("roberta", "inference", 12, 768, 128, 32, FILL, 2.5, 0.5),
    Case("roberta", "pretraining", 4, 256, 128, 32, 1.0, 4.0, 0.3),
    Case("albert", "inference", 12, 768, 128, 32, FILL, 3.2, None),
    Case("albert", "inference", 12, 768, 512, 32, FILL, 3.5, None),
    Case("albert", "pretraining", 12, 256, 128, 16, 1.0, 3.0, 0.4),
    Case("albert", "encoder training", 12, 768, 128, 32, FILL, 2.0, 0.3),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, 4.5, 0.45, wiring="everywhere"),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, 1.6, None, wiring="at masks"),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, None, None, wiring="at masks, logits too"),
    Case("xlnet", "evaluation", 4, 256, 128, 16, 1.0, 2.2, 0.6),
    Case("xlnet", "gradients", 4, 256, 128, 16, 1.0, 1.9, 0.6),
    Case("xlnet", "evaluation", 4, 256, 256, 8, 1.0, 2.2, 0.6),
    Case("xlnet", "gradients", 4, 256, 256, 8, 1.0, 1.9, 0.6),
    Case("xlnet", "inference", 4, 256, 128, 32, FILL, 3.8, None),
    Case("xlnet", "inference", 4, 256, 512, 32, FILL, 6.0, None),
    Case("xlnet", "compiled inference", 4, 256, 128, 32, 1.0, None, None),
]
_COMMON = [Case(family, "inference", 4, 256, 128, 32, FILL, 2.5, 0.5) for family in ENCODERS]
_COMMON += [
    Case(family, "pretraining", 4, 256, 128, 32, 1.0, 4.0, 0.3, config={"vocab_size": 30522})
    for family in ENCODERS
    if family in ("xlm_roberta", "spanbert", "structbert", "ernie", "xlm")
]

CASES = sorted(
    {(case.family, case.name): case for case in [*_COMMON, *_FURTHER]}.values(),
    key=lambda case: ENCODERS.index(case.family),
)

_SHAPES: list[tuple[Work, int, int, float, float | None, float | None]] = [
    ("inference", 4, 256, FILL, 3.5, None),
    ("inference", 4, 256, 1.0, 1.6, None),
    ("inference", 12, 768, FILL, 3.5, None),
    ("inference", 12, 768, 1.0, 1.6, None),
    ("pretraining", 4, 256, FILL, 4.0, 0.4),
    ("pretraining", 4, 256, 1.0, 1.7, 0.35),
    ("pretraining", 12, 768, FILL, 3.0, None),
    ("pretraining", 12, 768, 1.0, 1.4, None),
]
_PROMPTS: list[tuple[Work, int, int, float | None]] = [
    ("greedy generation", 4, 256, 1.25),
    ("greedy generation", 12, 768, None),
    ("generation with 4 beams", 4, 256, 1.5),
    ("generation with 4 beams", 12, 768, 2.5),
]
_UNCACHED = {("gpt", "greedy generation"): 4.0}  # the peer has no cache
LANGUAGE_MODEL_CASES = [
    Case(family, work, layers, width, 128, 32, fill, speed, memory)
    for family in DECODERS
    for work, layers, width, fill, speed, memory in _SHAPES
]
GENERATION_CASES = [
    Case(family, work, layers, width, 32, 8, 1.0, _UNCACHED.get((family, work), speed), None)
    for family in DECODERS
    for work, layers, width, speed in _PROMPTS
]

_TARGET_SHAPES = [  # (layers, width, batch) of training
    (4, 256, 32),
    (12, 768, 16),
]
_TRAINED = {  # family -> expected speed and memory at `FILL` and full
    "t5": ((3.2, 0.4), (1.45, 1.0)),  # its targets are short: little is saved at the vocabulary
    "bart": ((3.3, 0.4), (1.6, 0.6)),
    "mass": ((3.3, 0.4), (1.6, 0.6)),
    "unilm": ((8.0, 0.4), (3.5, 0.6)),
    "ernie_gen": ((8.0, 0.4), (3.5, 0.6)),
}
_ENCODED = ((3.5, 0.4), (1.6, 0.6))  # likewise
SEQ2SEQ_CASES = [
    Case(family, "training", layers, width, 128, batch, fill, *expected)
    for family, both in _TRAINED.items()
    for layers, width, batch in _TARGET_SHAPES
    for fill, expected in zip((FILL, 1.0), both, strict=True)
]
SEQ2SEQ_CASES += [
    Case(family, "encoder states", layers, width, 128, 32, fill, *expected)
    for family in ("t5", "bart")
    for layers, width, _ in _TARGET_SHAPES
    for fill, expected in zip((FILL, 1.0), _ENCODED, strict=True)
]
_WRITTEN: list[tuple[Work, float]] = [("greedy generation", 1.3), ("generation with 4 beams", 1.5)]
SEQ2SEQ_CASES += [
    Case(family, work, layers, width, 128, 8, 1.0, speed, None)
    for family in ("t5", "bart")
    for work, speed in _WRITTEN
    for layers, width, _ in _TARGET_SHAPES
]
