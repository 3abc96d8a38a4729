"""Runs blocks over a layout, records what is asked for, and computes the last one only where its output is used."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn
from transformers import Cache
from transformers.utils.output_capturing import selected_hidden_states

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.backends import Mask, prepare_mask
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.layers.transformer.block import Memory

HiddenStates = bool | int | Sequence[int] | None
"""Which hidden states to record: all, none, or those with these numbers (0 is the input of the first block)."""


@dataclass(frozen=True, eq=False)
class StackOutput:
    """What a stack gives.

    Attributes:
        last_hidden_state: (batch, length, hidden), zeros at padding in a packed layout; with an output mask (targets,
            hidden) in row-major order.
        rows: (..., hidden) all computed rows.
        layout: Where these lie: `layout.first(rows)` is what a pooler reads.
        hidden_states: The input of every block, (batch, length, hidden), and `last_hidden_state`, None in place of
            those not chosen; None if none were asked for. What follows is computed from them, so that gradients with
            respect to them can be taken.
        attentions: (batch, heads, queries, keys) of every block; None if they were not asked for.
        cross_attentions: Likewise; empty without cross-attention.
    """

    last_hidden_state: Tensor
    rows: Tensor
    layout: Layout
    hidden_states: tuple[Tensor | None, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


def run_stack(
    blocks: Iterable[nn.Module],
    hidden_states: Tensor,
    layout: Layout,
    masks: MaskSpec | Sequence[MaskSpec] = BIDIRECTIONAL,
    *,
    memory: Memory | None = None,
    past_key_values: Cache | None = None,
    final_norm: Callable[[Tensor], Tensor] | None = None,
    output_mask: Tensor | None = None,
    include_first_tokens: bool = False,
    zero_padding: bool = False,
    output_hidden_states: HiddenStates = None,
    output_attentions: bool | None = None,
) -> StackOutput:
    """Run blocks one after the other.

    Args:
        blocks: `TransformerBlock`s in the order they are applied; one object may stand at several depths.
        hidden_states: (..., hidden) as packed by `layout`.
        layout: Where the tokens lie.
        masks: Who sees whom: one for all blocks, or one for each.
        memory: What their cross-attention reads, or None.
        past_key_values: The cache that `layout` was built with, or None.
        final_norm: Applied to the last block's output: the norm of pre-norm models, with dropout if they have it.
        output_mask: (batch, length) bool, the positions whose outputs are used: the last block of a packed layout is
            computed only there. None for all.
        include_first_tokens: Compute each row's first token as well.
        zero_padding: Set padding positions to 0 before the first block and after each, where they are computed at all.
        output_hidden_states, output_attentions: What to record.

    Raises:
        CtxError: Attention weights are asked for, and the implementation in use gives none.
    """
    chain = list(blocks)
    final = layout if output_mask is None else layout.select(output_mask, include_first_tokens=include_first_tokens)
    views = _views(masks, len(chain), layout, final, memory, hidden_states)
    padding = layout.padding() if zero_padding else None
    kept = recorded_layer_numbers(output_hidden_states, len(chain) + 1)
    recorded: list[Tensor | None] = []
    weights: list[tuple[Tensor, Tensor | None]] | None = [] if output_attentions else None
    for number, (block, view) in enumerate(zip(chain, views, strict=True)):
        hidden_states, state = _recorded(_zeroed(hidden_states, padding), layout, number in kept)
        recorded.append(state)
        hidden_states, *probabilities = block(
            hidden_states, view.layout, view.mask, view.memory, past_key_values=past_key_values, layer_index=number
        )
        if weights is not None:
            weights.append(_checked_weights(*probabilities))
    hidden_states = _zeroed(hidden_states if final_norm is None else final_norm(hidden_states), padding)
    output = final.output(hidden_states)
    recorded.append(output if len(chain) in kept else None)
    if recorded[-1] is not None and output_mask is None:
        hidden_states = final.pack(output)
    states = None if output_hidden_states is None or output_hidden_states is False else tuple(recorded)
    return StackOutput(output, hidden_states, final, states, *_by_kind(weights))


def _zeroed(rows: Tensor, padding: Tensor | None) -> Tensor:
    """The rows with 0 at padding; as they are where that is None."""
    return rows if padding is None else rows.masked_fill(padding, 0.0)


def _recorded(rows: Tensor, layout: Layout, kept: bool) -> tuple[Tensor, Tensor | None]:
    """The rows and, if they are kept, what is recorded of them. The rows are made from that, so that gradients with
    respect to it pass through it."""
    state = layout.unpack(rows) if kept else None
    return (rows if state is None else layout.pack(state)), state


def _by_kind(
    weights: list[tuple[Tensor, Tensor | None]] | None,
) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """Attention weights of all blocks, and of cross-attention where there is any; None where none are recorded."""
    if weights is None:
        return None, None
    return tuple(own for own, _ in weights), tuple(cross for _, cross in weights if cross is not None)


class _View(NamedTuple):
    """What one block attends by."""

    layout: Layout
    mask: Mask
    memory: Memory | None


def _views(
    masks: MaskSpec | Sequence[MaskSpec],
    count: int,
    layout: Layout,
    final: Layout,
    memory: Memory | None,
    like: Tensor,
) -> list[_View]:
    """One for each block; blocks that attend alike share the prepared mask."""
    specs = [masks] * count if isinstance(masks, MaskSpec) else list(masks)
    if len(specs) != count:
        raise CtxError(f"{len(specs)} masks for {count} blocks; give one for all, or one for each.")
    made: list[tuple[MaskSpec, Layout, _View]] = []
    views = []
    for number, spec in enumerate(specs):
        place = final if number + 1 == count else layout
        known = next((view for key, where, view in made if key is spec and where is place), None)
        if known is None:
            seen = None if memory is None else _prepare_memory(memory, place, like)
            known = _View(place, prepare_mask(spec, place, like), seen)
            made.append((spec, place, known))
        views.append(known)
    return views


def _prepare_memory(memory: Memory, layout: Layout, like: Tensor) -> Memory:
    return replace(
        memory, mask=prepare_mask(memory.mask, layout.sharing(memory.targets_per_source), like, memory.layout)
    )


def _checked_weights(probabilities: Tensor | None, cross_probabilities: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if probabilities is None or probabilities.dim() != 4:  # flex attention may give the logarithms of sums
        raise CtxError(
            "The attention implementation in use gives no attention weights, which output_attentions asks for.",
            hint='use attn_implementation="eager": model.set_attn_implementation("eager").',
        )
    return probabilities, cross_probabilities


def recorded_layer_numbers(choice: HiddenStates, count: int) -> set[int]:
    """Which of `count` hidden states to record, by their numbers from 0; a negative choice counts from the last."""
    if choice is None or choice is False:
        return set()
    numbers = selected_hidden_states(choice)
    return set(range(count)) if numbers is None else {number % count for number in numbers if -count <= number < count}
