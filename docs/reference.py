"""Pages of the API reference: one for each package, with its docstrings; for families also sizes and fields."""

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
# Packages without an API: commands are documented by their flags.
_NOT_API = ("cli", "__main__")
# Modules with compiled loops, whose import requires numba (the extra `words`) or Triton.
_COMPILED = ("window_kernels", "sgd_kernel", "adagrad_kernel", "lstm_kernels")


def objectives() -> dict[type[Objective], list[tuple[str, FamilySpec]]]:
    """Objective -> its names and the families that use it."""
    uses: dict[type[Objective], list[tuple[str, FamilySpec]]] = {}
    for family in FAMILIES.values():
        for name, objective in family.objectives.items():
            uses.setdefault(objective, []).append((name, family))
    return uses


def api_pages() -> dict[str, str]:
    """Path of a page -> its text, including the list of the top-level pages."""
    generated, paths = {}, {}
    for name, modules in api_packages().items():
        path = name.removeprefix(f"{PACKAGE}.").replace(".", "/")
        generated[f"api/{path}.rst"] = _package_page(name, modules)
        paths[name] = path
    top = [path for name, path in paths.items() if name.count(".") == 1]
    generated["_parts/api.md"] = "\n".join(
        [*(f"- [{path}]({path}.rst): {_summary(f'{PACKAGE}.{path}')}" for path in top), "", toctree(top)]
    )
    return generated


@cache
def api_packages() -> dict[str, list[str]]:
    """Subpackage, or module of the top-level package -> its public modules, sorted by name."""
    modules: dict[str, list[str]] = {}
    for info in walk_packages(hf_ctxmodels.__path__, f"{PACKAGE}."):
        parts = info.name.split(".")
        if parts[1] in _NOT_API or parts[-1] in _COMPILED:
            continue
        if info.ispkg:
            modules.setdefault(info.name, [])
        elif len(parts) == 2:
            modules[info.name] = [info.name]
        else:
            modules.setdefault(info.name.rpartition(".")[0], []).append(info.name)
    return modules


def _summary(name: str) -> str:
    return (getdoc(import_module(name)) or "").partition("\n\n")[0].replace("\n", " ")


def _package_page(name: str, modules: list[str]) -> str:
    lines = [*title(name.removeprefix(f"{PACKAGE}."))]
    family = next((spec for spec in FAMILIES.values() if spec.config.__module__.startswith(f"{name}.")), None)
    if name not in modules:
        lines += [f".. automodule:: {name}", "    :no-members:", ""]
    subpackages = [package for package in api_packages() if package.rpartition(".")[0] == name]
    if subpackages:
        folder = name.rpartition(".")[2]
        lines += [
            ".. toctree::",
            "    :maxdepth: 1",
            "",
            *(f"    {folder}/{package.rpartition('.')[2]}" for package in subpackages),
            "",
        ]
    if family:
        lines += _family_facts(family)
    for module in modules:
        if len(modules) > 1 or name not in modules:
            lines += title(module.removeprefix(f"{name}."), "-")
        excluded = sorted(_names_on_objective_pages() & _own_names(import_module(module)))
        lines += [
            f".. automodule:: {module}",
            *([f"    :exclude-members: {', '.join(excluded)}"] if excluded else []),
        ]
        lines.append("")
    return "\n".join(lines)


def _names_on_objective_pages() -> set[str]:
    collators = {collator_of(objective) for objective in objectives()}
    return {documented.__name__ for documented in (*objectives(), *collators)}


def collator_of(objective: type[Objective]) -> type:
    """The collator class of an objective, the first base class whose name starts with DataCollatorFor."""
    return next(base for base in objective.__mro__ if base.__name__.startswith("DataCollatorFor"))


def _family_facts(family: FamilySpec) -> list[str]:
    """Link to the card, and tables of sizes and configuration fields."""
    inherited = {entry.name for entry in fields(PreTrainedConfig)}  # type: ignore[arg-type]
    config_fields = [entry for entry in fields(family.config) if entry.name not in inherited]  # type: ignore[arg-type]
    sizes = [["size", "fields"]]
    for size, values in family.sizes.items():
        sizes.append([f"`{size}`", ", ".join(f"`{key}={value}`" for key, value in values.items()) or "the defaults"])
    defaults = [["field", "default"], *([f"`{entry.name}`", f"`{_default(entry)!r}`"] for entry in config_fields)]
    lines = [f":doc:`Card of the family </families/{family.name}>`.", ""]
    lines += [*title("Sizes", "-"), f"Values of ``{PROGRAM} pretrain --family {family.name} --config``.", ""]
    lines += [*list_table(sizes, _plain), "", *title("Fields of the configuration", "-")]
    lines += [f"The fields are documented in :py:class:`~{full_name(family.config)}` and its base classes.", ""]
    return [*lines, *list_table(defaults, _plain), ""]


def _default(entry: Any) -> Any:
    return entry.default_factory() if callable(entry.default_factory) else entry.default


def _plain(text: str) -> str:
    return text.replace("`", "``")


def _own_names(module: ModuleType) -> set[str]:
    """Public classes and functions with docstrings that the module defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (isclass(value) or isfunction(value)) and value.__module__ == module.__name__
        if value.__doc__
    }


@cache
def links() -> dict[str, str]:
    """Short name as used in docstrings -> full name, for all documented objects with a unique short name."""
    full_names: dict[str, set[str]] = {}
    for modules in api_packages().values():
        for module_name in modules:
            module = import_module(module_name)
            full_names.setdefault(module_name, set()).add(module_name)
            for name, full in _names_within(module):
                full_names.setdefault(name, set()).add(full)
                full_names.setdefault(full, set()).add(full)
    return {name: candidates.pop() for name, candidates in full_names.items() if len(candidates) == 1}


def _names_within(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name in _own_names(module):
        full = f"{module.__name__}.{name}"
        yield name, full
        for member, value in vars(getattr(module, name)).items():
            is_documented = isfunction(value) or isinstance(value, classmethod | staticmethod | property)
            if isclass(getattr(module, name)) and is_documented and not member.startswith("_") and value.__doc__:
                yield f"{name}.{member}", f"{full}.{member}"


def full_name(documented_class: type) -> str:
    """Qualified name of a class for Sphinx."""
    return f"{documented_class.__module__}.{documented_class.__qualname__}"


def title(text: str, line: str = "=") -> list[str]:
    """Heading in reStructuredText, as lines."""
    return [text, line * len(text), ""]


def toctree(names: Iterable[str]) -> str:
    """Hidden table of contents of a Markdown page, for the navigation."""
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```", ""])
