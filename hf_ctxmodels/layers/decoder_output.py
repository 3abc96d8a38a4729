"""Output of a recurrent decoder of an encoder-decoder."""

from typing import Any, NamedTuple

from torch import Tensor


class DecoderOutput(NamedTuple):
    """Output of a recurrent decoder.

    Attributes:
        states: (batch, steps, hidden) from which the next tokens are predicted; or (targets, hidden) at target
            positions.
        cache: The state after the last token; None if it was not computed.
        hidden_states: If recorded, layers + 1 tensors (batch, steps, width): the tokens' embeddings, the output of
            every layer except the last, and the states from which the next tokens are predicted, before dropout; else
            None.
        cross_attentions: If recorded, the (batch, 1, steps, length) weights of the source tokens for each attention;
            else None.
    """

    states: Tensor
    cache: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
