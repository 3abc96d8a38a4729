"""The decoder of GPT (Radford et al. 2018) and its successors: embeddings, causal layers, cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.configuration_decoder import CtxDecoderConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, cumulative_token_counts, is_traced
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import build_layout
from hf_ctxmodels.layers.attention.masks import CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.hook_points import HookPoint
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.transformer import FeedForward, TransformerBlock, run_stack


def build_layer(config: CtxDecoderConfig, norm: Literal["post", "pre"]) -> TransformerBlock:
    """A layer with post-norm or pre-norm."""
    return TransformerBlock(
        config.hidden_size,
        SelfAttention(config.hidden_size, config.num_attention_heads, dropout=config.attention_probs_dropout_prob),
        FeedForward(config.hidden_size, config.feed_forward_size, config.hidden_act),
        norm=norm,
        norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
        dropout=config.hidden_dropout_prob,
    )


class TransformerDecoder(CtxPreTrainedModel):
    """A causal Transformer, GPT-2's unless a family overrides its parts.

    A token's position is the number of tokens before it in its sequence, wherever the padding is, so left, right and no
    padding give the same states without `position_ids`. transformers counts columns.

    Attributes:
        word_embeddings, position_embeddings: Tables whose rows are summed.
        embedding_norm: The norm of the sum, identity in most families.
        layers: The layers in the order of application.
        final_norm: The norm of the last layer's output, identity with post-norm.
        masks: Which earlier tokens a token sees: one mask for all layers, or one for each.
        zeros_padding: Whether padding positions are 0 in all layers.
    """

    accepts_4d_masks = True
    _input_embed_layer = "word_embeddings"
    masks: MaskSpec | Sequence[MaskSpec] = CAUSAL
    zeros_padding: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.build_embeddings(config)
        self.embedding_norm = self.build_embedding_norm(config)
        self.dropout = Dropout(config.embedding_dropout_prob)
        self.layers = nn.ModuleList(self.build_layer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = self.build_final_norm(config)
        self.embedding_output = HookPoint()
        self.post_init()

    def build_embeddings(self, config: Any) -> None:
        """Create the tables whose rows are summed."""
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def build_layer(self, config: Any) -> nn.Module:
        """Create a layer."""
        return build_layer(config, "pre")

    def build_embedding_norm(self, config: Any) -> nn.Module:
        """Create the norm of the embeddings."""
        return nn.Identity()

    def build_final_norm(self, config: Any) -> nn.Module:
        """Create the norm of the last layer's output."""
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def extra_embedding_ids(self, words: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """(batch, length) ids that `embed` takes beside words and positions, by name.

        Args:
            words: (batch, length, ...).
            given: Keywords of `forward`; what belongs to the embeddings is taken out.
        """
        return {}

    def embed(self, words: Tensor, position_ids: Tensor) -> Tensor:
        """(...) ids or (..., hidden) word embeddings, and (...) positions -> (..., hidden)."""
        embedded = words if words.is_floating_point() else self.word_embeddings(words)
        return self.dropout(self.embedding_norm(embedded + self.position_embeddings(position_ids)))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Encode a batch.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), with a cache (batch, past + length): 1 at tokens and 0 at padding; or a
                ready 4-D mask.
            position_ids: (batch, length) or (1, length); None for the number of tokens before each.
            sequence_ids: (batch, length), 0 at padding; a run of equal numbers is one sequence, which sees itself only.
            past_key_values: The cache of the preceding tokens, from an earlier forward; it is extended in place.
            use_cache: Return `past_key_values`; None only if they are given. Without a cache the batch is computed
                unpadded.
            output_mask: (batch, length) bool; `last_hidden_state` then holds only these positions, (targets, hidden) in
                row-major order, and the last layer is computed only there.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention in place of sdpa), and arguments of
                the attention function.

        Raises:
            CtxError: Inputs do not match each other, the cache or the model.
        """
        recorded = self.config.resolve_output_flags(kwargs)
        cache = DynamicCache(config=self.config) if use_cache and past_key_values is None else past_key_values
        past = 0 if cache is None else cache.get_seq_length()
        places = {"sequence_ids": sequence_ids, "output_mask": output_mask, "position_ids": position_ids}
        words = self._checked_input(input_ids, inputs_embeds, attention_mask, cache, past, **places)
        if position_ids is None:
            position_ids = default_positions(words, attention_mask, sequence_ids, past)
        beside = self.extra_embedding_ids(words, kwargs)
        kwargs |= recorded
        layout = build_layout(words, attention_mask, sequence_ids, self.config, past_key_values=cache, **kwargs)
        beside |= {"words": words, "position_ids": position_ids.expand(words.shape[:2])}
        embedded = self.embed(**{name: layout.pack(each) for name, each in beside.items()})
        outputs = run_stack(
            self.layers,
            self.embedding_output(embedded),
            layout,
            self.masks,
            past_key_values=cache,
            final_norm=self.final_norm,
            output_mask=output_mask,
            zero_padding=self.zeros_padding,
            **recorded,
        )
        return BaseModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _checked_input(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
        past: int | Tensor,
        **places: Tensor | None,
    ) -> Tensor:
        """(batch, length) ids or (batch, length, hidden) embeddings; raises CtxError if an argument does not fit."""
        own_mask = mask_of_input(attention_mask, inputs_embeds if input_ids is None else input_ids, cache)
        width, limit = self.config.hidden_size, self.config.max_position_embeddings
        words = self.check_encoder_input(input_ids, inputs_embeds, own_mask, None, width=width, **places)
        validate_cache(cache, words, past, limit)
        check_ids("position_ids", places["position_ids"], limit, "max_position_embeddings")
        return words


def default_positions(
    words: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None, past: int | Tensor
) -> Tensor:
    """(batch, length) number of tokens before each in its sequence, 0 at leading padding.

    Args:
        words: (batch, length, ...).
        attention_mask: (batch, past + length), 0 at padding; others say nothing about positions.
        sequence_ids: (batch, length), see `cumulative_token_counts`.
        past: Columns in the cache.
    """
    length = words.shape[1]
    padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    if sequence_ids is not None:
        return (cumulative_token_counts(token_mask(words, padding, sequence_ids), sequence_ids) - 1).clamp(min=0)
    if padding is not None:
        return ((padding != 0).cumsum(1)[:, -length:] - 1).clamp(min=0)
    return torch.arange(length, device=words.device)[None] + past


def without_trailing_padding(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """(batch, length) bool: False at the padding tokens at the end of a row; True in a row of padding tokens only."""
    others = input_ids != pad_token_id
    before_the_last = others.flip(1).cumsum(1).flip(1) > 0
    return before_the_last | ~others.any(1, keepdim=True)


def mask_of_input(attention_mask: Any, given: Any, cache: Cache | None) -> Any:
    """The part of a (batch, past + length) mask that belongs to the input."""
    if cache is None or not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return attention_mask
    return attention_mask[:, -given.shape[1] :] if isinstance(given, Tensor) and given.dim() > 1 else attention_mask


def validate_cache(cache: Cache | None, words: Tensor, past: int | Tensor, limit: int | None) -> None:
    """Raise CtxError if the cache has other rows than the input, or together they are longer than the limit, if any."""
    if is_traced(words):
        return
    length, past = words.shape[1], int(past)
    if limit is not None and past + length > limit:
        given = f"{past} tokens of past_key_values and {length} of the input are" if past else f"{length} tokens are"
        raise CtxError(
            f"The sequence is too long: {given} above the model's max_sequence_length={limit} (see "
            "max_position_embeddings).",
            hint=f"truncate it (tokenizer(..., truncation=True, max_length={limit})), generate fewer new tokens, or "
            "split it into windows.",
        )
    rows = _batch_size(cache) if past else None
    if rows is not None and rows != words.shape[0]:
        raise CtxError(
            f"past_key_values holds {rows} rows, but the input has {words.shape[0]}.",
            hint="give the cache of the same texts, or batch_repeat_interleave it.",
        )


def _batch_size(cache: Cache | None) -> int | None:
    for layer in getattr(cache, "layers", []):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.dim() == 4:
            return keys.shape[0]
    return None
