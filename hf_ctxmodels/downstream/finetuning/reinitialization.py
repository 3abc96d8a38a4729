"""New weights in place of pretrained ones: of the top layers, of the pooler, and of the heads."""

import copy
from collections.abc import Collection

import torch
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.peft_support import newly_initialized_modules
from hf_ctxmodels.heads.layer_mix import find_layer_stack
from hf_ctxmodels.training.optim.layer_groups import LAYERS


def reinitialize_layers(model: PreTrainedModel, number: int, seed: int, *, pooler: bool = False) -> list[str]:
    """Draw the weights of the top layers of the encoder as in a new model (Zhang et al. 2021, arXiv 2006.05987,
    section 5).

    Layers that share all their weights are one. Of an encoder-decoder they are the decoder's, which its heads read:
    self-attention, cross-attention and feed-forward network of each. The paper draws the pooler anew as well.

    Args:
        model: The model with its pretrained weights.
        number: Of layers, from the top.
        seed: Of the weights.
        pooler: Also the encoder's pooler.

    Returns:
        Names of the parameters.

    Raises:
        CtxError: There are not so many layers, or there is no pooler.
    """
    layers = _distinct_layers(model)
    if not 0 <= number <= len(layers):
        raise CtxError(
            f"The encoder of {type(model).__name__} has {len(layers)} layers with weights of their own.",
            location=f"--reinit_layers {number}",
            hint="give a number from 0 to that.",
        )
    encoder = _prefix(model)
    chosen = {id(each) for layer in layers[len(layers) - number :] for each in layer}
    names = [name for name, each in model.named_parameters() if id(each) in chosen]
    if pooler:
        pooling = [name for name, _ in model.named_parameters() if name.startswith(f"{encoder}pooler.")]
        if not pooling:
            raise CtxError(
                f"The encoder of {type(model).__name__} has no pooler.",
                location="--reinit_modules pooler",
                hint="leave it out.",
            )
        names += pooling
    reinitialize_parameters(model, names, seed)
    return names


def pretrained_head_modules(model: PreTrainedModel) -> list[str]:
    """Names of the head's modules whose weights the opened checkpoint had, such as those of an earlier task; without an
    output layer that is tied to the embeddings, which is no part of a head."""
    new = getattr(model, "newly_initialized_modules", ())
    own = {name.partition(".")[0] for name, _ in model.named_parameters()}  # tied ones once, in the encoder
    return [
        name
        for name, module in model.named_children()
        if module is not model.base_model
        and name in own
        and not any(each == name or each.startswith(f"{name}.") for each in new)
    ]


def reinitialize_head(model: PreTrainedModel, seed: int) -> list[str]:
    """Draw the weights of everything outside the encoder as in a new model; gives their names.

    Raises:
        CtxError: There is nothing.
    """
    encoder = _prefix(model)
    names = [name for name in _weights(model) if not name.startswith(encoder)]
    if not encoder or not names:
        raise CtxError(f"{type(model).__name__} has no head.", location="--reinitialize_head", hint="leave it out.")
    reinitialize_parameters(model, names, seed)
    return names


@torch.no_grad()
def reinitialize_parameters(model: PreTrainedModel, names: Collection[str], seed: int) -> None:
    """Give the parameters of these names the values that they have in a new model of the same configuration, whose
    weights are drawn from the seed; the global generators stay as they are. `model.reinitialized_weights` has their names, and
    `model.newly_initialized_modules` those of the modules that they fill: PEFT saves these with an adapter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = _weights(type(model)(copy.deepcopy(model.config)))
    for name, weight in _weights(model).items():
        if name in names:
            weight.copy_(fresh[name])
    model.reinitialized_weights = (*getattr(model, "reinitialized_weights", ()), *names)
    model.newly_initialized_modules = (
        *getattr(model, "newly_initialized_modules", ()),
        *newly_initialized_modules(model, set(names)),
    )


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _distinct_layers(model: PreTrainedModel) -> list[list[torch.nn.Parameter]]:
    """The parameters of each layer below the head that has some of its own, from the lowest up."""
    found: list[list[torch.nn.Parameter]] = []
    seen: set[int] = set()
    for layer in getattr(find_layer_stack(model.base_model), LAYERS, ()):
        own = [each for each in layer.parameters() if id(each) not in seen]
        seen |= {id(each) for each in own}
        if own:
            found.append(own)
    return found


def _prefix(model: PreTrainedModel) -> str:
    return "" if model.base_model is model else f"{model.base_model_prefix}."
