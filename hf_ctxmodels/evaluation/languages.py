"""Similarity of the languages of two sets of examples: shared subwords and script."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.data.table_files import TaggedSentence
from hf_ctxmodels.downstream.tasks.question_answering import Question
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceExample


@dataclass(frozen=True)
class SubwordOverlap:
    """Overlap of the subwords of a training text and a test text, without special tokens, 0 to 1.

    Attributes:
        types: Distinct subwords that occur in both texts, as a share of all distinct subwords: |A ∩ B| / |A ∪ B| (Pires
            et al. 2019, section 3.1, where A and B are the subwords of entities; here of all words).
        tokens: Share of the tokens of the test text whose subword occurs in the training text, the token-level overlap
            of Wu & Dredze 2019.
    """

    types: float
    tokens: float

    @classmethod
    def between(cls, training: Counter[int], test: Counter[int], unknown_token: int | None = None) -> "SubwordOverlap":
        """The overlap of the counts of subwords; the unknown token is not shared."""
        shared, union = (training.keys() & test.keys()) - {unknown_token}, training.keys() | test.keys()
        shared_tokens = sum(test[subword] for subword in shared)
        return cls(len(shared) / max(len(union), 1), shared_tokens / max(test.total(), 1))


def example_texts(examples: Iterable[Any]) -> list[str] | list[list[str]]:
    """The distinct texts of the examples of a task; lists of words of tagged sentences.

    Raises:
        TypeError: The examples are neither tagged sentences, nor texts or pairs, nor questions.
    """
    texts: dict[tuple[str, ...], None] = {}
    are_words = False
    for example in examples:
        match example:
            case TaggedSentence(words=words):
                texts[tuple(words)], are_words = None, True
            case SequenceExample(texts=columns):
                texts |= dict.fromkeys((text,) for text in columns)
            case Question(question=question, context=context):
                texts |= dict.fromkeys([(question,), (context,)])
            case _:
                raise TypeError(f"no texts in {type(example).__name__}")
    return [list(text) for text in texts] if are_words else [text for (text,) in texts]


def count_subwords(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] | Sequence[list[str]], language: str | None = None
) -> Counter[int] | None:
    """Counts of the tokens of texts, or lists of words, without special tokens; None for tokens of several ids, as of
    character-based models. `language` is the language of the texts, for a tokenizer whose tokens depend on it."""
    are_words = not isinstance(texts[0], str)
    options: dict[str, Any] = {"is_split_into_words": are_words, "add_special_tokens": False, "verbose": False}
    if language is not None and getattr(tokenizer, "tokens_depend_on_language", False):
        options["language"] = language
    rows = tokenizer(list(texts), **options)["input_ids"]  # type: ignore[arg-type]
    if any(not isinstance(token, int) for row in rows for token in row[:1]):
        return None
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    return Counter(token for row in rows for token in row if token not in special)


def main_script(texts: Iterable[str | list[str]]) -> str:
    """The most frequent script of the letters of texts, or lists of words, such as "Latin", by the names of characters
    in Unicode; Chinese characters are "Han".

    >>> main_script(["Привет, world"])
    'Cyrillic'
    """
    letters = Counter(letter for text in texts for word in text for letter in word if letter.isalpha())
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        scripts[unicodedata.name(letter, "unknown").split()[0]] += count
    name = scripts.most_common(1)[0][0] if scripts else "none"
    return "Han" if name == "CJK" else name.capitalize()
