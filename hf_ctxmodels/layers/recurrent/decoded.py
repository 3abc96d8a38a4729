"""What a recurrent decoder gives."""

from typing import NamedTuple

from torch import Tensor

from hf_ctxmodels.core.cache import RecurrentCache


class Decoded(NamedTuple):
    """States of a decoder's steps.

    Attributes:
        states: (batch, steps, hidden) from which the next tokens are predicted; or (targets, hidden) of some of them.
        cache: The state after the last token; None where it was not computed.
        hidden_states: As recorded: layers + 1 tensors (batch, steps, width), the tokens' embeddings, the output of
            every layer but the top one, and what the next tokens are predicted from, before dropout; else None.
        cross_attentions: As recorded: (batch, 1, steps, length) weights of the source's tokens, one tensor for each
            attention; else, and of a decoder without attention, None.
    """

    states: Tensor
    cache: RecurrentCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
