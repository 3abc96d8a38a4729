"""A learned weighted sum of all encoder layers as the input of a head."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import padding_mask_or_none
from hf_ctxmodels.layers.common import ScalarMix
from hf_ctxmodels.layers.pooling import PoolingLayer, build_token_mask, first_token_columns, pool_tokens, states_at


def find_layer_stack(encoder: PreTrainedModel) -> nn.Module | None:
    """The module with the `layers` whose outputs are the `hidden_states`: the encoder itself, its stack or, for an
    encoder-decoder, the decoder; or None."""
    candidates = [encoder, getattr(encoder, "decoder", None), getattr(encoder, "encoder", None)]
    return next((module for module in candidates if hasattr(module, "layers")), None)


def build_layer_mix(encoder: PreTrainedModel) -> ScalarMix:
    """Create a mix of the embeddings and the layers of an encoder, or of the decoder of an encoder-decoder; raises
    CtxError for an encoder without layers."""
    stack: Any = find_layer_stack(encoder)
    if stack is None:
        message = f"{type(encoder).__name__} has no layers that could be mixed."
        raise CtxError(message, location="layer_mix=True", hint="omit layer_mix.")
    return ScalarMix(len(stack.layers) + 1)


def encode_with_layer_mix(
    encoder: PreTrainedModel, mix: ScalarMix | None, feature_lookup: Callable[..., Any] | None, **inputs: Any
) -> Any:
    """Run the encoder, or `feature_lookup`, which returns stored `hidden_states`; replace `last_hidden_state` and
    `pooler_output` by the mix, or by the last layer if it is None.

    `feature_lookup` is called with `all_layers`, whether all layers are needed, and the arguments of the encoder.
    """
    returns_states = encoder.config.returns_hidden_states(inputs.pop("output_hidden_states", None))
    if feature_lookup is None:
        outputs = encoder(return_dict=True, output_hidden_states=True, **inputs)
    else:
        outputs = feature_lookup(all_layers=mix is not None or returns_states, **inputs)
    states = outputs.hidden_states
    outputs.last_hidden_state = states[-1] if mix is None else mix(states)
    outputs.pooler_output = _pool(encoder, outputs.last_hidden_state, **inputs)
    if not returns_states:
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
    is_token = build_token_mask(states, padding_mask_or_none(attention_mask), sequence_ids)
    if isinstance(pooler, PoolingLayer):
        select_tokens = getattr(encoder, "select_tokens", None)
        return pooler(states, is_token if select_tokens is None else select_tokens(input_ids, is_token))
    if isinstance(pooler, nn.Module):
        return pooler(states_at(states, first_token_columns(states, is_token)))
    if isinstance(pooling, str):
        return pool_tokens(states, is_token, pooling)  # type: ignore[arg-type]
    return None
