"""Options of commands as dataclasses.

Each field of a dataclass is a flag. The value of a field whose choices are dataclasses has options of its own, which
are nested below the flag:

    --optimizer adamw:beta2=0.98,weight_decay=0.1

is `AdamWOptions(beta2=0.98, weight_decay=0.1)`. A recipe has a mapping: `optimizer: {adamw: {beta2: 0.98}}`. Several
values of one option follow one another: `q-bert:bits=2,4,groups=128`.
"""

import difflib
import json
import operator
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hf_ctxmodels.core.errors import CtxError

Options = TypeVar("Options")

REQUIRED: Any = MISSING
"""Default of a required flag."""

_NAME_WITH_OPTIONS = re.compile(r"(.*?):([A-Za-z_][\w-]*=.*)", re.DOTALL)
_NAME = re.compile(r"((?:[A-Za-z]:(?=[\\/])|[a-z][\w+.-]*://)?[^:]*):?(.*)", re.DOTALL)  # with a drive or a protocol


def flag(
    default: object,
    help: str,
    choices: Collection[str] | Mapping[str, Any] = (),
    *,
    group: str | None = None,
    conflicts: Sequence[str] = (),
    nested: bool = False,
    fixed: bool = False,
) -> Any:
    """Declare a dataclass field as a flag.

    Args:
        default: Default value: a tuple for a list, a string as on the command line for a choice with options,
            `REQUIRED` for a required flag.
        choices: Allowed values; not needed for a `Literal` type. For a choice with options: name -> dataclass of its
            options, or an instance with other defaults; the dataclass of flags then calls `parse_choices(self)` in
            `__post_init__`.
        group: Title of the group in `--help`; by default the first line of the dataclass's docstring.
        conflicts: Names of flags that cannot be combined with this one.
        nested: Whether the value is a string `NAME:key=value,...`, which the command parses.
        fixed: Whether the command sets the value, so that it is not a flag.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices if isinstance(choices, Mapping) else tuple(choices),
        "conflicts": tuple(conflicts),
        "nested": nested,
        "fixed": fixed,
    }
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def is_choice(entry: Field) -> bool:
    """Whether the choices of a field have options of their own."""
    return isinstance(entry.metadata.get("choices"), Mapping)


def is_settable(entry: Field) -> bool:
    """Whether a field can be given on the command line."""
    return entry.init and not entry.metadata.get("fixed")


def parse_choices(arguments: Any) -> None:
    """Replace strings in fields whose choices have options by instances of the dataclasses that they name."""
    for entry in fields(arguments):
        value = getattr(arguments, entry.name)
        if is_choice(entry) and isinstance(value, str):
            setattr(arguments, entry.name, parse_choice(value, entry.metadata["choices"], f"--{entry.name}"))


class ParsedChoices:
    """Base class of dataclasses of flags whose only check is `parse_choices`."""

    def __post_init__(self) -> None:
        parse_choices(self)


def parse_choice(text: str, choices: Mapping[str, Any], location: str) -> Any:
    """Parse `"ewc:weight=0.01,fisher_file=F"` into an instance of the dataclass `choices["ewc"]`, see `flag`.

    Raises:
        CtxError: The name or an option is unknown, an option is missing, or a value is of another type.
    """
    name, option_strings = split_choice(text)
    if name not in choices:
        raise CtxError(
            f"Unknown value {name!r}.",
            location=location,
            hint=f"{did_you_mean(name, choices)}use one of: {', '.join(choices)}.",
        )
    options = choices[name]
    location = f"{location} {name}"
    if isinstance(options, type):
        return make_options(options, name, option_strings, location)
    return replace(options, **typed_options(type(options), option_strings, location=location))


def make_options(options: type[Any], name: str, option_strings: Mapping[str, str], location: str) -> Any:
    """An instance of the dataclass of the options of a value `name`, from strings as on a command line.

    Raises:
        CtxError: An option is unknown or missing, or a value is of another type.
    """
    values = typed_options(options, option_strings, location=location)
    required = [entry.name for entry in fields(options) if entry.init and field_default(entry) is REQUIRED]
    if missing := [name for name in required if name not in values]:
        raise CtxError(
            f"{name} needs {', '.join(missing)}.", location=location, hint=f"write {name}:{missing[0]}=VALUE."
        )
    return options(**values)


def split_choice(text: str) -> tuple[str, dict[str, str]]:
    """Split `"q-bert:bits=2,4,groups=128"` into `("q-bert", {"bits": "2,4", "groups": "128"})`.

    An option that is given again has another value: `scale=a=2,scale=b=3` is `{"scale": "a=2,b=3"}`. The name may be a
    path with a drive, as in `C:\\words.txt:bias=2`, or a URL.
    """
    match = _NAME_WITH_OPTIONS.match(text) or _NAME.match(text)
    name, option_text = match.groups() if match else (text, "")
    options: dict[str, str] = {}
    key = ""
    for item in option_text.split(",") if option_text else ():
        if assignment := re.match(r"([A-Za-z_][\w-]*)=", item):
            key = assignment[1].replace("-", "_")
            value = item[assignment.end() :]
            options[key] = f"{options[key]},{value}" if key in options else value
        elif key:  # another value of the same option
            options[key] += f",{item}"
        else:
            options[item] = ""
    return name.strip(), options


def join_choice(name: str, options: Mapping[str, object]) -> str:
    """Join a name and its options; the inverse of `split_choice`."""
    items = [
        item if index and "=" not in item else f"{key}={item}"
        for key, value in options.items()
        for index, item in enumerate(str(value).split(","))
    ]
    return name + (":" if options else "") + ",".join(items)


def typed_options(
    options: type, option_strings: Mapping[str, str], *, location: str, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Convert options from strings, as on a command line, to the types of the fields of a dataclass. `names` are the
    fields that are options, None for all.

    Raises:
        CtxError: There is no such field, or a value is of another type.
    """
    entries = [entry for entry in fields(options) if is_settable(entry) and (names is None or entry.name in names)]
    hints = get_type_hints(options)
    types_by_name = {entry.name: hints[entry.name] for entry in entries}
    values = {}
    for name, text in option_strings.items():
        if name not in types_by_name or not text:
            is_unknown = name not in types_by_name
            lines = "".join(f"\n    {line}" for line in option_help(options, documented_only=names is not None))
            raise CtxError(
                f"Unknown option {name!r}." if is_unknown else f"{name!r} has no value.",
                location=location,
                hint=(did_you_mean(name, types_by_name) if is_unknown else "")
                + f"use KEY=VALUE with one of:{lines or ' none; it has no options.'}",
            )
        try:
            values[name] = convert(text, types_by_name[name])
        except ValueError as error:
            raise CtxError(f"{name}: {error}.", location=f"{location} {name}={text}") from error
    return values


