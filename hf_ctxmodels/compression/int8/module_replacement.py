"""Replacement of a model's linear layers, embeddings and recurrent layers by int8 modules, and their tied weights."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_ctxmodels.compression.int8.modules import ActivationScale, Int8Embedding, Int8Linear, Int8Rows
from hf_ctxmodels.compression.int8.quantization import range_of
from hf_ctxmodels.core.adapter_support import is_adapter_parameter
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.linear import is_plain_linear
from hf_ctxmodels.layers.recurrent.rnn import GRU, LSTM
from hf_ctxmodels.layers.transformer import ScaledEmbedding

_MIN_FEATURES = 8  # of inputs and outputs; a classifier with few labels stays in float32
_RECURRENT_PARAMETERS = ("state_weight", "projection")  # stored as int8

InputRanges = Mapping[str, tuple[float, float]]
"""Name of a linear layer -> minimum and maximum of its inputs."""


def find_replaceable_modules(model: nn.Module, *, embeddings: bool, skipped: Collection[str] = ()) -> list[str]:
    """Names of the modules that can be quantized to int8; adapters stay in float32.

    Args:
        model: A model in float32 or half precision.
        embeddings: Whether to include embeddings.
        skipped: Modules to exclude with their submodules: names, or last components of names.

    Raises:
        CtxError: A skipped name matches no module.
    """
    names = [name for name, _ in model.named_modules()]
    for skipped_name in skipped:
        if not any(_is_inside(name, skipped_name) for name in names):
            raise CtxError(
                f"There is no module {skipped_name!r} in {type(model).__name__}.",
                location="skip",
                hint=f"use a name or its last component, for example of {', '.join(names[-4:])}.",
            )
    return [
        name
        for name, module in model.named_modules()
        if _is_replaceable(module, embeddings)
        and not is_adapter_parameter(name)
        and not any(_is_inside(name, skipped_name) for skipped_name in skipped)
    ]


def _is_inside(name: str, outer: str) -> bool:
    return f".{outer}." in f".{name}."


def _is_replaceable(module: nn.Module, embeddings: bool) -> bool:
    if isinstance(module, LSTM | GRU):
        return not parametrize.is_parametrized(module) and "input_maps" not in module._modules
    if isinstance(module, nn.Embedding):
        is_plain = type(module).forward in (nn.Embedding.forward, ScaledEmbedding.forward)
        return embeddings and is_plain and module.embedding_dim >= _MIN_FEATURES
    return is_plain_linear(module) and min(module.weight.shape) >= _MIN_FEATURES


@torch.no_grad()
def replace_modules(
    model: nn.Module,
    names: Collection[str],
    activations: ActivationScale = "token",
    ranges: InputRanges | None = None,
    *,
    empty: bool = False,
) -> None:
    """Replace modules in place by int8 modules, and update the tied weights.

    Args:
        model: The model.
        names: Names from `find_replaceable_modules`.
        activations: As in `Int8Linear`.
        ranges: Input ranges of the linear layers, for static scales.
        empty: Leave the weights uninitialised, to load them from a file.

    Raises:
        CtxError: Scales are static, and a linear layer had no input in the calibration.
    """
    replacements: dict[int, nn.Module] = {}
    for name in names:
        module = model.get_submodule(name)
        mark_initialized(model, name)
        if isinstance(module, LSTM | GRU):
            _quantize_recurrent_layer(module, name, activations, ranges, empty)
        elif isinstance(module, nn.Embedding):
            factor = module.embedding_dim**0.5 if isinstance(module, ScaledEmbedding) else 1.0
            embedding = Int8Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, factor)
            replacements[id(module)] = embedding if empty else embedding.fill(module.weight)
        else:
            replacements[id(module)] = _new_linear(module.weight, module.bias, name, activations, ranges, empty)
    for parent in [*model.modules()]:
        for child_name, child in parent._modules.items():
            if id(child) in replacements:
                parent._modules[child_name] = replacements[id(child)]
    if isinstance(model, PreTrainedModel):
        _tie_weights(model)


def mark_initialized(model: nn.Module, name: str) -> None:
    """Mark a module and its parents as initialised, so that transformers does not initialise its weights."""
    components = name.split(".")
    for depth in range(1, len(components) + 1):
        module = model.get_submodule(".".join(components[:depth]))
        if not isinstance(module, PreTrainedModel):
            module._is_hf_initialized = True  # type: ignore[assignment]


def _new_linear(
    weight: Any, bias: Any, name: str, activations: ActivationScale, ranges: InputRanges | None, empty: bool
) -> Int8Linear:
    if empty:
        return Int8Linear(weight.shape[1], weight.shape[0], bias is not None, activations)
    if activations == "static" and name not in (ranges or {}):
        raise CtxError(
            f"{name} had no input in the calibration.",
            location="activations static",
            hint="calibrate with inputs that use it, or exclude it by `skip`.",
        )
    input_range = (ranges or {})[name] if activations == "static" else None
    return Int8Linear.from_weight(weight, bias, activations, input_range)


def _quantize_recurrent_layer(
    layer: Any, name: str, activations: ActivationScale, ranges: InputRanges | None, empty: bool
) -> None:
    """Replace the input projection, which runs for all steps at once, by int8 linear layers; the other weights are
    stored as int8 and dequantized."""
    activations = "token" if activations == "static" else activations  # the directions have no calibrated inputs
    projections = [_new_linear(weight, None, name, activations, ranges, empty) for weight in layer.input_weight]
    del layer.input_weight
    layer.input_weight, layer.input_maps = None, nn.ModuleList(projections)
    for parameter in _RECURRENT_PARAMETERS:
        if getattr(layer, parameter, None) is not None:
            getattr(layer, parameter).requires_grad_(False)  # integer codes have no gradient
            parametrize.register_parametrization(layer, parameter, Int8Rows(), unsafe=True)


def _tie_weights(model: PreTrainedModel) -> None:
    """Tie codes and scales of tied weights that are both quantized."""
    tied_keys = dict(_tied_keys(model, model.all_tied_weights_keys))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._tied_weights_keys = {}
            module.all_tied_weights_keys = {}
    model._tied_weights_keys = model.all_tied_weights_keys = tied_keys
    for target, source in tied_keys.items():
        parent, _, name = target.rpartition(".")
        setattr(model.get_submodule(parent), name, model.get_parameter_or_buffer(source))


def _tied_keys(model: PreTrainedModel, weight_keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for target, source in weight_keys.items():
        if {target, source} <= names:
            yield target, source
        target_module, source_module = target.removesuffix(".weight"), source.removesuffix(".weight")
        for parameter in ("codes", "code_scale"):
            if {f"{target_module}.{parameter}", f"{source_module}.{parameter}"} <= names:
                yield f"{target_module}.{parameter}", f"{source_module}.{parameter}"


def names_in_class(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """Module names of a checkpoint as names in a model that may be its encoder alone, or have a head."""
    prefix = f"{model.base_model_prefix}."
    has_head = hasattr(model, model.base_model_prefix)
    for name in names:
        yield name
        if has_head:
            yield prefix + name
        elif name.startswith(prefix):
            yield name.removeprefix(prefix)


class RangeRecorder:
    """Context manager that records the input ranges of linear layers.

    Args:
        model: A model in float32.
        names: Names of linear layers.

    Attributes:
        ranges: Name -> minimum and maximum of the inputs; the range includes 0.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self.ranges: dict[str, tuple[float, float]] = {}
        modules = {name: model.get_submodule(name) for name in names}
        self._linear_layers = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
        self._handles: list[Any] = []

    def __enter__(self) -> "RangeRecorder":
        for name, module in self._linear_layers.items():
            hook = partial(self._record, name)
            self._handles.append(module.register_forward_pre_hook(hook))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        minimum, maximum = range_of(arguments[0].detach().float())
        recorded = self.ranges.get(name, (0.0, 0.0))
        self.ranges[name] = (min(recorded[0], minimum), max(recorded[1], maximum))
