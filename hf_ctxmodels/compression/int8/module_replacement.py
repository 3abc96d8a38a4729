"""Where maps and tables of 8 bits stand in a model: replacement, and what is tied."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_ctxmodels.compression.int8.modules import ActivationScale, Int8Embedding, Int8Linear, Int8Rows
from hf_ctxmodels.compression.int8.quantization import range_of
from hf_ctxmodels.core.adapter_files import is_adapter_parameter
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.linear import is_plain_linear
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.transformer import ScaledEmbedding

_LEAST_WIDTH = 8  # of the inputs and the outputs; a classifier of a few labels stays in single precision
_RECURRENT = ("state_weight", "projection")  # parameters that are stored with 8 bits

InputRanges = Mapping[str, tuple[float, float]]


def find_replaceable_modules(model: nn.Module, *, embeddings: bool, skipped: Collection[str] = ()) -> list[str]:
    """Names of the modules that can have weights of 8 bits; adapters stay in single precision.

    Args:
        model: In single or half precision.
        embeddings: Whether tables count.
        skipped: Modules that stay as they are, with all that is in them: paths, or last parts of paths.

    Raises:
        CtxError: A skipped name is that of no module.
    """
    paths = [name for name, _ in model.named_modules()]
    for name in skipped:
        if not any(_lies_in(path, name) for path in paths):
            raise CtxError(
                f"There is no module {name!r} in {type(model).__name__}.",
                location="skip",
                hint=f"give a path, or its last part, of for example {', '.join(paths[-4:])}.",
            )
    return [
        path
        for path, module in model.named_modules()
        if _is_replaceable(module, embeddings)
        and not is_adapter_parameter(path)
        and not any(_lies_in(path, name) for name in skipped)
    ]


def _lies_in(path: str, name: str) -> bool:
    return f".{name}." in f".{path}."


def _is_replaceable(module: nn.Module, embeddings: bool) -> bool:
    if isinstance(module, LSTM | GRU):
        return not parametrize.is_parametrized(module) and "input_maps" not in module._modules
    if isinstance(module, nn.Embedding):
        plain = type(module).forward in (nn.Embedding.forward, ScaledEmbedding.forward)
        return embeddings and plain and module.embedding_dim >= _LEAST_WIDTH
    return is_plain_linear(module) and min(module.weight.shape) >= _LEAST_WIDTH


@torch.no_grad()
def replace(
    model: nn.Module,
    names: Collection[str],
    activations: ActivationScale = "token",
    ranges: InputRanges | None = None,
    *,
    empty: bool = False,
) -> None:
    """Put modules of 8 bits in the place of others, wherever these stand, and adapt what is tied.

    Args:
        model: Changed in place.
        names: Of `find_replaceable_modules`.
        activations: As in `Int8Linear`.
        ranges: The least and the largest input of each map, for static scales.
        empty: Whether weights are read from a file later.

    Raises:
        CtxError: A static scale is asked for, and a map had no input in the calibration.
    """
    made: dict[int, nn.Module] = {}
    for name in names:
        module = model.get_submodule(name)
        mark_initialized(model, name)
        if isinstance(module, LSTM | GRU):
            _convert_recurrence(module, name, activations, ranges, empty)
        elif isinstance(module, nn.Embedding):
            factor = module.embedding_dim**0.5 if isinstance(module, ScaledEmbedding) else 1.0
            table = Int8Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, factor)
            made[id(module)] = table if empty else table.fill(module.weight)
        else:
            made[id(module)] = _map(module.weight, module.bias, name, activations, ranges, empty)
    for parent in [*model.modules()]:
        for child, old in parent._modules.items():
            if id(old) in made:
                parent._modules[child] = made[id(old)]
    if isinstance(model, PreTrainedModel):
        _tie(model)


def mark_initialized(model: nn.Module, name: str) -> None:
    """transformers draws no initial weights for what is around a module, which may set those of the module."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        around = model.get_submodule(".".join(parts[:depth]))
        if not isinstance(around, PreTrainedModel):
            around._is_hf_initialized = True  # type: ignore[assignment]


def _map(
    weight: Any, bias: Any, name: str, activations: ActivationScale, ranges: InputRanges | None, empty: bool
) -> Int8Linear:
    if empty:
        return Int8Linear(weight.shape[1], weight.shape[0], bias is not None, activations)
    if activations == "static" and name not in (ranges or {}):
        raise CtxError(
            f"The calibration gave {name} no input.",
            location="activations static",
            hint="calibrate with inputs that use it, or leave it out by `skip`.",
        )
    return Int8Linear.of(weight, bias, activations, None if activations != "static" else (ranges or {})[name])


def _convert_recurrence(
    layer: Any, name: str, activations: ActivationScale, ranges: InputRanges | None, empty: bool
) -> None:
    """All inputs of a recurrence are multiplied at once, by maps; its other weights are stored with 8 bits."""
    activations = "token" if activations == "static" else activations  # a direction has no calibrated input
    maps = [_map(weight, None, name, activations, ranges, empty) for weight in layer.input_weight]
    del layer.input_weight
    layer.input_weight, layer.input_maps = None, nn.ModuleList(maps)
    for parameter in _RECURRENT:
        if getattr(layer, parameter, None) is not None:
            getattr(layer, parameter).requires_grad_(False)  # codes cannot have a gradient
            parametrize.register_parametrization(layer, parameter, Int8Rows(), unsafe=True)


def _tie(model: PreTrainedModel) -> None:
    """Codes and scales are tied where the weights were, if both sides have them."""
    tied = dict(_tied_parts(model, model.all_tied_weights_keys))
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            each._tied_weights_keys = {}
            each.all_tied_weights_keys = {}
    model._tied_weights_keys = model.all_tied_weights_keys = tied
    for target, source in tied.items():
        parent, _, last = target.rpartition(".")
        setattr(model.get_submodule(parent), last, model.get_parameter_or_buffer(source))


def _tied_parts(model: PreTrainedModel, tied: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for target, source in tied.items():
        if {target, source} <= names:
            yield target, source
        places = [name.removesuffix(".weight") for name in (target, source)]
        for part in ("codes", "code_scale"):
            if {f"{place}.{part}" for place in places} <= names:
                yield f"{places[0]}.{part}", f"{places[1]}.{part}"


def names_in_class(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """Paths of a checkpoint in a model that may be its encoder alone, or have a head on it."""
    prefix = f"{model.base_model_prefix}."
    has_head = hasattr(model, model.base_model_prefix)
    for name in names:
        yield name
        if has_head:
            yield prefix + name
        elif name.startswith(prefix):
            yield name.removeprefix(prefix)


class RangeRecorder:
    """Context that records the least and the largest input of maps.

    Args:
        model: In single precision.
        names: Of maps.

    Attributes:
        ranges: Name -> least and largest input, with 0 between them.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self.ranges: dict[str, tuple[float, float]] = {}
        modules = {name: model.get_submodule(name) for name in names}
        self._maps = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
        self._hooks: list[Any] = []

    def __enter__(self) -> "RangeRecorder":
        for name, module in self._maps.items():
            self._hooks.append(module.register_forward_pre_hook(lambda _, given, name=name: self._note(name, given[0])))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, states: Tensor) -> None:
        least, largest = range_of(states.detach().float())
        known = self.ranges.get(name, (0.0, 0.0))
        self.ranges[name] = (min(known[0], least), max(known[1], largest))
