"""Inputs of XLNet's encoder in the form that it computes with."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_ctxmodels.core.inputs import is_traced


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
        """Number of keys before those of the batch."""
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
        """The same inputs with the segment term; a single segment if there are no segment ids."""
        if self.token_types is not None:
            return self
        return replace(self, token_types=torch.zeros(self.shape, dtype=torch.long, device=self.words.device))
