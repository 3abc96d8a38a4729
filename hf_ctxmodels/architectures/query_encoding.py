"""Encoding of source, target and query tokens in one encoder stack.

A query token predicts a target token. It has the position of the target token and attends to the source, to the
target before that position, and to itself; no other token attends to it. The source, target and query tokens of a batch
are columns of one input, so that one call of the attention function covers them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache
from transformers.utils import ModelOutput

from hf_ctxmodels.core.caches import PreallocatedCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, to_device
from hf_ctxmodels.core.inputs import check_ids, reject_unused_tensors, sequence_starts
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.layers.attention.layouts import build_layout, pack_tokens
from hf_ctxmodels.layers.attention.masks import MaskSpec
from hf_ctxmodels.layers.pooling import build_token_mask
from hf_ctxmodels.layers.transformer import StackOutput, run_stack


@dataclass(frozen=True)
class TokenColumns:
    """(batch, columns) tokens of a batch with their positions, segments and the tokens they attend to.

    Attributes:
        ids: Token ids; None if there are word `embeddings`, (batch, columns, hidden).
        is_token: False at padding.
        ranges: (batch, columns, 3) attended ranges of tokens, see `MaskSpec`. Tokens are numbered within their row.
        device: Device of the states; None for tokens that are appended to others.

    All tensors except the embeddings are host copies.
    """

    ids: Tensor | None
    is_token: Tensor
    positions: Tensor
    segments: Tensor
    ranges: Tensor
    embeddings: Tensor | None = None
    device: torch.device | None = None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.is_token.shape[1]


def target_columns(
    ids: Tensor, is_token: Tensor, num_previous: Tensor, segment: int, device: torch.device | None = None
) -> TokenColumns:
    """(batch, steps) target tokens, each of which attends to the source and to the target up to itself.

    `is_token` is False at trailing tokens that are not needed; `num_previous` is the (batch, 1) number of source and
    target tokens before the first of these.
    """
    positions = num_previous + torch.arange(ids.shape[1], device=ids.device)
    ranges = torch.stack([positions + 1, positions, positions + 1], -1)
    return TokenColumns(ids, is_token, positions, torch.full_like(ids, segment), ranges, device=device)


@dataclass(frozen=True)
class QueryTokens:
    """The query tokens of a batch, with one id and one segment.

    Attributes:
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
        query_index = self.num_previous + (self.is_selected.cumsum(1) - 1).clamp(min=0)
        return self._columns(self.first_position + self.steps, query_index, query_index + 1)

    def attending_to_span(self, span_ids: Tensor) -> TokenColumns:
        """Queries that attend to the tokens before the span of their target token, and to all queries of the span.

        A run of equal (batch, queries) `span_ids` is a span.
        """
        is_first = sequence_starts(span_ids)
        columns = torch.arange(span_ids.shape[1], device=span_ids.device).expand_as(span_ids)
        first_column = torch.where(is_first, columns, 0).cummax(1).values
        is_last = F.pad(is_first[:, 1:], (0, 1), value=True)
        last_column = torch.where(is_last, columns, span_ids.shape[1]).flip(1).cummin(1).values.flip(1)
        ranks = self.is_selected.cumsum(1)
        start = self.num_previous + (ranks - self.is_selected.long()).gather(1, first_column)
        stop = self.num_previous + ranks.gather(1, last_column)
        return self._columns(self.first_position + self.steps.gather(1, first_column), start, stop)

    def _columns(self, prefix_lengths: Tensor, start: Tensor, stop: Tensor) -> TokenColumns:
        return TokenColumns(
            ids=torch.full_like(self.steps, self.token_id),
            is_token=self.is_selected,
            positions=self.first_position + self.steps,
            segments=torch.full_like(self.steps, self.segment),
            ranges=torch.stack([prefix_lengths, start, stop], -1),
        )


def required_target_tokens(is_predicted: Tensor, num_tokens: int, first_step_tokens: int) -> Tensor:
    """(batch, num_tokens) bool, the target tokens on which the (batch, steps) predicted steps depend; the first step
    depends on `first_step_tokens`."""
    steps = torch.arange(is_predicted.shape[1], device=is_predicted.device)
    num_required = torch.where(is_predicted, steps + first_step_tokens, 0).amax(1, keepdim=True)
    return torch.arange(num_tokens, device=is_predicted.device) < num_required


