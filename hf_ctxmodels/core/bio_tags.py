"""BIO tags of labeled spans of words: B-LABEL at the first word of a span, I-LABEL at its other words, O elsewhere."""

import re
from collections.abc import Sequence


def is_bio(tags: Sequence[str]) -> bool:
    """Whether every tag is `O`, `B-...` or `I-...`: entities or chunks, not parts of speech."""
    return all(re.fullmatch(r"O|[BI]-.+", tag) for tag in tags)
