"""ALBERT configuration (Lan et al. 2019, sections 3 and 4)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxEncoderConfig


@strict
class CtxAlbertConfig(CtxEncoderConfig):
    """Configuration of ALBERT; the defaults are ALBERT-base, version 2. See `CtxEncoderConfig` for the other arguments.

    Args:
        embedding_size: Width of the embeddings, E in the paper; projected to `hidden_size`, H in the paper.
        num_hidden_groups: Number of groups of consecutive layers that share parameters; must divide
            `num_hidden_layers`. With one layer per group nothing is shared.
        inner_group_num: Number of layers with different parameters at each depth.
        parameter_sharing: Parameters that a group shares: "all", "attention" or "ffn" (each with its LayerNorm), or
            "none" (Lan et al. 2019, table 4).
        hidden_dropout_prob, attention_probs_dropout_prob: 0 in version 2, 0.1 in version 1.
        classifier_dropout_prob: Dropout before the task heads and the sentence-order classifier.
    """

    model_type = "ctx-albert"
    reference_model_types: ClassVar[tuple[str, ...]] = ("albert",)
    head_dropout_field: ClassVar[str] = "classifier_dropout_prob"

    vocab_size: int = 30000
    embedding_size: int = 128
    num_hidden_groups: int = 1
    inner_group_num: int = 1
    parameter_sharing: Literal["all", "attention", "ffn", "none"] = "all"
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout_prob: float | int = 0.1
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3

    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        **CtxEncoderConfig.supported_reference_values,
        # fields of the first release
        "down_scale_factor": (1,),
        "gap_size": (0,),
        "net_structure_type": (0,),
        "num_memory_blocks": (0,),
    }

    def validate_architecture(self) -> None:
        """Also check that the groups divide the layers (called at construction)."""
        super().validate_architecture()
        layers, groups = self.num_hidden_layers, self.num_hidden_groups
        if groups < 1 or layers % groups:
            divisors = ", ".join(str(number) for number in range(1, layers + 1) if layers % number == 0)
            raise ValueError(
                f"num_hidden_groups={groups} does not divide num_hidden_layers={layers}; choose one of {divisors}."
            )
        self.require_positive("inner_group_num")
