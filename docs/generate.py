"""The pages of the site that are made from the code, the model cards, the recipes and the pages of the repository.

Nothing of them is stored: `pages` gives every text for one build. Pages written by hand lie beside this file.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import formatannotation, getdoc, isclass, isfunction
from pathlib import Path, PurePosixPath
from pkgutil import walk_packages
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest.mock import patch

from docstrings import list_table, to_rst
from transformers import HfArgumentParser, PreTrainedConfig

import hf_ctxmodels
from hf_ctxmodels.cli import COMMANDS, PROGRAM
from hf_ctxmodels.commands.recipes import first_sentence
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.recipe import packaged_folder

ROOT = Path(__file__).parents[1]
PACKAGE = hf_ctxmodels.__name__
# Rooms without an API: a command is documented by its flags, and benchmarks by their command.
_NOT_API = ("commands", "benchmarks", "cli", "__main__")
# Modules of compiled loops; to import one takes the extra `words`.
_COMPILED = ("window_kernels", "sgd_kernel", "prefetch", "adagrad_kernel")
# How-to pages that go on from one another.
_IN_ORDER = ("pretrain", "finetune", "publish", "convert")

Pages = dict[str, str]


def pages() -> Pages:
    """Path of a page (or of a part that a page includes) -> its text."""
    return {**_repository_pages(), **_objective_pages(), **_command_pages(), **_recipe_page(), **_api_pages()}


# Pages of the repository


def _places() -> dict[str, str]:
    """Path in the repository -> path in the site, of the pages that lie in both."""
    cards = (ROOT / "model_cards").rglob("*.md")
    names = [path.relative_to(ROOT / "model_cards").as_posix() for path in cards if path.name != "template.md"]
    return {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
        **{f"model_cards/{name}": f"families/{name.replace('README', 'index')}" for name in names},
    }


def images() -> dict[str, Path]:
    """Path in the site -> file, of the pictures of the cards."""
    return {f"families/{path.name}": path for path in (ROOT / "model_cards").glob("*.png")}


def adapted(text: str, source: str, place: str) -> str:
    """A text of the repository's page `source` for the page `place`: links lead to the site's pages.

    A link to a file that the site lacks becomes its words.
    """
    places = {**_places(), **{f"model_cards/{path.name}": name for name, path in images().items()}}

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found["words"], found["path"], found["anchor"] or ""
        if not target or "://" in target:
            return found[0]
        known = places.get((PurePosixPath(source).parent / target).as_posix())
        return f"{words}({_relative(known, place)}{anchor})" if known else words.strip("![]")

    return re.sub(r"(?P<words>!?\[[^][]*\])\((?P<path>[^()#\s]*)(?P<anchor>#[^()\s]*)?\)", link, text)


def _relative(target: str, place: str) -> str:
    """The path of one page of the site from another."""
    up = "../" * (len(PurePosixPath(place).parts) - 1)
    return up + target


def _read(source: str) -> str:
    return (ROOT / source).read_text(encoding="utf-8")


def _section(text: str, heading: str) -> str:
    """A section of a page with its heading, up to the next heading of its level."""
    level = heading.partition(" ")[0]
    found = re.search(rf"^{re.escape(heading)}\n.*?(?=^{level} |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise LookupError(f"README.md has no section {heading!r}, which the site includes.")
    return found[0]


def _repository_pages() -> Pages:
    readme = _read("README.md")
    introduction = readme.partition("\n")[2].partition("\n## ")[0]
    parts = {
        "introduction.md": (introduction + "\n" + _section(readme, "## Why"), "index.md"),
        "families.md": (_section(readme, "## Families"), "index.md"),
        "use.md": (_section(readme, "## Two commands") + _section(readme, "## Use"), "quickstart.md"),
    }
    made = {f"_parts/{name}": adapted(text, "README.md", place) for name, (text, place) in parts.items()}
    for source, place in _places().items():
        if source != "README.md":
            made[place] = adapted(_read(source), source, place)
    for family in FAMILIES.values():
        made[f"families/{family.name}.md"] += (
            f"\n## API\n\n[Classes, fields and sizes](../api/models/{family.name}.rst)\n"
        )
        tried = f"families/experiments/{family.name}.md"
        if tried in made:
            made[f"families/{family.name}.md"] += f"\n```{{toctree}}\n:hidden:\n\nexperiments/{family.name}\n```\n"
    made["families/index.md"] += "\n" + _toctree(family.name for family in FAMILIES.values())
    made["_parts/how-to.md"] = _how_to_list()
    return made


def _how_to_list() -> str:
    """The how-to pages with their titles: those that go on from one another, then the others."""
    found = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "docs" / "how-to").glob("*.md"))}
    names = [*_IN_ORDER, *(name for name in found if name not in (*_IN_ORDER, "index"))]
    titles = [f"- [{found[name].splitlines()[0].removeprefix('# ')}]({name}.md)" for name in names]
    return "\n".join([*titles, "", _toctree(names)])


def _toctree(names: Iterable[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```", ""])


def family_title(family: FamilySpec) -> str:
    """The heading of its card."""
    return _read(family.card).splitlines()[0].removeprefix("# ")


# Objectives


def objectives() -> dict[type[Objective], list[tuple[str, FamilySpec]]]:
    """Objective -> the names by which families know it."""
    found: dict[type[Objective], list[tuple[str, FamilySpec]]] = {}
    for family in FAMILIES.values():
        for name, objective in family.objectives.items():
            found.setdefault(objective, []).append((name, family))
    return found


def _objective_pages() -> Pages:
    made = {f"objectives/{each.__name__}.rst": _objective_page(each, uses) for each, uses in objectives().items()}
    rows = [["objective", "`--objective`", "families"]]
    for each, uses in objectives().items():
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(name for name, _ in uses))
        families = ", ".join(f"[{family_title(family)}](../families/{family.name}.md)" for _, family in uses)
        rows.append([f"[{each.__name__}]({each.__name__}.rst)", names, families])
    table = [f"| {' | '.join(row)} |" for row in rows]
    table.insert(1, "|---|---|---|")
    made["_parts/objectives.md"] = "\n".join([*table, "", _toctree(each.__name__ for each in objectives())])
    return made


def _objective_page(objective: type[Objective], uses: list[tuple[str, FamilySpec]]) -> str:
    collator = get_type_hints(objective)["collate"]
    names = {name: [family for other, family in uses if other == name] for name, _ in uses}
    of = "; ".join(
        f"``--objective {name}`` of " + ", ".join(f":doc:`/families/{family.name}`" for family in families)
        for name, families in names.items()
    )
    lines = [*_title(objective.__name__), f"{of}. Its head: ``{objective.auto_class}``.", ""]
    lines += [f".. autoclass:: {_full_name(objective)}", "", *_title("Options", "-")]
    lines += [*_options(objective, uses[0][0]), *_title("Collator", "-")]
    if first_owner(collator) is objective:
        lines += [f".. autoclass:: {_full_name(collator)}", ""]
    else:
        lines += [f"The collator is :py:class:`~{_full_name(collator)}`.", ""]
    return "\n".join(lines)


@cache
def first_owner(collator: type) -> type[Objective]:
    """The objective whose page documents a collator: the first of those that use it."""
    return next(each for each in objectives() if get_type_hints(each)["collate"] is collator)


def _options(objective: type[Objective], name: str) -> list[str]:
    """Every option with its type, default and explanation."""
    entries = fields(objective.Options)
    if not entries:
        return ["This objective has no options.", ""]
    command = f"``{PROGRAM} pretrain --objective {name} --objective_options NAME=VALUE``"
    collated = "In Python they are keywords of the class."
    lines = [f"{command} sets one or several. {collated}", "", f".. program:: {objective.__name__}", ""]
    for entry in entries:
        lines += [f".. option:: {entry.name}={entry.default}", "", f"    {_help(entry.metadata['help'])}"]
        lines += [f"    Type: {_type_name(entry.type)}.", ""]
    return lines


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"``{value}``" for value in get_args(kind))
    return f"``{formatannotation(kind)}``"


def _help(text: str) -> str:
    return to_rst(text, links()).strip()


# Commands


def _command_pages() -> Pages:
    made = {}
    for command in COMMANDS:
        made[f"commands/{command}.rst"] = _command_page(command)
    lines = [f"- [`{PROGRAM} {command}`]({command}.rst): {what}" for command, what in COMMANDS.items()]
    made["_parts/commands.md"] = "\n".join([*lines, "", _toctree(COMMANDS)])
    return made


class _AskedForArgumentsError(Exception):
    """Raised in place of parsing a command line, to learn what a command's arguments are."""


