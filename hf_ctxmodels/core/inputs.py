"""Checks of model inputs, and default positions and sequence numbers."""

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
    """Check inputs that would otherwise fail inside a layer or, on a GPU, abort the process.

    Args:
        input_ids: (batch, length, *id_axes), or None with `inputs_embeds` (batch, length, hidden).
        attention_mask: (batch, length) or a ready 4-D mask.
        max_length: Longest sequence of the model; None for no limit.
        limit, limit_name: The configuration's field, by value and name, that all ids are below.
        id_axes: Names of the axes of a single token's ids.
        sequence_ids: (batch, length), 0 at padding.
        output_mask: (batch, length) bool, the positions whose outputs are computed.
        aligned: Other (batch, length) tensors by argument name.

    Returns:
        The ids, or the embeddings (batch, length, hidden).

    Raises:
        CtxError: An argument is wrong; the message has its value and the expected one.
    """
    given = _ids_or_embeddings(input_ids, inputs_embeds, id_axes)
    length = given.shape[1]
    if max_length is not None and length > max_length:
        raise CtxError(
            f"The sequence has {length} tokens, above the model's max_sequence_length={max_length} (see "
            "max_position_embeddings).",
            hint=f"truncate it (tokenizer(..., truncation=True, max_length={max_length})) or split it into windows.",
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
                f"{int(misplaced.sum())} of the labels other than -100 are at padding positions ({name} is 0), the "
                f"first at {misplaced.nonzero()[0].tolist()}; labels and {name} do not match."
            )


def check_ids(name: str, ids: Tensor | None, limit: int, limit_name: str) -> None:
    """Raise CtxError for the first id outside [0, limit). Skipped while a graph is being traced."""
    if ids is None or is_traced(ids):
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < limit:
        return
    index = ((ids < 0) | (ids >= limit)).nonzero()[0].tolist()
    raise CtxError(
        f"{name}{index} is {int(ids[tuple(index)])}, outside [0, {limit_name}={limit}).",
        hint="use the model's own tokenizer; if tokens were added to it, call "
        "model.resize_token_embeddings(len(tokenizer)).",
    )


def check_row_lengths(row_lengths: Tensor) -> None:
    """Raise CtxError if one of the (batch,) numbers of tokens is 0."""
    if not bool((row_lengths > 0).all()):
        row = int((row_lengths == 0).nonzero()[0])
        raise CtxError(f"Row {row} of attention_mask has no token.", hint="drop the row, or give it a token.")


def count_tokens(tokens: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length) number of tokens of its sequence up to and including each column.

    Args:
        tokens: (batch, length) bool, False at padding.
        sequence_ids: (batch, length), a run of equal numbers is one sequence; None for one sequence per row.
    """
    counts = tokens.cumsum(1)
    if sequence_ids is None:
        return counts
    return counts - ((counts - tokens.long()) * sequence_starts(sequence_ids)).cummax(1).values


def sequence_starts(sequence_ids: Tensor) -> Tensor:
    """(batch, length) bool: True at the first token of each run of equal ids."""
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return starts


def sequence_numbers(sequence_ids: Tensor) -> Tensor:
    """(batch, length) sequence ids -> runs of equal ids, numbered within each row; padding is a run too."""
    return sequence_starts(sequence_ids).cumsum(1)


def is_traced(tensor: Tensor) -> bool:
    """Whether values are unavailable: a graph is being compiled or traced, or the device is meta."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.device.type == "meta"
