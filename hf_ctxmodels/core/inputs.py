"""Checks of what a model is given, and positions and sequence numbers where none are given."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError


def check_encoder_input(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    max_length: int | None,
    *,
    limit: int,
    limit_name: str = "vocab_size",
    id_axes: tuple[str, ...] = (),
    sequence_ids: Tensor | None = None,
    output_mask: Tensor | None = None,
    aligned: Mapping[str, Tensor | None] | None = None,
) -> Tensor:
    """Refuse what would fail deep inside or, on a GPU, take the device down.

    Args:
        input_ids: (batch, length, *id_axes), or None with `inputs_embeds` (batch, length, hidden).
        attention_mask: (batch, length) or a ready 4-D mask.
        max_length: Longest sequence the model can take; None sets no limit.
        limit, limit_name: Every id is below this field of the configuration.
        id_axes: Names of the axes that the ids of a single token have.
        sequence_ids: (batch, length), 0 at padding.
        output_mask: (batch, length) bool, the positions whose outputs are computed.
        aligned: Other (batch, length) tensors by their argument name.

    Returns:
        What is to be encoded: the ids, or the embeddings (batch, length, hidden).

    Raises:
        CtxError: Naming the argument, what it is and what was expected.
    """
    given = _ids_or_embeddings(input_ids, inputs_embeds, id_axes)
    length = given.shape[1]
    if max_length is not None and length > max_length:
        raise CtxError(
            f"The sequence has {length} tokens, this model takes at most max_sequence_length={max_length} (see "
            f"max_position_embeddings); truncate it "
            f"(tokenizer(..., truncation=True, max_length={max_length})) or split it into windows."
        )
    padding_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    masks = {"attention_mask": padding_mask, "sequence_ids": sequence_ids}
    _check_shapes({**(aligned or {}), **masks, "output_mask": output_mask}, given.shape[0], length)
    if input_ids is not None:
        check_ids("input_ids", input_ids, limit, limit_name)
    if output_mask is not None:
        _check_output_mask(output_mask, masks)
    return given


def _ids_or_embeddings(input_ids: Tensor | None, inputs_embeds: Tensor | None, id_axes: tuple[str, ...]) -> Tensor:
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise CtxError("Give exactly one of input_ids and inputs_embeds.")
    if given.dim() != (2 + len(id_axes) if input_ids is not None else 3):
        axes = ", ".join(("batch", "length", *id_axes))
        raise CtxError(f"input_ids must be ({axes}), inputs_embeds (batch, length, hidden); got {tuple(given.shape)}.")
    if not given.shape[0] or not given.shape[1]:
        raise CtxError(f"The batch is empty: shape {tuple(given.shape)}. Drop empty batches and texts without tokens.")
    return given


def _check_shapes(aligned: Mapping[str, Tensor | None], batch_size: int, length: int) -> None:
    for name, tensor in aligned.items():
        shapes = [(batch_size, length), (1, length)] if name == "position_ids" else [(batch_size, length)]
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise CtxError(f"{name} is {tuple(tensor.shape)}, but the input is ({batch_size}, {length}).")


def _check_output_mask(output_mask: Tensor, masks: Mapping[str, Tensor | None]) -> None:
    if is_traced(output_mask):
        return
    for name, tokens in masks.items():
        if tokens is not None and bool((misplaced := output_mask & (tokens == 0)).any()):
            raise CtxError(
                f"{int(misplaced.sum())} of the labels other than -100 stand where {name} is 0 (padding), the "
                f"first at {misplaced.nonzero()[0].tolist()}; labels and {name} do not belong together."
            )


def check_ids(name: str, ids: Tensor | None, limit: int, limit_name: str) -> None:
    """Raise if an id is outside [0, limit), naming the first one. Skipped while a graph is being traced.

    Raises:
        CtxError: The argument, the id, where it stands and the limit.
    """
    if ids is None or is_traced(ids):
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < limit:
        return
    place = ((ids < 0) | (ids >= limit)).nonzero()[0].tolist()
    raise CtxError(
        f"{name}{place} is {int(ids[tuple(place)])}, outside [0, {limit_name}={limit}).",
        hint="give ids that this model's own tokenizer makes; if tokens were added to it, call "
        "model.resize_token_embeddings(len(tokenizer)).",
    )


def check_row_lengths(row_lengths: Tensor) -> None:
    """Raise if a row of the batch has no token.

    Args:
        row_lengths: (batch,) tokens of each row.

    Raises:
        CtxError: Naming the first such row.
    """
    if not bool((row_lengths > 0).all()):
        row = int((row_lengths == 0).nonzero()[0])
        raise CtxError(f"Row {row} of attention_mask has no token at all; drop it or give it one token.")


def count_tokens(tokens: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length) how many tokens of its sequence stand up to each column, itself included.

    Args:
        tokens: (batch, length) bool, False at padding.
        sequence_ids: (batch, length), a run of equal numbers is one sequence; None makes every row one.
    """
    counts = tokens.cumsum(1)
    if sequence_ids is None:
        return counts
    return counts - ((counts - tokens.long()) * sequence_starts(sequence_ids)).cummax(1).values


def sequence_starts(sequence_ids: Tensor) -> Tensor:
    """(batch, length) bool: where a run of equal ids starts. A run is a sequence, whatever its number elsewhere."""
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return starts


def sequence_numbers(sequence_ids: Tensor) -> Tensor:
    """(batch, length) ids of sequences, -> their runs numbered within each row; padding counts as one."""
    return sequence_starts(sequence_ids).cumsum(1)


def is_traced(tensor: Tensor) -> bool:
    """Whether values cannot be looked at: a graph is being compiled or traced, or there are none."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.device.type == "meta"
