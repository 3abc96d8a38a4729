"""Sources and targets for `seq2seq` made from other data: summaries from articles, questions from SQuAD's form.

Both are exercises for comparing models, not benchmarks: a first sentence is no written summary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.sentence_splitting import split_sentences
from hf_ctxmodels.downstream.tasks.question_answering import Question

Item = TypeVar("Item")


@dataclass(frozen=True)
class PairLimits:
    """Lengths in words, split at white space, beyond which pairs are left out or sources cut.

    Attributes:
        min_target, max_target: Shortest and longest target.
        min_source: Shortest source.
        max_source: Longest source; it ends with the last sentence that fits.
    """

    min_target: int = 4
    max_target: int = 40
    min_source: int = 20
    max_source: int = 200


def summary_pairs(documents: Iterable[Sequence[str]], limits: PairLimits) -> Iterator[tuple[str, str]]:
    """(source, target) of each article: the sentences after the first one, and the first, which may be a title.

    Articles without enough words are left out, and so are those whose first sentence is too long or stands in the rest.

    Args:
        documents: Lists of sentences.
        limits: The lengths.
    """
    for document in documents:
        first, *rest = map(_one_line, document)
        source = _beginning(rest, limits.max_source)
        fits = limits.min_target <= _words(first) <= limits.max_target
        if fits and _words(source) >= limits.min_source and first not in source:
            yield source, first


def question_pairs(questions: Iterable[Question], limits: PairLimits) -> Iterator[tuple[str, str]]:
    """(source, target) of each question with an answer: `answer: ... context: ...`, and the question.

    The context is the sentences that the first answer lies in. Pairs that are too long, or whose question is too short,
    are left out.
    """
    for question in questions:
        if not question.answers:
            continue
        start, answer = question.answers[0]
        context = _sentences_around(question.context, start, start + len(answer))
        source, target = f"answer: {_one_line(answer)} context: {context}", _one_line(question.question)
        if _words(source) <= limits.max_source and limits.min_target <= _words(target) <= limits.max_target:
            yield source, target


def split_questions(questions: Sequence[Question], validation_fraction: float) -> tuple[list[Question], list[Question]]:
    """Training questions, and those about the last contexts of the file, so that no context is in both parts.

    Raises:
        CtxError: The share is out of range, or one of the parts is empty.
    """
    contexts = list(dict.fromkeys(question.context for question in questions))
    kept = len(contexts) - round(validation_fraction * len(contexts))
    if not 0 < kept < len(contexts):
        raise CtxError(
            f"A share of {validation_fraction} of {len(contexts)} contexts leaves one part empty.",
            location="--validation_fraction",
            hint="use a value such as 0.1, and a file of more contexts.",
        )
    training = set(contexts[:kept])
    parts: tuple[list[Question], list[Question]] = [], []
    for question in questions:
        parts[question.context not in training].append(question)
    return parts


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _words(text: str) -> int:
    return len(text.split())


def _beginning(sentences: Sequence[str], most: int) -> str:
    """The first sentences with at most so many words together."""
    taken: list[str] = []
    for sentence in sentences:
        if _words(" ".join([*taken, sentence])) > most:
            break
        taken.append(sentence)
    return " ".join(taken)


def _sentences_around(text: str, start: int, end: int) -> str:
    """The sentences of a text in which the characters from `start` to `end` lie, as one line."""
    found, place = [], 0
    for paragraph in text.splitlines(keepends=True):
        offset = place
        for sentence in split_sentences(paragraph):
            begins = text.index(sentence, offset)
            offset = begins + len(sentence)
            if begins < end and start < offset:
                found.append(sentence)
        place += len(paragraph)
    return _one_line(" ".join(found))
