"""Denoising (Lewis et al. 2020, "BART", section 2.2): restore a text that noising functions have corrupted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, exp
from typing import Any, Literal, get_args

import numpy as np
import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, pad_targets, required_token
from hf_ctxmodels.objectives.base import Objective, batch_statistics, target_rates
from hf_ctxmodels.objectives.features import NonSpecialTokens, check_token_ids, feature_generator, feature_word_ids
from hf_ctxmodels.objectives.tokenized_documents import NO_WORD, SpecialTokensTemplate, sequence_bounds

MaskLength = Literal["span-poisson", "word", "subword"]
_MIN_PROBABILITY = 1e-7  # of a span length; the Poisson distribution is truncated at less probable ones
_SPACE = "Ġ"  # its representation in byte-level vocabularies


@dataclass
class DataCollatorForDenoising(PaddingCollator):
    """Corrupts sequences by up to five noising functions; the targets are the original sequences.

    The functions are applied in this order: permute sentences, mask, insert, rotate. The paper's token masking is
    mask_length "subword" or "word" with replace_length 1; token deletion, replace_length 0; text infilling,
    "span-poisson" with replace_length 1. All shares of tokens, words or sentences are rounded up.

    The special tokens at the ends are not moved. The defaults are from the released command. As in the release, words
    of a byte-level vocabulary are separated by spaces: a comma belongs to the word before it. Unlike in the release,
    random tokens are never special ones, and the first token of a sentence begins a word.

    Each feature holds:
        input_ids: (tokens,) with special tokens.
        word_ids: (tokens,), for words and spans of words; None or -1 for special tokens.
        sentence_starts: (tokens,), not 0 at the first token of a sentence; not required with `full_stops`, nor without
            `permute_sentences`.

    Returns: input_ids, attention_mask (batch, width), the corrupted sequences; labels (batch, steps), the original
    sequences, -100 after their ends. The decoder prepends its start token.
    """

    mask: float = flag(0.3, "Share of the words to mask.")
    mask_random: float = flag(0.1, "Share of the masked spans and inserted tokens that become random tokens.")
    mask_length: MaskLength = flag("span-poisson", "Unit of masking: spans of words, words, or tokens.")
    poisson_lambda: float = flag(3.5, "Mean length of a span in words; 3 in the paper.")
    replace_length: int = flag(1, "Mask tokens that replace a span: 1, 0, or -1: one for each of its tokens.")
    permute_sentences: float = flag(1.0, "Share of the sentences that are permuted.")
    insert: float = flag(0.0, "Tokens to insert, as a share of the sequence.")
    rotate: float = flag(0.0, "Share of the sequences that begin at a random token.")
    full_stops: bool = flag(False, 'Sentences end at a token ".", as in the release; False: as in the text.')
    static: bool = flag(False, "The same corruption in every epoch instead of a new one.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "mask", "mask_random", "permute_sentences", "insert", "rotate", at_least=0, at_most=1)
        check_range(self, "poisson_lambda", above=0, at_most=50)
        check_choice(get_args(MaskLength), mask_length=self.mask_length)
        check_choice((1, 0, -1), replace_length=self.replace_length)
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)
        self.non_special = NonSpecialTokens(self.tokenizer)
        self.mask_id, self.replacements = int(self.tokenizer.mask_token_id), self.non_special.ids
        self.needs_words = self.mask > 0 and self.mask_length != "subword"
        weights = [exp(-self.poisson_lambda)]
        while weights[-1] >= _MIN_PROBABILITY or len(weights) <= self.poisson_lambda:
            weights.append(weights[-1] * self.poisson_lambda / len(weights))
        self.length_probabilities = np.array(weights) / sum(weights)
        """Probabilities of the span lengths 0, 1, 2, ... in words."""
        vocabulary = self.tokenizer.get_vocab()
        self._full_stop = vocabulary.get(".")
        if self.full_stops and self._full_stop is None:
            raise CtxError(
                'The tokenizer has no token ".", at which full_stops ends sentences.',
                hint="use full_stops=False: sentences end at the sentence ends of the text.",
            )
        begins_with_space = [number for token, number in vocabulary.items() if token.startswith(_SPACE)]
        ids = np.arange(len(self.non_special.table))
        self._begins_with_space = np.isin(ids, begins_with_space) if _SPACE in vocabulary else None

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Corrupt and pad features; see the class for their columns and the returned ones."""
        sequences = [np.asarray(feature["input_ids"]) for feature in features]
        corrupted = [self.corrupt(feature, ids) for feature, ids in zip(features, sequences, strict=True)]
        return self.pad_inputs(corrupted)[1] | {"labels": pad_targets(sequences)}

    def corrupt(self, feature: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
        """(tokens after noising,) ids of a sequence."""
        check_token_ids(ids, len(self.non_special.table))
        text = slice(self.template.leading, len(ids) - self.template.special_tokens + self.template.leading)
        word_starts = self._word_starts(feature, ids)[text] if self.needs_words else np.ones(len(ids[text]), dtype=bool)
        bounds = self._sentence_bounds(feature, ids, text) if self.permute_sentences else np.zeros(1, dtype=int)
        rng = feature_generator(feature, self.seed, period=1 if self.static else None)
        noised = self.noise(ids[text], word_starts, bounds, rng)
        return np.concatenate([ids[: text.start], noised, ids[text.stop :]])

    def _word_starts(self, feature: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
        """(tokens,) bool: True at the first token of a word; in a byte-level vocabulary a word begins after a space, or
        with a sentence or sequence."""
        words = feature_word_ids(feature)
        starts = (np.diff(words, prepend=NO_WORD) != 0) & (words != NO_WORD)
        if self._begins_with_space is None:
            return starts
        begins = self._begins_with_space[ids] | (np.arange(len(ids)) == self.template.leading)
        if "sentence_starts" in feature:
            begins |= np.asarray(feature["sentence_starts"]) != 0
        return starts & begins

    def _sentence_bounds(self, feature: Mapping[str, Any], ids: np.ndarray, text: slice) -> np.ndarray:
        """(sentences + 1,) sentence s is the tokens [bounds[s], bounds[s + 1]) of the text."""
        if self.full_stops:
            stops = ids[text] == self._full_stop
            starts = np.flatnonzero(stops & ~np.append(False, stops[:-1])[: len(stops)]) + 1
        elif "sentence_starts" in feature:
            starts = np.flatnonzero(np.asarray(feature["sentence_starts"])[text])
        else:
            raise CtxError(
                "A feature has no `sentence_starts`, which the permutation of sentences requires.",
                hint="make the examples with Denoising.examples(documents), or use full_stops=True or "
                "permute_sentences=0.",
            )
        return np.unique(np.concatenate([[0], starts, [len(ids[text])]]))

    def noise(
        self, ids: np.ndarray, word_starts: np.ndarray, sentence_bounds: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """(tokens after noising,) ids of a text without special tokens.

        Args:
            word_starts: (tokens,) bool, True at the first token of a word.
            sentence_bounds: (sentences + 1,); not used without `permute_sentences`.
        """
        if self.permute_sentences:
            order = np.arange(len(sentence_bounds) - 1)
            moved = rng.permutation(len(order))[: share_of(len(order), self.permute_sentences)]
            order[moved] = moved[rng.permutation(len(moved))]
            sentences = [np.arange(sentence_bounds[number], sentence_bounds[number + 1]) for number in order]
            positions = np.concatenate([np.zeros(0, dtype=np.int64), *sentences])
            ids, word_starts = ids[positions], word_starts[positions]
        if self.mask:
            ids = self._mask(ids, np.flatnonzero(word_starts), rng)
        if self.insert:
            ids = self._insert(ids, share_of(len(ids) + self.template.special_tokens, self.insert), rng)
        if self.rotate and rng.random() < self.rotate and len(ids):
            ids = np.roll(ids, -int(rng.integers(len(ids))))
        return ids

    def _mask(self, ids: np.ndarray, starts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(tokens,) ids with a share of the words masked, which begin at `starts`.

        A span begins at a random word and consists of whole words, which may overlap other spans; it ends with the
        text. Spans of length 0 are inserted tokens.
        """
        budget = share_of(len(starts), self.mask)
        if not budget:
            return ids
        lengths = self.span_lengths(budget, rng)
        inserted = int((lengths == 0).sum())
        lengths = lengths[lengths > 0]
        words = rng.permutation(len(starts))[: len(lengths)]
        stops = np.append(starts, len(ids))[np.minimum(words + lengths, len(starts))]
        is_random = rng.random(len(words)) < self.mask_random
        ids, remaining = ids.copy(), np.ones(len(ids), dtype=bool)
        for span in np.argsort(-words).tolist():  # of overlapping spans, the one that begins first is applied last
            begin, stop = int(starts[words[span]]), int(stops[span])
            if self.replace_length == 0:
                remaining[begin:stop] = False
                continue
            end = stop if self.replace_length == -1 else begin + 1
            ids[begin:end] = rng.choice(self.replacements, end - begin) if is_random[span] else self.mask_id
            remaining[end:stop] = False
        return self._insert(ids[remaining], inserted, rng)

    def span_lengths(self, budget: int, rng: np.random.Generator) -> np.ndarray:
        """(spans,) lengths in words with the sum `budget`, some of them 0; the last one is trimmed."""
        if self.mask_length != "span-poisson":
            return np.ones(budget, dtype=np.int64)
        lengths = np.zeros(0, dtype=np.int64)
        while lengths.sum() < budget:
            sampled = rng.choice(len(self.length_probabilities), size=budget, p=self.length_probabilities)
            lengths = np.append(lengths, sampled)
        totals = np.cumsum(lengths)
        last = int(np.searchsorted(totals, budget))
        lengths[last] -= totals[last] - budget
        return lengths[: last + 1]

    def _insert(self, ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """(tokens + count,) ids with random tokens and mask tokens inserted."""
        if not count:
            return ids
        inserted = rng.permutation(len(ids) + count)[:count]
        is_original = np.ones(len(ids) + count, dtype=bool)
        is_original[inserted] = False
        result = np.full(len(is_original), self.mask_id, dtype=ids.dtype)
        random = inserted[: share_of(count, self.mask_random)]
        result[random] = rng.choice(self.replacements, len(random))
        result[is_original] = ids
        return result


def share_of(count: int, share: float) -> int:
    """The share of a number, rounded up; 0.1 * 30, slightly above 3 in floating point, is 3."""
    return ceil(count * share - 1e-9)


@dataclass
class Denoising(DataCollatorForDenoising, Objective):
    """BART's objective: generate the whole text from a corrupted copy.

    An example is whole sentences of one document, as in `MaskedLM`. In the corrupted copy sentences are permuted, and
    spans of words are replaced by one mask token each; see the collator for the other noising functions.

    | document | source | targets |
    |---|---|---|
    | `A B C.` `D E.` | `<s> D E. A <mask> </s>` | `<s> A B C. D E. </s>` |

    References: Lewis et al. 2020 (arXiv 1910.13461), section 2.2, and the released code.
    Related: `MaskedLM` predicts the masked tokens alone.

    Example:
        >>> Denoising(tokenizer, max_length=512, seed=0, poisson_lambda=3.0)
    """

    auto_class = "AutoModelForSeq2SeqLM"
    predicts_special_tokens = True

    def __post_init__(self) -> None:
        super().__post_init__()
        end = self.tokenizer.sep_token_id if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id
        self._end = required_token(self.tokenizer, "eos_token", "starts the decoder") if end is None else int(end)
        self.max_text_tokens = self.template.num_text_tokens(self.max_length)
        self.config_fields = {"decoder_start_token_id": self._end}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, sentence_starts, and word_ids if words are masked."""
        for document in self.tokenized(documents, self.needs_words):
            is_first = np.zeros(len(document.ids), dtype=np.int32)
            is_first[document.bounds[:-1]] = 1
            for start, stop in sequence_bounds(document, self.max_text_tokens):
                starts = (self.template.fill_words(is_first[start:stop]) == 1).astype(np.int8)
                yield self.template.example(document, (start, stop)) | {"sentence_starts": starts}

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `batch_statistics`, and mask tokens."""
        return batch_statistics(batch, self.tokenizer.unk_token_id, self.mask_id)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, the share of mask tokens in the sources, and their length relative to targets."""
        return {
            **target_rates(counts),
            "mask_token_share": counts["masks"] / max(1, counts["tokens"]),
            "source_length": counts["tokens"] / max(1, counts["targets"]),
        }
