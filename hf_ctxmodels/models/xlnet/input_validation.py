"""What XLNet's encoder refuses; either form of permutations and targets is brought into one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_row_lengths, check_tensors, is_traced
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.encoder_inputs import EncoderInputs, Permutation

NO_TARGET = -1


def check_tokens(attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor | None:
    """Where the tokens are, by either argument: (batch, length) bool, False at padding; None without padding.

    Raises:
        CtxError: A row without any token.
    """
    masks = [mask != 0 for mask in (attention_mask, sequence_ids) if mask is not None]
    if not masks:
        return None
    tokens = torch.stack(masks).all(0)
    if is_traced(tokens):
        return tokens
    check_row_lengths(tokens.sum(1))
    return None if bool(tokens.all()) else tokens


def check_memory(mems: Sequence[Tensor] | None, config: CtxXLNetConfig, batch_size: int) -> tuple[Tensor, ...] | None:
    """The memory, or None.

    Raises:
        CtxError: Not one tensor a layer, or one of another batch size, width or length.
    """
    if mems is None or not len(mems):
        return None
    if len(mems) != config.num_hidden_layers:
        raise CtxError(
            f"mems has {len(mems)} tensors; this model takes one for each of its {config.num_hidden_layers} "
            "layers, as it returned them."
        )
    expected = f"(batch={batch_size}, memory, hidden={config.hidden_size})"
    length = mems[0].shape[1] if mems[0].dim() == 3 else -1
    for number, memory in enumerate(mems):
        if memory.dim() != 3 or memory.shape[0] != batch_size or memory.shape[2] != config.hidden_size:
            raise CtxError(
                f"mems[{number}] is {tuple(memory.shape)}; expected {expected}.",
                hint="give the memory that this model returned for the same rows; a reference model's has the batch "
                "second: mem.transpose(0, 1).",
            )
        if memory.shape[1] != length:
            raise CtxError(
                f"mems[{number}] holds {memory.shape[1]} positions, mems[0] {length}; all layers hold equally many."
            )
    if config.mem_len and length > config.mem_len:
        raise CtxError(
            f"mems holds {length} positions, over mem_len={config.mem_len}.",
            hint="give what this model returned, cut it (memory[:, -mem_len:]), or raise config.mem_len.",
        )
    return tuple(mems)


def check_permutation(
    words: Tensor,
    tokens: Tensor | None,
    permutation_order: Tensor | None,
    target_positions: Tensor | None,
    perm_mask: Tensor | None,
    target_mapping: Tensor | None,
) -> Permutation:
    """Bring either form of a permutation, and of its targets, into one.

    Args:
        words: (batch, length) ids or (batch, length, hidden) embeddings.
        tokens: (batch, length) bool, False at padding; None when there is none.
        permutation_order, target_positions, perm_mask, target_mapping: As the encoder takes them.

    Raises:
        CtxError: Both forms at once, shapes that do not fit the input, or targets that cannot be predicted.
    """
    batch_size, length = words.shape[:2]
    for first, second, names in (
        (permutation_order, perm_mask, "permutation_order and perm_mask"),
        (target_positions, target_mapping, "target_positions and target_mapping"),
    ):
        if first is not None and second is not None:
            raise CtxError(f"{names} say the same in two forms; give one of them.")
    _check_shape("permutation_order", permutation_order, (batch_size, length))
    _check_shape("perm_mask", perm_mask, (batch_size, length, length))
    _check_shape("target_mapping", target_mapping, (batch_size, None, length))
    _check_shape("target_positions", target_positions, (batch_size, None))
    if target_mapping is not None:
        target_positions = _positions(target_mapping)
    elif target_positions is not None:
        if permutation_order is None and perm_mask is None:
            raise CtxError(
                "target_positions without permutation_order: every prediction would see the token it predicts.",
                hint="give permutation_order (batch, length), as the collator does, or perm_mask.",
            )
        _check_positions(target_positions, permutation_order, tokens, length)
    if permutation_order is not None and not is_traced(permutation_order) and int(permutation_order.min()) < -1:
        row, column = (permutation_order < -1).nonzero()[0].tolist()
        raise CtxError(
            f"permutation_order[{row}, {column}] is {int(permutation_order[row, column])}; ranks are 0, 1, "
            "..., and -1 for positions that every row sees."
        )
    hidden_pairs = None if perm_mask is None else perm_mask > 0
    return Permutation(permutation_order, hidden_pairs, target_positions)


def _check_shape(name: str, tensor: Tensor | None, expected: tuple[int | None, ...]) -> None:
    if tensor is None:
        return
    same = len(expected) == tensor.dim() and all(
        side in (None, size) for side, size in zip(expected, tensor.shape, strict=True)
    )
    if not same:
        sizes = ", ".join("targets" if size is None else str(size) for size in expected)
        raise CtxError(f"{name} is {tuple(tensor.shape)}; for this input it must be ({sizes}).")


def _positions(target_mapping: Tensor) -> Tensor:
    """(batch, targets) columns of one-hot rows (batch, targets, length); -1 for rows of zeros."""
    chosen = target_mapping != 0
    if not is_traced(target_mapping):
        bad = (chosen.sum(-1) > 1) | (chosen & (target_mapping != 1)).any(-1)
        if bool(bad.any()):
            row, target = bad.nonzero()[0].tolist()
            raise CtxError(
                f"target_mapping[{row}, {target}] is not one-hot; each row marks the one position it predicts with 1."
            )
    return chosen.long().argmax(-1).masked_fill(~chosen.any(-1), NO_TARGET)


def _check_positions(
    target_positions: Tensor, permutation_order: Tensor | None, tokens: Tensor | None, length: int
) -> None:
    if is_traced(target_positions) or not target_positions.numel():
        return
    given = target_positions != NO_TARGET
    problems = {
        f"outside [0, length={length}) and not -1 (no target)": (target_positions < -1) | (target_positions >= length)
    }
    columns = target_positions.clamp(0, length - 1)
    if permutation_order is not None:
        problems["which has rank -1 in permutation_order: every row sees it"] = permutation_order.gather(1, columns) < 0
    if tokens is not None:
        problems["where attention_mask is 0 (padding)"] = ~tokens.gather(1, columns)
    for problem, wrong in problems.items():
        if bool((wrong & given).any()):
            row, target = (wrong & given).nonzero()[0].tolist()
            raise CtxError(f"target_positions[{row}, {target}] is {int(target_positions[row, target])}, {problem}.")


def check_combination(config: CtxXLNetConfig, inputs: EncoderInputs) -> None:
    """Refuse arguments that do not go together.

    Raises:
        CtxError: Saying which.
    """
    if inputs.output_mask is not None and inputs.target_positions is not None:
        raise CtxError("output_mask chooses outputs of a single stream; with targets the outputs are theirs.")
    if inputs.sequence_ids is not None and inputs.memory is not None:
        raise CtxError("sequence_ids puts several texts into one row; which of them would mems belong to?")
    if config.bi_data and inputs.words.shape[0] % 2:
        raise CtxError(
            f"With bi_data the second half of a batch runs backwards, but this one has {inputs.words.shape[0]} rows.",
            hint="give an even number of rows, or set config.bi_data=False.",
        )


def check_target_labels(labels: Tensor, target_positions: Tensor | None, target_mapping: Tensor | None) -> None:
    """Refuse labels that do not belong to the targets.

    Raises:
        CtxError: Labels of another shape, or one where there is no target.
    """
    check_tensors(target_positions=target_positions, target_mapping=target_mapping)
    targets = target_positions if target_positions is not None else target_mapping
    if targets is None:
        return
    if labels.shape != targets.shape[:2]:
        raise CtxError(
            f"labels is {tuple(labels.shape)}, but there are {tuple(targets.shape[:2])} targets (batch, targets)."
        )
    if target_positions is not None and not is_traced(labels):
        misplaced = (labels != -100) & (target_positions == NO_TARGET)
        if bool(misplaced.any()):
            row, target = misplaced.nonzero()[0].tolist()
            raise CtxError(
                f"labels[{row}, {target}] is {int(labels[row, target])}, but target_positions is -1 (no "
                "target) there; use -100."
            )
