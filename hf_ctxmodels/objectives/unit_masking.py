"""Masking of words, phrases and entities as units, with pairs of segments (Sun et al. 2019, section 3.2)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.objectives.masking import UnitMaskingRule
from hf_ctxmodels.objectives.sentence_pairs import (
    CONTINUATION,
    RANDOM,
    LabeledSegments,
    RandomSegment,
    Segment,
    SentencePairCollator,
    SentencePairs,
    next_sentence_pairs,
)
from hf_ctxmodels.objectives.tokenized_documents import NO_WORD, TokenizedDocument, sentence_chunks

Pairs = Literal["random", "swapped"]
_END = None  # key of a trie node at which a phrase ends
Word = tuple[int, ...]


class Phrases:
    """A list of phrases, matched as sequences of tokenized words from left to right, the longest first; single words
    and phrases with an unknown token are skipped."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, phrases: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        self._root: dict[Word | None, Any] = {}
        for phrase in phrases:
            encoded = tokenizer(phrase, add_special_tokens=False, verbose=False)
            ids = encoded["input_ids"]
            words = list(_split_words(np.array(ids), np.array(encoded.word_ids())))
            if len(words) < 2 or tokenizer.unk_token_id in ids:
                continue
            node = self._root
            for word in words:
                node = node.setdefault(word, {})
            node[_END] = True
        self._first_tokens = np.unique([word[0] for word in self._root if word])

    @classmethod
    def from_file(cls, tokenizer: PreTrainedTokenizerBase, file: str | Path) -> Self:
        """The phrases of a file, one per line, or none for an empty name; raises CtxError if it has no valid phrase."""
        if not file:
            return cls(tokenizer, ())
        phrases = cls(tokenizer, filter(None, (line.strip() for line in read_lines(file))))
        if not phrases._root:
            raise CtxError(
                "There is no phrase of two or more words in the tokenizer's vocabulary.",
                location=str(file),
                hint="write one phrase per line, for example with `hf-ctxmodels data units`.",
            )
        return phrases

    def join(self, ids: np.ndarray, word_ids: np.ndarray) -> np.ndarray:
        """(tokens,) numbers of the units of a text, phrases and other words; `NO_WORD` is preserved."""
        words = list(_split_words(ids, word_ids))
        starts = np.flatnonzero(np.diff(word_ids, prepend=NO_WORD - 1) != 0)
        units = np.arange(len(words))
        end = 0
        for first in np.flatnonzero(np.isin(ids[starts], self._first_tokens)).tolist():
            if first < end:  # inside the previous phrase
                continue
            node, end = self._root, first + 1
            for number in range(first, len(words)):
                if (child := node.get(words[number])) is None:
                    break
                node = child
                if _END in node:
                    end = number + 1
            units[first:end] = first
        joined = np.repeat(units, np.diff(np.append(starts, len(ids)))).astype(np.int32)
        return np.where(word_ids == NO_WORD, NO_WORD, joined).astype(np.int32)

    def join_document(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with units as words: its `units` if it has any, else these phrases."""
        phrases = Phrases(self.tokenizer, document.units) if document.units else self
        if document.word_ids is None or not phrases._root:
            return document
        return replace(document, word_ids=phrases.join(document.ids, document.word_ids))


def _split_words(ids: np.ndarray, word_ids: np.ndarray) -> Iterator[Word]:
    """The words of a text; special tokens are empty words, which no phrase contains."""
    if len(ids):
        cuts = np.flatnonzero(np.diff(word_ids)) + 1
        for tokens, numbers in zip(np.split(ids, cuts), np.split(word_ids, cuts), strict=True):
            yield () if numbers[0] == NO_WORD else tuple(tokens.tolist())


@dataclass
class DataCollatorForUnitMaskingWithPairs(SentencePairCollator):
    """Masks units of pairs: all tokens of 15% of the units, each replaced independently: 80% -> mask token, 10% ->
    random, 10% unchanged.

    Each feature holds, in addition to the columns of `DataCollatorForMaskedLM`:
        word_ids: (tokens,) numbers of units; -1 for special tokens.
        next_sentence_labels: 0 if the second segment follows the first, else 1; -100 for one segment.
    """

    label, label_classes = "next_sentence_labels", {"random_next": RANDOM}
    rule_class = UnitMaskingRule

    whole_word: bool = field(default=True, init=False)
    ngram: int = field(default=1, init=False)
    unit_rows: float = flag(1.0, "Probability that units are masked in an example instead of single tokens.")
    mlm_probability: float = flag(0.15, "Share of the units of an example to predict.")


@dataclass
class UnitMaskingWithPairs(DataCollatorForUnitMaskingWithPairs, SentencePairs):
    """ERNIE 1.0's objective: predict masked words, phrases or entities, and whether two segments belong together.

    15% of the units are selected, at least one. All tokens of a unit are targets, and each is replaced independently.
    The units are words and, with `units`, the phrases of a file; the phrases of a document (`--units_column`) replace
    them. The stages of the paper (words, phrases, entities) are runs with different files, each continued from the
    previous one.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the units; one class: B follows A (0) or not (1) |

    The negative pairs:

    - `pairs=random`: B is of another document, as in BERT. The first released reader takes B from the next example of a
      shuffled buffer.
    - `pairs=swapped`: the halves of a text, split at the sentence nearest to its middle, are swapped with probability
      1/2, as in the later release. A text of one sentence is split at its middle token.

    References: Sun et al. 2019, sections 3.2 and 4.2; the readers of the PaddlePaddle/ERNIE releases.
    Related: `MaskedLMWithNextSentence` selects 15% of the tokens; `ContinualTasks` adds the tasks of ERNIE 2.0.

    Example:
        >>> UnitMaskingWithPairs(tokenizer, max_length=128, seed=0, units="phrases.txt", pairs="swapped")
    """

    units: str = flag("", "File of phrases, one per line, that are units; empty: only words are units.")
    pairs: Pairs = flag(
        "random",
        "Negative pairs: `random` takes the second segment of another document, `swapped` the halves of a text in the "
        "wrong order.",
    )
    short_seq_probability: float = flag(0.15, "Share of the documents whose pairs get a random shorter length.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(get_args(Pairs), pairs=self.pairs)
        self.phrases = Phrases.from_file(self.tokenizer, self.units)
        self.samples_other_documents = self.pairs == "random"
        self.config_fields = {"pretraining_tasks": {"next_sentence": 2}}

    def prepare(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with phrases as units."""
        return self.phrases.join_document(document)

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """The examples of a document, see `SentencePairs.segment_pairs`."""
        if self.pairs == "random":
            yield from next_sentence_pairs(document, target, random_segment, rng)
            return
        for first, last in sentence_chunks(document.bounds, target, from_end=rng.random() < 0.5):
            text = Segment.of(document, first, last)
            if len(text) < 2:
                yield LabeledSegments((text,), IGNORE_INDEX)
                continue
            bounds = document.bounds[first : last + 1]
            middle = (text.start + text.stop) // 2
            if len(bounds) > 2:  # the sentence end nearest to the middle, the earlier of two
                middle = int(min(bounds[1:-1], key=lambda bound: abs(2 * bound - text.start - text.stop)))
            halves = (Segment(document, text.start, middle), Segment(document, middle, text.stop))
            is_swapped = rng.random() < 0.5
            yield LabeledSegments(halves[::-1], RANDOM) if is_swapped else LabeledSegments(halves, CONTINUATION)
