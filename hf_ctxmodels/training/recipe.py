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

    `--recipe FILE.yaml` has `flag: value` pairs, which are parsed like flags before those of the command line: the same
    checks apply, and the command line overrides the recipe.

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
    parser.add_argument("--recipe", metavar="FILE.yaml", help="YAML file of `flag: value` defaults; flags override it.")

    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--recipe")
    recipe = finder.parse_known_args(argv)[0].recipe
    if recipe is not None and not {"-h", "--help"} & set(argv):
        argv = recipe_flags(Path(recipe), known) + argv
    *parsed, unknown = parser.parse_args_into_dataclasses(argv, look_for_args_file=False, return_remaining_strings=True)
    if unknown:
        near = difflib.get_close_matches(unknown[0].removeprefix("--").replace("-", "_"), known, n=1)
        raise CtxError(
            f"Unknown arguments: {' '.join(unknown)}.",
            location=unknown[0],
            hint=(f"did you mean --{near[0]}? " if near else "") + "--help lists the flags.",
        )
    return tuple(parsed[: len(dataclass_types)])


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
    except yaml.YAMLError as error:
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
