"""Selection and replacement of modules, and recording of their inputs, for all methods of compression."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError

MIN_FEATURES = 8
"""Linear layers with fewer inputs or outputs, such as a classifier with few labels, are not compressed."""


def match_modules(model: nn.Module, names: Iterable[str], location: str) -> set[str]:
    """Names of modules that are selected by names or last components of names, with their submodules; raises CtxError
    if there is no module of a name."""
    modules = dict(model.named_modules())
    selected: set[str] = set()
    for name in names:
        matches = {module_name for module_name in modules if f".{name}." in f".{module_name}."}
        if not matches:
            raise CtxError(
                f"There is no module {name!r} in {type(model).__name__}.",
                location=location,
                hint=f"use a name or its last component, for example of {', '.join([*modules][-4:])}.",
            )
        selected |= matches
    return selected


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


def mark_initialized(model: nn.Module, name: str) -> None:
    """Mark a module and its parents as initialized, so that transformers does not initialize its weights."""
    components = name.split(".")
    for depth in range(1, len(components) + 1):
        module = model.get_submodule(".".join(components[:depth]))
        if not isinstance(module, PreTrainedModel):
            module._is_hf_initialized = True  # type: ignore[assignment]


def replace_children(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Replace modules, `id` of a module -> its replacement, in all their parents."""
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if id(child) in replacements:
                parent._modules[name] = replacements[id(child)]


@contextmanager
def watch_inputs(
    model: nn.Module, names: Collection[str], record: Callable[[str, nn.Module, Tensor], None]
) -> Iterator[None]:
    """Call `record(name, module, input)` before each forward pass of the named modules, while the `with` body runs."""

    def call(name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        record(name, module, arguments[0].detach())

    handles = [
        module.register_forward_pre_hook(partial(call, name)) for name, module in model.named_modules() if name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
