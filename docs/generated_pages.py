"""Generate the pages of the site from the code, the model cards, the recipes and the pages of the repository.

The generated pages are not stored: `pages` returns their text for one build. Handwritten pages are in this folder.
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
from hf_ctxmodels.core.command_line import Section, metavar, packaged_folder, shown_fields
from hf_ctxmodels.core.flags import REQUIRED, field_default, is_choice, is_settable
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels_cli import GROUPS, PROGRAM, Command, leaf_commands

ROOT = Path(__file__).parents[1]
_GUIDES = {
    "Choose a model": ("choose-a-model", "word-embeddings"),
    "Pretrain": ("clean-text", "pretrain", "cluster", "compare"),
    "Fine-tune": (
        "finetune",
        "fine-tune-without-forgetting",
        "adapters",
        "task-networks",
        "transfer",
        "text-to-text",
    ),
    "Generate": ("generate", "control"),
    "Evaluate": ("prompts", "evaluate", "explain"),
    "Compress and compile": ("distill", "quantize", "low-rank", "compile"),
    "Publish and deploy": ("publish", "convert", "export", "serve"),
}

Pages = dict[str, str]


def pages() -> Pages:
    """Path of a page (or of an included part of a page) -> its text."""
    return {**_repository_pages(), **_objective_pages(), **_command_pages(), **_recipe_page(), **api_pages()}


# Pages of the repository


def _site_paths() -> dict[str, str]:
    """Path in the repository -> path in the site, of pages in both."""
    cards = (ROOT / "model_cards").rglob("*.md")
    names = [path.relative_to(ROOT / "model_cards").as_posix() for path in cards if path.name != "template.md"]
    return {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
        **{f"model_cards/{name}": f"families/{name.replace('README', 'index')}" for name in names},
    }


def images() -> dict[str, Path]:
    """Path in the site -> file, of the figures of the cards."""
    return {f"families/{path.name}": path for path in (ROOT / "model_cards").glob("*.png")}


def adapt_links(text: str, source: str, site_path: str) -> str:
    """Replace the links of a repository page by links between pages of the site.

    Links to files that are not part of the site become plain text.

    Args:
        text: Markdown of the page.
        source: Path of the page in the repository.
        site_path: Path of the page in the site.
    """
    site_paths = {**_site_paths(), **{f"model_cards/{path.name}": name for name, path in images().items()}}

    def adapt_link(match: re.Match[str]) -> str:
        label, target, anchor = match["label"], match["path"], match["anchor"] or ""
        if not target or "://" in target:
            return match[0]
        target_page = site_paths.get((PurePosixPath(source).parent / target).as_posix())
        return f"{label}({_relative(target_page, site_path)}{anchor})" if target_page else label.strip("![]")

    return re.sub(r"(?P<label>!?\[[^][]*\])\((?P<path>[^()#\s]*)(?P<anchor>#[^()\s]*)?\)", adapt_link, text)


def _relative(target: str, site_path: str) -> str:
    """Path of the page `target`, relative to the page `site_path`."""
    return "../" * (len(PurePosixPath(site_path).parts) - 1) + target


def _read(source: str) -> str:
    return (ROOT / source).read_text(encoding="utf-8")


def _section(text: str, heading: str) -> str:
    """A section of a page with its heading, up to the next heading of its level."""
    level = heading.partition(" ")[0]
    match = re.search(rf"^{re.escape(heading)}\n.*?(?=^{level} |\Z)", text, re.DOTALL | re.MULTILINE)
    if match is None:
        raise LookupError(f"README.md has no section {heading!r}, which the site includes.")
    return match[0]


def _repository_pages() -> Pages:
    readme = _read("README.md")
    parts = {
        "why.md": (_section(readme, "## Why"), "index.md"),
        "families.md": (_section(readme, "## Families"), "index.md"),
        "use.md": (_section(readme, "## Two commands") + _section(readme, "## Use"), "usage.md"),
    }
    generated = {f"_parts/{name}": adapt_links(text, "README.md", path) for name, (text, path) in parts.items()}
    for source, site_path in _site_paths().items():
        if source != "README.md":
            generated[site_path] = adapt_links(_read(source), source, site_path)
    for family in FAMILIES.values():
        generated[f"families/{family.name}.md"] += (
            f"\n## API\n\n[Classes, fields and sizes](../api/models/{family.name}.rst)\n"
        )
        if f"families/experiments/{family.name}.md" in generated:
            generated[f"families/{family.name}.md"] += f"\n```{{toctree}}\n:hidden:\n\nexperiments/{family.name}\n```\n"
    # cards of models without a family, and experiments without a card
    cards = [path.removeprefix("families/").removesuffix(".md") for path in generated if path.startswith("families/")]
    other_cards = [card for card in cards if card != "index" and Path(card).stem not in FAMILIES]
    generated["families/index.md"] += "\n" + toctree([*FAMILIES, *other_cards])
    generated["_parts/how-to.md"] = _how_to_list()
    generated["_parts/analysis.md"] = _analysis_list()
    return generated


def _how_to_list() -> str:
    """List of the how-to guides by topic; raises LookupError for a guide without a topic."""
    guides = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "docs" / "how-to").glob("*.md"))}
    names = [name for group in _GUIDES.values() for name in group]
    if missing := sorted(set(guides) - {*names, "index"}):
        raise LookupError(f"docs/how-to has guides without a topic in _GUIDES: {', '.join(missing)}.")
    lines = []
    for topic, group in _GUIDES.items():
        lines += [f"## {topic}", ""]
        for name in group:
            heading = re.search("^# (.*)", guides[name], re.MULTILINE)
            lines.append(f"- [{heading[1] if heading else name}]({name}.md)")
        lines.append("")
    return "\n".join([*lines, toctree(names)])


def _analysis_list() -> str:
    """Table of contents of the pages of analyses."""
    return toctree([path.stem for path in sorted((ROOT / "docs" / "analysis").glob("*.md")) if path.stem != "index"])


def family_title(family: FamilySpec) -> str:
    """Heading of the card of a family."""
    return _read(family.card).splitlines()[0].removeprefix("# ")


# Objectives


def _objective_pages() -> Pages:
    generated = {
        f"objectives/{objective.__name__}.rst": _objective_page(objective, uses)
        for objective, uses in objectives().items()
    }
    rows = [["objective", "`--objective`", "families"]]
    for objective, uses in objectives().items():
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(name for name, _ in uses))
        families = ", ".join(f"[{family_title(family)}](../families/{family.name}.md)" for _, family in uses)
        rows.append([f"[{objective_title(objective)}]({objective.__name__}.rst)", names, families])
    table = [f"| {' | '.join(row)} |" for row in rows]
    table.insert(1, "|---|---|---|")
    entries = toctree([objective.__name__ for objective in objectives()])
    generated["_parts/objectives.md"] = "\n".join([*table, "", entries])
    return generated


def objective_title(objective: type[Objective]) -> str:
    """Heading of the page of an objective: the words of its class name."""
    name = objective.__name__.removesuffix("LM") + ("Language modeling" if objective.__name__.endswith("LM") else "")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.replace("LMWith", "LanguageModelingWith"))
    return re.sub("^(Cross|Skip) ", r"\1-", words[0] + words[1:].lower())


def _objective_page(objective: type[Objective], uses: list[tuple[str, FamilySpec]]) -> str:
    collator = collator_of(objective)
    families_by_name = {name: [family for other_name, family in uses if other_name == name] for name, _ in uses}
    usage = "; ".join(
        f"``--objective {name}`` of " + ", ".join(f":doc:`/families/{family.name}`" for family in families)
        for name, families in families_by_name.items()
    )
    lines = [*title(objective_title(objective)), f"{usage}. Its head: ``{objective.auto_class}``.", ""]
    lines += [f".. autoclass:: {full_name(objective)}", "", *title("Options", "-")]
    lines += [*_options(objective, uses[0][0]), *title("Collator", "-")]
    if first_owner(collator) is objective:
        lines += [f".. autoclass:: {full_name(collator)}", ""]
    else:
        lines += [f"The collator is :py:class:`~{full_name(collator)}`.", ""]
    return "\n".join(lines)


@cache
def first_owner(collator: type) -> type[Objective]:
    """The first objective with this collator; its page documents the collator."""
    return next(objective for objective in objectives() if collator_of(objective) is collator)


def _options(objective: type[Objective], name: str) -> list[str]:
    """All options with type, default and help."""
    entries = [entry for entry in fields(objective) if entry.name in objective.option_help()]
    if not entries:
        return ["This objective has no options.", ""]
    command = f"``{PROGRAM} pretrain --objective {name}:NAME=VALUE,...``"
    lines = [
        f"{command} sets options. In Python they are keyword arguments of the class.",
        "",
        f".. program:: {objective.__name__}",
        "",
    ]
    for entry in entries:
        lines += [f".. option:: {entry.name}={entry.default}", "", f"    {_help(entry.metadata['help'])}"]
        lines += [f"    Type: {_type_name(entry.type)}.", ""]
    return lines


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"``{value}``" for value in get_args(annotation))
    return f"``{formatannotation(annotation)}``"


def _help(text: str) -> str:
    return to_rst(text, links()).strip()


# Commands


def _command_pages() -> Pages:
    generated: Pages = {}
    lines: list[str] = []
    slugs = {words: words.replace(" ", "-") for words in leaf_commands()}
    for words, slug in slugs.items():
        generated[f"commands/{slug}.rst"] = _command_page(words)
    for title_, commands in GROUPS.items():
        lines += [f"**{title_.capitalize()}**", ""]
        for words, leaf in leaf_commands().items():
            if words.partition(" ")[0] in commands:
                lines.append(f"- [`{PROGRAM} {words}`]({slugs[words]}.rst): {leaf.summary}")
        lines.append("")
    generated["_parts/commands.md"] = "\n".join([*lines, toctree(slugs.values())])
    return generated


class _ParsedArgumentsError(Exception):
    """Raised instead of parsing a command line, to get the arguments of the parser."""


def parsed_sections(command: Command) -> tuple[tuple[Section, ...], str]:
    """The dataclasses whose fields are the flags of a command, and its description."""
    module = import_module(f"{PACKAGE}.cli.{command.module}")
    with patch.object(module, "parse_arguments", side_effect=_ParsedArgumentsError) as parse:
        try:
            getattr(module, command.function)(*command.arguments)
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
                shown = "" if default in (None, REQUIRED, (), "") else f" Default: ``{default}``."
                lines.append(f"      - ``{entry.name}``: {_help(entry.metadata['help'])}{shown}")
        lines.append("")
    return lines


# Recipes


def _label(path: Path) -> str:
    """Anchor of a file: its name, with a suffix for lists of tasks and plans, which may share the name of a recipe."""
    return f"{path.stem}-{path.parent.name}" if path.parent.name in ("tasks", "comparisons") else path.stem


def _recipe_page() -> Pages:
    lines = []
    headings = {
        "recipes": "Recipes of the package",
        "tasks": "Lists of tasks",
        "text2text": "Tasks as text",
        "prompts": "Prompt tasks",
        "behavior": "Behavioral tests",
        "comparisons": "Plans of comparisons",
        "accelerate": "Configurations of accelerate",
    }
    for folder, heading in headings.items():
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
