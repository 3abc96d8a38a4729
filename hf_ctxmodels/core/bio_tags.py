"""Tags of the words of spans: B at the first word, I at the others, O outside."""

import re
from collections.abc import Sequence


def is_bio(tags: Sequence[str]) -> bool:
    """Whether every tag is `O`, `B-...` or `I-...`: entities or chunks, not parts of speech."""
    return all(re.fullmatch(r"O|[BI]-.+", tag) for tag in tags)
