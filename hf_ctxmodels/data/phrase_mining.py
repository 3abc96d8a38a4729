"""Phrases of several words: mined from text by mutual information, joined in text by underscores, or extracted from
tagged sentences."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from math import log

import regex

from hf_ctxmodels.core.bio_tags import is_bio
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.word_patterns import LETTER, RUN_OR_MARK
from hf_ctxmodels.data.table_files import TaggedSentence

_BETWEEN_WORDS = regex.compile(rf"([^{LETTER}]+)", regex.V1)
_SPACE = " "


def find_phrases(
    documents: Iterable[list[str]], *, min_count: int = 20, min_information: float = 3.0, max_words: int = 4
) -> Counter[str]:
    """Runs of words that occur together more often than by chance, with their counts.

    Two neighbors are joined if they occur together at least `min_count` times and their pointwise mutual information
    ln p(a b) / (p(a) p(b)) is at least `min_information` (Mikolov et al. 2013b, section 4, with another score), until
    no phrase grows.
    """
    check_range({"min_count": min_count}, at_least=1)
    check_range({"max_words": max_words}, at_least=2)
    sentences = [RUN_OR_MARK.findall(sentence) for document in documents for sentence in document]
    while True:
        accepted = _pairs(sentences, min_count, min_information, max_words)
        if not accepted:
            return Counter(word for sentence in sentences for word in sentence if _SPACE in word)
        sentences = [list(_join(sentence, accepted)) for sentence in sentences]


def _pairs(
    sentences: Sequence[Sequence[str]], min_count: int, min_information: float, max_words: int
) -> dict[tuple[str, str], float]:
    """The neighbors to join, with their mutual information."""
    words = Counter(word for sentence in sentences for word in sentence)
    pairs = Counter(pair for sentence in sentences for pair in pairwise(sentence))
    total, number = words.total(), max(1, pairs.total())
    accepted = {}
    for (first, second), count in pairs.items():
        if count < min_count or first.count(_SPACE) + second.count(_SPACE) + 2 > max_words:
            continue
        if not (first[0].isalpha() and second[0].isalpha()):  # neither numbers nor punctuation
            continue
        information = log(count / number) - log(words[first] / total) - log(words[second] / total)
        if information >= min_information:
            accepted[first, second] = information
    return accepted


def _join(sentence: Sequence[str], accepted: dict[tuple[str, str], float]) -> Iterator[str]:
    """The words, with accepted neighbors joined from left to right."""
    position = 0
    while position < len(sentence):
        pair = tuple(sentence[position : position + 2])
        if pair in accepted:
            yield _SPACE.join(pair)
            position += 2
        else:
            yield sentence[position]
            position += 1


def score_phrases(texts: Iterable[str], *, min_count: int = 5, threshold: float = 10.0) -> dict[tuple[str, str], float]:
    """Neighboring words that occur together more often than by chance, lower-cased, with their scores.

    The score of two words is (count(a b) - min_count) / (count(a) count(b)) (Mikolov et al. 2013b, section 4, equation
    6), times the number of distinct words and pairs, as in gensim, so that thresholds do not depend on the size of the
    text. Words with anything but white space between them are not a pair.

    Args:
        min_count: The discount of rare pairs; a pair that occurs as often or less has no positive score.
        threshold: Only pairs with a higher score are returned.
    """
    check_range({"min_count": min_count}, at_least=1)
    check_range({"threshold": threshold}, at_least=0)
    words, pairs = Counter[str](), Counter[tuple[str, str]]()
    for text in texts:
        pieces = _BETWEEN_WORDS.split(text.lower())  # words and what is between them, in turn
        words.update(filter(None, pieces[::2]))
        pairs.update(
            (first, second)
            for first, between, second in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False)
            if first and second and between.isspace()
        )
    size = len(words) + len(pairs)
    scores = {pair: (count - min_count) / (words[pair[0]] * words[pair[1]]) * size for pair, count in pairs.items()}
    return {pair: score for pair, score in scores.items() if score > threshold}


def join_phrases(text: str, phrases: Container[tuple[str, str]]) -> str:
    """Replace the space between the words of each phrase by an underscore, from left to right.

    Args:
        phrases: Pairs of lower-cased words; the case of the text does not matter, and is preserved.
    """
    pieces = _BETWEEN_WORDS.split(text)
    position = 1
    while position < len(pieces):
        if pieces[position].isspace() and (pieces[position - 1].lower(), pieces[position + 1].lower()) in phrases:
            pieces[position] = "_"
            position += 2  # the second word is not the first one of another phrase
        position += 2
    return "".join(pieces)


def extract_entities(sentences: Iterable[TaggedSentence]) -> Counter[str]:
    """Entities of two or more words in sentences with BIO tags, and how often each occurs."""
    entities = Counter[str]()
    for sentence in sentences:
        if not is_bio(sentence.tags):
            raise CtxError(
                f"The tags are not B-, I- and O: {' '.join(sentence.tags)[:80]!r}.",
                location=sentence.location,
                hint="use a CoNLL file with entities in its last column.",
            )
        entity: list[str] = []
        for word, tag in [*zip(sentence.words, sentence.tags, strict=True), ("", "O")]:
            if tag.startswith("I-"):
                entity.append(word)
                continue
            if len(entity) > 1:
                entities[_SPACE.join(entity)] += 1
            entity = [word] if tag.startswith("B-") else []
    return entities
