"""Re-initialization of pretrained weights: the top layers, the pooler, and the heads."""

import copy
from collections.abc import Collection

import torch
from transformers import PreTrainedModel

from hf_ctxmodels.core.adapter_support import newly_initialized_modules
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads.layer_mix import find_layer_stack
from hf_ctxmodels.training.model_loading import new_model_with_seed
from hf_ctxmodels.training.optimizers import LAYERS


def reinitialize_layers(model: PreTrainedModel, number: int, seed: int, *, pooler: bool = False) -> list[str]:
    """Re-initialize the top layers of the encoder (Zhang et al. 2021, arXiv 2006.05987, section 5); returns the names
    of the parameters. Layers that share all their weights count as one; the layers of an encoder-decoder are the
    decoder's.

    Raises:
        CtxError: The encoder has fewer layers, or no pooler.
    """
    layers: list[list[torch.nn.Parameter]] = []  # parameters that are not shared with a lower layer
    seen_ids: set[int] = set()
    for layer in getattr(find_layer_stack(model.base_model), LAYERS, ()):
        parameters = [parameter for parameter in layer.parameters() if id(parameter) not in seen_ids]
        seen_ids |= {id(parameter) for parameter in parameters}
        if parameters:
            layers.append(parameters)
    if not 0 <= number <= len(layers):
        raise CtxError(
            f"The encoder of {type(model).__name__} has {len(layers)} layers with weights of their own.",
            location=f"--reinit {number}",
            hint=f"use a number from 0 to {len(layers)}.",
        )
    parameter_ids = {id(parameter) for layer in layers[len(layers) - number :] for parameter in layer}
    if pooler:
        pooler_module = getattr(model.base_model, "pooler", None)
        if pooler_module is None:
            raise CtxError(f"{type(model).__name__} has no pooler.", location="--reinit pooler", hint="remove it.")
        parameter_ids |= {id(parameter) for parameter in pooler_module.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in parameter_ids]
    reinitialize_parameters(model, names, seed)
    return names


def pretrained_head_modules(model: PreTrainedModel) -> list[str]:
    """Names of the head's modules that were in the checkpoint, without an output layer tied to the embeddings."""
    new_modules = getattr(model, "newly_initialized_modules", ())
    # tied parameters are listed once, in the encoder
    untied_modules = {name.partition(".")[0] for name, _ in model.named_parameters()}
    new_names = {name.partition(".")[0] for name in new_modules}
    return [
        name
        for name, module in model.named_children()
        if module is not model.base_model and name in untied_modules and name not in new_names
    ]


def reinitialize_head(model: PreTrainedModel, seed: int) -> list[str]:
    """Re-initialize all weights outside the encoder, and return their names; raises CtxError without a head."""
    names = [name for name in _weights(model) if not name.startswith(f"{model.base_model_prefix}.")]
    if model.base_model is model or not names:
        raise CtxError(f"{type(model).__name__} has no head.", location="--reinit head", hint="remove it.")
    reinitialize_parameters(model, names, seed)
    return names


def replace_label_weights(model: PreTrainedModel, seed: int) -> None:
    """Re-initialize the weights whose shape depends on the number of labels."""
    config = copy.deepcopy(model.config)
    config.num_labels += 1
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in _weights(type(model)(config)).items()}
    names = [name for name, weight in _weights(model).items() if weight.shape != shapes[name]]
    reinitialize_parameters(model, names, seed)


@torch.no_grad()
def reinitialize_parameters(model: PreTrainedModel, names: Collection[str], seed: int) -> None:
    """Set parameters and buffers to their values in a new model that is initialized with `seed`; the global generators
    are not changed. The names are added to `model.reinitialized_weights`, and their modules to
    `model.newly_initialized_modules`."""
    new_weights = _weights(new_model_with_seed(type(model), model.config, seed))
    for name, weight in _weights(model).items():
        if name in names:
            weight.copy_(new_weights[name])
    model.reinitialized_weights = (*getattr(model, "reinitialized_weights", ()), *names)
    model.newly_initialized_modules = (
        *getattr(model, "newly_initialized_modules", ()),
        *newly_initialized_modules(model, set(names)),
    )


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
