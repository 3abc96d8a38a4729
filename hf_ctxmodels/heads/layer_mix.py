"""A learned weighted sum of all encoder layers as the input of a head."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.common import ScalarMix
from hf_ctxmodels.layers.pooling import PoolingLayer, first_token_columns, pool_tokens, states_at, token_mask


class LayerMix(ScalarMix):
    """`ScalarMix` of the hidden states of an encoder, or of the decoder of an encoder-decoder (Peters et al. 2018,
    section 3.2, equation 1).

    Layers whose width differs from the width of the last layer, such as the inner layers of AWD-LSTM, are excluded.
    """

    def mix(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Compute the weighted sum of the embeddings and the outputs of all layers: (batch, length, hidden)."""
        width = hidden_states[-1].shape[-1]
        included = [layer for layer, states in enumerate(hidden_states) if states.shape[-1] == width]
        weights = self.weights.float()[included].softmax(0) * self.gamma
        mixed = hidden_states[included[0]] * weights[0].to(hidden_states[0].dtype)
        for layer, weight in zip(included[1:], weights[1:], strict=True):
            mixed = mixed + hidden_states[layer] * weight.to(mixed.dtype)
        return mixed


def find_layer_stack(encoder: PreTrainedModel) -> nn.Module | None:
    """The module with the `layers` whose outputs are the `hidden_states`: the encoder itself, its stack or, for an
    encoder-decoder, the decoder; or None."""
    candidates = [encoder, getattr(encoder, "decoder", None), getattr(encoder, "encoder", None)]
    return next((module for module in candidates if hasattr(module, "layers")), None)


def num_hidden_states(encoder: PreTrainedModel) -> int:
    """The number of `hidden_states`, including the embeddings; raises CtxError for an encoder without layers."""
    stack: Any = find_layer_stack(encoder)
    if stack is None:
        raise CtxError(
            f"{type(encoder).__name__} has no layers that could be mixed.",
            location="layer_mix=True",
            hint="omit layer_mix.",
        )
    return len(stack.layers) + 1


def encode_with_layer_mix(
    encoder: PreTrainedModel, mix: LayerMix | None, feature_lookup: Callable[..., Any] | None, **inputs: Any
) -> Any:
    """Run the encoder or look up its stored outputs; replace `last_hidden_state` and `pooler_output` by the mix.

    Args:
        encoder: The encoder.
        mix: The weighted sum; None for the last layer.
        feature_lookup: Replaces the encoder: a function of the encoder's arguments and of `all_layers`, whether all
            layers are needed, that returns an output with `hidden_states`.
        inputs: The arguments of the encoder.
    """
    returns_states = inputs.pop("output_hidden_states", None)
    if feature_lookup is None:
        outputs = encoder(return_dict=True, output_hidden_states=True, **inputs)
    else:
        outputs = feature_lookup(all_layers=mix is not None or bool(returns_states), **inputs)
    states = outputs.hidden_states
    outputs.last_hidden_state = states[-1] if mix is None else mix.mix(states)
    outputs.pooler_output = _pool(encoder, outputs.last_hidden_state, **inputs)
    if not (encoder.config.output_hidden_states if returns_states is None else returns_states):
        for name in ("hidden_states", "decoder_hidden_states", "encoder_hidden_states"):
            if name in outputs:
                setattr(outputs, name, None)
    return outputs


def _pool(
    encoder: Any,
    states: Tensor,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Pool the mixed states in the way in which the encoder pools its last layer; None if it has no pooling."""
    pooler, pooling = getattr(encoder, "pooler", None), getattr(encoder, "pooling", None)
    is_padding_mask = attention_mask is not None and attention_mask.dim() == 2
    is_token = token_mask(states, attention_mask if is_padding_mask else None)
    if sequence_ids is not None:
        is_token = is_token & (sequence_ids != 0)
    if isinstance(pooler, PoolingLayer):
        select_tokens = getattr(encoder, "select_tokens", None)
        return pooler(states, is_token if select_tokens is None else select_tokens(input_ids, is_token))
    if isinstance(pooler, nn.Module):
        return pooler(states_at(states, first_token_columns(states, is_token)))
    if isinstance(pooling, str):
        return pool_tokens(states, is_token, pooling)  # type: ignore[arg-type]
    return None
