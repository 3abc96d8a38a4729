"""Command lines from dataclasses, with YAML recipes of defaults."""

import argparse
import re
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_ctxmodels.core.console import is_main_process, print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import (
    REQUIRED,
    check_conflicts,
    convert,
    did_you_mean,
    field_default,
    is_choice,
    is_settable,
    join_choice,
    option_help,
    split_choice,
)
from hf_ctxmodels.core.yaml_mapping import YamlMapping

Section = type | tuple[type, Collection[str]]
"""A dataclass whose fields become flags, or a dataclass and the names of the fields that do."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors as `CtxError`."""

    def error(self, message: str) -> Any:
        flag, _, problem = message.removeprefix("argument ").partition(": ")
        if message.startswith("argument ") and problem:
            raise CtxError(f"{flag}: {problem}.", location=flag, hint=f"see `{self.prog} --help`.")
        raise CtxError(
            f"{message[0].upper()}{message[1:]}.", location=self.prog, hint=f"add them; see `{self.prog} --help`."
        )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description and of the help of a flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=100)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [
            wrapped
            for line in text.splitlines()
            for wrapped in textwrap.wrap(line, width, subsequent_indent="    " if line.startswith("  ") else "")
        ]


class _ChoiceAction(argparse.Action):
    """Stores `NAME:key=value,...`. The same name given again, as after a recipe, adds to the options."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, options = split_choice(values)
        previous = getattr(namespace, f"_{self.dest}", None)
        if previous is not None and previous[0] == name:
            options = {**previous[1], **options}
        setattr(namespace, f"_{self.dest}", (name, options))
        setattr(namespace, self.dest, join_choice(name, options))


def parse_arguments(
    *sections: Section,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    essential: Sequence[str] = (),
    program: str | None = None,
) -> tuple[Any, ...]:
    """Parse the command line into one instance of each dataclass.

    `--recipe NAME` is a YAML file of `flag: value` pairs, or the name of one in the package. They are parsed like flags
    at the start of the command line: the same checks apply, and the command line overrides the recipe. A flag of the
    recipe that conflicts with a flag of the command line is dropped.

    Args:
        sections: Dataclasses, or tuples of a dataclass and the names of the fields that become flags. The fields are
            declared with `core.flags.flag`.
        description: First lines of `--help`.
        argv: The command line without the program name; `sys.argv[1:]` by default.
        essential: The flags that `--help` shows first.
        program: Name of the command in usage lines and errors; by default `sys.argv[0]`.

    Raises:
        CtxError: The recipe is missing or no mapping of flags to values, a flag or value is unknown, or two flags
            cannot be combined.
    """
    parser = _make_parser(sections, description, essential, program)
    names = {action.dest for action in parser._actions} - {"help", "recipe"}
    argv = [_with_underscores(argument, names) for argument in (sys.argv[1:] if argv is None else argv)]
    finder = _Parser(prog=program, add_help=False, allow_abbrev=False)
    finder.add_argument("--recipe")
    recipe = None if {"-h", "--help"} & set(argv) else finder.parse_known_args(argv)[0].recipe
    all_flags = argv
    if recipe is not None:
        path = find_packaged(recipe, "recipes", "recipe", "--recipe")
        recipe_values = read_recipe(path)
        all_flags = recipe_flags(recipe_values, names, path) + argv
    _check_flags(all_flags, names, parser.prog)
    namespace, unknown = parser.parse_known_args(all_flags)
    if recipe is not None and (dropped := _conflicting_flags(sections, parser, namespace, argv)):
        print_status(f"of the recipe, {', '.join(dropped)} is ignored", is_main_process())
        kept_values = {name: value for name, value in recipe_values.items() if f"--{name}" not in dropped}
        namespace, unknown = parser.parse_known_args(recipe_flags(kept_values, names, path) + argv)
    if unknown:
        raise CtxError(
            f"Unknown arguments: {' '.join(unknown)}.", location=unknown[0], hint=f"see `{parser.prog} --help`."
        )
    parsed = []
    for section in sections:
        options = section[0] if isinstance(section, tuple) else section
        parsed.append(options(**{entry.name: getattr(namespace, entry.name) for entry in shown_fields(section)}))
    check_conflicts(*parsed)
    return tuple(parsed)


def _conflicting_flags(
    sections: Sequence[Section], parser: _Parser, namespace: argparse.Namespace, argv: Sequence[str]
) -> list[str]:
    """Flags of a recipe that conflict with a flag of the command line, if neither has its default value."""
    argv_names = {argument.partition("=")[0].removeprefix("--") for argument in argv if argument.startswith("--")}
    non_default_names = {name for name, value in vars(namespace).items() if value != parser.get_default(name)}
    conflicting_names: set[str] = set()
    for entry in (entry for section in sections for entry in shown_fields(section)):
        for name in entry.metadata.get("conflicts", ()):
            pair = {entry.name, name}
            if pair <= non_default_names and pair & argv_names:
                conflicting_names |= pair - argv_names
    return [f"--{name}" for name in sorted(conflicting_names)]


def _check_flags(argv: Sequence[str], names: Collection[str], program: str) -> None:
    """Raise CtxError for the first unknown flag, before missing flags and invalid values are reported."""
    for argument in argv:
        match = re.match(r"--?([A-Za-z][\w-]*)(=|$)", argument)
        if match and argument.partition("=")[0] not in ("-h", *(f"--{name}" for name in (*names, "help", "recipe"))):
            similar = did_you_mean(match[1].replace("-", "_"), names).replace("mean ", "mean --")
            flag = argument.partition("=")[0]
            raise CtxError(f"Unknown flag {flag}.", location=flag, hint=f"{similar}see `{program} --help`.")


def join_repeated(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """The command line with these list flags joined, `--model A --model B` as `--model A B`; the last occurrence of
    other flags replaces earlier ones."""
    groups: list[list[str]] = [[]]  # a flag and its values
    first_groups: dict[str, list[str]] = {}
    group = groups[0]
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            group.append(argument)
        elif name.removeprefix("--") in names:
            if name not in first_groups:
                first_groups[name] = [name]
                groups.append(first_groups[name])
            group = first_groups[name]
            group += [value] if equals else []
        else:
            group = [argument]
            groups.append(group)
    return [argument for group in groups for argument in group]


def _with_underscores(argument: str, names: set[str]) -> str:
    """`--max-steps` as `--max_steps`."""
    name, equals, value = argument.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    return f"--{name}{equals}{value}" if argument.startswith("--") and name in names else argument


def shown_fields(section: Section) -> list[Field]:
    """The fields of a section that are flags."""
    options, names = section if isinstance(section, tuple) else (section, None)
    entries = [entry for entry in fields(options) if is_settable(entry) and "help" in entry.metadata]
    return [entry for entry in entries if names is None or entry.name in names]


def _make_parser(
    sections: Sequence[Section], description: str | None, essential: Sequence[str], program: str | None
) -> _Parser:
    """The parser of `parse_arguments`, with the flags in groups."""
    parser = _Parser(
        prog=program,
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--help] [--recipe NAME] --flag VALUE ...",
    )
    groups: dict[str, Any] = {}
    entries = [(entry, section) for section in sections for entry in shown_fields(section)]
    entries.sort(key=lambda pair: essential.index(pair[0].name) if pair[0].name in essential else len(essential))
    for entry, section in entries:
        options = section[0] if isinstance(section, tuple) else section
        title = (options.__doc__ or options.__name__).strip().partition("\n")[0].rstrip(".")
        title = title[:1].lower() + title[1:]  # as in the titles of argparse
        title = "most used" if entry.name in essential else entry.metadata.get("group") or title
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], entry, get_type_hints(options)[entry.name])
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="YAML file of `flag: value` defaults, or a name that `hf-ctxmodels recipes` lists; flags override it",
    )
    return parser


def _add_flag(group: Any, entry: Field, annotation: Any) -> None:
    """Add the argument of a field."""
    default = field_default(entry)
    annotation = _without_none(annotation)
    is_list = get_origin(annotation) is list
    settings: dict[str, Any] = {"required": True} if default is REQUIRED else {"default": default}
    help_text = entry.metadata["help"].rstrip(".")
    if default is REQUIRED:
        help_text += " (required)"
    elif default not in (None, [], "", False):
        help_text += f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
    if is_choice(entry):
        settings |= {"action": _ChoiceAction, "metavar": "NAME[:KEY=VALUE,...]"}
        help_text = "\n".join([help_text, *_choice_lines(entry.metadata["choices"])])
    elif entry.metadata.get("nested"):
        settings |= {"metavar": "NAME[:KEY=VALUE,...]"} | ({"nargs": "+"} if is_list else {"action": _ChoiceAction})
    elif bool in (annotation, *get_args(annotation)):
        settings |= {"nargs": "?", "const": True, "metavar": metavar(annotation), "type": _converter(annotation)}
    else:
        choices = entry.metadata.get("choices")
        item = Literal[tuple(choices)] if choices else get_args(annotation)[0] if is_list else annotation
        settings |= {"metavar": metavar(item), "type": _converter(item)} | ({"nargs": "+"} if is_list else {})
    group.add_argument(f"--{entry.name}", help=help_text.replace("%", "%%"), **settings)


def _choice_lines(choices: Mapping[str, Any]) -> list[str]:
    """A line for each value of a flag with nested options, values with the same options together."""
    names_by_options: dict[str, list[str]] = {}
    for name, options in choices.items():
        text = ", ".join(line.partition(": ")[0] for line in option_help(options, documented_only=True))
        if any("help" not in entry.metadata for entry in fields(options)):
            text += ", ..."
        names_by_options.setdefault(text, []).append(name)
    return [f"  {' | '.join(names)}" + (f": {text}" if text else "") for text, names in names_by_options.items()]


def metavar(annotation: Any) -> str:
    """Placeholder of a value in `--help`."""
    annotation = _without_none(annotation)
    if get_origin(annotation) is Literal:
        text = "{" + ",".join(map(str, get_args(annotation))) + "}"
        return text if len(text) < 70 else "NAME"
    if get_origin(annotation) in (Union, types.UnionType):
        return "|".join(map(metavar, get_args(annotation)))
    return {int: "N", float: "X", bool: "BOOL"}.get(annotation, "TEXT")


def _without_none(annotation: Any) -> Any:
    members = [member for member in get_args(annotation) if member is not type(None)]
    return members[0] if type(None) in get_args(annotation) and len(members) == 1 else annotation


def _converter(annotation: Any) -> Callable[[str], Any]:
    """The `type` of an argument of argparse."""

    def convert_argument(text: str) -> Any:
        try:
            return convert(text, annotation)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert_argument


def packaged_folder(name: str) -> Path:
    """A folder of files that come with the package: "recipes", "tasks", "text2text", "prompts", "behavior",
    "comparisons" or "accelerate". It is in the installed package, or else in the source tree."""
    installed = Path(__file__).parents[1] / name
    return installed if installed.is_dir() else Path(__file__).parents[2] / "scripts" / name


def find_packaged(name: str, folder: str, description: str, flag: str) -> Path:
    """The path of a YAML file: `name` itself if it is a file, else the packaged file of this name. A name with a folder
    is returned without a check.

    Args:
        folder: See `packaged_folder`.
        description, flag: Kind of file and flag, for errors.

    Raises:
        CtxError: There is neither a file nor a packaged file of this name.
    """
    path = Path(name)
    packaged = packaged_folder(folder) / f"{name.removesuffix('.yaml')}.yaml"
    if path.is_file() or path.name != name:
        return path
    if packaged.is_file():
        return packaged
    similar = did_you_mean(packaged.stem, [file.stem for file in packaged.parent.glob("*.yaml")])
    raise CtxError(
        f"The {description} cannot be read: there is neither a file nor a packaged {description} of this name.",
        location=f"{flag} {name}",
        hint=f"{similar}`hf-ctxmodels recipes` lists the names.",
    )


def with_first_flag(argv: Sequence[str], name: str) -> list[str]:
    """The arguments of a command line, with the name of the flag before a first value without flag."""
    return [f"--{name}", *argv] if argv and not argv[0].startswith("-") else [*argv]


def read_recipe(path: Path) -> dict[str, Any]:
    """The flags of a recipe and their values, which are texts, lists and mappings of texts, so that `no`, `1e-4` and
    `on` are parsed as flags; raises CtxError if the YAML file is not a mapping."""
    recipe = YamlMapping.from_file(path, "recipe")
    return {key: recipe.text(key) for key in recipe.nodes}


def recipe_flags(recipe: Mapping[str, Any], names: Collection[str], location: object) -> list[str]:
    """The flags of a recipe: `{"max_steps": "10"}` is `["--max_steps", "10"]`.

    A list gives several values. A mapping of mappings names values and their nested options: `{"optimizer": {"adamw":
    {"beta2": "0.98"}}}` is `["--optimizer", "adamw:beta2=0.98"]`. Any other mapping gives `key=value` pairs. `null` or
    an empty value gives no flag. Raises CtxError for a key that is not in `names`, and for deeper lists and mappings,
    with the location of the recipe, or the key if it is None.
    """
    flags: list[str] = []
    for key, value in recipe.items():
        if key not in names:
            raise CtxError(
                f"Unknown key {key!r} in the recipe.",
                location=key if location is None else location,
                hint=f"{did_you_mean(key, names)}use one of: {', '.join(sorted(names))}.",
            )
        if value in ("", "null"):
            continue
        try:
            flags += [f"--{key}", *_flag_values(value)]
        except TypeError as error:
            raise CtxError(
                f"Expected a value of {key}, got {value!r}.",
                location=key if location is None else location,
                hint="write a value, a list of values, or a mapping of options.",
            ) from error
    return flags


def _flag_values(value: Any) -> list[str]:
    """The values of a flag, see `recipe_flags`; raises TypeError for deeper lists and mappings."""
    if not isinstance(value, dict):
        return [_text(item) for item in (value if isinstance(value, list) else [value])]
    values = []
    for name, options in value.items():
        if isinstance(options, dict):
            values.append(join_choice(name, {option: _joined(item) for option, item in options.items()}))
        else:
            values.append(f"{name}={_joined(options)}" if options else name)
    return values


def _joined(value: Any) -> str:
    return ",".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: Any) -> Any:
    if isinstance(value, list | dict):
        raise TypeError(f"{value!r} is not a text")
    return value
