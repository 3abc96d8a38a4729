"""What the decoder of an encoder-decoder gives."""

from typing import Any, NamedTuple

from torch import Tensor


class DecoderOutput(NamedTuple):
    """States of a decoder's steps.

    Attributes:
        states: (batch, steps, hidden) from which the next tokens are predicted; or (targets, hidden) of some of them.
        cache: The state after the last token; None where it was not computed.
        hidden_states: As recorded: layers + 1 tensors (batch, steps, width), the tokens' embeddings, the output of
            every layer but the top one, and what the next tokens are predicted from, before dropout; else None.
        cross_attentions: As recorded: (batch, 1, steps, length) weights of the source's tokens, one tensor for each
            attention, in a Transformer (batch, heads, steps, length) of every layer; else, and of a decoder without
            attention, None.
        attentions: As recorded by a Transformer: (batch, heads, steps, keys) weights of what was written, of every
            layer; else None.
    """

    states: Tensor
    cache: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
