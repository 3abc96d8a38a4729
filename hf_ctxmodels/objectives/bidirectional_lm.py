"""Bidirectional language modelling: a forward and a backward model (Peters et al. 2018, section 3.1)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Stream
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.base import Batch, Objective
from hf_ctxmodels.objectives.common.features import check_token_ids, feature_generator, require_padding_token
from hf_ctxmodels.objectives.common.masking import IGNORED
from hf_ctxmodels.objectives.common.padding import RowPadder
from hf_ctxmodels.objectives.common.rates import count_targets, target_rates
from hf_ctxmodels.objectives.common.segments import document_batches

_BEHIND_A_WORD = 0xFF  # in no UTF-8 text


def log_uniform_samples(numbers: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Ids with the probabilities of `layers.lm_loss.sampled.log_uniform`, from numbers that are uniform in [0, 1)."""
    ids = (numbers.double() * math.log(vocab_size + 1)).exp().long() - 1
    return ids.clamp(0, vocab_size - 1)


def spelling_of(words: Iterable[str]) -> np.ndarray:
    """(bytes,) uint8: the UTF-8 bytes of the words, each followed by a separator."""
    text = b"".join(word.encode("utf-8", "surrogatepass") + bytes([_BEHIND_A_WORD]) for word in words)
    return np.frombuffer(text, dtype=np.uint8)


def words_of(spelling: np.ndarray) -> list[str]:
    """The inverse of `spelling_of`."""
    parts = spelling.astype(np.uint8).tobytes().split(bytes([_BEHIND_A_WORD]))
    return [part.decode("utf-8", "surrogatepass") for part in parts[:-1]]


