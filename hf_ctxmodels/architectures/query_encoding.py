"""Encoding of source, target and query tokens in one encoder stack.

A query token stands for a target token that is to be predicted. It has the position of that target token and attends
to the source, to the target before that position, and to itself; no other token attends to it. The source, target and
query tokens of a batch are columns of one input, so that one call of the attention function covers them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache
from transformers.utils import ModelOutput

from hf_ctxmodels.core.caches import PreallocatedCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, is_traced, reject_unused_tensors
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.layers.attention.layouts import build_layout
from hf_ctxmodels.layers.attention.masks import MaskSpec
from hf_ctxmodels.layers.transformer import StackOutput, run_stack


@dataclass(frozen=True)
class TokenColumns:
    """Tokens of a batch with their positions, segments and the tokens they attend to.

    Attributes:
        ids: (batch, columns) token ids; None if the source consists of embeddings.
        is_token: (batch, columns) bool, False at padding.
        positions: (batch, columns) positions for the position embeddings.
        segments: (batch, columns) segment ids.
        ranges: (batch, columns, 3) attended ranges of tokens, see `MaskSpec`. Tokens are numbered within their row.
    """

    ids: Tensor | None
    is_token: Tensor
    positions: Tensor
    segments: Tensor
    ranges: Tensor

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.is_token.shape[1]

    def append(self, new_columns: Self) -> "TokenColumns":
        """Concatenate with further columns of the same batch."""
        return TokenColumns(
            ids=None if self.ids is None or new_columns.ids is None else torch.cat([self.ids, new_columns.ids], 1),
            is_token=torch.cat([self.is_token, new_columns.is_token], 1),
            positions=torch.cat([self.positions, new_columns.positions], 1),
            segments=torch.cat([self.segments, new_columns.segments], 1),
            ranges=torch.cat([self.ranges, new_columns.ranges], 1),
        )


def source_columns(ids: Tensor | None, is_token: Tensor, segments: Tensor) -> TokenColumns:
    """The source tokens, each of which attends to the whole source.

    Args:
        ids: (batch, length) token ids, or None.
        is_token: (batch, length) bool, False at padding.
        segments: (batch, length) segment ids.
    """
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    lengths = is_token.sum(1, keepdim=True).expand_as(positions)
    return TokenColumns(ids, is_token, positions, segments, torch.stack([lengths, positions, positions + 1], -1))


def target_columns(ids: Tensor, is_token: Tensor, num_previous: Tensor, segment: int) -> TokenColumns:
    """Target tokens, each of which attends to the source and to the target up to itself.

    Args:
        ids: (batch, steps) token ids.
        is_token: (batch, steps) bool, False at trailing tokens that are not needed.
        num_previous: (batch, 1) number of source and target tokens before the first of these.
        segment: The segment id of all of them.
    """
    positions = num_previous + torch.arange(ids.shape[1], device=ids.device)
    ranges = torch.stack([positions + 1, positions, positions + 1], -1)
    return TokenColumns(ids, is_token, positions, torch.full_like(ids, segment), ranges)


@dataclass(frozen=True)
class QueryTokens:
    """The query tokens of a batch.

    Attributes:
        token_id: The id of all query tokens.
        segment: The segment id of all query tokens.
        steps: (batch, queries) index of the target token that each query predicts.
        is_selected: (batch, queries) bool, False at queries that are not computed.
        first_position: (batch, 1) position of the first target token that can be predicted.
        num_previous: (batch, 1) number of tokens of the row before the first query.
    """

    token_id: int
    segment: int
    steps: Tensor
    is_selected: Tensor
    first_position: Tensor
    num_previous: Tensor

    def attending_to_prefix(self) -> TokenColumns:
        """Queries that attend to the tokens before their target token, and to themselves."""
        positions = self.first_position + self.steps
        query_index = self.num_previous + (self.is_selected.cumsum(1) - 1).clamp(min=0)
        return self._columns(positions, torch.stack([positions, query_index, query_index + 1], -1))

    def attending_to_span(self, span_ids: Tensor) -> TokenColumns:
        """Queries that attend to the tokens before the span of their target token, and to all queries of the span.

        Args:
            span_ids: (batch, queries) span ids; a run of equal ids is a span.
        """
        is_first = F.pad(span_ids[:, 1:] != span_ids[:, :-1], (1, 0), value=True)
        columns = torch.arange(span_ids.shape[1], device=span_ids.device).expand_as(span_ids)
        first_column = torch.where(is_first, columns, 0).cummax(1).values
        is_last = F.pad(is_first[:, 1:], (0, 1), value=True)
        last_column = torch.where(is_last, columns, span_ids.shape[1]).flip(1).cummin(1).values.flip(1)
        ranks = self.is_selected.cumsum(1)
        start = self.num_previous + (ranks - self.is_selected.long()).gather(1, first_column)
        stop = self.num_previous + ranks.gather(1, last_column)
        prefix_lengths = self.first_position + self.steps.gather(1, first_column)
        return self._columns(self.first_position + self.steps, torch.stack([prefix_lengths, start, stop], -1))

    def _columns(self, positions: Tensor, ranges: Tensor) -> TokenColumns:
        ids = torch.full_like(self.steps, self.token_id)
        segments = torch.full_like(self.steps, self.segment)
        return TokenColumns(ids, self.is_selected, positions, segments, ranges)


def required_target_tokens(is_predicted: Tensor, num_tokens: int, first_step_tokens: int) -> Tensor:
    """Mark the target tokens on which a predicted step depends.

    Args:
        is_predicted: (batch, steps) bool.
        num_tokens: The number of target tokens.
        first_step_tokens: The number of target tokens on which the first step depends.

    Returns:
        (batch, num_tokens) bool.
    """
    steps = torch.arange(is_predicted.shape[1], device=is_predicted.device)
    num_required = torch.where(is_predicted, steps + first_step_tokens, 0).amax(1, keepdim=True)
    return torch.arange(num_tokens, device=is_predicted.device) < num_required


class EncoderInput(NamedTuple):
    """The columns of an encoder input, and their (batch, columns, hidden) embeddings if the source has no ids."""

    columns: TokenColumns
    embeddings: Tensor | None = None


def prepare_source(
    model: HeadModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    segment: int | None,
) -> EncoderInput:
    """Validate a source and determine its positions and segments.

    Args:
        model: The head.
        input_ids, inputs_embeds, attention_mask, token_type_ids: As in the forward of the encoder.
        segment: The segment id of all source tokens, which overrides `token_type_ids`; or None.

    Raises:
        CtxError: An argument is invalid.
    """
    config = model.config
    words = model.check_encoder_input(
        input_ids,
        inputs_embeds,
        attention_mask,
        config.max_sequence_length,
        width=config.hidden_size,
        token_type_ids=token_type_ids,
    )
    check_ids("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    if attention_mask is None:
        is_token = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device)
    else:
        is_token = attention_mask != 0
    if segment is not None:
        segments = torch.full_like(is_token, segment, dtype=torch.long)
    elif token_type_ids is not None:
        segments = token_type_ids
    else:
        segments = torch.zeros_like(is_token, dtype=torch.long)
    return EncoderInput(source_columns(input_ids, is_token, segments), words if input_ids is None else None)


def append_columns(model: HeadModel, source: EncoderInput, token_groups: Sequence[TokenColumns]) -> EncoderInput:
    """Append target and query tokens to a source; they are embedded if the source consists of embeddings."""
    columns = source.columns
    for group in token_groups:
        columns = columns.append(group)
    if source.embeddings is None:
        return EncoderInput(columns)
    ids = torch.cat([group.ids for group in token_groups if group.ids is not None], 1)
    embeddings = model.get_input_embeddings()(ids).to(source.embeddings.dtype)
    return EncoderInput(columns, torch.cat([source.embeddings, embeddings], 1))


def encode_columns(
    model: HeadModel,
    inputs: EncoderInput,
    output_mask: Tensor | None = None,
    *,
    needs_position: Tensor | None = None,
    cache: Cache | None = None,
    key_mask: Tensor | None = None,
    **output_flags: Any,
) -> StackOutput:
    """Run the encoder's layers on source, target and query tokens.

    Args:
        model: The head.
        inputs: The columns.
        output_mask: (batch, columns) bool, the columns whose outputs are used; None for all.
        needs_position: (batch, columns) bool, the columns whose positions must be valid; None for all tokens. The
            outputs of the other columns, for example at padded labels, are not used.
        cache: Cache that the columns extend and attend to; or None.
        key_mask: (batch, keys) bool, False at padding, for the keys of the cache and the columns; None for the mask of
            the columns.
        output_flags: As in `run_stack`.

    Raises:
        CtxError: Source and target together exceed the maximum length.
    """
    columns, encoder, config = inputs.columns, model.base_model, model.config
    embedded = inputs.embeddings if columns.ids is None else columns.ids
    assert embedded is not None
    limit = config.max_position_embeddings
    _check_positions(columns.positions, columns.is_token if needs_position is None else needs_position, limit)
    key_mask = columns.is_token if key_mask is None else key_mask
    layout = build_layout(embedded, key_mask.long(), None, config, past_key_values=cache, **output_flags)
    positions = columns.positions.clamp(max=limit - 1)  # columns without a valid position are embedded, too
    states = encoder.embeddings(layout.pack(embedded), layout.pack(positions), layout.pack(columns.segments))
    mask = MaskSpec(ranges=layout.pack(columns.ranges))
    return run_stack(
        encoder.layers, states, layout, mask, past_key_values=cache, output_mask=output_mask, **output_flags
    )


def _check_positions(positions: Tensor, is_token: Tensor, limit: int) -> None:
    if is_traced(positions):
        return
    length = int(positions.masked_fill(~is_token, 0).max()) + 1
    if length > limit:
        raise CtxError(
            f"Source and target have {length} tokens, above the model's max_sequence_length={limit} (see "
            "max_position_embeddings).",
            hint="truncate the source or the target, or generate fewer new tokens.",
        )


@dataclass
class SourceOutput(ModelOutput):
    """An encoded source, which all steps of `generate` use.

    Attributes:
        last_hidden_state: (batch, length, hidden) states of the last layer.
        keys_and_values: (batch, layers, 2, heads, length, head_dim) keys and values of all layers.
        hidden_states: The states of all layers; None unless requested.
        attentions: The attention weights of all layers; None unless requested.
    """

    last_hidden_state: Tensor | None = None
    keys_and_values: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


def source_keys_and_values(encoder_outputs: Any) -> Tensor:
    """Return the keys and values of a `SourceOutput`.

    Raises:
        CtxError: The output has no keys and values.
    """
    keys_and_values = getattr(encoder_outputs, "keys_and_values", None)
    if keys_and_values is None:
        raise CtxError("encoder_outputs has no keys_and_values.", hint="pass the output of model.get_encoder().")
    return keys_and_values


def cache_from_source(encoder_outputs: Any, config: Any) -> PreallocatedCache:
    """Create a cache with the keys and values of an encoded source.

    Args:
        encoder_outputs: A `SourceOutput`.
        config: The model's configuration.

    Raises:
        CtxError: See `source_keys_and_values`.
    """
    keys_and_values = source_keys_and_values(encoder_outputs)
    cache = PreallocatedCache(config=config)
    for layer in range(keys_and_values.shape[1]):
        cache.update(keys_and_values[:, layer, 0], keys_and_values[:, layer, 1], layer)
    return cache


class SourceEncoder(nn.Module):
    """The encoder that `generate` calls: encodes sources and returns the keys and values for the decoding steps.

    Args:
        model: The head.
        segment: See `prepare_source`.
    """

    main_input_name = "input_ids"

    def __init__(self, model: HeadModel, segment: int | None) -> None:
        super().__init__()
        self.model = model
        self.segment = segment

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> SourceOutput:
        """Encode (batch, length) sources.

        Args:
            input_ids, attention_mask, token_type_ids, inputs_embeds: As in the forward of the encoder.

        Raises:
            CtxError: An argument is invalid or unknown.
        """
        reject_unused_tensors(**kwargs)
        config = self.model.config
        source = prepare_source(self.model, input_ids, inputs_embeds, attention_mask, token_type_ids, self.segment)
        cache = PreallocatedCache(config=config)
        outputs = encode_columns(self.model, source, cache=cache, **config.resolve_output_flags(kwargs))
        layers = [torch.stack([layer.keys, layer.values], 1) for layer in cache.layers]
        return SourceOutput(
            last_hidden_state=outputs.last_hidden_state,
            keys_and_values=torch.stack(layers, 1),
            hidden_states=outputs.hidden_states,  # type: ignore[arg-type]
            attentions=outputs.attentions,
        )
