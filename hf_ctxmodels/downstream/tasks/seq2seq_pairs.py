"""Sources and targets for comparing `seq2seq` models: summaries from articles, questions from SQuAD files."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import split_sentences
from hf_ctxmodels.downstream.tasks.question_answering import Question


@dataclass(frozen=True)
class PairLimits:
    """Shortest and longest target and source in words; a longer source of a summary is truncated after the last
    sentence that fits, other pairs beyond the limits are skipped. Sources of questions have no shortest length."""

    min_target: int = 4
    max_target: int = 40
    min_source: int = 20
    max_source: int = 200


def summary_pairs(documents: Iterable[Sequence[str]], limits: PairLimits) -> Iterator[tuple[str, str]]:
    """(source, target) of each article, a list of sentences: the sentences after the first, and the first sentence,
    unless it occurs again."""
    for document in documents:
        target, *sentences = map(_normalize_whitespace, document)
        source = ""
        for sentence in sentences:
            if _count_words(f"{source} {sentence}") > limits.max_source:
                break
            source = f"{source} {sentence}".strip()
        has_valid_target = limits.min_target <= _count_words(target) <= limits.max_target
        if has_valid_target and _count_words(source) >= limits.min_source and target not in source:
            yield source, target


def question_pairs(questions: Iterable[Question], limits: PairLimits) -> Iterator[tuple[str, str]]:
    """(source, target) of each question with an answer: `answer: ... context: ...`, with the sentences that contain the
    first answer, and the question."""
    for question in questions:
        if not question.answers:
            continue
        start, answer = question.answers[0]
        context = _sentences_around(question.context, start, start + len(answer))
        source = f"answer: {_normalize_whitespace(answer)} context: {context}"
        target = _normalize_whitespace(question.question)
        has_valid_target = limits.min_target <= _count_words(target) <= limits.max_target
        if has_valid_target and _count_words(source) <= limits.max_source:
            yield source, target


def split_questions(questions: Sequence[Question], validation_fraction: float) -> tuple[list[Question], list[Question]]:
    """Training questions, and validation questions about the last contexts of the file; no context is in both. Raises
    CtxError if one of the splits is empty."""
    contexts = list(dict.fromkeys(question.context for question in questions))
    num_training = len(contexts) - round(validation_fraction * len(contexts))
    if not 0 < num_training < len(contexts):
        raise CtxError(
            f"A fraction of {validation_fraction} of {len(contexts)} contexts leaves one split empty.",
            location="--validation_fraction",
            hint="use a value such as 0.1, and a file of more contexts.",
        )
    training_contexts = set(contexts[:num_training])
    training = [question for question in questions if question.context in training_contexts]
    validation = [question for question in questions if question.context not in training_contexts]
    return training, validation


def _normalize_whitespace(text: str) -> str:
    return " ".join(text.split())


def _count_words(text: str) -> int:
    return len(text.split())


def _sentences_around(text: str, start: int, end: int) -> str:
    """The sentences of a text that contain the characters from `start` to `end`, on one line."""
    sentences, paragraph_start = [], 0
    for paragraph in text.splitlines(keepends=True):
        offset = paragraph_start
        for sentence in split_sentences(paragraph):
            sentence_start = text.index(sentence, offset)
            offset = sentence_start + len(sentence)
            if sentence_start < end and start < offset:
                sentences.append(sentence)
        paragraph_start += len(paragraph)
    return _normalize_whitespace(" ".join(sentences))
