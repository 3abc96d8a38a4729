"""Transformer-XL configuration (Dai et al. 2019, arXiv 1901.02860, section 4 and the released commands)."""

from itertools import pairwise
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxTransformerConfig


@strict
class CtxTransformerXLConfig(CtxTransformerConfig):
    """Configuration of Transformer-XL; the defaults are the released model of WikiText-103 with 285 million parameters.

    The names of the released configuration (`d_model`, `d_embed`, `n_layer`, `n_head`, `d_inner`, `dropout`, `dropatt`,
    `init_std`, `proj_init_std`, `layer_norm_epsilon`) are accepted. There is no maximum length: positions are relative.
    See `CtxTransformerConfig` for the other arguments.

    Args:
        hidden_size: Width of the layers; an even multiple of `num_attention_heads`.
        embedding_size: Width of the embeddings of the most frequent words.
        cutoffs: Ascending ids that divide the vocabulary, which is ordered by frequency, into clusters (Grave et al.
            2017, arXiv 1609.04309); () for a plain embedding and softmax.
        div_val: The width of the embeddings is divided by this number from one cluster to the next (Baevski & Auli
            2019, arXiv 1809.10853).
        tie_projs: Whether the softmax of each cluster shares the projection of the embeddings; None for all clusters
            but the first.
        untie_r: Whether the biases u and v (section 3.3) differ from layer to layer.
        mem_len: Number of states of earlier segments that a layer attends to; 0 for none.
        clamp_len: Distances are clamped to this value; -1 for no limit.
        same_length: Whether a token attends to at most `mem_len` keys, itself included, so that all tokens see the same
            number of keys when the memory is full.
    """

    model_type = "ctx-transformer_xl"
    keys_to_ignore_at_inference = [*CtxTransformerConfig.keys_to_ignore_at_inference, "mems"]
    attribute_map: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "d_embed": "embedding_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "d_inner": "intermediate_size",
        "dropout": "hidden_dropout_prob",
        "dropatt": "attention_probs_dropout_prob",
        "init_std": "initializer_range",
        "proj_init_std": "projection_initializer_range",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    vocab_size: int = 267_735
    hidden_size: int = 1024
    embedding_size: int = 1024
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    hidden_act: str = "relu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout: float | int | None = None
    initializer_range: float | int = 0.02
    projection_initializer_range: float | int = 0.01
    layer_norm_eps: float = 1e-5
    cutoffs: list[int] | tuple[int, ...] = (20_000, 40_000, 200_000)
    div_val: int = 4
    tie_projs: list[bool] | None = None
    untie_r: bool = True
    mem_len: int = 1600
    clamp_len: int = 1000
    same_length: bool = True
    use_mems_train: bool = False
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = 0
    tie_word_embeddings: bool = True

    # of the layers of XLNet, see `models.xlnet.streams`
    attn_type: ClassVar[str] = "uni"
    bi_data: ClassVar[bool] = False
    reuse_len: ClassVar[int | None] = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.cutoffs = list(self.cutoffs)
        if self.tie_projs is None:
            self.tie_projs = [False, *[True] * len(self.cutoffs)]
        super().__post_init__(**kwargs)

    def validate_clusters(self) -> None:
        """Check the clusters of the vocabulary (called at construction)."""
        ends = [0, *self.cutoffs, self.vocab_size]
        if any(start >= end for start, end in pairwise(ends)):
            raise ValueError(f"cutoffs={self.cutoffs} must ascend between 0 and vocab_size={self.vocab_size}.")
        if len(self.tie_projs or []) != len(self.cutoffs) + 1:
            raise ValueError(f"tie_projs={self.tie_projs} must have one value for each of {len(ends) - 1} clusters.")
        if self.div_val < 1 or self.embedding_size // self.div_val ** len(self.cutoffs) < 1:
            raise ValueError(
                f"embedding_size={self.embedding_size} with div_val={self.div_val} leaves no width for cluster "
                f"{len(self.cutoffs)}."
            )
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings=False is not supported: the softmax shares the embeddings.")
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size={self.hidden_size} is odd; distance encodings are sines and cosines.")
        if self.mem_len < 0:
            raise ValueError(f"mem_len={self.mem_len} is negative; 0 disables the memory.")

    @property
    def use_mems_eval(self) -> bool:
        """Whether the model returns a memory in evaluation."""
        return self.mem_len > 0

    @property
    def attention_window(self) -> int | None:
        """Number of keys that a token attends to, itself included; None for all."""
        return self.mem_len if self.same_length and self.mem_len else None

    @property
    def cluster_sizes(self) -> list[tuple[int, int]]:
        """Number of tokens and width of the embeddings of each cluster."""
        ends = [0, *self.cutoffs, self.vocab_size]
        return [
            (end - start, self.embedding_size // self.div_val**cluster)
            for cluster, (start, end) in enumerate(pairwise(ends))
        ]
