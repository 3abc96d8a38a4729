"""Everything that may differ from plain fine-tuning, as one object."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_conflicts
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments, adapter_identity
from hf_ctxmodels.downstream.finetuning.arguments import (
    UNCOMPARED_FIELDS,
    FinetuningMethodArguments,
    FrozenEncoderOptions,
)
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.training_state import flags_identity


class QuantizationAwareTraining(Protocol):
    """Options of training with low-bit weights: `hf_ctxmodels.compression.low_bits.training.LowBitsArguments`."""

    @property
    def is_active(self) -> bool:
        """Whether the weights are quantized."""

    def start(
        self, model: PreTrainedModel, features: Sequence[Any], collate: Any, batch_size: int, accelerator: Accelerator
    ) -> None:
        """Compute with low-bit weights from now on."""

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str, accelerator: Accelerator
    ) -> None:
        """Write the packed model next to the float32 weights."""

    def identity(self) -> dict[str, Any]:
        """Values that must be equal when the run is resumed."""


@dataclass(frozen=True)
class FinetuningConfig:
    """Everything that may differ from plain fine-tuning.

    Attributes:
        methods: Frozen, re-initialised and regularised weights.
        adapters: Bottleneck adapters.
        low_bits: Training with low-bit weights.

    Raises:
        CtxError: Two of the options cannot be combined.
    """

    methods: FinetuningMethodArguments = field(default_factory=FinetuningMethodArguments)
    adapters: AdapterArguments = field(default_factory=AdapterArguments)
    low_bits: QuantizationAwareTraining | None = None

    def __post_init__(self) -> None:
        check_conflicts(self.methods, self.adapters)
        frozen = self.methods.freeze
        caches_features = isinstance(frozen, FrozenEncoderOptions) and frozen.cache_features is not None
        if caches_features and self.low_bits is not None and self.low_bits.is_active:
            raise CtxError(
                "Cached features are computed with float32 weights.",
                location="--freeze encoder:cache_features with --quantize",
                hint="use only one of them.",
            )

    def prepare(
        self, model: Any, source: str | None, loop: LoopArguments, accelerator: Accelerator
    ) -> list[FinetuningCallback]:
        """Re-initialise and freeze weights, add adapters, and make the callbacks of the training loop.

        Args:
            model: The model with its pretrained weights.
            source: The checkpoint that it was loaded from; None for a new model.
            loop: The flags of the loop.
            accelerator: The accelerator of the run.

        Raises:
            CtxError: The flags do not match the model.
        """
        callbacks = self.methods.prepare(model, source, loop, accelerator)
        self.adapters.apply(model)
        return callbacks

    def identity(self, model: Any) -> dict[str, Any]:
        """Values that must be equal when the run is resumed."""
        return {
            **flags_identity(self.methods, UNCOMPARED_FIELDS),
            **adapter_identity(model),
            **({} if self.low_bits is None else self.low_bits.identity()),
        }