def field_default(entry: Field) -> Any:
    """The default of a dataclass field; `REQUIRED` if it has none."""
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def option_help(options: Any, documented_only: bool = False) -> Iterator[str]:
    """A line for each field of a dataclass, or of an instance: name, default and help."""
    for entry in filter(is_settable, fields(options)):
        if documented_only and "help" not in entry.metadata:
            continue
        default = field_default(entry) if isinstance(options, type) else getattr(options, entry.name)
        text = entry.metadata.get("help", "")
        default_text = "" if default in (None, REQUIRED, [], ()) else f"={default}"
        yield f"{entry.name}{default_text}" + (f": {text}" if text else "")


def convert(text: str, annotation: Any) -> Any:
    """Convert a string to a type: bool, int, float, str, Literal, list, tuple, or a union of them; else parse JSON.
    Raises ValueError for a string that is not a value of the type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", "null"):
            return None
        members = [member for member in arguments if member is not type(None)]
        if len(members) == 1:
            return convert(text, members[0])
        for member in sorted(members, key=lambda member: member is str):  # str last: it accepts any string
            try:
                return convert(text, member)
            except ValueError:
                continue
        raise ValueError(f"invalid value {text!r}")
    if origin is Literal:
        values = {str(value): value for value in arguments}
        if text not in values:
            raise ValueError(f"invalid value {text!r}; {did_you_mean(text, values)}use one of: {', '.join(values)}")
        return values[text]
    if origin in (list, tuple):
        items = [convert(item.strip(), arguments[0]) for item in text.split(",")]
        return items if origin is list else tuple(items)
    if annotation is bool:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError(f"invalid value {text!r}; use true or false")
        return text.lower() in ("true", "yes", "1")
    if annotation in (int, float, str):
        try:
            return annotation(text)
        except ValueError as error:
            raise ValueError(f"invalid {annotation.__name__} value {text!r}") from error
    return json.loads(text)


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return `"did you mean x? "` for the most similar name, or an empty string.

    Abbreviations (`lr` of `learning_rate`) come first, then names with all words of `name` (`epochs` of
    `num_train_epochs`), then misspelled names.
    """
    abbreviated = [full for full in names if name == "".join(word[:1] for word in full.split("_"))]
    containing = [full for full in names if set(name.split("_")) <= set(full.split("_"))]
    similar = abbreviated or sorted(containing, key=len) or difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {similar[0]}? " if similar else ""


