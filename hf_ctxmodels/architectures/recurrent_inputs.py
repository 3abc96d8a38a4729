"""Input checks of recurrent and static encoders."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_ctxmodels.core.inputs import is_traced, sequence_numbers
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import check_row_lengths
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.recurrent.packing import PackedSequences


@dataclass(frozen=True)
class CheckedInputs:
    """The checked inputs of an encoder, see `prepare_inputs`.

    Attributes:
        words: (batch, length, ...) ids, or (batch, length, width) embeddings.
        are_ids: Whether `words` are ids.
        tokens: (batch, length) bool, False at padding.
        sequences: (batch, length) index of the sequence within its row; None for one sequence per row.
        unpad: `config.unpad`.
    """

    words: Tensor
    are_ids: bool
    tokens: Tensor
    sequences: Tensor | None
    unpad: bool

    def embed(self, embed_ids: Callable[[Tensor], Tensor]) -> Tensor:
        """(batch, length, width) embeddings, computed from ids by `embed_ids`."""
        return embed_ids(self.words) if self.are_ids else self.words

    def pack(self, directions: int, tokens: Tensor | None = None) -> PackedSequences:
        """Pack the rows without padding; with padding if `config.unpad` is false or a graph is traced.

        Args:
            directions: 1 or 2.
            tokens: (batch, length) bool, instead of the attribute `tokens`.
        """
        build = PackedSequences.build if self.unpad and not is_traced(self.words) else PackedSequences.with_padding
        return build(self.tokens if tokens is None else tokens, self.sequences, directions)


def zero_padding(states: Tensor, tokens: Tensor) -> Tensor:
    """(batch, length, width) states, zero where `tokens` (batch, length) bool is False."""
    return states * tokens[..., None].to(states.dtype)


def prepare_inputs(
    model: CtxPreTrainedModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    sequence_ids: Tensor | None = None,
    *,
    width: int,
    **aligned: Tensor | None,
) -> CheckedInputs:
    """Check the common inputs of recurrent and static encoders.

    Args:
        model: The encoder.
        input_ids: (batch, length) ids, or (batch, length, characters) ids of character-based families.
        inputs_embeds: (batch, length, width), instead of the ids.
        attention_mask: (batch, length), 1 at tokens and 0 at padding, which does not change the state.
        sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
            sequence, whose initial state is zero.
        width: Width of the embeddings.
        aligned: Other (batch, length) tensors; with `output_mask`, bool, the encoder's `last_hidden_state` has only
            these positions, (targets, hidden).

    Raises:
        CtxError: Inputs do not match each other or the model, or a row has no tokens.
    """
    aligned = {"sequence_ids": sequence_ids, **aligned}
    words = model.check_word_input(input_ids, inputs_embeds, attention_mask, width, **aligned)
    tokens = token_mask(words, attention_mask, sequence_ids)
    if not is_traced(words):
        check_row_lengths(tokens.sum(1))
    sequences = None if sequence_ids is None else sequence_numbers(sequence_ids)
    return CheckedInputs(words, input_ids is not None, tokens, sequences, model.config.unpad)
