"""What all Transformers with a cache share: embeddings, layers, final norm, and default positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_ctxmodels.core.caches import get_targets_per_source
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, cumulative_token_counts, is_traced
from hf_ctxmodels.layers.attention.layouts import build_layout, build_memory_layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.common import HookPoint
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.transformer import Memory, StackOutput, run_stack


@dataclass(frozen=True, eq=False)
class EncodedSource:
    """The encoder's output that a decoder attends to.

    Attributes:
        states: (batch, length, hidden).
        attention_mask: (batch, length), 0 at positions that are hidden from the decoder; None for none.
        sequence_ids: (batch, length) `sequence_ids` of the encoder's input, or None.
    """

    states: Tensor
    attention_mask: Tensor | None = None
    sequence_ids: Tensor | None = None


class LayerStack(nn.Module):
    """Embeddings, layers and final norm; families override them.

    The position of a token is the number of tokens before it in its sequence, wherever the padding is, so that left,
    right and no padding give the same states without `position_ids`. transformers counts columns.

    Attributes:
        norm: Position of the norms in a layer; "pre" adds a final norm.
        normalizes_embeddings: Whether the embeddings are normalised.
        has_relative_positions: Whether `position_ids` are an error.
        masks: The attention pattern: one for all layers, or one for each layer.
        zeros_padding: Whether the states at padding positions are 0 in all layers.
        word_embeddings, position_embeddings: The embeddings, which are summed.
        embedding_norm: The norm of the embeddings, or identity.
        layers: The layers in the order of application.
        final_norm: The norm of the last layer's output, or identity.
        embedding_output: Hook point of the embeddings.
    """

    norm: ClassVar[Literal["post", "pre"]] = "post"
    normalizes_embeddings: ClassVar[bool] = True
    has_relative_positions: ClassVar[bool] = False
    masks: MaskSpec | Sequence[MaskSpec] = CAUSAL
    zeros_padding: ClassVar[bool] = False
    config: Any

    def build_modules(self, config: Any, num_layers: int, embedding_dropout: float) -> None:
        """Create all modules except the word embeddings."""
        self.build_embeddings(config)
        norm = partial(nn.LayerNorm, config.hidden_size, eps=config.layer_norm_eps)
        self.embedding_norm = norm() if self.normalizes_embeddings else nn.Identity()
        self.dropout = Dropout(embedding_dropout)
        self.layers = nn.ModuleList(self.build_layer(config) for _ in range(num_layers))
        self.final_norm = self.build_final_norm(config)
        self.embedding_output = HookPoint()

    def build_embeddings(self, config: Any) -> None:
        """Create the embeddings that are added to the word embeddings."""
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def build_layer(self, config: Any) -> nn.Module:
        """Create a layer."""
        raise NotImplementedError

    def build_final_norm(self, config: Any) -> nn.Module:
        """Create the norm of the last layer's output."""
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if self.norm == "pre" else nn.Identity()

    def mask_specs(self) -> MaskSpec | Sequence[MaskSpec]:
        """The attention pattern of a forward pass."""
        return self.masks

    def extra_embedding_ids(self, words: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the (batch, length) arguments of `embed` other than words and positions, by name.

        Args:
            words: (batch, length, ...) ids or embeddings.
            kwargs: Keyword arguments of `forward`, from which the arguments of the embeddings are popped.
        """
        return {}

    def embed(self, words: Tensor, position_ids: Tensor) -> Tensor:
        """(..., hidden) word embeddings and (...) positions -> (..., hidden)."""
        return self.dropout(self.embedding_norm(words + self.position_embeddings(position_ids)))

    def run_layers(
        self,
        words: Tensor,
        word_embeddings: nn.Module,
        *,
        attention_mask: Any,
        position_ids: Tensor | None,
        sequence_ids: Tensor | None,
        cache: Cache | None,
        output_mask: Tensor | None,
        source: EncodedSource | None = None,
        **kwargs: Any,
    ) -> StackOutput:
        """Embed a validated batch of ids or embeddings and run the layers; arguments as in `forward`."""
        if position_ids is not None and self.has_relative_positions:
            raise CtxError(
                "The model has relative positions and takes no position_ids.",
                hint="remove position_ids; separate packed sequences by sequence_ids.",
            )
        output_flags = self.config.resolve_output_flags(kwargs)
        past_length = 0 if cache is None else cache.get_seq_length()
        limit = self.config.max_sequence_length
        check_cache(getattr(cache, "self_attention_cache", cache), words, past_length, limit)
        if limit is not None:
            check_ids("position_ids", position_ids, limit, "max_position_embeddings")
        if position_ids is None:
            position_ids = default_positions(words, attention_mask, sequence_ids, past_length)
        embedding_ids = self.extra_embedding_ids(words, kwargs) | {"position_ids": position_ids.expand(words.shape[:2])}
        kwargs |= output_flags
        layout = build_layout(words, attention_mask, sequence_ids, self.config, past_key_values=cache, **kwargs)
        memory = None
        if source is not None:
            # the first of each group of equal rows of the source
            targets_per_source = get_targets_per_source(cache)
            states, mask = source.states[::targets_per_source], source.attention_mask
            mask = None if mask is None else mask[::targets_per_source]
            memory_layout = build_memory_layout(layout, states, mask, source.sequence_ids)
            memory = Memory(memory_layout.pack(states), memory_layout, BIDIRECTIONAL, targets_per_source)
        packed_ids = {name: layout.pack(tensor) for name, tensor in embedding_ids.items()}
        return run_stack(
            self.layers,
            self._embed_packed(layout.pack(words), word_embeddings, packed_ids),  # no reference: it can be freed
            layout,
            self.mask_specs(),
            memory=memory,
            past_key_values=cache,
            final_norm=self.final_norm,
            output_mask=output_mask,
            zero_padding=self.zeros_padding,
            **output_flags,
        )

    def _embed_packed(self, words: Tensor, word_embeddings: nn.Module, extra_ids: dict[str, Tensor]) -> Tensor:
        """(...) ids or (..., hidden) word embeddings -> (..., hidden) input of the first layer."""
        vectors = words if words.is_floating_point() else word_embeddings(words)
        return self.embedding_output(self.embed(vectors, **extra_ids))


def default_positions(
    words: Tensor, attention_mask: Any, sequence_ids: Tensor | None, past_length: int | Tensor
) -> Tensor:
    """(batch, length) number of tokens before each token in its sequence, 0 at leading padding.

    Args:
        words: (batch, length, ...).
        attention_mask: (batch, past + length), 0 at padding; masks with other dimensions are ignored.
        sequence_ids: (batch, length), see `cumulative_token_counts`.
        past_length: Number of columns in the cache.
    """
    length = words.shape[1]
    padding = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
    if sequence_ids is not None:
        return (cumulative_token_counts(token_mask(words, padding, sequence_ids), sequence_ids) - 1).clamp(min=0)
    if padding is not None:
        return ((padding != 0).cumsum(1)[:, -length:] - 1).clamp(min=0)
    return torch.arange(length, device=words.device)[None] + past_length


def mask_of_new_tokens(attention_mask: Any, inputs: Any, cache: Cache | None) -> Any:
    """The columns of a (batch, past + length) mask that belong to the input; other masks are returned unchanged."""
    if cache is None or not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return attention_mask
    return attention_mask[:, -inputs.shape[1] :] if isinstance(inputs, Tensor) and inputs.dim() > 1 else attention_mask


def check_cache(cache: Cache | None, words: Tensor, past_length: int | Tensor, limit: int | None) -> None:
    """Raise CtxError if cache and input have different batch sizes, or together exceed the maximum length, if any."""
    if is_traced(words):
        return
    length, past_length = words.shape[1], int(past_length)
    if limit is not None and past_length + length > limit:
        tokens = (
            f"{past_length} tokens of past_key_values and {length} of the input" if past_length else f"{length} tokens"
        )
        raise CtxError(
            f"The sequence is too long: {tokens} exceed the model's max_sequence_length={limit} (see "
            "max_position_embeddings).",
            hint=f"truncate it (tokenizer(..., truncation=True, max_length={limit})), generate fewer new tokens, or "
            "split it into windows.",
        )
    for layer in getattr(cache, "layers", []) if past_length else []:
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[0] != words.shape[0]:
            raise CtxError(
                f"past_key_values has batch size {keys.shape[0]}, but the input has {words.shape[0]}.",
                hint="pass a cache of the same batch, or repeat its rows with batch_repeat_interleave.",
            )
