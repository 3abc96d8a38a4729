"""Causal language modelling on running text, left to right or right to left (Merity et al. 2017, section 5)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least
from hf_ctxmodels.objectives.components.features import padded_columns
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.rates import target_rates
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches

_HALVED = 0.05  # share of the rows that are half as long
_SHORTEST = 5


@dataclass
class DataCollatorForCausalLM(PaddingCollator):
    """Pads rows of running text and adds the word after each row as the last target.

    Each feature holds:
        input_ids: (words,).
        following: Optional, the id of the word that the model reads after the row; -100 for none.
        sequence_ids: (words,), optional: a run of equal numbers is one sequence, whose last word has no target.

    Returns, padded on the tokenizer's side:
        input_ids, attention_mask: (batch, words).
        sequence_ids: Likewise, if the features hold them.
        labels: (batch, words + 1) the row's words and the following one, which is on the left for a backward model;
            -100 for the first word in reading order and for a missing following word.

    Attributes:
        tokenizer: Its padding token and side are used.
        backward: Read from right to left.
    """

    backward: bool = False

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        targets = [self._targets(row.astype(np.int64), feature) for row, feature in zip(rows, features, strict=True)]
        return {
            "input_ids": padder.pad(rows, int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
            "labels": torch.nn.functional.pad(padder.pad(targets, IGNORE_INDEX), self._read_first, value=IGNORE_INDEX),
            **padded_columns(features, ("sequence_ids",), padder, self.tokenizer),
        }

    @property
    def _read_first(self) -> tuple[int, int]:
        """Columns without a target on the left and on the right of a row: the first word in reading order."""
        return (0, 1) if self.backward else (1, 0)

    def _targets(self, row: np.ndarray, feature: dict[str, Any]) -> np.ndarray:
        """(words,) ids -> (words,) the next word of each in reading order."""
        following = int(feature.get("following", IGNORE_INDEX))
        targets = np.append(following, row[:-1]) if self.backward else np.append(row[1:], following)
        if (sequences := feature.get("sequence_ids")) is not None:
            ends = np.flatnonzero(np.diff(np.asarray(sequences)))
            targets[ends + 1 if self.backward else ends] = IGNORE_INDEX
        return targets


@dataclass(frozen=True)
class CausalLMOptions:
    """Options of `CausalLM`."""

    bptt: int = flag(0, "Mean length of a row; 0: max_length less two standard deviations.")
    bptt_deviation: float = flag(5.0, "Standard deviation of the rows' lengths; 0: rows of equal length.")
    backward: bool = flag(False, "Read from right to left: predict each word from those after it.")
    carry: bool = flag(True, "Carry the model's state from row to row; rows are then contiguous text, not shuffled.")

    def __post_init__(self) -> None:
        check_at_least(0, bptt=self.bptt, bptt_deviation=self.bptt_deviation)


class CausalLM(Objective):
    """Predict each word from the words before it, in rows of random length cut from the concatenated documents.

    Row lengths are drawn from a normal distribution around `bptt`, one in twenty around half of it, so that gradients
    are not always truncated at the same words. The text is cut before batches are made, so a batch's rows differ in
    length; the loop's `lr_reference_targets` scales the learning rate by the number of targets. With `backward` the
    text is cut from its end, and each word is predicted from those after it.

    | document | row | targets |
    |---|---|---|
    | running text | about `bptt` words, continued by the next row | every word |

    References: Merity et al. 2017 (arXiv 1708.02182), sections 5 and 4.1; Howard & Ruder 2018, sections 3.1 and 3.3.
    Related: `BidirectionalLM` trains one model for each direction together; `SequenceAutoencoding` predicts a text from
    itself.

    Example:
        >>> CausalLM(tokenizer, max_length=80, seed=0, bptt=70, backward=True)
    """

    auto_class = "AutoModelForCausalLM"
    Options: ClassVar[type] = CausalLMOptions
    collate: DataCollatorForCausalLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if max_length < 2 or self.options.bptt > max_length:
            raise CtxError(
                f"max_length={max_length} and bptt={self.options.bptt} do not fit together.",
                hint="use a max_length of 2 or more, and a bptt of at most that, or 0.",
            )
        self.baseline = replace(self.baseline, excluded_ids=[int(tokenizer.pad_token_id)])  # <unk>, <eos> are targets
        self.sampling = SamplingPolicy(contiguous=self.options.carry)
        self.usual = self.options.bptt or max(-(-max_length // 2), round(max_length - 2 * self.options.bptt_deviation))
        self.collate = DataCollatorForCausalLM(tokenizer, self.options.backward)

    @property
    def config_fields(self) -> dict[str, Any]:
        """Whether the model returns its state, and its direction."""
        return {"stateful": self.options.carry, "backward": self.options.backward}

    @property
    def immutable_config_fields(self) -> tuple[str, ...]:
        """See `Objective.immutable_config_fields`."""
        return ("backward",)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and following."""
        numbers = count()
        length = self._length(pass_index, next(numbers))
        rest = np.empty(0, dtype=np.int32)
        for text in self._texts(documents):
            text = text[::-1] if self.options.backward else text
            rest, start = np.concatenate([rest, text]), 0
            while start + length < len(rest):  # with the word after it
                yield self._row(rest, start, start + length)
                start, length = start + length, self._length(pass_index, next(numbers))
            rest = rest[start:]
        if len(rest):
            yield self._row(rest, 0, len(rest))

    def _texts(self, documents: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """(words,) ids of some documents, concatenated with the special tokens of each."""
        for batch in document_batches(documents):
            encodings = self.tokenizer([" ".join(document) for document in batch], verbose=False).encodings or []
            text = np.concatenate([np.array(encoding.ids, dtype=np.int32) for encoding in encodings])
            self.statistics.update(documents=len(batch), sentences=sum(map(len, batch)), tokens=len(text))
            yield text

    def _length(self, pass_index: int, number: int) -> int:
        """Number of words of a row, without the following one."""
        if not self.options.bptt_deviation:
            return self.usual
        draws = generator(self.seed, pass_index, number, Stream.CORRUPTION)
        usual = self.usual / 2 if draws.random() < _HALVED else self.usual
        length = round(draws.normal(usual, self.options.bptt_deviation))
        return int(np.clip(length, min(_SHORTEST, self.max_length), self.max_length))

    def _row(self, text: np.ndarray, start: int, stop: int) -> Example:
        """A row of a text in reading order; the row's words are in the order of the text."""
        words = text[start:stop]
        following = int(text[stop]) if stop < len(text) else IGNORE_INDEX
        return {"input_ids": words[::-1].copy() if self.options.backward else words, "following": following}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {**target_rates(counts), "words_per_row": counts["tokens"] / max(1, counts["rows"])}
