"""The pages of the site that are made from the code, the model cards, the recipes and the pages of the repository.

Nothing of them is stored: `pages` gives every text for one build. Pages written by hand lie beside this file.
"""

import re
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import cache
from importlib import import_module
from inspect import cleandoc, formatannotation, getdoc
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest.mock import patch

from docstrings import to_rst
from reference import PACKAGE, api_pages, collator_of, full_name, links, objectives, title, toctree

from hf_ctxmodels.cli.recipes import first_sentence
from hf_ctxmodels.core.flags import REQUIRED, field_default, is_choice, is_settable
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.recipe import Section, metavar, packaged_folder, shown_fields
from hf_ctxmodels_cli import COMMANDS, GROUPS, PROGRAM, Command, CommandGroup

ROOT = Path(__file__).parents[1]
# How-to pages that go on from one another.
_IN_ORDER = ("pretrain", "finetune", "distill", "generate", "publish", "convert")

Pages = dict[str, str]


def pages() -> Pages:
    """Path of a page (or of a part that a page includes) -> its text."""
    return {**_repository_pages(), **_objective_pages(), **_command_pages(), **_recipe_page(), **api_pages()}


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
    # cards of models that are no family of their own, and what was tried for something else
    others = [place.removeprefix("families/").removesuffix(".md") for place in made if place.startswith("families/")]
    others = [each for each in others if each != "index" and Path(each).stem not in FAMILIES]
    made["families/index.md"] += "\n" + toctree([*FAMILIES, *others])
    made["_parts/how-to.md"] = _how_to_list()
    return made


def _how_to_list() -> str:
    """The how-to pages with their titles: those that go on from one another, then the others."""
    found = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "docs" / "how-to").glob("*.md"))}
    names = [*_IN_ORDER, *(name for name in found if name not in (*_IN_ORDER, "index"))]
    titles = [f"- [{found[name].splitlines()[0].removeprefix('# ')}]({name}.md)" for name in names]
    return "\n".join([*titles, "", toctree(names)])


def family_title(family: FamilySpec) -> str:
    """The heading of its card."""
    return _read(family.card).splitlines()[0].removeprefix("# ")


# Objectives


def _objective_pages() -> Pages:
    made = {f"objectives/{each.__name__}.rst": _objective_page(each, uses) for each, uses in objectives().items()}
    rows = [["objective", "`--objective`", "families"]]
    for each, uses in objectives().items():
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(name for name, _ in uses))
        families = ", ".join(f"[{family_title(family)}](../families/{family.name}.md)" for _, family in uses)
        rows.append([f"[{each.__name__}]({each.__name__}.rst)", names, families])
    table = [f"| {' | '.join(row)} |" for row in rows]
    table.insert(1, "|---|---|---|")
    made["_parts/objectives.md"] = "\n".join([*table, "", toctree(each.__name__ for each in objectives())])
    return made


def _objective_page(objective: type[Objective], uses: list[tuple[str, FamilySpec]]) -> str:
    collator = collator_of(objective)
    names = {name: [family for other, family in uses if other == name] for name, _ in uses}
    of = "; ".join(
        f"``--objective {name}`` of " + ", ".join(f":doc:`/families/{family.name}`" for family in families)
        for name, families in names.items()
    )
    lines = [*title(objective.__name__), f"{of}. Its head: ``{objective.auto_class}``.", ""]
    lines += [f".. autoclass:: {full_name(objective)}", "", *title("Options", "-")]
    lines += [*_options(objective, uses[0][0]), *title("Collator", "-")]
    if first_owner(collator) is objective:
        lines += [f".. autoclass:: {full_name(collator)}", ""]
    else:
        lines += [f"The collator is :py:class:`~{full_name(collator)}`.", ""]
    return "\n".join(lines)


@cache
def first_owner(collator: type) -> type[Objective]:
    """The objective whose page documents a collator: the first of those that use it."""
    return next(each for each in objectives() if collator_of(each) is collator)


def _options(objective: type[Objective], name: str) -> list[str]:
    """Every option with its type, default and explanation."""
    entries = [entry for entry in fields(objective) if entry.name in objective.option_help()]
    if not entries:
        return ["This objective has no options.", ""]
    command = f"``{PROGRAM} pretrain --objective {name}:NAME=VALUE,...``"
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


def leaf_commands() -> dict[str, Command]:
    """Words of a command -> the command; subcommands for those that have them."""
    leaves: dict[str, Command] = {}
    for name, command in COMMANDS.items():
        if isinstance(command, CommandGroup):
            leaves |= {f"{name} {subcommand}": leaf for subcommand, leaf in command.subcommands.items()}
        else:
            leaves[name] = command
    return leaves


