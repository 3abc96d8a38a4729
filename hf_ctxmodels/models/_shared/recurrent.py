"""What recurrent families share on top of the model base."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_row_lengths, is_traced, sequence_numbers
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.lstm import LSTM, PackedRows


class RecurrentPreTrainedModel(CtxPreTrainedModel):
    """The part of the model base that families with LSTMs or GRUs share."""

    supports_gradient_checkpointing = False  # the recurrence keeps little more than its outputs

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LSTM | GRU):
            module.reset_parameters()
        else:
            super()._init_weights(module)


def check_words(
    model: CtxPreTrainedModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    width: int | None = None,
    /,
    **aligned: Tensor | None,
) -> Tensor:
    """What a model is to encode, ids or embeddings.

    Args:
        model: Whose input it is.
        input_ids, inputs_embeds, attention_mask, aligned: As in `check_encoder_input`.
        width: Of embeddings; None for `config.embedding_size`.

    Raises:
        CtxError: As there, or a mask is not (batch, length), or embeddings are of another width.
    """
    given = model.check_encoder_input(input_ids, inputs_embeds, attention_mask, None, **aligned)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise CtxError(f"attention_mask must be (batch, length); got {tuple(attention_mask.shape)}.")
    width = model.config.embedding_size if width is None else width
    if inputs_embeds is not None and inputs_embeds.shape[2] != width:
        raise CtxError(f"inputs_embeds is {tuple(inputs_embeds.shape)}, expected width {width}.")
    return given


def rows_of(
    config: Any, given: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None, directions: int
) -> PackedRows:
    """Where the tokens of a batch are: packed, unless `config.unpad` is off or a graph is traced.

    Raises:
        CtxError: A row without tokens.
    """
    tokens = token_mask(given, attention_mask, sequence_ids)
    numbers = None if sequence_ids is None else sequence_numbers(sequence_ids)
    if is_traced(given):
        return PackedRows.with_padding(tokens, numbers, directions)
    check_row_lengths(tokens.sum(1))
    build = PackedRows.build if config.unpad else PackedRows.with_padding
    return build(tokens, numbers, directions)


def run_both_ways(
    layers: Iterable[nn.Module], given: Tensor, rows: PackedRows, dropout: nn.Module
) -> tuple[list[Tensor], list[Any]]:
    """Layers of both directions, each of which reads both of the one below.

    Args:
        layers: `layers.recurrent.LSTM`, or `layers.gru.GRU`, of two directions.
        given: (batch, words, width) what the first one reads, as it is.
        rows: Where the words are.
        dropout: On what every other layer reads.

    Returns:
        `given` and each layer's output (batch, words, 2 * width), zero at padding; and each layer's state behind a
        row's last word, in the order of the batch.
    """
    states, after = [given], []
    for depth, layer in enumerate(layers):
        packed, state = layer(rows.pack(dropout(states[-1]) if depth else given), rows)
        states.append(side_by_side(rows.unpack(packed)))
        after.append(rows.unsorted(state))
    return states, after


def side_by_side(states: Tensor) -> Tensor:
    """(2, batch, words, width) of the directions -> (batch, words, 2 * width)."""
    return torch.cat([states[0], states[1]], -1)


def check_states(states: Sequence[Tensor], expected: Sequence[tuple[int, ...]]) -> None:
    """Raise CtxError unless the `states` that a model is given have these shapes."""
    found = [tuple(each.shape) for each in states]
    if found != list(expected):
        raise CtxError(
            f"states are {found}, expected {list(expected)}.",
            hint="give what the last forward returned, of as many rows, or states=None to start anew.",
        )