def command_arguments(command: str) -> tuple[type, ...]:
    """The dataclasses whose fields are the command's flags."""
    module = import_module(f"{PACKAGE}.commands.{command.replace('-', '_')}")
    with patch.object(module, "parse_arguments", side_effect=_AskedForArgumentsError) as asked:
        try:
            module.main()
        except _AskedForArgumentsError:
            return asked.call_args.args
    raise LookupError(f"The command {command} does not parse its arguments first.")


def _command_page(command: str) -> str:
    module = import_module(f"{PACKAGE}.commands.{command.replace('-', '_')}")
    lines = [*_title(f"{PROGRAM} {command}"), to_rst(getdoc(module) or "", links()), ""]
    lines += [f".. program:: {PROGRAM} {command}", ""]
    for kind in command_arguments(command):
        lines += [*_title(kind.__name__, "-"), to_rst(getdoc(kind) or "", links()), ""]
        for action in HfArgumentParser(kind)._actions:
            if action.dest != "help":
                lines += _flag(action)
    if command_arguments(command):
        lines += ["``--recipe NAME`` reads defaults from a file or from one of the :doc:`/recipes`.", ""]
    return "\n".join(lines)


def _flag(action: Any) -> list[str]:
    """A flag with its values, default and help."""
    kind = getattr(action.type, "__name__", "")
    value = "" if action.nargs == 0 else {"str": "TEXT"}.get(kind, kind.upper() if kind in ("int", "float") else "")
    shape = f" {value or 'VALUE'}" + (" ..." if action.nargs in ("+", "*") else "") if action.nargs != 0 else ""
    if action.nargs == "?":  # a switch: its name alone is True
        shape = ""
    lines = [f".. option:: --{action.dest}{shape}", "", f"    {_help((action.help or '').replace('%%', '%'))}"]
    choices = [str(choice) for choice in action.choices or ()]
    if choices:
        lines.append(f"    One of {', '.join(f'``{choice}``' for choice in choices)}.")
    if action.required:
        lines.append("    Required.")
    elif action.default not in (None, [], False, ""):
        lines.append(f"    Default: ``{action.default}``.")
    return [*lines, ""]


