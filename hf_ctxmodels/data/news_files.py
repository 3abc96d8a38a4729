"""Files of news articles: one JSON object a line, with the fields of Grover (Zellers et al. 2019, section 3.1)."""

import datetime
import re
from collections.abc import Callable, Iterator
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.constants import NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import NewsArticle
from hf_ctxmodels.data.text_files import check_file, file_suffix, read_json_lines

# As in the released code: authors of at most 5 characters and summaries of at most 50 are taken for noise.
_SHORTEST = {"authors": 6, "summary": 51}
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
# Not strptime's %B, which depends on the locale.
_DATES = (
    re.compile(r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"),
    re.compile(r"(?P<month>\d{1,2})-(?P<day>\d{1,2})-(?P<year>\d{4})"),
    re.compile(rf"(?P<month>{'|'.join(_MONTHS)}) (?P<day>\d{{1,2}}), (?P<year>\d{{4}})"),
)
_EXAMPLE = (
    '{"domain": "example.org", "date": "2019-04-06", "authors": ["A. Writer"], "title": "...", "article": "...", '
    '"summary": null}'
)


def open_articles(dataset: str) -> tuple[str, Callable[[], Iterator[list[str]]]]:
    """The name of a .jsonl file, or of a pattern of such files, and its reader.

    Raises:
        CtxError: There is no such file, or it is of another kind.
    """
    path = Path(dataset).expanduser()
    matches = has_magic(dataset) and not path.exists()
    files = (sorted(map(Path, glob(str(path), recursive=True))) if matches else []) or [path]
    for file in files:
        if file_suffix(file) != ".jsonl":
            raise CtxError(
                "News articles are read from .jsonl files.",
                location=str(file),
                hint=f"write one article a line: {_EXAMPLE}; or leave --news_articles out.",
            )
        check_file(file)
    return dataset if matches else path.name, partial(_read_files, files)


def _read_files(files: list[Path]) -> Iterator[list[str]]:
    for file in files:
        yield from read_articles(file)


def read_articles(file: str | Path) -> Iterator[NewsArticle]:
    """The articles of a .jsonl file, plain or .gz, with the texts of their fields.

    Every line has all `NEWS_FIELDS`: `authors` a list of strings, the others strings. Any but `article` may be null or
    empty and is then left out, as are authors of up to 5 characters together and summaries of up to 50. A date is
    "2019-04-06", "04-06-2019" or "April 6, 2019"; its text is the last of these.

    Raises:
        CtxError: As `read_json_lines`, or a field is missing or of another type; with the line.
    """
    for row, location in read_json_lines(file):
        for field in NEWS_FIELDS:
            if field not in row:
                raise CtxError(
                    f"The article has no field {field!r}; its fields are {', '.join(map(repr, row))}.",
                    location=location,
                    hint=f"give every field, null where it is unknown: {_EXAMPLE}.",
                )
        texts = {field: format_field(field, row[field], location) for field in NEWS_FIELDS}
        if not texts["article"]:
            raise CtxError("The article has no text.", location=location, hint="take the line out.")
        yield NewsArticle({field: text for field, text in texts.items() if text})


def format_field(field: str, value: Any, location: str | None = None) -> str:
    """The text of a field, empty for one that is left out; see `read_articles`.

    Raises:
        CtxError: The value has another type, or is no date.
    """
    expected = "list of strings" if field == "authors" else "string"
    if value is None:
        return ""
    if field == "authors":
        right = isinstance(value, list) and all(isinstance(author, str) for author in value)
    else:
        right = isinstance(value, str)
    if not right:
        raise CtxError(
            f"Field {field!r} holds a {type(value).__name__}, not a {expected}: {value!r}.",
            location=location,
            hint=f"write, for example: {_EXAMPLE}.",
        )
    text = ", ".join(author.strip() for author in value if author.strip()) if field == "authors" else value.strip()
    if field == "date" and text:
        return format_date(text, location)
    return text if len(text) >= _SHORTEST.get(field, 0) else ""


def format_date(date: str, location: str | None = None) -> str:
    """A date as Grover reads it, "April 6, 2019"; raises CtxError for what is none."""
    found = next(filter(None, (form.fullmatch(date) for form in _DATES)), None)
    if found is not None:
        month = found["month"]
        number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
        try:
            day = datetime.date(int(found["year"]), number, int(found["day"]))
        except ValueError:
            pass  # such as the 31st of February
        else:
            return f"{_MONTHS[day.month - 1]} {day.day}, {day.year}"
    raise CtxError(
        f"{date!r} is not a date.", location=location, hint='write it as "2019-04-06", "04-06-2019" or "April 6, 2019".'
    )