def flat_options(arguments: Any) -> dict[str, Any]:
    """Names and values of a dataclass of flags, with nested options: `optimizer: "adamw"`, `optimizer.beta2: 0.98`."""
    values: dict[str, Any] = {}
    for entry in fields(arguments):
        value = getattr(arguments, entry.name)
        if is_dataclass(value) and is_choice(entry):
            choices = entry.metadata["choices"].items()
            names = (name for name, options in choices if type(value) in (options, type(options)))
            values[entry.name] = getattr(value, "choice", None) or next(names)
            values |= {f"{entry.name}.{name}": nested for name, nested in flat_options(value).items()}
        else:
            values[entry.name] = value
    return values


def non_default_fields(arguments: Any) -> set[str]:
    """Names of the fields of a dataclass of flags that differ from their defaults."""
    names = set()
    for entry in fields(arguments):
        default, value = field_default(entry), getattr(arguments, entry.name)
        if is_choice(entry) and isinstance(default, str):
            default = parse_choice(default, entry.metadata["choices"], entry.name)
        if value != default:
            names.add(entry.name)
    return names


def check_conflicts(*arguments: Any) -> None:
    """Raise CtxError if two conflicting flags of dataclasses, which declare `conflicts`, differ from their defaults."""
    set_names = {name for options in arguments for name in non_default_fields(options)}
    for options in arguments:
        for entry in fields(options):
            for conflicting_name in entry.metadata.get("conflicts", ()):
                if entry.name in set_names and conflicting_name in set_names:
                    raise CtxError(
                        f"--{entry.name} cannot be combined with --{conflicting_name}.",
                        location=f"--{entry.name}, --{conflicting_name}",
                        hint="remove one of them, also from the recipe.",
                    )


def check_choice(choices: Collection[object], **values: object) -> None:
    """Raise CtxError if one of the values is not among the choices."""
    for name, value in values.items():
        if value not in choices:
            raise CtxError(f"{name}={value!r} is unknown.", hint=f"use one of: {', '.join(map(str, choices))}.")


def check_range(
    arguments: object,
    *names: str,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    location: str | None = None,
) -> None:
    """Raise CtxError if one of the named fields of a dataclass, or a value of a mapping, is out of range, or an item of
    a list; None is allowed. `location` is the flag whose options the fields are."""
    values = arguments if isinstance(arguments, Mapping) else {name: getattr(arguments, name) for name in names}
    comparisons = (
        ("above", above, operator.gt),
        ("at least", at_least, operator.ge),
        ("at most", at_most, operator.le),
        ("below", below, operator.lt),
    )
    limits = [(phrase, limit, compare) for phrase, limit, compare in comparisons if limit is not None]
    items = ((name, item) for name, value in values.items() for item in (value if isinstance(value, list) else [value]))
    for name, value in items:
        if value is not None and not all(compare(value, limit) for _, limit, compare in limits):
            expected = " and ".join(f"{phrase} {limit:,}" for phrase, limit, _ in limits)
            raise CtxError(
                f"{name}={value} is out of range.", location=location, hint=f"use a value that is {expected}."
            )


def select_fields(options: type[Options], arguments: Any) -> Options:
    """Create an instance of a dataclass from the fields of `arguments` with the same names."""
    return options(**{entry.name: getattr(arguments, entry.name) for entry in fields(options)})  # type: ignore[arg-type]