# Recipes


def _recipe_page() -> Pages:
    lines = []
    for title, folder in (("Recipes of the package", "recipes"), ("Configurations of accelerate", "accelerate")):
        paths = sorted(packaged_folder(folder).glob("*.yaml"))
        lines += [f"## {title}", "", *(f"- [{path.stem}](#{path.stem}): {first_sentence(path)}" for path in paths), ""]
        for path in paths:
            lines += [f"({path.stem})=", f"### {path.stem}", "", "```yaml", path.read_text("utf-8").rstrip(), "```", ""]
    return {"_parts/recipes.md": "\n".join(lines)}


# Reference of the classes and functions


def _api_pages() -> Pages:
    made, below = {}, {}
    for name, modules in api_packages().items():
        path = name.removeprefix(f"{PACKAGE}.").replace(".", "/")
        made[f"api/{path}.rst"] = _package_page(name, modules)
        below[name] = path
    top = [path for name, path in below.items() if name.count(".") == 1]
    made["_parts/api.md"] = "\n".join(
        [*(f"- [{path}]({path}.rst): {_summary(f'{PACKAGE}.{path}')}" for path in top), "", _toctree(top)]
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
    lines = [*_title(name.removeprefix(f"{PACKAGE}."))]
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
            lines += _title(module.removeprefix(f"{name}."), "-")
        elsewhere = sorted(_on_objective_pages() & _own_names(import_module(module)))
        lines += [
            f".. automodule:: {module}",
            *([f"    :exclude-members: {', '.join(elsewhere)}"] if elsewhere else []),
        ]
        lines.append("")
    return "\n".join(lines)


def _on_objective_pages() -> set[str]:
    collators = {get_type_hints(each)["collate"] for each in objectives()}
    return {each.__name__ for each in (*objectives(), *collators)}


def _family_facts(family: FamilySpec) -> list[str]:
    """The card, and tables of the sizes and of the configuration's fields."""
    known = {entry.name for entry in fields(PreTrainedConfig)}  # type: ignore[arg-type]
    own = [entry for entry in fields(family.config) if entry.name not in known]  # type: ignore[arg-type]
    chosen = [["size", "fields"]]
    for size, changed in family.sizes.items():
        chosen.append([f"`{size}`", ", ".join(f"`{key}={value}`" for key, value in changed.items()) or "the defaults"])
    defaults = [["field", "default"], *([f"`{entry.name}`", f"`{_default(entry)!r}`"] for entry in own)]
    lines = [f":doc:`Card of the family </families/{family.name}>`.", ""]
    lines += [*_title("Sizes", "-"), f"Values of ``{PROGRAM} pretrain --family {family.name} --config``.", ""]
    lines += [*list_table(chosen, _plain), "", *_title("Fields of the configuration", "-")]
    lines += [f"What each means is said in :py:class:`~{_full_name(family.config)}` and its bases.", ""]
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


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _title(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]
