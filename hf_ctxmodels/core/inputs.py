"""Checks of model inputs, and default positions and sequence numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.masking_utils import find_packed_sequence_indices

from hf_ctxmodels.core.devices import autocast_dtype
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host, to_device

_PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_ID_TYPES = (torch.int64, torch.int32)  # the types that torch.nn.Embedding supports


def check_encoder_input(
    model: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    max_length: int | None,
    *,
    width: int | None = None,
    sequence_ids: Tensor | None = None,
    output_mask: Tensor | None = None,
    **aligned: Tensor | None,
) -> Tensor:
    """Validate the inputs of an encoder, which could otherwise fail inside a layer or, on a GPU, abort the process.

    Args:
        model: A `CtxPreTrainedModel`, or a module with its `config`; its `id_limit_field`, `token_id_axes`,
            `accepts_4d_masks` and `mask_hint` describe the inputs.
        input_ids: (batch, length, *token_id_axes) ids; or None.
        inputs_embeds: (batch, length, hidden) embeddings, instead of ids; or None.
        attention_mask: (batch, length), 1 or True at tokens, 0 or False at padding; with `accepts_4d_masks` also a mask
            of the attention function: (batch, heads, queries, keys), bool or additive, or a `BlockMask`.
        max_length: Maximum length of a sequence; None for no limit.
        width: Expected width of embeddings; None for any.
        sequence_ids: (batch, length) sequence ids, 0 at padding.
        output_mask: (batch, length) bool, the positions whose outputs are computed.
        aligned: Other (batch, length) tensors.

    Returns:
        The ids, or the (batch, length, hidden) embeddings with zeros at padding positions, where other values could be
        infinite or NaN and affect the tokens in the padded layout.

    Raises:
        CtxError: An argument is invalid; the message contains its value and the expected one.
    """
    check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
    inputs = input_ids if input_ids is not None else inputs_embeds
    token_id_axes = getattr(model, "token_id_axes", ())
    if inputs is None or (input_ids is not None and inputs_embeds is not None):
        raise CtxError("Give exactly one of input_ids and inputs_embeds.")
    if inputs.dim() != (2 + len(token_id_axes) if input_ids is not None else 3):
        axes = ", ".join(("batch", "length", *token_id_axes))
        raise CtxError(f"input_ids must be ({axes}), inputs_embeds (batch, length, hidden); got {tuple(inputs.shape)}.")
    if not inputs.shape[0] or not inputs.shape[1]:
        name = "input_ids" if input_ids is not None else "inputs_embeds"
        problem = "it has no sequence" if not inputs.shape[0] else "its texts are empty or have no tokens"
        raise CtxError(
            f"The batch is empty: {name} is {tuple(inputs.shape)}, {problem}.",
            hint="remove empty batches and texts.",
        )
    batch_size, length = inputs.shape[:2]
    if max_length is not None and length > max_length:
        raise CtxError(
            f"The sequence has {length} tokens, above the model's max_sequence_length={max_length} (see "
            "max_position_embeddings).",
            hint=f"truncate it (tokenizer(..., truncation=True, max_length={max_length})) or split it into windows.",
        )
    if inputs_embeds is not None:
        _check_embeddings(inputs_embeds, width, model)
    accepts_4d_masks, mask_hint = getattr(model, "accepts_4d_masks", False), getattr(model, "mask_hint", None)
    padding_mask = _check_attention_mask(attention_mask, batch_size, length, accepts_4d_masks, mask_hint)
    masks = {"attention_mask": padding_mask, "sequence_ids": sequence_ids}
    check_aligned({**aligned, **masks, "output_mask": output_mask}, batch_size, length)
    check_padding_mask(padding_mask)
    if sequence_ids is not None and not is_traced(sequence_ids):
        ids = host_copy(sequence_ids)
        if int(ids.min()) < 0:
            problem = _describe_first("sequence_ids", ids, ids < 0)
            raise CtxError(f"{problem}, expected 0 at padding, 1 or more at tokens.")
    if input_ids is not None:
        limit_name = getattr(model, "id_limit_field", "vocab_size")
        check_ids("input_ids", input_ids, getattr(model.config, limit_name), limit_name)
    for name, mask in masks.items():
        if mask is not None:
            _check_labels_at_tokens(output_mask, mask, name)
            if input_ids is None:
                inputs = inputs.masked_fill((mask == 0)[..., None], 0)
    return inputs


def _check_labels_at_tokens(output_mask: Tensor | None, mask: Tensor, name: str) -> None:
    if output_mask is None or is_traced(output_mask):
        return
    misplaced = host_copy(output_mask) & (host_copy(mask) == 0)
    if bool(misplaced.any()):
        raise CtxError(
            f"{int(misplaced.sum())} of the labels other than -100 are at padding positions ({name} is 0), the first "
            f"at {misplaced.nonzero()[0].tolist()}; labels and {name} do not match."
        )


def _describe_first(name: str, values: Tensor, is_invalid: Tensor) -> str:
    """The first invalid value: "input_ids[0, 3] is 99"."""
    index = is_invalid.nonzero()[0].tolist()
    return f"{name}{index} is {values[tuple(index)].item()}"


def check_tensors(**arguments: Any) -> None:
    """Raise CtxError if an argument is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise CtxError(
                f"{name} is a {type(value).__name__}, expected a torch.Tensor.",
                hint='call the tokenizer with return_tensors="pt", or use torch.as_tensor.',
            )


