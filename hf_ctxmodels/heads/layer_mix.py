"""What a head reads in place of its encoder's last layer: a learned mix of all layers, or states that were kept."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.pooling import PoolingLayer, first_token_columns, pool_tokens, states_at, token_mask
from hf_ctxmodels.layers.scalar_mix import ScalarMix

_RECORDED = ("hidden_states", "decoder_hidden_states", "encoder_hidden_states")


class LayerMix(ScalarMix):
    """`ScalarMix` of an encoder's recorded states (Peters et al. 2018, section 3.2, equation 1); of an encoder-decoder
    those of the decoder, of which its heads read the last one.

    Layers of another width than the last one, such as the wide ones of AWD-LSTM, are left out of the mix.
    """

    def mix(self, states: Sequence[Tensor]) -> Tensor:
        """The states of every layer, the embeddings first -> (batch, length, hidden)."""
        width = states[-1].shape[-1]
        chosen = [number for number, each in enumerate(states) if each.shape[-1] == width]
        weights = self.weights.float()[chosen].softmax(0) * self.gamma
        mixed = states[chosen[0]] * weights[0].to(states[0].dtype)
        for number, weight in zip(chosen[1:], weights[1:], strict=True):
            mixed = mixed + states[number] * weight.to(mixed.dtype)
        return mixed


def find_layer_stack(encoder: PreTrainedModel) -> nn.Module | None:
    """The module whose `layers` a head on an encoder reads the states of, or None.

    It is the encoder itself or its stack; of an encoder-decoder the decoder, whose layers' states its
    `hidden_states` are.
    """
    parts = [encoder, *(getattr(encoder, name, None) for name in ("decoder", "encoder"))]
    return next((part for part in parts if hasattr(part, "layers")), None)


def num_hidden_states(encoder: PreTrainedModel) -> int:
    """Number of `hidden_states` that an encoder records for its heads, see `find_layer_stack`.

    Raises:
        CtxError: It has no layers.
    """
    stack: Any = find_layer_stack(encoder)
    if stack is None:
        raise CtxError(
            f"{type(encoder).__name__} has no stack of layers that its heads could read.",
            location="layer_mix=True",
            hint="leave layer_mix out.",
        )
    return len(stack.layers) + 1


def encode_with_layer_mix(
    encoder: PreTrainedModel, mix: LayerMix | None, feature_lookup: Callable[..., Any] | None, **inputs: Any
) -> Any:
    """Run the encoder, or look its states up; `last_hidden_state` is the mix, and `pooler_output` pools it.

    Args:
        encoder: The encoder.
        mix: None for the last layer.
        feature_lookup: In place of the encoder: its arguments, and whether `every_layer` is read -> an output with
            `hidden_states`, the last layer's among them.
        inputs: The encoder's arguments.
    """
    wants = inputs.pop("output_hidden_states", None)
    if feature_lookup is None:
        outputs = encoder(return_dict=True, output_hidden_states=True, **inputs)
    else:
        outputs = feature_lookup(every_layer=mix is not None or bool(wants), **inputs)
    states = outputs.hidden_states
    outputs.last_hidden_state = states[-1] if mix is None else mix.mix(states)
    outputs.pooler_output = _pooled(encoder, outputs.last_hidden_state, **inputs)
    if not (encoder.config.output_hidden_states if wants is None else wants):
        for name in [each for each in _RECORDED if each in outputs]:
            setattr(outputs, name, None)
    return outputs


def _pooled(
    encoder: Any,
    states: Tensor,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """What the encoder itself makes of its last layer, made of other states; None where it has no pooling."""
    pooler, pooling = getattr(encoder, "pooler", None), getattr(encoder, "pooling", None)
    tokens = token_mask(states, attention_mask if attention_mask is None or attention_mask.dim() == 2 else None)
    tokens = tokens if sequence_ids is None else tokens & (sequence_ids != 0)
    if isinstance(pooler, PoolingLayer):
        chooses = getattr(encoder, "select_tokens", None)
        return pooler(states, tokens if chooses is None else chooses(input_ids, tokens))
    if isinstance(pooler, nn.Module):
        return pooler(states_at(states, first_token_columns(states, tokens)))
    return None if not isinstance(pooling, str) else pool_tokens(states, tokens, pooling)  # type: ignore[arg-type]
