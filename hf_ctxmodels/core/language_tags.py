"""Tags of languages at the start of a text."""

import re

_TAG = re.compile(r"<([^<>\s]+)> ?")


def split_language_tag(text: str) -> tuple[str | None, str]:
    """The language of a text that begins with its tag ("<de> Ein Satz."), or None, and the text without the tag."""
    tag = _TAG.match(text)
    return (None, text) if tag is None else (tag[1], text[tag.end() :])