def _command_pages() -> Pages:
    made, lines, slugs = {}, [], {words: words.replace(" ", "-") for words in leaf_commands()}
    for words, slug in slugs.items():
        made[f"commands/{slug}.rst"] = _command_page(words)
    for title_, commands in GROUPS.items():
        lines += [f"**{title_.capitalize()}**", ""]
        for words, leaf in leaf_commands().items():
            if words.partition(" ")[0] in commands:
                lines.append(f"- [`{PROGRAM} {words}`]({slugs[words]}.rst): {leaf.summary}")
        lines.append("")
    made["_parts/commands.md"] = "\n".join([*lines, toctree(slugs.values())])
    return made


class _ParsedArgumentsError(Exception):
    """Raised instead of parsing a command line, to learn what a command parses."""


def parsed_sections(command: Command) -> tuple[tuple[Section, ...], str]:
    """The dataclasses whose fields are the flags of a command, and its description."""
    module = import_module(f"{PACKAGE}.cli.{command.module}")
    with patch.object(module, "parse_arguments", side_effect=_ParsedArgumentsError) as parse:
        try:
            module.main(*command.arguments)
        except _ParsedArgumentsError:
            return parse.call_args.args, parse.call_args.kwargs["description"]
    raise LookupError(f"The command {command.module} does not parse its arguments first.")


def _command_page(words: str) -> str:
    sections, description = parsed_sections(leaf_commands()[words])
    lines = [*title(f"{PROGRAM} {words}"), to_rst(cleandoc(description), links()), ""]
    lines += [f".. program:: {PROGRAM} {words}", ""]
    for section in sections:
        options = section[0] if isinstance(section, tuple) else section
        lines += title((getdoc(options) or options.__name__).partition("\n")[0].rstrip("."), "-")
        for entry in shown_fields(section):
            lines += _flag(entry, get_type_hints(options)[entry.name])
    if sections:
        lines += ["``--recipe NAME`` reads defaults from a file or from one of the :doc:`/recipes`.", ""]
    return "\n".join(lines)


def _flag(entry: Field, annotation: Any) -> list[str]:
    """A flag with its values, default and help."""
    default, choices = field_default(entry), entry.metadata.get("choices") or ()
    nested = is_choice(entry) or entry.metadata.get("nested")
    shape = " NAME[:KEY=VALUE,...]" if nested else "" if annotation is bool else f" {metavar(annotation)}"
    lines = [f".. option:: --{entry.name}{shape}", "", f"    {_help(entry.metadata['help'])}"]
    if isinstance(choices, Mapping):
        lines += ["", *_nested_options(choices)]
    elif choices:
        lines.append(f"    One of {', '.join(f'``{choice}``' for choice in choices)}.")
    if default is REQUIRED:
        lines.append("    Required.")
    elif default not in (None, [], False, ""):
        lines.append(f"    Default: ``{default}``.")
    return [*lines, ""]


def _nested_options(choices: Mapping[str, Any]) -> list[str]:
    """The values of a flag with nested options, each with its options."""
    names_by_class: dict[type, list[str]] = {}
    for name, options in choices.items():
        names_by_class.setdefault(options if isinstance(options, type) else type(options), []).append(name)
    lines = []
    for options, names in names_by_class.items():
        summary = (getdoc(options) or "").partition("\n\n")[0].replace("\n", " ")
        lines += [f"    - {', '.join(f'``{name}``' for name in names)}: {_help(summary)}", ""]
        for entry in fields(options):
            if is_settable(entry) and "help" in entry.metadata:
                default = field_default(entry)
                shown = "" if default in (None, REQUIRED, ()) else f" Default: ``{default}``."
                lines.append(f"      - ``{entry.name}``: {_help(entry.metadata['help'])}{shown}")
        lines.append("")
    return lines


# Recipes


def _label(path: Path) -> str:
    """Of a file's heading: its name, which a recipe and its list of tasks share."""
    return f"{path.stem}-tasks" if path.parent.name == "tasks" else path.stem


def _recipe_page() -> Pages:
    lines = []
    headings = ("Recipes of the package", "Lists of tasks", "Configurations of accelerate")
    for heading, folder in zip(headings, ("recipes", "tasks", "accelerate"), strict=True):
        paths = sorted(packaged_folder(folder).glob("*.yaml"))
        lines += [
            f"## {heading}",
            "",
            *(f"- [{path.stem}](#{_label(path)}): {first_sentence(path)}" for path in paths),
            "",
        ]
        for path in paths:
            lines += [
                f"({_label(path)})=",
                f"### {path.stem}",
                "",
                "```yaml",
                path.read_text("utf-8").rstrip(),
                "```",
                "",
            ]
    return {"_parts/recipes.md": "\n".join(lines)}