@dataclass
class DataCollatorForBidirectionalLanguageModeling(DataCollatorMixin):
    """Makes the characters of each word, and its next and previous word as targets.

    Each feature holds:
        input_ids: (words,) vocabulary ids, with those that mark sentence boundaries.
        spelling: the words that are not in the vocabulary, see `spelling_of`.
        example_index, epoch: integers, needed with `negatives`; they seed the draws.

    Returns, padded on the tokenizer's side:
        input_ids: (batch, words, characters).
        attention_mask: (batch, words).
        labels: (batch, words, 2) the next and the previous word; -100 at padding, at the ends of a row, and for
            boundary tokens of the neighbouring sentence, which follow from the word itself.
        negatives: (batch, negatives) ids for a sampled softmax, see `layers.lm_loss.sampled`; absent with 0.

    Attributes:
        tokenizer: one that gives characters (`spell`).
        negatives: drawn for every row.
        seed: of the draws.
    """

    tokenizer: PreTrainedTokenizerBase
    negatives: int = 0
    seed: int = 0
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        require_padding_token(self.tokenizer)
        if not hasattr(self.tokenizer, "spell"):
            raise CtxError(
                f"{type(self.tokenizer).__name__} does not spell words, which this objective reads.",
                hint="use the tokenizer of a family that reads characters.",
            )
        table = self.tokenizer.spell(range(len(self.tokenizer)), self.tokenizer.words)
        self.characters = table.astype(np.int16)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        ids = np.concatenate(rows)
        check_token_ids(ids, len(self.characters))
        unknown = self.tokenizer.unk_token_id
        words = [word for feature in features for word in words_of(np.asarray(feature["spelling"]))]
        spelled = self.characters[ids]
        spelled[ids == unknown] = self.tokenizer.spell([unknown] * len(words), words)
        spelled = self.tokenizer.tagged(ids, spelled)
        characters = np.zeros((*padder.filled.shape, spelled.shape[1]), dtype=np.int64)
        characters[padder.filled] = spelled
        batch = {
            "input_ids": torch.from_numpy(characters),
            "attention_mask": padder.attention_mask(),
            "labels": torch.stack([padder.pad(part, IGNORED) for part in self._neighbours(rows)], -1),
        }
        if self.negatives:
            batch["negatives"] = self._drawn(features)
        return batch

    def _neighbours(self, rows: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Of every row the next words, and the previous ones."""
        begins, ends = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        following, previous = [], []
        for row in rows:
            row = row.astype(np.int64)
            following.append(np.append(np.where(row[1:] == begins, IGNORED, row[1:]), IGNORED))
            previous.append(np.append(IGNORED, np.where(row[:-1] == ends, IGNORED, row[:-1])))
        return following, previous

    def _drawn(self, features: list[dict[str, Any]]) -> torch.Tensor:
        numbers = [
            feature_generator(feature, self.seed, False, Stream.SAMPLING).random(self.negatives) for feature in features
        ]
        return log_uniform_samples(torch.from_numpy(np.stack(numbers)), len(self.characters))


@dataclass(frozen=True)
class BidirectionalLMOptions:
    """Options of `BidirectionalLM`."""

    negatives: int = flag(
        0, "Words sampled for every row in place of the whole vocabulary (sampled softmax); 0: the whole softmax."
    )
    carry: bool = flag(True, "Carry the LSTM's state from row to row; rows are then contiguous text, not shuffled.")

    def __post_init__(self) -> None:
        if self.negatives < 0:
            raise CtxError(f"negatives={self.negatives} is negative.", hint="use 0 or more.")


class BidirectionalLM(Objective):
    """ELMo's objective: predict each word from those before it, and from those after it, by two LSTMs.

    Rows are whole sentences, as many as fit, each between its boundary tokens; a longer sentence is cut. The LSTM state
    of both directions is carried from row to row: the backward state then is that of the beginning of a sentence, as in
    the released models.

    | document | row | targets |
    |---|---|---|
    | sentences | `<S> words </S>` of several sentences, as characters | each word's next and previous word |

    References: Peters et al. 2018, section 3.1; Jozefowicz et al. 2016 (arXiv 1602.02410) for words from characters.
    Related: `CausalLM` has one direction; `MaskedLM` reads both sides in one model.

    Example:
        >>> BidirectionalLM(tokenizer, max_length=128, seed=0, negatives=8192)
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = BidirectionalLMOptions
    collate: DataCollatorForBidirectionalLanguageModeling

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if max_length < 3:
            raise CtxError(
                f"max_length={max_length} leaves no room for a word between its marks.", hint="use 3 or more."
            )
        self.baseline = replace(self.baseline, excluded_ids=[int(tokenizer.pad_token_id)])  # <unk>, <S> are targets
        self.sampling = SamplingPolicy(contiguous=self.options.carry)
        self.collate = DataCollatorForBidirectionalLanguageModeling(tokenizer, self.options.negatives, seed)

    @property
    def config_fields(self) -> dict[str, Any]:
        """Whether the model gives its state, to be carried on; and how many languages tag words, if any."""
        fields: dict[str, Any] = {"stateful": self.options.carry}
        if languages := self.tokenizer.languages:
            fields |= {"num_characters": self.tokenizer.num_characters, "num_languages": len(languages)}
        return fields

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and spelling."""
        unknown, room = self.tokenizer.unk_token_id, self.max_length
        rows: list[np.ndarray] = []
        words: list[str] = []
        for batch in document_batches(documents):
            sentences = [sentence for document in batch for sentence in document]
            self.statistics["documents"] += len(batch)
            for ids, unknown_words in self.tokenizer.vocabulary_ids(sentences):
                if len(ids) == 2:
                    continue  # nothing between the marks
                self.statistics.update(sentences=1, tokens=len(ids), unknown_tokens=len(unknown_words))
                if rows and sum(map(len, rows)) + len(ids) > room:
                    yield {"input_ids": np.concatenate(rows), "spelling": spelling_of(words)}
                    rows, words = [], []
                while len(ids) > room:
                    cut = int((ids[:room] == unknown).sum())
                    yield {"input_ids": ids[:room], "spelling": spelling_of(unknown_words[:cut])}
                    ids, unknown_words = np.append(self.tokenizer.mark_of(ids), ids[room:]), unknown_words[cut:]
                rows.append(ids)
                words += unknown_words
        if rows:
            yield {"input_ids": np.concatenate(rows), "spelling": spelling_of(words)}

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        return count_targets(batch, self.tokenizer.unk_token_id)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return target_rates(counts)
