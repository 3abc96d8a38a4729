"""What may differ from plain fine-tuning, as one object for the commands."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.flags import reject_flag_conflicts
from hf_ctxmodels.downstream.adapters.arguments import TASK_CONFIG, AdapterArguments, adapter_identity
from hf_ctxmodels.downstream.finetuning.arguments import UNCOMPARED_FIELDS, FinetuningMethodArguments
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.checkpoint.identity import flags_identity


class QuantizationAwareTraining(Protocol):
    """Options of training with low-bit weights, see `hf_ctxmodels.compression.low_bits.training`."""

    quantize_bits: list[int]

    def start(
        self, model: PreTrainedModel, features: Sequence[Any], collate: Any, batch_size: int, accelerator: Accelerator
    ) -> None:
        """Compute with low-bit weights from now on."""

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str, accelerator: Accelerator
    ) -> None:
        """Write the packed model beside the float32 weights."""

    def identity(self) -> dict[str, Any]:
        """Values that must be equal when the run is resumed."""


@dataclass(frozen=True)
class FinetuningConfig:
    """What may differ from plain fine-tuning.

    Attributes:
        methods: Which weights are trained when, and what holds them near their start.
        adapters: Bottleneck adapters.
        low_bits: Weights of few bits.

    Raises:
        CtxError: They do not go together.
    """

    methods: FinetuningMethodArguments = field(default_factory=FinetuningMethodArguments)
    adapters: AdapterArguments = field(default_factory=AdapterArguments)
    low_bits: QuantizationAwareTraining | None = None

    def __post_init__(self) -> None:
        rules = (
            (
                self.adapters.adapter is not None and self.methods.reinit_layers,
                "--adapter with --reinit_layers",
                "Below an adapter the encoder is frozen: layers that are drawn anew would stay as they are drawn.",
            ),
            (
                self.methods.cache_features and self.low_bits is not None and self.low_bits.quantize_bits,
                "--cache_features with --quantize_bits",
                "Kept features are those of the encoder in single precision.",
            ),
        )
        reject_flag_conflicts(rules, "leave one of them out.")

    def prepare(
        self, model: Any, source: str | None, loop: LoopArguments, accelerator: Accelerator
    ) -> list[FinetuningCallback]:
        """Draw weights anew, freeze and add adapters, as the flags say; gives the methods that the loop calls.

        Args:
            model: With its pretrained weights.
            source: The checkpoint that it was opened from; None for a new model.
            loop: The loop's flags.
            accelerator: The run's.

        Raises:
            CtxError: The flags do not fit the model, or do not go together.
        """
        methods = self.methods.prepare(model, source, loop, accelerator)
        self.adapters.apply(model, TASK_CONFIG, frozen=bool(self.methods.freeze or methods))
        return methods

    def identity(self, model: Any) -> dict[str, Any]:
        """What must be equal when the run is resumed."""
        return {
            **flags_identity(self.methods, UNCOMPARED_FIELDS),
            **adapter_identity(model),
            **({} if self.low_bits is None else self.low_bits.identity()),
        }
