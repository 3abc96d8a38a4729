"""The demo corpus: test data of the package gensim, so that a first run needs no network."""

import bz2
import html
import re
from collections.abc import Iterator
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError

NEWS = "lee_background.cor"
WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

_PROSE = re.compile(r"[A-Z\"“‘(].*[.!?][\"”’)]*")
_MARKUP_LEFT = re.compile(r"[{}|<>\[\]=\\_]|''|https?:|File:|Image:")
_MINIMUM_WORDS = 8


def demo_documents() -> Iterator[list[str]]:
    """Documents as lists of paragraphs: 299 news stories, then the articles of a shortened Wikipedia dump.

    About 60,000 and 380,000 words. Raises CtxError when gensim is not installed.
    """
    try:
        from gensim.corpora.wikicorpus import extract_pages, filter_wiki
        from gensim.test.utils import datapath
    except ImportError as error:
        raise CtxError(
            "The demo text is part of the package gensim, which is not installed.",
            hint="pip install hf_ctxmodels[demo]",
        ) from error

    for line in Path(datapath(NEWS)).read_text(encoding="utf-8").splitlines():
        yield [line]
    with bz2.open(datapath(WIKIPEDIA), "rb") as dump:
        for _, markup, _ in extract_pages(dump, filter_namespaces=("0",)):
            if markup.lstrip()[:9].upper() == "#REDIRECT":
                continue
            paragraphs = prose_paragraphs(filter_wiki(markup, promote_remaining=True, simplify_links=True))
            if paragraphs:
                yield paragraphs


def prose_paragraphs(text: str) -> list[str]:
    """The lines of running text in an article that gensim stripped of wiki markup: without headings, list items,
    captions, table rows and lines with remaining markup. Bold and italic quotes are removed."""
    paragraphs = []
    for line in text.splitlines():
        clean = html.unescape(re.sub(r"'{2,5}", "", line)).replace(" , ", ", ").replace("()", "")
        clean = " ".join(clean.split())
        if len(clean.split()) >= _MINIMUM_WORDS and _PROSE.fullmatch(clean) and not _MARKUP_LEFT.search(clean):
            paragraphs.append(clean)
    return paragraphs
