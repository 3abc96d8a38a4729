"""The demo corpus: test data of the package gensim, so that a first run needs no network.

All functions raise CtxError if gensim is not installed.
"""

import bz2
import html
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from hf_ctxmodels.core.errors import CtxError

NEWS = "lee_background.cor"
WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
RATED_NEWS = "lee.cor"
RATINGS = "similarities0-1.txt"
WORD_PAIRS = "wordsim353.tsv"

_PROSE = re.compile(r"[A-Z\"“‘(].*[.!?][\"”’)]*")
_REMAINING_MARKUP = re.compile(r"[{}|<>\[\]=\\_]|''|https?:|File:|Image:")
_MIN_WORDS = 8


def demo_file(name: str) -> Path:
    """The path of one of gensim's test files; raises CtxError if gensim is not installed."""
    package = importlib.util.find_spec("gensim")  # importing gensim itself is slow and not required
    if package is None or package.origin is None:
        raise CtxError(
            "The demo text is part of the package gensim, which is not installed.",
            hint="pip install 'hf_ctxmodels[demo]'",
        )
    return Path(package.origin).parent / "test" / "test_data" / name


def demo_documents() -> Iterator[list[str]]:
    """Documents as lists of paragraphs: 299 news stories (60,000 words), then the articles of a shortened Wikipedia
    dump (380,000 words)."""
    for line in demo_file(NEWS).read_text(encoding="utf-8").splitlines():
        yield [line]
    for _, paragraphs in demo_articles():
        yield paragraphs


def demo_articles() -> Iterator[tuple[str, list[str]]]:
    """Title and paragraphs of the 102 Wikipedia articles with running text."""
    for title, paragraphs in _articles_with_text():
        yield title, list(paragraphs)


@cache
def _articles_with_text() -> list[tuple[str, list[str]]]:
    """The articles, cached, since the removal of the markup takes seconds."""
    path, articles = demo_file(WIKIPEDIA), []
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki

    with bz2.open(path, "rb") as dump:
        for title, markup, _ in extract_pages(dump, filter_namespaces=("0",)):
            if markup.lstrip()[:9].upper() == "#REDIRECT":
                continue
            paragraphs = prose_paragraphs(filter_wiki(markup, promote_remaining=True, simplify_links=True))
            if paragraphs:
                articles.append((title, paragraphs))
    return articles


def rated_stories() -> tuple[list[str], np.ndarray]:
    """50 news stories, and human similarity ratings of all pairs: (50, 50) means from 0 to 1.

    From Lee, Pincombe & Welsh 2005, "An empirical evaluation of models of text document similarity". The matrix is
    symmetric, with ones on the diagonal.
    """
    stories = demo_file(RATED_NEWS).read_text(encoding="windows-1252").splitlines()
    upper = np.triu(np.loadtxt(demo_file(RATINGS)), 1)
    return [story for story in stories if story.strip()], upper + upper.T + np.eye(len(upper))


def rated_words() -> list[tuple[str, str, float]]:
    """Pairs of words with human similarity ratings from 0 to 10: WordSim-353 (Finkelstein et al. 2002)."""
    lines = demo_file(WORD_PAIRS).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [(first, second, float(rating)) for first, second, rating in rows]


def prose_paragraphs(text: str) -> list[str]:
    """The lines of running text in an article without wiki markup (removed by gensim): headings, list items, captions,
    table rows and lines with remaining markup are dropped, as are the quotes of bold and italic text."""
    paragraphs = []
    for line in text.splitlines():
        clean = html.unescape(re.sub(r"'{2,5}", "", line)).replace(" , ", ", ").replace("()", "")
        clean = " ".join(clean.split())
        if len(clean.split()) >= _MIN_WORDS and _PROSE.fullmatch(clean) and not _REMAINING_MARKUP.search(clean):
            paragraphs.append(clean)
    return paragraphs
