"""Cases of the suites `encoders`, `decoders` and `seq2seq`: shapes, and targets set before the first run."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.architectures.transformer_decoder import TransformerDecoder
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.registry import FAMILIES

NEW_TOKENS = 64  # generated for each prompt
FILL = 0.36  # typical fraction of tokens that are not padding in a batch of sentences

Workload = Literal[
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
    "training loop, bare step as reference",
    "training loop, Trainer as reference",
]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        family: Name of the family.
        workload: "training loop" is the whole pretraining loop. "inference" and "compiled inference" run the encoder,
            "encoder training" is a training step of the encoder. With the pretraining head, "pretraining" is a training
            step, "evaluation" a forward pass, "gradients" forward and backward pass. For sequence-to-sequence models,
            "training" is a training step, "encoder states" is inference of the encoder, "generation" is decoding.
        layers, width, length, batch: Number of layers, hidden size, sequence length and batch size.
        fill: Fraction of the batch that is not padding.
        min_speedup: Target for the reference's time divided by the model's, if any.
        max_memory_ratio: Target for the model's peak memory divided by the reference's, if any.
        config: Additional configuration fields.
        sampling: Variant of the generator/discriminator reference, see `electra_reference`.
        busy_min_speedup: `min_speedup` while a second process occupies one core.
        busy: Whether a second process occupies one core.
    """

    family: str
    workload: Workload
    layers: int
    width: int
    length: int
    batch: int
    fill: float
    min_speedup: float | None
    max_memory_ratio: float | None
    config: dict[str, Any] = field(default_factory=dict)
    sampling: Literal["everywhere", "at masks", "at masks, logits too"] | None = None
    busy_min_speedup: float | None = None
    busy: bool = False

    @property
    def name(self) -> str:
        """Workload and shape, as shown in the table."""
        shape = f"{self.layers}x{self.width}, B={self.batch}, T={self.length}, {self.fill:.0%} filled"
        sampling = "" if self.sampling is None else f", reference samples {self.sampling}"
        return f"{self.workload}, {shape}{sampling}{', busy' if self.busy else ''}"

    def with_load(self, busy: bool) -> "Case":
        """Return the case for an idle machine, or for one with a busy core."""
        return replace(self, busy=True, min_speedup=self.busy_min_speedup) if busy else self

    @property
    def title(self) -> str:
        """Family and name."""
        return f"{self.family} {self.name}"

    @property
    def is_end_to_end(self) -> bool:
        """Whether the whole training loop is measured; times are then per token."""
        return self.workload.startswith("training loop")

    @property
    def uses_pretraining_head(self) -> bool:
        """Whether the model has its pretraining head."""
        return self.workload in ("pretraining", "evaluation", "gradients")

    @property
    def is_generation(self) -> bool:
        """Whether the workload is generation."""
        return "generation" in self.workload

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward pass."""
        return self.workload in ("pretraining", "encoder training", "training", "gradients")


_FAMILIES_WITH_REFERENCE = [
    name for name, spec in FAMILIES.items() if spec.reference and issubclass(spec.config, CtxTransformerConfig)
]
# Families of Transformer encoders, and of decoder language models, that transformers implements as well.
DECODERS = [
    name
    for name in _FAMILIES_WITH_REFERENCE
    if issubclass(FAMILIES[name].models["AutoModel"], TransformerDecoder)
    and FAMILIES[name].models["AutoModelForCausalLM"].reference_model_type
]
ENCODERS = [
    name
    for name in _FAMILIES_WITH_REFERENCE
    if name not in DECODERS and not issubclass(FAMILIES[name].models["AutoModel"], EncoderDecoder)
]

# Cases with special shapes or targets; they replace common cases of the same name.
_SPECIAL = [
    Case("bert", "inference", 4, 256, 128, 32, FILL, 2.5, 0.5, busy_min_speedup=2.0),
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
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, 4.5, 0.45, sampling="everywhere"),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, 1.6, None, sampling="at masks"),
    Case("electra", "pretraining", 12, 256, 128, 16, 1.0, None, None, sampling="at masks, logits too"),
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
    {(case.family, case.name): case for case in [*_COMMON, *_SPECIAL]}.values(),
    key=lambda case: ENCODERS.index(case.family),
)

_MODEL_SHAPES: list[tuple[Workload, int, int, float, float | None, float | None]] = [
    ("inference", 4, 256, FILL, 3.5, None),
    ("inference", 4, 256, 1.0, 1.6, None),
    ("inference", 12, 768, FILL, 3.5, None),
    ("inference", 12, 768, 1.0, 1.6, None),
    ("pretraining", 4, 256, FILL, 4.0, 0.4),
    ("pretraining", 4, 256, 1.0, 1.7, 0.35),
    ("pretraining", 12, 768, FILL, 3.0, None),
    ("pretraining", 12, 768, 1.0, 1.4, None),
]
_GENERATION_SHAPES: list[tuple[Workload, int, int, float | None]] = [
    ("greedy generation", 4, 256, 1.25),
    ("greedy generation", 12, 768, None),
    ("generation with 4 beams", 4, 256, 1.5),
    ("generation with 4 beams", 12, 768, 2.5),
]
_UNCACHED = {("gpt", "greedy generation"): 4.0}  # the reference has no cache
LANGUAGE_MODEL_CASES = [
    Case(family, workload, layers, width, 128, 32, fill, speed, memory)
    for family in DECODERS
    for workload, layers, width, fill, speed, memory in _MODEL_SHAPES
]
GENERATION_CASES = [
    Case(family, workload, layers, width, 32, 8, 1.0, _UNCACHED.get((family, workload), speed), None)
    for family in DECODERS
    for workload, layers, width, speed in _GENERATION_SHAPES
]

_SEQ2SEQ_SHAPES = [  # (layers, width, training batch size)
    (4, 256, 32),
    (12, 768, 16),
]
_TRAINING_TARGETS = {  # family -> target speedup and memory ratio at `FILL` and without padding
    "t5": ((3.2, 0.4), (1.45, 1.0)),  # short targets: the output layer is a small part of the work
    "bart": ((3.3, 0.4), (1.6, 0.6)),
    "mass": ((3.3, 0.4), (1.6, 0.6)),
    "unilm": ((8.0, 0.4), (3.5, 0.6)),
    "ernie_gen": ((8.0, 0.4), (3.5, 0.6)),
}
_ENCODER_TARGETS = ((3.5, 0.4), (1.6, 0.6))  # as above, for the encoder alone
SEQ2SEQ_CASES = [
    Case(family, "training", layers, width, 128, batch, fill, *target)
    for family, targets in _TRAINING_TARGETS.items()
    for layers, width, batch in _SEQ2SEQ_SHAPES
    for fill, target in zip((FILL, 1.0), targets, strict=True)
]
SEQ2SEQ_CASES += [
    Case(family, "encoder states", layers, width, 128, 32, fill, *target)
    for family in ("t5", "bart")
    for layers, width, _ in _SEQ2SEQ_SHAPES
    for fill, target in zip((FILL, 1.0), _ENCODER_TARGETS, strict=True)
]
_GENERATION_WORKLOADS: list[tuple[Workload, float]] = [("greedy generation", 1.3), ("generation with 4 beams", 1.5)]
SEQ2SEQ_CASES += [
    Case(family, workload, layers, width, 128, 8, 1.0, speed, None)
    for family in ("t5", "bart")
    for workload, speed in _GENERATION_WORKLOADS
    for layers, width, _ in _SEQ2SEQ_SHAPES
]
