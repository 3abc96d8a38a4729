"""Denoising (Lewis et al. 2020, "BART", section 2.2): restore a text that noising functions have corrupted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.objectives.base import Batch, Objective, collator_options
from hf_ctxmodels.objectives.components.features import check_token_ids, feature_generator, feature_word_ids
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.noising import MaskLength, NoisedText, Noiser, NoisingRule
from hf_ctxmodels.objectives.components.non_special_tokens import NonSpecialTokens
from hf_ctxmodels.objectives.components.rates import count_targets, target_rates
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    NO_WORD,
    RowTemplate,
    row_bounds,
    tokenized_batches,
)

_SPACE = "Ġ"  # how byte-level vocabularies write it
_RULE = (
    "mask",
    "mask_random",
    "mask_length",
    "poisson_lambda",
    "replace_length",
    "permute_sentences",
    "insert",
    "rotate",
)


@dataclass
class DataCollatorForDenoising(PaddingCollator):
    """Corrupts rows by a `NoisingRule`; the targets are the rows as they were.

    The special tokens at a row's ends stay where they are. The defaults are those of the released command. As in the
    released code, words of a byte-level vocabulary stand between spaces: a comma belongs to the one before it.
    Unlike there, random tokens are never special ones, and the first token of a sentence begins a word.

    Each feature holds:
        input_ids: (tokens,) with special tokens.
        example_index, epoch: Integers that seed the corruption.
        word_ids: (tokens,), for words and spans of words; None or -1 for special tokens.
        sentence_starts: (tokens,), not 0 at the first token of a sentence; not needed with `full_stops`, nor without
            `permute_sentences`.

    Returns, padded on the tokenizer's side and on the right:
        input_ids, attention_mask: (batch, width) the corrupted rows.
        labels: (batch, steps) the rows, -100 after their ends. The decoder reads them after its start token.

    Args:
        tokenizer: With a mask token and a padding token.
        mask, mask_random, mask_length, poisson_lambda, replace_length, permute_sentences, insert, rotate: See
            `NoisingRule`.
        full_stops: Sentences end at a token ".", if none precedes it, as in the released code for GPT-2's vocabulary;
            otherwise where the text's do.
        static: The same corruption in every epoch.
        seed: Seed of the corruptions.

    Raises:
        CtxError: A feature lacks a field, or the tokenizer a token.

    Example:
        >>> collate = DataCollatorForDenoising(tokenizer, full_stops=True, mask_length="subword", seed=1)
        >>> batch = collate([{"input_ids": tokenizer("A cat. A dog.").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels']
    """

    mask: float = 0.3
    mask_random: float = 0.1
    mask_length: MaskLength = "span-poisson"
    poisson_lambda: float = 3.5
    replace_length: int = 1
    permute_sentences: float = 1.0
    insert: float = 0.0
    rotate: float = 0.0
    full_stops: bool = False
    static: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = NoisingRule(**{name: getattr(self, name) for name in _RULE})
        self.template = RowTemplate(self.tokenizer, segments=1)
        self.non_special = NonSpecialTokens(self.tokenizer)
        self.noiser = Noiser(self.rule, int(self.tokenizer.mask_token_id), self.non_special.ids)
        vocabulary = self.tokenizer.get_vocab()
        stop = vocabulary.get(".")
        if self.full_stops and stop is None:
            raise CtxError(
                'The tokenizer has no token ".", at which full_stops ends sentences.',
                hint="use full_stops=False: sentences end where those of the text do.",
            )
        self._full_stop = stop
        spaced = [number for token, number in vocabulary.items() if token.startswith(_SPACE)]
        self._spaced = np.isin(np.arange(len(self.non_special.table)), spaced) if _SPACE in vocabulary else None

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        noised = [self.noised(feature, ids) for feature, ids in zip(features, rows, strict=True)]
        padder = RowPadder([len(row) for row in noised], self.tokenizer.padding_side)
        return {
            "input_ids": padder.pad(noised, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "labels": RowPadder([len(row) for row in rows], "right").pad(rows, IGNORE_INDEX),
        }

    def noised(self, feature: dict[str, Any], ids: np.ndarray) -> np.ndarray:
        """(tokens after noising,) ids of a row."""
        check_token_ids(ids, len(self.non_special.table))
        special = self.template.special_tokens
        text = slice(self.template.leading, len(ids) - special + self.template.leading)
        starts = np.ones(len(ids), dtype=bool)
        if self.rule.needs_words:
            starts = self._word_starts(feature, ids)
        bounds = self._sentence_bounds(feature, ids, text) if self.rule.permute_sentences else np.zeros(1, dtype=int)
        rng = feature_generator(feature, self.seed, self.static)
        found = self.noiser(NoisedText(ids[text], starts[text], bounds), special, rng)
        return np.concatenate([ids[: text.start], found, ids[text.stop :]])

    def _word_starts(self, feature: dict[str, Any], ids: np.ndarray) -> np.ndarray:
        """(tokens,) bool: True at the first token of a word; in a byte-level vocabulary a word begins after a space, or
        with a sentence or row."""
        words = feature_word_ids(feature)
        starts = (np.diff(words, prepend=NO_WORD) != 0) & (words != NO_WORD)
        if self._spaced is None:
            return starts
        begins = self._spaced[ids] | (np.arange(len(ids)) == self.template.leading)
        if "sentence_starts" in feature:
            begins |= np.asarray(feature["sentence_starts"]) != 0
        return starts & begins

    def _sentence_bounds(self, feature: dict[str, Any], ids: np.ndarray, text: slice) -> np.ndarray:
        """(sentences + 1,) see `NoisedText`."""
        length = text.stop - text.start
        if self.full_stops:
            stops = ids[text] == self._full_stop
            starts = np.flatnonzero(stops & ~np.append(False, stops[:-1])[: len(stops)]) + 1
        elif "sentence_starts" in feature:
            starts = np.flatnonzero(np.asarray(feature["sentence_starts"])[text])
        else:
            raise CtxError(
                "A feature has no `sentence_starts`, which the permutation of sentences needs.",
                hint="make the rows with Denoising.examples(documents), or use full_stops=True or permute_sentences=0.",
            )
        return np.unique(np.concatenate([[0], starts, [length]]))


@dataclass(frozen=True)
class DenoisingOptions:
    """Options of `Denoising`; see `NoisingRule`. The defaults are those of the released command."""

    mask: float = flag(0.3, "Share of the words to mask.")
    mask_random: float = flag(0.1, "Share of the masked spans and inserted tokens that are random tokens.")
    mask_length: MaskLength = flag("span-poisson", "What is masked: spans of words, words, or tokens.")
    poisson_lambda: float = flag(3.5, "Mean length of a span in words; 3 in the paper.")
    replace_length: int = flag(1, "What replaces a span: 1 mask token, 0 none, -1 one for each of its tokens.")
    permute_sentences: float = flag(1.0, "Share of the sentences that are permuted.")
    insert: float = flag(0.0, "Tokens to insert, as a share of the row.")
    rotate: float = flag(0.0, "Share of the rows that begin at a random token.")
    full_stops: bool = flag(
        False, 'Sentences end at a token ".", as in the release; False: where those of the text do.'
    )
    static: bool = flag(False, "The same corruption in every epoch instead of a new one.")


class Denoising(Objective):
    """BART's objective: write the whole text from a corrupted copy.

    A row holds whole sentences of one document, as many as fit. A sentence longer than a row is cut and continued in
    the next one. Its copy has its sentences permuted, and spans of words replaced by one mask token each; see
    `NoisingRule` for the other functions.

    | document | source | targets |
    |---|---|---|
    | `A B C.` `D E.` | `<s> D E. A <mask> </s>` | `<s> A B C. D E. </s>` |

    References: Lewis et al. 2020 (arXiv 1910.13461), section 2.2, and the released code.
    Related: `MaskedLM` predicts the masked tokens alone.

    Example:
        >>> Denoising(tokenizer, max_length=512, seed=0, poisson_lambda=3.0)
    """

    auto_class = "AutoModelForSeq2SeqLM"
    Options: ClassVar[type] = DenoisingOptions
    collate: DataCollatorForDenoising

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if end is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no eos_token, which the decoder starts from.",
                hint="use a tokenizer with an eos_token.",
            )
        self._end = int(end)
        names = collator_options(DataCollatorForDenoising, self.options)
        self.collate = DataCollatorForDenoising(tokenizer, seed=seed, **names)
        self.baseline = replace(self.baseline, excluded_ids=[int(tokenizer.pad_token_id)])  # <s> and </s> are targets
        self.template = self.collate.template
        self.room = self.template.room(max_length)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The decoder starts from the end token (the released code moves it to the front)."""
        return {"decoder_start_token_id": self._end}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, sentence_starts, and word_ids if words are masked."""
        needs_words = self.collate.rule.needs_words
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, needs_words):
            for document in batch:
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                first = np.zeros(len(document.ids), dtype=np.int32)
                first[document.bounds[:-1]] = 1
                for start, stop in row_bounds(document, self.room):
                    row: Example = {
                        "input_ids": self.template.fill(document.ids[start:stop]),
                        "sentence_starts": (self.template.fill_words(first[start:stop]) == 1).astype(np.int8),
                    }
                    if document.word_ids is not None:
                        row["word_ids"] = self.template.fill_words(document.word_ids[start:stop])
                    yield row

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        masks = int((batch["input_ids"] == self.tokenizer.mask_token_id).sum())
        return {**count_targets(batch, self.tokenizer.unk_token_id), "masks": masks}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`: the share of mask tokens in the sources, and the length of sources to that of targets,
        too."""
        return {
            **target_rates(counts),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "masks": counts["masks"] / max(1, counts["tokens"]),
            "source_length": counts["tokens"] / max(1, counts["targets"]),
        }
