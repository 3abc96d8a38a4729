"""ALBERT configuration (Lan et al. 2019, sections 3 and 4)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxTransformerConfig


@strict
class CtxAlbertConfig(CtxTransformerConfig):
    """Shape, sharing and regularisation of an ALBERT encoder; the defaults are ALBERT-base, version 2.

    Args:
        vocab_size: Number of SentencePiece tokens.
        embedding_size: Width of the embedding tables, E in the paper; projected to `hidden_size`.
        hidden_size: Width of the residual stream, H in the paper; a multiple of `num_attention_heads`.
        num_hidden_layers: Number of layers in depth.
        num_hidden_groups: Number of groups of consecutive layers that share parameters; must divide
            `num_hidden_layers`. With as many groups as layers nothing is shared.
        inner_group_num: Layers applied at each depth, each with its own parameters.
        parameter_sharing: Parameters that a group shares: "all", "attention" or "ffn" (each with its LayerNorm), or
            "none" (Lan et al. 2019, table 4).
        num_attention_heads: Attention heads per layer.
        intermediate_size: Width of the feed-forward layer.
        hidden_act: Activation of the feed-forward layer and of the masked-LM transform.
        hidden_dropout_prob: Dropout after the embeddings and after each sub-layer: 0 in version 2, 0.1 in version 1.
        attention_probs_dropout_prob: Dropout on attention probabilities, likewise.
        classifier_dropout_prob: Dropout before the task heads and the sentence-order classifier.
        max_position_embeddings: Longest sequence, in tokens.
        type_vocab_size: Number of segments.
        initializer_range: Standard deviation of the normal initialisation.
        layer_norm_eps: Epsilon of every LayerNorm.
        pad_token_id: Id of the padding token; its embedding starts at zero.
        bos_token_id: Id of [CLS].
        eos_token_id: Id of [SEP].
        tie_word_embeddings: Share the masked-LM decoder with the word embeddings.
    """

    model_type = "ctx-albert"
    head_dropout_field: ClassVar[str] = "classifier_dropout_prob"

    vocab_size: int = 30000
    embedding_size: int = 128
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_hidden_groups: int = 1
    inner_group_num: int = 1
    parameter_sharing: Literal["all", "attention", "ffn", "none"] = "all"
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    tie_word_embeddings: bool = True

    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
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
