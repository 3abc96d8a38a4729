"""Inputs of XLNet's encoder and their validation; both forms of permutations and targets are converted to one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_row_lengths, check_tensors, is_traced
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig

NO_TARGET = -1


@dataclass(frozen=True, eq=False)
class Permutation:
    """A factorisation order and the positions to predict in it (Yang et al. 2019, sections 2.2 and 2.3).

    Attributes:
        order: (batch, length) rank of each position in the factorisation order, -1 for positions that are visible to
            all; or None. Key j is visible to the content stream at i if order[j] <= order[i], and to the query stream
            at target i if order[j] < order[i].
        hidden_pairs: (batch, length, length) bool, the form of the order in transformers: True where key j is hidden
            from position i; or None. A position of the content stream always attends to itself.
        target_positions: (batch, targets) columns to predict, -1 for none; None without a query stream.
    """

    order: Tensor | None
    hidden_pairs: Tensor | None
    target_positions: Tensor | None

    @property
    def is_empty(self) -> bool:
        """Whether all keys are visible and nothing is predicted."""
        return self.order is None and self.hidden_pairs is None and self.target_positions is None


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """Validated inputs of one forward pass.

    Attributes:
        words: (batch, length) token ids, or (batch, length, hidden) embeddings.
        tokens: (batch, length) bool, False at padding; None without padding.
        token_types: (batch, length) segment ids of any numbering; None omits the segment term.
        sequence_ids: (batch, length), 0 at padding; a run of equal numbers is one sequence. None for one sequence per
            example.
        memory: (batch, memory, hidden) states of earlier segments per layer, zeros where empty; or None.
        permutation: The factorisation order and the targets.
        output_mask: (batch, length) bool, the positions whose outputs are returned, for a single stream; None for all.
    """

    words: Tensor
    tokens: Tensor | None
    token_types: Tensor | None
    sequence_ids: Tensor | None
    memory: tuple[Tensor, ...] | None
    permutation: Permutation
    output_mask: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, length)."""
        return self.words.shape[0], self.words.shape[1]

    @property
    def length(self) -> int:
        """Number of columns of the batch."""
        return self.words.shape[1]

    @property
    def target_positions(self) -> Tensor | None:
        """(batch, targets) columns of the query stream; None for a single stream."""
        return self.permutation.target_positions

    @property
    def memory_length(self) -> int:
        """Number of memory keys, which precede the keys of the batch."""
        return 0 if self.memory is None else self.memory[0].shape[1]

    @property
    def memory_tokens(self) -> Tensor | None:
        """(batch, memory) bool, False where the last layer's memory is zero, that is, empty. None if no position is."""
        if self.memory is None:
            return None
        tokens = (self.memory[-1] != 0).any(-1)
        return None if not is_traced(tokens) and bool(tokens.all()) else tokens

    @property
    def has_inner_padding(self) -> bool:
        """Whether there is padding between the tokens of a sequence, which counts in their distances."""
        if self.tokens is None:
            return False
        if self.sequence_ids is not None:
            return bool((self.tokens != (self.sequence_ids != 0)).any())
        starts = self.tokens[:, 1:] & ~self.tokens[:, :-1]
        return bool((self.tokens[:, 0].long() + starts.sum(1) != 1).any())

    def with_token_types(self) -> "EncoderInputs":
        """Return the inputs with the segment term; a single segment if there are no segment ids."""
        if self.token_types is not None:
            return self
        return replace(self, token_types=torch.zeros(self.shape, dtype=torch.long, device=self.words.device))


