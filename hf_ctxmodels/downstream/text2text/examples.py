"""Examples of tasks as text, and templates with the fields of rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter, punctuation
from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import Row


@dataclass(frozen=True)
class TextExample:
    """An example of a task as text.

    Attributes:
        input: The source text.
        target: The target text in training; for an unlabeled example "", or its referent.
        targets: All accepted references; none for an unlabeled example.
        label: Index of the target in `choices`, number, or for a referent whether it is correct (0 or 1); None for free
            text and for an unlabeled example.
        choices: The label strings, or the choices of this example; empty for free text.
        location: `file:line`.
        group: Examples that are scored together, such as the answers of a question of MultiRC.
    """

    input: str
    target: str
    targets: tuple[str, ...]
    label: int | float | None
    choices: tuple[str, ...]
    location: str
    group: str | None = None


class Template:
    """A text with fields in braces; `{{` and `}}` are literal braces. `{entities:, }` joins a list by a comma and a
    space, `{entities}` by a space. `{sentence!p}` removes punctuation at the end."""

    def __init__(self, text: str, location: str) -> None:
        try:
            self._segments = list(Formatter().parse(text))
        except ValueError as error:
            raise CtxError(
                f"Not a template: {text!r}: {error}.", location=location, hint="write {{ and }} for braces."
            ) from error
        if any(name == "" or conversion not in (None, "p") for _, name, _, conversion in self._segments):
            raise CtxError(
                f"A field of {text!r} has no name, or a conversion other than !p.",
                location=location,
                hint="write {name}.",
            )
        self.text = text
        self.fields = tuple(dict.fromkeys(name for _, name, _, _ in self._segments if name is not None))

    @property
    def only_field(self) -> str | None:
        """The field, if the template consists of one field without a separator."""
        return self.fields[0] if self.fields and self._segments == [("", self.fields[0], "", None)] else None

    def render(self, row: Row) -> str:
        """The text with the values of a row; raises CtxError if a field is missing or null."""
        texts = []
        for literal, name, separator, conversion in self._segments:
            texts.append(literal)
            if name is not None:
                value = field_value(row, name)
                values = value if isinstance(value, list) else [value]
                value_string = (separator or " ").join(map(value_text, values))
                texts.append(value_string.rstrip(punctuation) if conversion else value_string)
        return "".join(texts)


def field_value(row: Row, name: str) -> Any:
    """A value of a row; raises CtxError if it is missing, null or an object."""
    require_field(row, name)
    value = row.values[name]
    items = value if isinstance(value, list) else [value]
    if any(item is None or isinstance(item, dict | list) for item in items):
        raise CtxError(
            f"The field {name!r} is {str(value)[:80]}, expected a text, a number or a list of them.",
            location=row.location,
            hint="correct the line, or use another field.",
        )
    return value


def select_rows(rows: Sequence[Row], conditions: Mapping[str, str]) -> Iterator[Row]:
    """The rows whose fields have these values; raises CtxError for a missing field."""
    for row in rows:
        for field in conditions:
            require_field(row, field)
        if all(value_text(row.values[field]) == value for field, value in conditions.items()):
            yield row


def require_field(row: Row, field: str) -> None:
    """Raise CtxError if a row lacks a field."""
    if field not in row.values:
        raise CtxError(
            f"No field {field!r}. The fields are: {', '.join(row.values)}.",
            location=row.location,
            hint="correct the template, or the file.",
        )


def value_text(value: Any) -> str:
    """A value as it is written in YAML: `true`, `0`, `entailment`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
