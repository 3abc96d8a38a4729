"""XLNet configuration (Yang et al. 2019, section 2 and appendix A.4)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxTransformerConfig


@strict
class CtxXLNetConfig(CtxTransformerConfig):
    """Configuration of XLNet; the defaults are XLNet-large.

    The names of transformers (`d_model`, `n_layer`, `n_head`, `d_inner`, `ff_activation`, `dropout`) are accepted.
    There is no maximum length: positions are relative. See `CtxTransformerConfig` for the other arguments.

    Args:
        hidden_size: Width of the residual stream; an even number and a multiple of `num_attention_heads`.
        hidden_dropout_prob: Dropout after the embeddings, within and after the feed-forward layer, and after attention.
        attention_probs_dropout_prob: Dropout on attention probabilities; `None` means `hidden_dropout_prob`, the only
            rate of transformers.
        attn_type: "bi" as in XLNet, or "uni": causal attention, as in Transformer-XL.
        mem_len, reuse_len: Number of positions of earlier segments, and of leading positions of a segment, to remember;
            None or 0 remembers all.
        use_mems_eval, use_mems_train: Whether the encoder returns memory in evaluation and in training mode.
        bi_data: The second half of each batch holds reversed text: its distances are negated.
        clamp_len: Distances are clamped to this value; -1 for no limit.
        same_length: With "uni", the number of visible keys is the same for all positions.
        summary_type: Pooling of the sequence and choice heads: "last", "first" or "mean" of the tokens ("cls_index" is
            "last").
        summary_use_proj, summary_activation: A linear layer after the pooling, and its activation; None for none.
        summary_last_dropout: Dropout before the sequence, choice and token classifiers.
        start_n_top, end_n_top: Number of start candidates of the beam-search span head, and of ends per start.
    """

    model_type = "ctx-xlnet"
    reference_model_types: ClassVar[tuple[str, ...]] = ("xlnet",)
    head_dropout_field: ClassVar[str] = "summary_last_dropout"
    keys_to_ignore_at_inference = [*CtxTransformerConfig.keys_to_ignore_at_inference, "mems"]
    attribute_map: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "d_inner": "intermediate_size",
        "ff_activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
    }

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int | None = None
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-12
    attn_type: str = "bi"
    mem_len: int | None = 512
    reuse_len: int | None = None
    use_mems_eval: bool = True
    use_mems_train: bool = False
    bi_data: bool = False
    clamp_len: int = -1
    same_length: bool = False
    summary_type: str = "last"
    summary_use_proj: bool = True
    summary_activation: str | None = "tanh"
    summary_last_dropout: float | int = 0.1
    start_n_top: int = 5
    end_n_top: int = 5
    pad_token_id: int | None = 5
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "attention_probs_dropout_prob",
    )
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {"untie_r": (True,)}
    attention_window: ClassVar[int | None] = None

    @property
    def prefix(self) -> str:
        """Paragraphs that `pipeline("text-generation")` adds before each prompt, as for XLNet in transformers; the
        argument `prefix` of the pipeline replaces them."""
        from transformers import TextGenerationPipeline  # slow to import

        return TextGenerationPipeline.XL_PREFIX

    def validate_architecture(self) -> None:
        """Check the values of the fields (called at construction)."""
        super().validate_architecture()
        if self.hidden_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} is odd; distance encodings are pairs of a sine and a cosine."
            )
        supported = {"attn_type": ("bi", "uni"), "summary_type": ("last", "first", "mean", "cls_index")}
        for name, values in supported.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}; use one of {', '.join(map(repr, values))}.")
        for name in ("mem_len", "reuse_len"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; None or 0 sets no limit.")
