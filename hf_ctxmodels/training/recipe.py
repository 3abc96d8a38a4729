"""Command lines from dataclasses, with YAML recipes of defaults."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from hf_ctxmodels.core.errors import CtxError


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the description's line breaks, and shows non-empty defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def parse_arguments(
    *dataclass_types: type, description: str | None = None, argv: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """Parse the command line into one instance of each dataclass.

    `--recipe NAME` is a file of `flag: value` pairs, or the name of one in the package. They are parsed like flags
    before those of the command line: the same checks apply, and the command line overrides the recipe.

    Args:
        dataclass_types: Dataclasses whose fields become flags, with `metadata={"help": ...}`.
        description: First lines of `--help`.
        argv: The command line without the program name; `sys.argv[1:]` by default.

    Raises:
        CtxError: The recipe is missing or no mapping of flags to values, or a flag is unknown.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(dataclass_types, description=description, formatter_class=_HelpFormatter)
    known = {action.dest for action in parser._actions if action.dest != "help"}
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="YAML file of `flag: value` defaults, or a name that `hf-ctxmodels recipes` lists; flags override it.",
    )

    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--recipe")
    recipe = finder.parse_known_args(argv)[0].recipe
    if recipe is not None and not {"-h", "--help"} & set(argv):
        argv = recipe_flags(find_recipe(recipe), known) + argv
    *parsed, unknown = parser.parse_args_into_dataclasses(argv, look_for_args_file=False, return_remaining_strings=True)
    if unknown:
        near = difflib.get_close_matches(unknown[0].removeprefix("--").replace("-", "_"), known, n=1)
        raise CtxError(
            f"Unknown arguments: {' '.join(unknown)}.",
            location=unknown[0],
            hint=(f"did you mean --{near[0]}? " if near else "") + "--help lists the flags.",
        )
    return tuple(parsed[: len(dataclass_types)])


def packaged_folder(name: str) -> Path:
    """A folder of files that come with the package, "recipes", "tasks" or "accelerate": in the installed package,
    else in the source tree."""
    installed = Path(__file__).parents[1] / name
    return installed if installed.is_dir() else Path(__file__).parents[2] / "scripts" / name


def find_recipe(name: str) -> Path:
    """The recipe's file: a path, or the name of one that comes with the package.

    Raises:
        CtxError: There is neither.
    """
    return find_packaged(name, "recipes", "recipe", "--recipe")


def find_packaged(name: str, folder: str, what: str, flag: str) -> Path:
    """A YAML file: a path, or the name of one in a `packaged_folder`.

    Args:
        name: The path or name.
        folder: See `packaged_folder`.
        what, flag: What it is and the flag that gave it, for the error.

    Raises:
        CtxError: There is neither.
    """
    given = Path(name)
    packaged = packaged_folder(folder) / f"{name.removesuffix('.yaml')}.yaml"
    if given.is_file() or given.name != name:
        return given
    if packaged.is_file():
        return packaged
    near = difflib.get_close_matches(packaged.stem, [path.stem for path in packaged.parent.glob("*.yaml")])
    raise CtxError(
        f"The {what} cannot be read: there is no such file, and none of that name comes with the package.",
        location=f"{flag} {name}",
        hint=(f"did you mean {' or '.join(near)}? " if near else "") + "`hf-ctxmodels recipes` lists those there are.",
    )


def recipe_flags(path: Path, known: set[str]) -> list[str]:
    """The flags of a recipe: `{"max_steps": 10}` is `["--max_steps", "10"]`. A list gives several values, a mapping
    `key=value` pairs, `null` or nothing no flag."""
    flags: list[str] = []
    for key, value in _read_recipe(path).items():
        if key not in known:
            raise CtxError(
                f"Unknown key {key!r} in the recipe.",
                location=str(path),
                hint=f"use one of: {', '.join(sorted(known))}.",
            )
        if value in ("", "null"):
            continue
        if isinstance(value, dict):
            value = [f"{name}={item}" for name, item in value.items()]
        flags += [f"--{key}", *(value if isinstance(value, list) else [value])]
    return flags


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        # BaseLoader keeps scalars as text, so that `no`, `1e-4` and `on` are parsed as flags
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise CtxError(
            f"The recipe cannot be read: {error}.", location=str(path), hint="give --recipe an existing YAML file."
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise CtxError(
            f"The recipe is not valid YAML: {error}.", location=str(path), hint="write one `flag: value` per line."
        ) from error
    if not isinstance(content, dict):
        raise CtxError(
            f"A recipe is a mapping of flags to values, not {type(content).__name__}.",
            location=str(path),
            hint="write one `flag: value` per line.",
        )
    return content
