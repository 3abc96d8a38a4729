"""Denoising (Lewis et al. 2020, "BART", section 2.2): restore a text that noising functions have corrupted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, RowPadder
from hf_ctxmodels.objectives.base import Objective, count_targets, target_rates
from hf_ctxmodels.objectives.components.features import (
    NonSpecialTokens,
    check_token_ids,
    feature_generator,
    feature_word_ids,
)
from hf_ctxmodels.objectives.components.noising import MaskLength, NoisedText, Noiser, NoisingRule
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    NO_WORD,
    SpecialTokensTemplate,
    sequence_bounds,
    tokenized_batches,
)

_SPACE = "Ġ"  # its representation in byte-level vocabularies


@dataclass
class DataCollatorForDenoising(PaddingCollator):
    """Corrupts sequences by a `NoisingRule`; the targets are the original sequences.

    The special tokens at the ends are not moved. The defaults are taken from the released command. As in the released
    code, words of a byte-level vocabulary are separated by spaces: a comma belongs to the word before it. Unlike in the
    release, random tokens are never special ones, and the first token of a sentence begins a word.

    Each feature holds:
        input_ids: (tokens,) with special tokens.
        example_index, epoch: Integers that seed the corruption.
        word_ids: (tokens,), for words and spans of words; None or -1 for special tokens.
        sentence_starts: (tokens,), not 0 at the first token of a sentence; not required with `full_stops`, nor without
            `permute_sentences`.

    Returns, padded on the tokenizer's side and on the right:
        input_ids, attention_mask: (batch, width) the corrupted sequences.
        labels: (batch, steps) the original sequences, -100 after their ends. The decoder prepends its start token.

    Args:
        tokenizer: With a mask token and a padding token.
        mask, mask_random, mask_length, poisson_lambda, replace_length, permute_sentences, insert, rotate: See
            `NoisingRule`.
        full_stops: Sentences end at a token ".", if none precedes it, as in the released code for GPT-2's vocabulary;
            otherwise at the sentence ends of the text.
        static: The same corruption in every epoch.
        seed: Seed of the corruptions.

    Raises:
        CtxError: A feature lacks a column, or the tokenizer a token.

    Example:
        >>> collate = DataCollatorForDenoising(tokenizer, full_stops=True, mask_length="subword", seed=1)
        >>> batch = collate([{"input_ids": tokenizer("A cat. A dog.").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels']
    """

    mask: float = flag(0.3, "Share of the words to mask.")
    mask_random: float = flag(0.1, "Share of the masked spans and inserted tokens that become random tokens.")
    mask_length: MaskLength = flag("span-poisson", "Unit of masking: spans of words, words, or tokens.")
    poisson_lambda: float = flag(3.5, "Mean length of a span in words; 3 in the paper.")
    replace_length: int = flag(1, "Mask tokens that replace a span: 1, 0, or -1: one for each of its tokens.")
    permute_sentences: float = flag(1.0, "Share of the sentences that are permuted.")
    insert: float = flag(0.0, "Tokens to insert, as a share of the sequence.")
    rotate: float = flag(0.0, "Share of the sequences that begin at a random token.")
    full_stops: bool = flag(
        False, 'Sentences end at a token ".", as in the release; False: at the sentence ends of the text.'
    )
    static: bool = flag(False, "The same corruption in every epoch instead of a new one.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = NoisingRule(**{option.name: getattr(self, option.name) for option in fields(NoisingRule)})
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)
        self.non_special = NonSpecialTokens(self.tokenizer)
        self.noiser = Noiser(self.rule, int(self.tokenizer.mask_token_id), self.non_special.ids)
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
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        corrupted = [self.corrupt(feature, ids) for feature, ids in zip(features, rows, strict=True)]
        padder = RowPadder([len(ids) for ids in corrupted], self.tokenizer.padding_side)
        return {
            "input_ids": padder.pad(corrupted, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "labels": RowPadder([len(ids) for ids in rows], "right").pad(rows, IGNORE_INDEX),
        }

    def corrupt(self, feature: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
        """(tokens after noising,) ids of a sequence."""
        check_token_ids(ids, len(self.non_special.table))
        special_tokens = self.template.special_tokens
        text = slice(self.template.leading, len(ids) - special_tokens + self.template.leading)
        starts = self._word_starts(feature, ids) if self.rule.needs_words else np.ones(len(ids), dtype=bool)
        bounds = self._sentence_bounds(feature, ids, text) if self.rule.permute_sentences else np.zeros(1, dtype=int)
        rng = feature_generator(feature, self.seed, self.static)
        noised = self.noiser(NoisedText(ids[text], starts[text], bounds), special_tokens, rng)
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
        """(sentences + 1,) see `NoisedText`."""
        length = text.stop - text.start
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
        return np.unique(np.concatenate([[0], starts, [length]]))


@dataclass
class Denoising(DataCollatorForDenoising, Objective):
    """BART's objective: generate the whole text from a corrupted copy.

    An example is whole sentences of one document, as many as fit. A sentence longer than an example is cut and
    continued in the next one. In the corrupted copy sentences are permuted, and spans of words are replaced by one mask
    token each; see `NoisingRule` for the other functions.

    | document | source | targets |
    |---|---|---|
    | `A B C.` `D E.` | `<s> D E. A <mask> </s>` | `<s> A B C. D E. </s>` |

    References: Lewis et al. 2020 (arXiv 1910.13461), section 2.2, and the released code.
    Related: `MaskedLM` predicts the masked tokens alone.

    Example:
        >>> Denoising(tokenizer, max_length=512, seed=0, poisson_lambda=3.0)
    """

    auto_class = "AutoModelForSeq2SeqLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        end = self.tokenizer.sep_token_id if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id
        if end is None:
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no eos_token, from which the decoder starts.",
                hint="use a tokenizer with an eos_token.",
            )
        self._end = int(end)
        # <s> and </s> are targets
        self.baseline = replace(self.baseline, excluded_ids=[int(self.tokenizer.pad_token_id)])
        self.room = self.template.room(self.max_length)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The decoder starts from the end token (the released code moves it to the front)."""
        return {"decoder_start_token_id": self._end}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with input_ids, sentence_starts, and word_ids if words are masked."""
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, self.rule.needs_words):
            for document in batch:
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                is_first = np.zeros(len(document.ids), dtype=np.int32)
                is_first[document.bounds[:-1]] = 1
                for start, stop in sequence_bounds(document, self.room):
                    example: Example = {
                        "input_ids": self.template.fill(document.ids[start:stop]),
                        "sentence_starts": (self.template.fill_words(is_first[start:stop]) == 1).astype(np.int8),
                    }
                    if document.word_ids is not None:
                        example["word_ids"] = self.template.fill_words(document.word_ids[start:stop])
                    yield example

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `count_targets`, and mask tokens."""
        masks = int((batch["input_ids"] == self.tokenizer.mask_token_id).sum())
        return {**count_targets(batch, self.tokenizer.unk_token_id), "masks": masks}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, the share of mask tokens in the sources, and the length of sources relative to
        targets."""
        return {
            **target_rates(counts),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "masks": counts["masks"] / max(1, counts["tokens"]),
            "source_length": counts["tokens"] / max(1, counts["targets"]),
        }
