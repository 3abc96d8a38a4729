"""Files of news articles: one JSON object per line, with the fields of Grover (Zellers et al. 2019, section 3.1)."""

import datetime
import re
from collections.abc import Iterator
from typing import Any

from hf_ctxmodels.core.constants import NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import NewsArticle
from hf_ctxmodels.data.text_files import FileRange, align_range, read_json_lines

# As in the released code, shorter authors and summaries are treated as noise.
_MIN_LENGTHS = {"authors": 6, "summary": 51}
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
# strptime's %B depends on the locale.
_DATES = (
    re.compile(r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"),
    re.compile(r"(?P<month>\d{1,2})-(?P<day>\d{1,2})-(?P<year>\d{4})"),
    re.compile(rf"(?P<month>{'|'.join(_MONTHS)}) (?P<day>\d{{1,2}}), (?P<year>\d{{4}})"),
)
EXAMPLE_ARTICLE = (
    '{"domain": "example.org", "date": "2019-04-06", "authors": ["A. Writer"], "title": "...", "article": "...", '
    '"summary": null}'
)


def read_articles(selection: FileRange) -> Iterator[NewsArticle]:
    """The articles of a .jsonl file, or of a range of it, with the texts of their fields.

    Every line has all `NEWS_FIELDS`: `authors` is a list of strings, the others are strings. Any but `article` may be
    null or empty and is then dropped, as are authors of up to 5 characters in total and summaries of up to 50. A date
    is "2019-04-06", "04-06-2019" or "April 6, 2019"; its text is the last of these.
    """
    for row, location in read_json_lines(*align_range(selection, "line")):
        for field in NEWS_FIELDS:
            if field not in row:
                raise CtxError(
                    f"The article has no field {field!r}; its fields are {', '.join(map(repr, row))}.",
                    location=location,
                    hint=f"write every field, null if it is unknown: {EXAMPLE_ARTICLE}.",
                )
        texts = {field: format_field(field, row[field], location) for field in NEWS_FIELDS}
        if not texts["article"]:
            raise CtxError("The article has no text.", location=location, hint="remove the line.")
        yield NewsArticle({field: text for field, text in texts.items() if text}, location)


def format_field(field: str, value: Any, location: object = None) -> str:
    """The text of a field, empty if it is dropped; raises CtxError for a wrong type or an invalid date. See
    `read_articles`."""
    if value is None:
        return ""
    values, expected = ([value], "string") if field != "authors" else (value, "list of strings")
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise CtxError(
            f"Field {field!r} contains a {type(value).__name__}, not a {expected}: {value!r}.",
            location=location,
            hint=f"write, for example: {EXAMPLE_ARTICLE}.",
        )
    text = ", ".join(text.strip() for text in values if text.strip())
    if field == "date" and text:
        return format_date(text, location)
    return text if len(text) >= _MIN_LENGTHS.get(field, 0) else ""


def format_date(date: str, location: object = None) -> str:
    """A date in Grover's format, "April 6, 2019"; raises CtxError for an invalid date."""
    match = next(filter(None, (pattern.fullmatch(date) for pattern in _DATES)), None)
    if match is not None:
        month = match["month"]
        number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
        try:
            day = datetime.date(int(match["year"]), number, int(match["day"]))
        except ValueError:
            pass  # such as the 31st of February
        else:
            return f"{_MONTHS[day.month - 1]} {day.day}, {day.year}"
    raise CtxError(
        f"{date!r} is not a date.", location=location, hint='write it as "2019-04-06", "04-06-2019" or "April 6, 2019".'
    )
