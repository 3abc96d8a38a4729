"""Tasks of ELECTRA's discriminator (Clark et al. 2020, sections 2 and 3.5)."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead
from hf_ctxmodels.models.electra.configuration_electra import CtxElectraConfig
from hf_ctxmodels.models.electra.replaced_token_detection import (
    DetectionHead,
    copy_or_predict_loss,
    detection_counts,
    detection_loss,
)


class DiscriminatorTask(ABC):
    """A task of the discriminator, selected by `config.discriminator_task`: its heads and its loss.

    The heads are modules of the joint model with the names of the other classes of the family, so that these classes
    can load a joint checkpoint.

    Args:
        masked_only: Compute the loss at the masked positions only.

    Attributes:
        head_name: Name of the head that returns the logits.
        output_layer: See `HeadModel`.
    """

    head_name: ClassVar[str]
    output_layer: ClassVar[str | None] = None

    def __init__(self, *, masked_only: bool) -> None:
        self.masked_only = masked_only

    @abstractmethod
    def build_heads(self, config: CtxElectraConfig) -> dict[str, nn.Module]:
        """Create the heads: name -> module."""

    @abstractmethod
    def loss(
        self, model: Any, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss in nats, and the counts for `metrics` of the output.

        Args:
            model: The joint model with the heads.
            states: (tokens, hidden) output of the discriminator.
            corrupted_ids, original_ids: (tokens,) input of the discriminator, and the tokens before masking.
        """


class DetectionTask(DiscriminatorTask):
    """Detection of replaced tokens (section 2)."""

    head_name = "rtd_head"

    def build_heads(self, config: CtxElectraConfig) -> dict[str, nn.Module]:
        """Create the detection head."""
        return {"rtd_head": DetectionHead(config.hidden_size, activation=config.hidden_act)}

    def loss(
        self, model: Any, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Binary cross-entropy."""
        logits, replaced = model.rtd_head(states), corrupted_ids != original_ids
        counts = detection_counts(logits.detach(), replaced)
        return detection_loss(logits, replaced), {f"rtd_{name}": count for name, count in counts.items()}


class PredictionTask(DiscriminatorTask):
    """Prediction of the original tokens (section 3.5, "Replace MLM")."""

    head_name = "mlm_head"
    output_layer = "mlm_head.decoder"

    def build_heads(self, config: CtxElectraConfig) -> dict[str, nn.Module]:
        """Create the masked-LM head."""
        head = MaskedLMHead(
            config.hidden_size,
            config.embedding_size,
            config.vocab_size,
            activation="gelu",
            layer_norm_eps=config.layer_norm_eps,
        )
        return {"mlm_head": head}

    def loss(
        self, model: Any, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy."""
        return model.mlm_head.summed_loss(states, original_ids), {}


class CopyOrPredictionTask(PredictionTask):
    """Prediction of the original tokens with a copy mechanism (section 3.5, "All-Tokens MLM")."""

    def build_heads(self, config: CtxElectraConfig) -> dict[str, nn.Module]:
        """Create the masked-LM head and the copy gate."""
        return super().build_heads(config) | {"copy_gate": nn.Linear(config.hidden_size, 1)}

    def loss(
        self, model: Any, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy with a copy mechanism, see `copy_or_predict_loss`."""
        gate = model.copy_gate(states).squeeze(-1)
        return copy_or_predict_loss(model.mlm_head, gate, states, corrupted_ids, original_ids), {}


DISCRIMINATOR_TASKS: dict[str, DiscriminatorTask] = {
    "detection": DetectionTask(masked_only=False),
    "detection_masked": DetectionTask(masked_only=True),
    "replace_mlm": PredictionTask(masked_only=True),
    "all_tokens_mlm": CopyOrPredictionTask(masked_only=False),
}
