"""Runs an encoder's layers over source, target and query rows, and reads sources for `generate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.utils import ModelOutput

from hf_ctxmodels.architectures.query_tokens import Rows, source_rows
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation_cache import PreallocatedCache
from hf_ctxmodels.core.inputs import check_ids, is_traced, reject_unused_tensors
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.layers.attention.layouts import build_layout
from hf_ctxmodels.layers.attention.masks import MaskSpec
from hf_ctxmodels.layers.transformer import StackOutput, run_stack


class Words(NamedTuple):
    """Rows, and word embeddings (batch, columns, hidden), where they were given in place of ids."""

    rows: Rows
    embeddings: Tensor | None = None


def read_source(
    model: HeadModel,
    ids: Tensor | None,
    embeddings: Tensor | None,
    mask: Tensor | None,
    token_type_ids: Tensor | None,
    segment: int | None,
) -> Words:
    """The rows of a source.

    Args:
        model: The head.
        ids, embeddings, mask, token_type_ids: (batch, length) as in the encoder's forward.
        segment: Segment of all tokens, in place of `token_type_ids`; or None.

    Raises:
        CtxError: As the encoder does.
    """
    config = model.config
    words = model.check_encoder_input(
        ids, embeddings, mask, config.max_sequence_length, width=config.hidden_size, token_type_ids=token_type_ids
    )
    check_ids("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    tokens = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device) if mask is None else mask != 0
    types = torch.zeros_like(tokens, dtype=torch.long) if token_type_ids is None else token_type_ids
    types = types if segment is None else torch.full_like(types, segment)
    return Words(source_rows(ids, tokens, types), words if ids is None else None)


def joined(model: HeadModel, source: Words, parts: Sequence[Rows]) -> Words:
    """The source and further rows, all by ids or all by embeddings."""
    rows = source.rows
    for part in parts:
        rows = rows.beside(part)
    if source.embeddings is None:
        return Words(rows)
    further = torch.cat([part.ids for part in parts if part.ids is not None], 1)
    embedded = model.get_input_embeddings()(further).to(source.embeddings.dtype)
    return Words(rows, torch.cat([source.embeddings, embedded], 1))


def run_rows(
    model: HeadModel,
    words: Words,
    output_mask: Tensor | None = None,
    *,
    checked: Tensor | None = None,
    cache: Cache | None = None,
    tokens: Tensor | None = None,
    **recorded: Any,
) -> StackOutput:
    """Run the encoder's layers on rows.

    Args:
        model: The head.
        words: The rows.
        output_mask: (batch, columns) bool, those whose outputs are used; None for all.
        checked: (batch, columns) bool, those that must have positions; None for all tokens. Of others, such as padding
            of labels, nothing is read.
        cache: What the rows attend to beside each other, extended by them; or None.
        tokens: (batch, keys) bool, False at padding, with the keys of the cache; None for those of the rows.
        recorded: As in `run_stack`.

    Raises:
        CtxError: Source and target are longer than the model's limit.
    """
    rows, encoder, config = words.rows, model.base_model, model.config
    given = words.embeddings if rows.ids is None else rows.ids
    assert given is not None
    _check_positions(rows.positions, rows.tokens if checked is None else checked, config.max_position_embeddings)
    tokens = rows.tokens if tokens is None else tokens
    layout = build_layout(given, tokens.long(), None, config, past_key_values=cache, **recorded)
    positions = rows.positions.clamp(max=config.max_position_embeddings - 1)  # of what is left out, too
    states = encoder.embeddings(layout.pack(given), layout.pack(positions), layout.pack(rows.types))
    mask = MaskSpec(ranges=layout.pack(rows.ranges))
    return run_stack(encoder.layers, states, layout, mask, past_key_values=cache, output_mask=output_mask, **recorded)


def _check_positions(positions: Tensor, tokens: Tensor, limit: int) -> None:
    if is_traced(positions):
        return
    longest = int(positions.masked_fill(~tokens, 0).max()) + 1
    if longest > limit:
        raise CtxError(
            f"Source and target have {longest} tokens, above the model's max_sequence_length={limit} (see "
            "max_position_embeddings).",
            hint="truncate the source or the target, or generate fewer new tokens.",
        )


@dataclass
class SourceOutput(ModelOutput):
    """A source, read once for all steps of `generate`.

    Attributes:
        last_hidden_state: (batch, length, hidden).
        keys_and_values: (batch, layers, 2, heads, length, head_dim), what the steps attend to.
        hidden_states, attentions: As asked for.
    """

    last_hidden_state: Tensor | None = None
    keys_and_values: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


def kept_source(encoded: Any) -> Tensor:
    """The keys and values of a `SourceOutput`; raises CtxError for another output, without them."""
    kept = getattr(encoded, "keys_and_values", None)
    if kept is None:
        raise CtxError("encoder_outputs has no keys_and_values.", hint="give what model.get_encoder() returns.")
    return kept


def begun_cache(encoded: Any, config: Any) -> PreallocatedCache:
    """A cache that holds a source.

    Args:
        encoded: A `SourceOutput`.
        config: The model's.

    Raises:
        CtxError: See `kept_source`.
    """
    kept = kept_source(encoded)
    cache = PreallocatedCache(config=config)
    for number in range(kept.shape[1]):
        cache.update(kept[:, number, 0], kept[:, number, 1], number)
    return cache


class SourceReader(nn.Module):
    """The encoder as `generate` calls it: reads sources, and keeps what the steps attend to.

    Args:
        model: The head.
        segment: See `read_source`.
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
        """Read (batch, length) sources; arguments as in the encoder's forward.

        Raises:
            CtxError: They do not match each other or the model, or there are others.
        """
        reject_unused_tensors(**kwargs)
        config = self.model.config
        source = read_source(self.model, input_ids, inputs_embeds, attention_mask, token_type_ids, self.segment)
        cache = PreallocatedCache(config=config)
        outputs = run_rows(self.model, source, cache=cache, **config.resolve_output_flags(kwargs))
        layers = [torch.stack([layer.keys, layer.values], 1) for layer in cache.layers]
        states = outputs.last_hidden_state
        return SourceOutput(states, torch.stack(layers, 1), outputs.hidden_states, outputs.attentions)  # type: ignore[arg-type]
