"""Input checks of recurrent and static encoders, and recurrent layers that continue from a state."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hf_ctxmodels.core.caches import RecurrentCache, check_recurrent_cache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import is_traced, on_host
from hf_ctxmodels.core.inputs import check_no_empty_rows, check_one_sequence_per_row, sequence_numbers
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import build_token_mask
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, concat_directions


@dataclass(frozen=True)
class CheckedInputs:
    """The checked inputs of an encoder: `tokens` are (batch, length, ...) ids, or (batch, length, width) embeddings.

    Attributes:
        token_mask: (batch, length) bool, False at padding.
        sequences: (batch, length) index of the sequence within its row; None for one sequence per row.
    """

    tokens: Tensor
    are_ids: bool
    token_mask: Tensor
    sequences: Tensor | None
    unpad: bool

    def embed(self, embed_ids: Callable[[Tensor], Tensor]) -> Tensor:
        """(batch, length, width) embeddings, computed from ids by `embed_ids`."""
        return embed_ids(self.tokens) if self.are_ids else self.tokens

    def pack(self, directions: int, token_mask: Tensor | None = None) -> PackedSequences:
        """Pack `token_mask`, by default the attribute; with padding if `config.unpad` is false or a graph is traced."""
        token_mask = self.token_mask if token_mask is None else token_mask
        return PackedSequences.build(token_mask, self.sequences, directions, self.unpad and not is_traced(self.tokens))


def zero_padding(states: Tensor, token_mask: Tensor) -> Tensor:
    """(batch, length, width) states, zero where `token_mask` (batch, length) bool is False."""
    return states * token_mask[..., None].to(states.dtype)


def prepare_inputs(
    model: CtxPreTrainedModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    sequence_ids: Tensor | None,
    output_mask: Tensor | None,
    *,
    width: int | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: RecurrentCache | None = None,
) -> CheckedInputs:
    """Check the common inputs of recurrent and static encoders.

    Args:
        input_ids: (batch, length) ids, or (batch, length, characters) in character-based families; or `inputs_embeds`
            (batch, length, width).
        attention_mask: (batch, length), 1 at tokens and 0 at padding, which does not change the state.
        sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
            sequence, whose initial state is zero.
        output_mask: (batch, length) bool, the positions to which the encoder restricts `last_hidden_state`, then
            (targets, hidden).
        width: Width of the embeddings; None for `config.embedding_size`.
        token_type_ids: (batch, length), only validated: heads use them to separate two texts.
        position_ids: (batch, length), only validated: without `sequence_ids` they must not separate packed sequences.

    Raises:
        CtxError: Inputs do not match each other or the model, or a row has no tokens.
    """
    if past_key_values is not None and sequence_ids is not None:
        raise CtxError("past_key_values cannot be combined with sequence_ids: a cache has one state per row.")
    masks = {"sequence_ids": sequence_ids, "output_mask": output_mask, "token_type_ids": token_type_ids}
    tokens = model.check_input_of_any_length(input_ids, inputs_embeds, attention_mask, width, **masks)
    token_mask = build_token_mask(tokens, attention_mask, sequence_ids)
    if not is_traced(tokens):
        check_no_empty_rows(token_mask)
    if position_ids is not None and sequence_ids is None:
        check_one_sequence_per_row(position_ids, token_mask)
    sequences = None if sequence_ids is None else on_host(sequence_numbers, sequence_ids)
    return CheckedInputs(tokens, input_ids is not None, token_mask, sequences, model.config.unpad)


def run_stateful_layers(
    layers: Iterable[nn.Module],
    packed: Tensor,
    packing: PackedSequences,
    cache: RecurrentCache | None,
    state_sizes: Sequence[tuple[int, int]],
    *,
    layer_dropout: Callable[[Tensor, int], Tensor],
    truncation: int | None = None,
    residual: bool = False,
    records_inputs: bool = False,
) -> tuple[list[Tensor], Tensor, RecurrentCache]:
    """Run recurrent layers of 1 or 2 directions, which may continue from a cache.

    Args:
        packed: (directions, tokens, width) input of the first layer, in the order of `packing`.
        cache: The state before the tokens; None for zeros.
        state_sizes: Widths of the hidden and the cell state of each layer of the model.
        layer_dropout: Dropout of the packed input of the layer with this index.
        truncation: Number of steps to back-propagate through; None for all.
        residual: Residual connections around all layers except the first.

    Returns:
        The inputs of the layers if `records_inputs`, and the output of the last layer, (batch, length, directions *
        width) each; and the state after the last token.
    """
    directions, num_past_tokens = packed.shape[0], 0
    initial_states: list[tuple[Tensor, ...] | None] = [None] * len(state_sizes)
    if cache is not None:
        check_recurrent_cache(
            cache, [[(packing.shape[0], directions, size) for size in sizes] for sizes in state_sizes]
        )
        num_past_tokens = cache.seen_tokens
        initial_states = [packing.pack_state(state) for state in cache.states]
    inputs, final_states = [], []
    for depth, layer in enumerate(layers):
        if records_inputs:
            inputs.append(concat_directions(packing.unpack(packed)))
            # repack, so that gradients pass through the recorded input
            packed = packing.repack(inputs[-1].unflatten(-1, (directions, -1)).movedim(-2, 0))
        output, state = layer(layer_dropout(packed, depth), packing, initial_states[depth], truncation)
        packed = output + packed if residual and depth else output
        final_states.append(packing.unpack_state(state))
    last = concat_directions(packing.unpack(packed))
    return inputs, last, RecurrentCache(final_states, num_past_tokens + packing.shape[1])