def prepare_source(
    model: HeadModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    segment: int | None,
) -> TokenColumns:
    """Validate a source, each token of which attends to the whole source; `segment` overrides `token_type_ids`."""
    config = model.config
    tokens = model.check_encoder_input(
        input_ids,
        inputs_embeds,
        attention_mask,
        config.max_sequence_length,
        width=config.hidden_size,
        token_type_ids=token_type_ids,
    )
    check_ids("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    is_token = host_copy(build_token_mask(tokens, attention_mask))
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    lengths = is_token.sum(1, keepdim=True).expand_as(positions)
    ranges = torch.stack([lengths, positions, positions + 1], -1)
    if segment is not None or token_type_ids is None:
        token_type_ids = torch.full_like(positions, segment or 0)
    embeddings = tokens if input_ids is None else None
    ids = None if input_ids is None else host_copy(input_ids)
    return TokenColumns(ids, is_token, positions, host_copy(token_type_ids), ranges, embeddings, tokens.device)


def append_columns(model: HeadModel, columns: TokenColumns, groups: Sequence[TokenColumns]) -> TokenColumns:
    """Append target and query tokens of the same batch; they are embedded if the source consists of embeddings."""

    def concatenate(name: str) -> Tensor:
        return torch.cat([getattr(group, name) for group in (columns, *groups)], 1)

    ids = embeddings = None
    if columns.embeddings is None:
        ids = concatenate("ids")
    else:
        new_ids = torch.cat([group.ids for group in groups if group.ids is not None], 1)
        new_embeddings = model.get_input_embeddings()(to_device(new_ids, columns.embeddings.device))
        new_embeddings = new_embeddings.to(columns.embeddings.dtype)
        embeddings = torch.cat([columns.embeddings, new_embeddings], 1)
    fields = {name: concatenate(name) for name in ("is_token", "positions", "segments", "ranges")}
    return TokenColumns(ids=ids, embeddings=embeddings, device=columns.device, **fields)


def encode_columns(
    model: HeadModel,
    columns: TokenColumns,
    output_mask: Tensor | None = None,
    *,
    needs_position: Tensor | None = None,
    cache: Cache | None = None,
    key_mask: Tensor | None = None,
    **output_flags: Any,
) -> StackOutput:
    """Run the encoder's layers on source, target and query tokens.

    Args:
        output_mask: (batch, columns) bool on the CPU, the columns whose outputs are used; None for all.
        needs_position: (batch, columns) bool, the columns whose positions must be valid; None for all tokens. The
            outputs of the other columns, for example at padded labels, are not used.
        cache: Cache that the columns extend and attend to.
        key_mask: (batch, keys) bool, False at padding, for the keys of the cache and the columns; None for the mask of
            the columns.

    Raises:
        CtxError: Source and target together exceed the maximum length.
    """
    encoder, config, limit = model.base_model, model.config, model.config.max_position_embeddings
    device, embedded = columns.device, columns.embeddings
    assert device is not None
    if embedded is None:
        assert columns.ids is not None
        embedded = to_device(columns.ids, device)
    if not is_traced(columns.positions):
        is_checked = columns.is_token if needs_position is None else host_copy(needs_position)
        length = int(columns.positions.masked_fill(~is_checked, 0).max()) + 1
        if length > limit:
            raise CtxError(
                f"Source and target have {length} tokens, above the model's max_sequence_length={limit} (see "
                "max_position_embeddings).",
                hint="truncate the source or the target, or generate fewer new tokens.",
            )
    key_mask = to_device((columns.is_token if key_mask is None else key_mask).long(), device)
    layout = build_layout(embedded, key_mask, None, config, past_key_values=cache, **output_flags)
    positions = columns.positions.clamp(max=limit - 1)  # columns without a valid position are embedded, too
    packed = (to_device(layout.pack(tensor), device) for tensor in (positions, columns.segments, columns.ranges))
    packed_positions, segments, ranges = packed
    tokens = pack_tokens(layout, embedded, encoder.get_input_embeddings())
    states = encoder.embeddings(tokens, packed_positions, segments)
    mask = MaskSpec(ranges=ranges)
    output_mask = None if output_mask is None else to_device(output_mask, device)
    return run_stack(
        encoder.layers, states, layout, mask, past_key_values=cache, output_mask=output_mask, **output_flags
    )


@dataclass
class SourceOutput(ModelOutput):
    """An encoded source, which all steps of `generate` use.

    Attributes:
        keys_and_values: (batch, layers, 2, heads, length, head_dim) keys and values of all layers.
    """

    last_hidden_state: Tensor | None = None
    keys_and_values: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class SourceEncoder(nn.Module):
    """The encoder that `generate` calls: encodes sources and returns the keys and values for the decoding steps."""

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
        """Encode (batch, length) sources; raises CtxError for an invalid or unknown argument."""
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