def check_tokens(attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor | None:
    """(batch, length) bool, False where either argument is 0 (padding); None without padding.

    Raises:
        CtxError: An example has no token.
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
    """The memory, or None if it is empty.

    Raises:
        CtxError: The number of tensors, the batch size, the width or the length is wrong.
    """
    if mems is None or not len(mems):
        return None
    if len(mems) != config.num_hidden_layers:
        raise CtxError(
            f"mems has {len(mems)} tensors, expected one for each of the {config.num_hidden_layers} layers.",
            hint="pass mems unchanged, as returned by the model.",
        )
    length = mems[0].shape[1] if mems[0].dim() == 3 else -1
    for number, memory in enumerate(mems):
        if memory.dim() != 3 or memory.shape[0] != batch_size or memory.shape[2] != config.hidden_size:
            raise CtxError(
                f"mems[{number}] is {tuple(memory.shape)}, expected (batch={batch_size}, memory, "
                f"hidden={config.hidden_size}).",
                hint="pass the memory that this model returned for the same batch; transpose the memory of a model of "
                "transformers: mem.transpose(0, 1).",
            )
        if memory.shape[1] != length:
            raise CtxError(
                f"mems[{number}] has {memory.shape[1]} positions, mems[0] has {length}; expected the same number in "
                "all layers.",
                hint="pass mems unchanged, as returned by the model.",
            )
    if config.mem_len and length > config.mem_len:
        raise CtxError(
            f"mems has {length} positions, above mem_len={config.mem_len}.",
            hint="truncate the memory (memory[:, -mem_len:]), or raise config.mem_len.",
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
    """Convert both forms of a permutation and its targets to a `Permutation`.

    Args:
        words: (batch, length) ids or (batch, length, hidden) embeddings.
        tokens: (batch, length) bool, False at padding; None without padding.
        permutation_order, target_positions, perm_mask, target_mapping: As in `CtxXLNetModel.forward`.

    Raises:
        CtxError: Both forms are passed, a shape does not match the input, or a target cannot be predicted.
    """
    batch_size, length = words.shape[:2]
    alternatives = {
        "permutation_order and perm_mask": (permutation_order, perm_mask),
        "target_positions and target_mapping": (target_positions, target_mapping),
    }
    for names, (compact, dense) in alternatives.items():
        if compact is not None and dense is not None:
            raise CtxError(f"{names} are two forms of the same argument.", hint="pass only one of them.")
    _check_shape("permutation_order", permutation_order, (batch_size, length))
    _check_shape("perm_mask", perm_mask, (batch_size, length, length))
    _check_shape("target_mapping", target_mapping, (batch_size, None, length))
    _check_shape("target_positions", target_positions, (batch_size, None))
    if target_mapping is not None:
        target_positions = _mapping_to_positions(target_mapping)
    elif target_positions is not None:
        if permutation_order is None and perm_mask is None:
            raise CtxError(
                "target_positions requires permutation_order: otherwise each target could attend to itself.",
                hint="pass permutation_order (batch, length), as the data collator does, or perm_mask.",
            )
        _check_positions(target_positions, permutation_order, tokens, length)
    if permutation_order is not None and not is_traced(permutation_order) and int(permutation_order.min()) < -1:
        row, column = (permutation_order < -1).nonzero()[0].tolist()
        raise CtxError(
            f"permutation_order[{row}, {column}] is {int(permutation_order[row, column])}; expected ranks 0, 1, ..., "
            "or -1 for positions that are visible to all."
        )
    hidden_pairs = None if perm_mask is None else perm_mask > 0
    return Permutation(permutation_order, hidden_pairs, target_positions)


def _check_shape(name: str, tensor: Tensor | None, expected: tuple[int | None, ...]) -> None:
    """Raise CtxError for a tensor of another shape; None in `expected` is the number of targets."""
    if tensor is None:
        return
    matches = len(expected) == tensor.dim() and all(
        size in (None, actual) for size, actual in zip(expected, tensor.shape, strict=True)
    )
    if not matches:
        sizes = ", ".join("targets" if size is None else str(size) for size in expected)
        raise CtxError(f"{name} is {tuple(tensor.shape)}, expected ({sizes}) for this input.")


def _mapping_to_positions(target_mapping: Tensor) -> Tensor:
    """(batch, targets, length) one-hot -> (batch, targets) columns, -1 where all values are zero."""
    is_selected = target_mapping != 0
    if not is_traced(target_mapping):
        is_invalid = (is_selected.sum(-1) > 1) | (is_selected & (target_mapping != 1)).any(-1)
        if bool(is_invalid.any()):
            row, target = is_invalid.nonzero()[0].tolist()
            raise CtxError(
                f"target_mapping[{row}, {target}] is not one-hot.", hint="set 1 at the position to predict, else 0."
            )
    return is_selected.long().argmax(-1).masked_fill(~is_selected.any(-1), NO_TARGET)


def _check_positions(
    target_positions: Tensor, permutation_order: Tensor | None, tokens: Tensor | None, length: int
) -> None:
    if is_traced(target_positions) or not target_positions.numel():
        return
    errors = {
        f"outside [0, length={length}) and not -1 (no target)": (target_positions < -1) | (target_positions >= length)
    }
    columns = target_positions.clamp(0, length - 1)
    if permutation_order is not None:
        is_visible = permutation_order.gather(1, columns) < 0
        errors["which has rank -1 in permutation_order and is visible to all positions"] = is_visible
    if tokens is not None:
        errors["where attention_mask is 0 (padding)"] = ~tokens.gather(1, columns)
    for error, is_wrong in errors.items():
        wrong_targets = is_wrong & (target_positions != NO_TARGET)
        if bool(wrong_targets.any()):
            row, target = wrong_targets.nonzero()[0].tolist()
            raise CtxError(f"target_positions[{row}, {target}] is {int(target_positions[row, target])}, {error}.")


def check_combination(config: CtxXLNetConfig, inputs: EncoderInputs) -> None:
    """Raise CtxError for arguments that cannot be combined."""
    if inputs.output_mask is not None and inputs.target_positions is not None:
        raise CtxError(
            "output_mask cannot be combined with targets, for which the query stream is returned.",
            hint="remove output_mask.",
        )
    if inputs.sequence_ids is not None and inputs.memory is not None:
        raise CtxError("mems cannot be combined with packed sequences (sequence_ids).", hint="remove one of them.")
    if config.bi_data and inputs.words.shape[0] % 2:
        raise CtxError(
            f"With bi_data the second half of a batch is reversed text, but the batch size {inputs.words.shape[0]} is "
            "odd.",
            hint="use an even number of examples, or set config.bi_data=False.",
        )


def check_target_labels(labels: Tensor, target_positions: Tensor | None, target_mapping: Tensor | None) -> None:
    """Check that labels match the targets.

    Raises:
        CtxError: The shape of the labels is wrong, or a label has no target.
    """
    check_tensors(target_positions=target_positions, target_mapping=target_mapping)
    targets = target_positions if target_positions is not None else target_mapping
    if targets is None:
        return
    if labels.shape != targets.shape[:2]:
        raise CtxError(f"labels is {tuple(labels.shape)}, but the targets are {tuple(targets.shape[:2])}.")
    if target_positions is not None and not is_traced(labels):
        misplaced = (labels != -100) & (target_positions == NO_TARGET)
        if bool(misplaced.any()):
            row, target = misplaced.nonzero()[0].tolist()
            raise CtxError(
                f"labels[{row}, {target}] is {int(labels[row, target])}, but target_positions is -1 (no target) there.",
                hint="use the label -100.",
            )