def reject_unused_tensors(**kwargs: Any) -> None:
    """Raise CtxError if the unknown keyword arguments of a forward contain a tensor or a cache, which would be ignored;
    the packing arguments of the collators of transformers and trl are ignored: `position_ids` are enough."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor | Cache) and name not in _PACKING_ARGUMENTS:
            raise CtxError(
                f"This model does not accept the argument {name}.",
                hint="omit it, or correct its name: help(model.forward) lists the arguments.",
            )


def check_padding_mask(mask: Tensor | None, name: str = "attention_mask") -> None:
    """Raise CtxError if a mask contains values other than 1 and 0, or True and False; skipped in traced graphs."""
    if mask is None or mask.dtype == torch.bool or is_traced(mask):
        return
    mask = host_copy(mask)
    if not mask.is_floating_point() and mask.numel():  # one operator for the common case
        low, high = torch.aminmax(mask)
        if int(low) >= 0 and int(high) <= 1:
            return
    valid = (mask == 0) | (mask == 1)
    if bool(valid.all()):
        return
    raise CtxError(
        f"{_describe_first(name, mask, ~valid)}; it must be 1 (or True) at tokens and 0 (or False) at padding.",
        hint="convert an additive mask, which is 0 at tokens and negative at padding, by mask == 0.",
    )


def check_source_mask(mask: Tensor | None, states: Tensor) -> None:
    """Raise CtxError unless a mask fits the (batch, length, ...) encoder `states`; in traced graphs only its type."""
    check_tensors(attention_mask=mask)
    check_padding_mask(mask)
    if mask is None or is_traced(mask) or tuple(mask.shape) == tuple(states.shape[:2]):
        return
    raise CtxError(
        f"attention_mask is {tuple(mask.shape)}, but encoder_outputs have the shape {tuple(states.shape[:2])}.",
        hint="pass the (batch, length) mask that was passed to the encoder.",
    )


def padding_mask_or_none(attention_mask: Any) -> Tensor | None:
    """A (batch, length) mask of tokens; None for no mask, or a mask of the attention function."""
    return attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None


def mask_of_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Any, cache: Cache | None
) -> Any:
    """The columns of an attention mask, (batch, past + length) with a cache, that belong to the inputs."""
    inputs = inputs_embeds if input_ids is None else input_ids
    if (
        cache is None
        or padding_mask_or_none(attention_mask) is None
        or not isinstance(inputs, Tensor)
        or inputs.dim() < 2
    ):
        return attention_mask
    length = inputs.shape[1]
    return on_host(lambda mask: mask[:, -length:], attention_mask)


def _check_attention_mask(
    attention_mask: Any, batch_size: int, length: int, accepts_4d_masks: bool, hint: str | None
) -> Tensor | None:
    """Return the mask if it is a padding mask; None if it is a mask of the attention function."""
    if attention_mask is None or (accepts_4d_masks and isinstance(attention_mask, BlockMask)):
        return None
    check_tensors(attention_mask=attention_mask)
    shape = tuple(attention_mask.shape)
    if len(shape) == 2:
        return attention_mask
    expected = f"({batch_size}, {length}), 1 at tokens and 0 at padding"
    if accepts_4d_masks:
        expected += f", or ({batch_size}, heads or 1, {length}, {length}), bool or additive"
        fits = len(shape) == 4 and shape[0] in (1, batch_size) and shape[2] in (1, length) and shape[3] >= length
        if fits and (attention_mask.is_floating_point() or attention_mask.dtype == torch.bool):
            return None
    message = f"attention_mask is {shape} of {attention_mask.dtype}; it must be (batch, length) = {expected}."
    raise CtxError(message, hint=hint)


def _check_embeddings(embeddings: Tensor, width: int | None, model: Any) -> None:
    if not embeddings.is_floating_point():
        raise CtxError(f"inputs_embeds is {embeddings.dtype}, expected floating-point vectors; ids are input_ids.")
    if width is not None and embeddings.shape[2] != width:
        raise CtxError(f"inputs_embeds is {tuple(embeddings.shape)}, expected width {width}.")
    if torch.compiler.is_compiling():
        return
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    is_autocast = autocast_dtype(embeddings.device.type) is not None
    if embeddings.dtype == dtype or (is_autocast and torch.float64 not in (embeddings.dtype, dtype)):
        return
    raise CtxError(
        f"inputs_embeds is {embeddings.dtype}, but the model is {dtype}.", hint="pass inputs_embeds.to(model.dtype)."
    )


def check_aligned(aligned: Mapping[str, Tensor | None], batch_size: int, length: int) -> None:
    """Raise CtxError if an argument is not None or an integer or bool tensor of shape (batch, length)."""
    check_tensors(**aligned)
    for name, tensor in aligned.items():
        if tensor is None:
            continue
        shapes = [(batch_size, length), (1, length)] if name == "position_ids" else [(batch_size, length)]
        if tuple(tensor.shape) not in shapes:
            raise CtxError(f"{name} is {tuple(tensor.shape)}, but the input is ({batch_size}, {length}).")
        if name == "output_mask" and tensor.dtype != torch.bool:
            raise CtxError(f"output_mask is {tensor.dtype}, expected bool.")
        if name != "attention_mask" and tensor.is_floating_point():
            raise CtxError(f"{name} is {tensor.dtype}, expected integers.")


def check_id_type(name: str, ids: Any) -> None:
    """Raise CtxError if `ids` is neither None nor an int64 or int32 tensor."""
    check_tensors(**{name: ids})
    if ids is not None and ids.dtype not in _ID_TYPES:
        raise CtxError(f"{name} is {ids.dtype}, expected torch.int64 or torch.int32.", hint=f"pass {name}.long().")


def check_ids(name: str, ids: Tensor | None, limit: int, limit_name: str) -> None:
    """Raise CtxError for an unsupported type and, outside of traced graphs, for the first id not in [0, limit)."""
    check_id_type(name, ids)
    if ids is None or is_traced(ids) or not ids.numel():
        return
    ids = host_copy(ids)
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < limit:
        return
    raise CtxError(
        f"{_describe_first(name, ids, (ids < 0) | (ids >= limit))}, outside [0, {limit_name}={limit}).",
        hint="use the model's own tokenizer; if tokens were added to it, call "
        "model.resize_token_embeddings(len(tokenizer)).",
    )


def nonzero_in_all(*masks: Tensor | None) -> Tensor | None:
    """(batch, length) bool, False where one of the masks of this shape is 0; None without a mask."""

    def combine(*tensors: Tensor) -> Tensor:
        return torch.stack([mask != 0 for mask in tensors]).all(0) if len(tensors) > 1 else tensors[0] != 0

    available_masks = [mask for mask in masks if mask is not None]
    return on_host(combine, *available_masks) if available_masks else None


def check_no_empty_rows(token_mask: Tensor) -> None:
    """Raise CtxError if a row of a (batch, length) bool mask has no token."""
    has_token = host_copy(token_mask).any(1)
    if not bool(has_token.all()):
        row = int((~has_token).nonzero()[0])
        raise CtxError(f"Row {row} of attention_mask has no token.", hint="remove the row or empty text.")


def packed_sequence_ids(position_ids: Tensor, shape: Sequence[int]) -> Tensor | None:
    """The `sequence_ids` of packed sequences, which start where positions do not increase by 1.

    `DataCollatorWithFlattening` of transformers separates sequences in this way.

    Args:
        position_ids: (batch, length) or (1, length).
        shape: (batch, length).

    Returns:
        (batch, length) ids from 1; None if each row is one sequence.

    Raises:
        CtxError: The shape of `position_ids` differs.
    """
    if tuple(position_ids.shape) not in {tuple(shape), (1, shape[1])}:
        raise CtxError(
            f"position_ids is {tuple(position_ids.shape)}, expected {tuple(shape)} or {(1, shape[1])}.",
            hint="pass a position for each token.",
        )
    indices = find_packed_sequence_indices(host_copy(position_ids.expand(*shape)))
    return None if indices is None else to_device(indices + 1, position_ids.device)


def check_one_sequence_per_row(position_ids: Tensor, token_mask: Tensor) -> None:
    """Raise CtxError if positions separate packed sequences: they do not increase by 1 from each token to the next.

    For models without positions, which would ignore them. Not checked in traced graphs.

    Args:
        position_ids: (batch, length) or (1, length).
        token_mask: (batch, length) bool, False at padding.
    """
    check_aligned({"position_ids": position_ids}, *token_mask.shape)
    if is_traced(position_ids) or is_traced(token_mask):
        return
    mask = host_copy(token_mask)
    first_positions = host_copy(position_ids).expand(mask.shape) - mask.cumsum(1)
    lowest = first_positions.masked_fill(~mask, torch.iinfo(first_positions.dtype).max).amin(1)
    highest = first_positions.masked_fill(~mask, torch.iinfo(first_positions.dtype).min).amax(1)
    if bool((lowest < highest).any()):
        row = int((lowest < highest).nonzero()[0])
        raise CtxError(
            f"Row {row} of position_ids does not increase by 1 from each token to the next, and the model has no "
            "positions.",
            hint="separate packed sequences by sequence_ids, 1 at the tokens of the first one, 2 of the second one.",
        )


def cumulative_token_counts(token_mask: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length) number of tokens of the sequence up to and including each column.

    `token_mask` (batch, length) is False at padding; a run of equal `sequence_ids` is a sequence, None is one per row.
    """
    counts = token_mask.cumsum(1)
    if sequence_ids is None:
        return counts
    return counts - ((counts - token_mask.long()) * sequence_starts(sequence_ids)).cummax(1).values


def sequence_starts(sequence_ids: Tensor) -> Tensor:
    """Mark the first token of each run of equal ids: (batch, length) bool."""
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return starts


def sequence_numbers(sequence_ids: Tensor) -> Tensor:
    """Number the runs of equal (batch, length) sequence ids within each row; padding is also a run."""
    return sequence_starts(sequence_ids).cumsum(1)


def span_boundaries(marked: Tensor) -> tuple[Tensor, Tensor]:
    """For each position of (rows, length) bool, the unmarked positions before and after its run of marked positions.

    They are (rows, length) int64: -1 or `length` if there is none, the position itself if it is unmarked.
    """
    length = marked.shape[1]
    positions = torch.arange(length, device=marked.device).expand_as(marked)
    before = positions.masked_fill(marked, -1).cummax(1).values
    after = positions.masked_fill(marked, length).flip(1).cummin(1).values.flip(1)
    return before, after
