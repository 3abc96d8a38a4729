"""Attention heads: the layers that have them, selections of heads, and pruning.

The name of a layer is its number in an encoder or decoder, such as "3". In an encoder-decoder, these are the layers of
the encoder, and "decoder.3" and "cross.3" are the self-attention and the cross-attention of the decoder. Heads keep
their numbers when other heads of the layer are pruned.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.tensor_parallel import is_tensor_parallel

HeadSelection = Mapping[Any, Iterable[int]]
"""Name or number of a layer (str or int) -> numbers of heads, from 0."""

PRUNED_HEADS = "pruned_heads"
"""Field of the configuration of a pruned model: name of a layer -> numbers of the heads that it lacks."""

# names of projections in the attention modules of transformers, and of modules with cross-attention or with a bias of
# the scores by relative positions
_OUTPUT_PROJECTIONS = {"o_proj", "out_proj", "c_proj", "out_lin", "o", "Wo", "dense", "wo"}
_QUERY_PROJECTIONS = {"query", "q_proj", "q_lin", "q"}
_RELATIVE_POSITIONS = re.compile(r"rel(ative)?_|distance_embedding|alibi")
_CROSS_ATTENTION = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The heads of one layer.

    Attributes:
        number: Number of the layer in its stack; layers may share their modules.
        heads: Numbers of the heads that the layer has.
        out_proj: The output projection, whose input is the context of all heads, (..., heads * head_dim).
        query_proj: The projection whose first outputs are the queries of all heads; None if the scores do not depend on
            queries alone, or if it cannot be located.
        module: The attention module; None in models of transformers.
    """

    name: str
    number: int
    heads: tuple[int, ...]
    out_proj: nn.Module
    query_proj: nn.Module | None = None
    module: Any = None


def attention_layers(model: nn.Module) -> dict[str, AttentionLayer]:
    """The layers of a model that have attention heads, by name.

    Raises:
        CtxError: The model has no attention heads, they cannot be located, or they are divided among processes.
    """
    if is_tensor_parallel(model):
        raise CtxError(
            "The attention heads are divided among processes by tensor parallelism.",
            hint="load the model without tp_plan.",
        )
    base: Any = getattr(model, "base_model", model)
    layers = _ctx_attention_layers(base) or _layers_of_transformers(base)
    if not layers:
        raise CtxError(f"{type(model).__name__} has no attention heads.", hint="use a Transformer.")
    return layers


def _ctx_attention_layers(base: Any) -> dict[str, AttentionLayer]:
    if hasattr(base, "layers"):
        stacks = {"": base}
    else:
        stacks = {"": getattr(base, "encoder", None), "decoder.": getattr(base, "decoder", None)}
    layers = {}
    for prefix, stack in stacks.items():
        for number, block in enumerate(getattr(stack, "layers", ())):
            modules: dict[str, Any] = {
                prefix: getattr(block, "attention", None),
                "cross.": getattr(block, "cross_attention", None),
            }
            for module_prefix, module in modules.items():
                if hasattr(module, "prune_heads"):
                    name = f"{module_prefix}{number}"
                    query_proj = module.q_proj if hasattr(module, "q_proj") else module.qkv_proj
                    layers[name] = AttentionLayer(
                        name, number, tuple(module.heads), module.out_proj, query_proj, module
                    )
    return layers


def _layers_of_transformers(base: Any) -> dict[str, AttentionLayer]:
    """The layers of a model of transformers, located by the names of its modules."""
    config = getattr(base, "config", None)
    stacks = ("", "decoder.", "cross.")
    projections: dict[str, list[nn.Module]] = {stack: [] for stack in stacks}
    queries: dict[str, list[nn.Module]] = {stack: [] for stack in stacks}
    has_relative_positions = any(map(_RELATIVE_POSITIONS.search, (name for name, _ in base.named_parameters())))
    for name, module in base.named_modules():
        *path, last = name.split(".")
        if not isinstance(module, nn.Linear | Conv1D) or not any("att" in component.lower() for component in path):
            continue
        in_decoder = path[0] == "decoder" and hasattr(base, "encoder")
        stack = "cross." if any(map(_CROSS_ATTENTION.search, path)) else "decoder." if in_decoder else ""
        if last in _OUTPUT_PROJECTIONS:
            projections[stack].append(module)
        elif last in _QUERY_PROJECTIONS and not has_relative_positions:
            queries[stack].append(module)
    layers = {}
    for stack, modules in projections.items():
        names = ("decoder_attention_heads", "num_attention_heads") if stack else ("num_attention_heads",)
        heads = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
        depths = ("num_decoder_layers", "decoder_layers", "num_hidden_layers") if stack else ("num_hidden_layers",)
        depth = next((getattr(config, name) for name in depths if getattr(config, name, None)), None)
        if modules and (not isinstance(heads, int) or len(modules) != depth):
            raise CtxError(
                f"The attention heads of {type(base).__name__} cannot be located.",
                hint="use a model of this package; most checkpoints of transformers can be opened with it.",
            )
        query_projections = queries[stack] if len(queries[stack]) == len(modules) else [None] * len(modules)
        for number, (module, query_proj) in enumerate(zip(modules, query_projections, strict=True)):
            name = f"{stack}{number}"
            layers[name] = AttentionLayer(name, number, tuple(range(heads)), module, query_proj)  # type: ignore[arg-type]
    return layers


