"""The reference: a page for each package, with the docstrings of its modules; for families, sizes and fields too."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import getdoc, isclass, isfunction
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

from docstrings import list_table
from transformers import PreTrainedConfig

import hf_ctxmodels
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels_cli import PROGRAM

PACKAGE = hf_ctxmodels.__name__
# Rooms without an API: a command is documented by its flags, and benchmarks by their command.
_NOT_API = ("cli", "__main__")
# Modules of compiled loops; to import one takes the extra `words`.
_COMPILED = ("window_kernels", "sgd_kernel", "prefetch", "adagrad_kernel")


def objectives() -> dict[type[Objective], list[tuple[str, FamilySpec]]]:
    """Objective -> the names by which families know it."""
    found: dict[type[Objective], list[tuple[str, FamilySpec]]] = {}
    for family in FAMILIES.values():
        for name, objective in family.objectives.items():
            found.setdefault(objective, []).append((name, family))
    return found


def api_pages() -> dict[str, str]:
    """Path of a page -> its text, and the list of the uppermost pages."""
    made, below = {}, {}
    for name, modules in api_packages().items():
        path = name.removeprefix(f"{PACKAGE}.").replace(".", "/")
        made[f"api/{path}.rst"] = _package_page(name, modules)
        below[name] = path
    top = [path for name, path in below.items() if name.count(".") == 1]
    made["_parts/api.md"] = "\n".join(
        [*(f"- [{path}]({path}.rst): {_summary(f'{PACKAGE}.{path}')}" for path in top), "", toctree(top)]
    )
    return made


@cache
def api_packages() -> dict[str, list[str]]:
    """Package, or module directly in the package -> its public modules, all in order of their names."""
    found: dict[str, list[str]] = {}
    for info in walk_packages(hf_ctxmodels.__path__, f"{PACKAGE}."):
        parts = info.name.split(".")
        if parts[1] in _NOT_API or parts[-1] in _COMPILED:
            continue
        if info.ispkg:
            found.setdefault(info.name, [])
        elif len(parts) == 2:
            found[info.name] = [info.name]
        else:
            found.setdefault(info.name.rpartition(".")[0], []).append(info.name)
    return found


def _summary(name: str) -> str:
    return (getdoc(import_module(name)) or "").partition("\n\n")[0].replace("\n", " ")


def _package_page(name: str, modules: list[str]) -> str:
    lines = [*title(name.removeprefix(f"{PACKAGE}."))]
    family = next((each for each in FAMILIES.values() if each.config.__module__.startswith(f"{name}.")), None)
    if name not in modules:
        lines += [f".. automodule:: {name}", "    :no-members:", ""]
    inner = [other for other in api_packages() if other.rpartition(".")[0] == name]
    if inner:
        here = name.rpartition(".")[2]
        lines += [
            ".. toctree::",
            "    :maxdepth: 1",
            "",
            *(f"    {here}/{each.rpartition('.')[2]}" for each in inner),
            "",
        ]
    if family:
        lines += _family_facts(family)
    for module in modules:
        if len(modules) > 1 or name not in modules:
            lines += title(module.removeprefix(f"{name}."), "-")
        elsewhere = sorted(_on_objective_pages() & _own_names(import_module(module)))
        lines += [
            f".. automodule:: {module}",
            *([f"    :exclude-members: {', '.join(elsewhere)}"] if elsewhere else []),
        ]
        lines.append("")
    return "\n".join(lines)


def _on_objective_pages() -> set[str]:
    collators = {collator_of(objective) for objective in objectives()}
    return {each.__name__ for each in (*objectives(), *collators)}


def collator_of(objective: type[Objective]) -> type:
    """The collator class of an objective, its first base with the name of a collator."""
    return next(base for base in objective.__mro__ if base.__name__.startswith("DataCollatorFor"))


def _family_facts(family: FamilySpec) -> list[str]:
    """The card, and tables of the sizes and of the configuration's fields."""
    known = {entry.name for entry in fields(PreTrainedConfig)}  # type: ignore[arg-type]
    own = [entry for entry in fields(family.config) if entry.name not in known]  # type: ignore[arg-type]
    chosen = [["size", "fields"]]
    for size, changed in family.sizes.items():
        chosen.append([f"`{size}`", ", ".join(f"`{key}={value}`" for key, value in changed.items()) or "the defaults"])
    defaults = [["field", "default"], *([f"`{entry.name}`", f"`{_default(entry)!r}`"] for entry in own)]
    lines = [f":doc:`Card of the family </families/{family.name}>`.", ""]
    lines += [*title("Sizes", "-"), f"Values of ``{PROGRAM} pretrain --family {family.name} --config``.", ""]
    lines += [*list_table(chosen, _plain), "", *title("Fields of the configuration", "-")]
    lines += [f"What each means is said in :py:class:`~{full_name(family.config)}` and its bases.", ""]
    return [*lines, *list_table(defaults, _plain), ""]


def _default(entry: Any) -> Any:
    return entry.default_factory() if callable(entry.default_factory) else entry.default


def _plain(text: str) -> str:
    return text.replace("`", "``")


def _own_names(module: ModuleType) -> set[str]:
    """Public classes and functions that the module defines and describes."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (isclass(value) or isfunction(value)) and value.__module__ == module.__name__
        if value.__doc__
    }


@cache
def links() -> dict[str, str]:
    """Name as docstrings write it -> full name, of everything in the reference whose short name is unique."""
    found: dict[str, set[str]] = {}
    for modules in api_packages().values():
        for module_name in modules:
            module = import_module(module_name)
            found.setdefault(module_name, set()).add(module_name)
            for name, full in _names_within(module):
                found.setdefault(name, set()).add(full)
                found.setdefault(full, set()).add(full)
    return {name: full.pop() for name, full in found.items() if len(full) == 1}


def _names_within(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name in _own_names(module):
        full = f"{module.__name__}.{name}"
        yield name, full
        for member, value in vars(getattr(module, name)).items():
            described = isfunction(value) or isinstance(value, classmethod | staticmethod | property)
            if isclass(getattr(module, name)) and described and not member.startswith("_") and value.__doc__:
                yield f"{name}.{member}", f"{full}.{member}"


def full_name(kind: type) -> str:
    """Under which Sphinx knows a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def title(text: str, line: str = "=") -> list[str]:
    """Lines of a heading in reStructuredText."""
    return [text, line * len(text), ""]


def toctree(names: Iterable[str]) -> str:
    """Pages below a Markdown page, relative to it, for the navigation alone."""
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```", ""])