def parse_heads(text: str) -> dict[str, list[int]]:
    """Parse a selection in the notation of the command line, `LAYER:HEAD,HEAD;LAYER:HEAD`.

    Example:
        >>> parse_heads("0:1,3;decoder.2:5")
        {'0': [1, 3], 'decoder.2': [5]}

    Raises:
        CtxError: The text has another form.
    """
    selection: dict[str, list[int]] = {}
    for selector in filter(None, (item.strip() for item in text.split(";"))):
        match = re.fullmatch(r"((?:encoder\.|decoder\.|cross\.)?\d+)\s*:\s*(\d+(?:\s*,\s*\d+)*)", selector)
        if match is None:
            raise CtxError(
                f"{selector!r} does not select heads.", hint="write LAYER:HEAD,HEAD;LAYER:HEAD, such as 0:1,3;2:5."
            )
        selection.setdefault(match[1], []).extend(map(int, match[2].split(",")))
    if not selection:
        raise CtxError("No heads are selected.", hint="write LAYER:HEAD,HEAD;LAYER:HEAD, such as 0:1,3;2:5.")
    return selection


def select_heads(model: nn.Module, heads: HeadSelection) -> list[tuple[AttentionLayer, tuple[int, ...]]]:
    """The selected layers, each with the sorted numbers of its selected heads.

    Raises:
        CtxError: The model has no such layer or head.
    """
    layers = attention_layers(model)
    selected: dict[str, set[int]] = {}
    for key, numbers in heads.items():
        name = str(key).removeprefix("encoder.")
        if name not in layers:
            raise CtxError(
                f"{type(model).__name__} has no attention in a layer {name!r}.",
                hint=f"use one of {_abbreviated(layers)}.",
            )
        numbers = set(numbers)
        if unknown := sorted(numbers - set(layers[name].heads)):
            raise CtxError(
                f"Layer {name} of {type(model).__name__} has no head {', '.join(map(str, unknown))}.",
                hint=f"use heads among {_abbreviated(layers[name].heads)}.",
            )
        selected.setdefault(name, set()).update(numbers)
    return [(layers[name], tuple(sorted(numbers))) for name, numbers in selected.items() if numbers]


def _abbreviated(values: Iterable[Any]) -> str:
    names = [str(value) for value in values]
    return ", ".join(names if len(names) <= 12 else [*names[:6], "...", *names[-3:]])


@torch.no_grad()
def prune_heads(model: nn.Module, heads: HeadSelection) -> None:
    """Remove heads from a model of this package: its projections become smaller (Michel et al. 2019, section 4).

    The outputs are the same as with these heads disabled (mode "zero"). The configuration gets the field
    `pruned_heads`, by which the saved model is opened. Heads keep their numbers in later calls.

    Raises:
        CtxError: There is no such head; a layer would have no head; layers that share their weights are not pruned
            equally (ALBERT); projections are quantized, adapted or tied; or the model is of transformers, whose
            classes have no place for pruned heads since version 5.
    """
    selected = select_heads(model, heads)
    _check_prunable(model, selected)
    base: Any = getattr(model, "base_model", model)
    pruned = {name: set(numbers) for name, numbers in (getattr(base.config, PRUNED_HEADS, None) or {}).items()}
    _prune(selected)
    for layer, numbers in selected:
        pruned[layer.name] = pruned.get(layer.name, set()) | set(numbers)
    for config in (model.config, base.config):
        if config.model_type == base.config.model_type:  # type: ignore[union-attr]
            setattr(config, PRUNED_HEADS, {name: sorted(numbers) for name, numbers in pruned.items()})


def apply_pruned_heads(model: nn.Module) -> None:
    """Prune the heads in `config.pruned_heads` of a model under construction; without effect if they are pruned.

    Raises:
        CtxError: The model has no such head, or its layers share weights and are not pruned equally.
    """
    base: Any = getattr(model, "base_model", model)
    pruned = getattr(base.config, PRUNED_HEADS, None)
    if not pruned:
        return
    layers = attention_layers(base)
    has_decoder = any(name.startswith("decoder.") for name in layers)
    remaining: dict[int | str, list[int]] = {}
    for name, numbers in pruned.items():
        if name in layers:
            pruned_before = set(range(layers[name].module.initial_num_heads)) - set(layers[name].heads)
            remaining[name] = [number for number in numbers if number not in pruned_before]
        elif has_decoder or name.isdecimal():  # the encoder of an encoder-decoder can be opened alone
            remaining[name] = numbers
    selected = select_heads(base, remaining)
    _check_prunable(base, selected)
    _prune(selected)


def _prune(selected: list[tuple[AttentionLayer, tuple[int, ...]]]) -> None:
    pruned_ids: set[int] = set()
    for layer, numbers in selected:
        if id(layer.module) not in pruned_ids:
            layer.module.prune_heads(numbers)
            pruned_ids.add(id(layer.module))


def check_shared_layers(model: nn.Module, selected: list[tuple[AttentionLayer, tuple[int, ...]]]) -> None:
    """Raise CtxError unless the same heads are selected in all layers that share their weights (ALBERT)."""
    numbers_by_name = {layer.name: numbers for layer, numbers in selected}
    layers = attention_layers(model)
    for layer, numbers in selected:
        sharing = [name for name, module in layers.items() if module.out_proj is layer.out_proj]
        if any(numbers_by_name.get(name) != numbers for name in sharing):
            raise CtxError(
                f"The layers {_abbreviated(sharing)} of {type(model).__name__} share their weights.",
                hint="select the same heads in all of them, or use disabled_heads.",
            )


def _check_prunable(model: nn.Module, selected: list[tuple[AttentionLayer, tuple[int, ...]]]) -> None:
    check_shared_layers(model, selected)
    for layer, numbers in selected:
        if layer.module is None:
            raise CtxError(
                f"The heads of {type(model).__name__} cannot be pruned: transformers has no layout for it.",
                hint="open the checkpoint with a family of this package, or use disabled_heads.",
            )
        if len(numbers) == len(layer.heads):
            raise CtxError(f"Layer {layer.name} would have no head.", hint="leave at least one head in each layer.")
        for name, projection in layer.module.named_children():
            if type(projection) is not nn.Linear or type(projection.weight) is not nn.Parameter:
                raise CtxError(
                    f"{name} of layer {layer.name} is a {type(projection).__name__}, not a plain linear layer.",
                    hint="prune the model before quantizing or adapting it.",
                )
    parameter_ids = {id(parameter) for layer, _ in selected for parameter in layer.module.parameters()}
    modules = {id(layer.module): layer.module for layer, _ in selected}
    count = sum(id(parameter) in parameter_ids for _, parameter in model.named_parameters(remove_duplicate=False))
    if count > sum(len(list(module.parameters())) for module in modules.values()):
        raise CtxError(
            f"The attention weights of {type(model).__name__} are tied to another module.",
            hint="prune a model without its generator.",
        )


def prune_projections(attention: Any, heads: Iterable[int], inputs: Mapping[nn.Linear, int]) -> list[int]:
    """Remove heads from the projections of an attention module, in place; returns the indices of the remaining ones.

    Args:
        attention: A module with the attributes `heads`, `num_heads`, `head_dim` and `out_proj`.
        inputs: Projection -> number of the tensors (queries, keys, values) that it computes for all heads.
    """
    removed = set(heads)
    indices = [index for index, head in enumerate(attention.heads) if head not in removed]
    width = attention.num_heads * attention.head_dim
    features = torch.arange(width, device="cpu").view(-1, attention.head_dim)[indices].flatten()
    for projection, count in inputs.items():
        _select_features(projection, torch.cat([features + number * width for number in range(count)]), 0)
    _select_features(attention.out_proj, features, 1)
    attention.heads = tuple(attention.heads[index] for index in indices)
    attention.num_heads = len(indices)
    return indices


def _select_features(layer: nn.Linear, features: Tensor, dim: int) -> None:
    """Remove all but some output (`dim` 0) or input (`dim` 1) features."""
    layer.weight = select_slices(layer.weight, features, dim)
    if dim == 0 and layer.bias is not None:
        layer.bias = select_slices(layer.bias, features, 0)
    layer.out_features, layer.in_features = layer.weight.shape


def select_slices(parameter: Tensor, indices: Tensor, dim: int) -> nn.Parameter:
    """A parameter of the slices with these indices."""
    selected = parameter.index_select(dim, indices.to(parameter.device))
    return nn.Parameter(selected, requires_grad=parameter.requires_grad)
