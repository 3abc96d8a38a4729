"""Bidirectional language modelling: a forward and a backward model (Peters et al. 2018, section 3.1)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.data.seeding import Stream
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least
from hf_ctxmodels.objectives.components.features import check_token_ids, feature_generator
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches

_SEPARATOR = 0xFF  # a byte that UTF-8 never uses


def log_uniform_samples(numbers: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Ids distributed as `layers.lm_loss.sampled_softmax.log_uniform`, from numbers uniform in [0, 1)."""
    ids = (numbers.double() * math.log(vocab_size + 1)).exp().long() - 1
    return ids.clamp(0, vocab_size - 1)


def encode_words(words: Iterable[str]) -> np.ndarray:
    """(bytes,) uint8: the UTF-8 bytes of the words, each followed by a separator."""
    text = b"".join(word.encode("utf-8", "surrogatepass") + bytes([_SEPARATOR]) for word in words)
    return np.frombuffer(text, dtype=np.uint8)


def decode_words(encoded: np.ndarray) -> list[str]:
    """The inverse of `encode_words`."""
    parts = encoded.astype(np.uint8).tobytes().split(bytes([_SEPARATOR]))
    return [part.decode("utf-8", "surrogatepass") for part in parts[:-1]]


@dataclass
class DataCollatorForBidirectionalLM(PaddingCollator):
    """Collates words as characters, with the next and the previous word of each as targets.

    Each feature holds:
        input_ids: (words,) vocabulary ids, those of sentence boundaries included.
        unknown_words: The words outside the vocabulary, see `encode_words`.
        example_index, epoch: Integers that seed the draws of `negatives`.

    Returns, padded on the tokenizer's side:
        input_ids: (batch, words, characters).
        attention_mask: (batch, words).
        labels: (batch, words, 2) the next and the previous word; -100 at padding, at the ends of a row, and for the
            boundary token of the neighbouring sentence, which the word itself implies.
        negatives: (batch, negatives) ids for a sampled softmax, see `layers.lm_loss.sampled_softmax`; absent with 0.

    Attributes:
        tokenizer: A `CtxCharacterTokenizer`.
        negatives: Number of samples for every row.
        seed: Seed of the samples.
    """

    negatives: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self.tokenizer, "character_ids"):
            raise CtxError(
                f"{type(self.tokenizer).__name__} gives no characters, which this objective needs.",
                hint="use the tokenizer of a character-based family.",
            )
        table = self.tokenizer.character_ids(range(len(self.tokenizer)), self.tokenizer.words)
        self.characters = table.astype(np.int16)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        ids = np.concatenate(rows)
        check_token_ids(ids, len(self.characters))
        unknown = self.tokenizer.unk_token_id
        words = [word for feature in features for word in decode_words(np.asarray(feature["unknown_words"]))]
        table = self.characters[ids]
        table[ids == unknown] = self.tokenizer.character_ids([unknown] * len(words), words)
        table = self.tokenizer.apply_language_tags(ids, table)
        characters = np.zeros((*padder.filled.shape, table.shape[1]), dtype=np.int64)
        characters[padder.filled] = table
        batch = {
            "input_ids": torch.from_numpy(characters),
            "attention_mask": padder.attention_mask(),
            "labels": torch.stack([padder.pad(part, IGNORE_INDEX) for part in self._neighbours(rows)], -1),
        }
        if self.negatives:
            batch["negatives"] = self._drawn(features)
        return batch

    def _neighbours(self, rows: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The next and the previous words of every row."""
        begins, ends = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        following, previous = [], []
        for row in rows:
            row = row.astype(np.int64)
            following.append(np.append(np.where(row[1:] == begins, IGNORE_INDEX, row[1:]), IGNORE_INDEX))
            previous.append(np.append(IGNORE_INDEX, np.where(row[:-1] == ends, IGNORE_INDEX, row[:-1])))
        return following, previous

    def _drawn(self, features: list[dict[str, Any]]) -> torch.Tensor:
        numbers = [
            feature_generator(feature, self.seed, False, Stream.SAMPLING).random(self.negatives) for feature in features
        ]
        return log_uniform_samples(torch.from_numpy(np.stack(numbers)), len(self.characters))


@dataclass(frozen=True)
class BidirectionalLMOptions:
    """Options of `BidirectionalLM`."""

    negatives: int = flag(0, "Negatives of a sampled softmax for every row; 0: the full softmax.")
    carry: bool = flag(True, "Carry the LSTM's state from row to row; rows are then contiguous text, not shuffled.")

    def __post_init__(self) -> None:
        check_at_least(0, negatives=self.negatives)


class BidirectionalLM(Objective):
    """ELMo's objective: two LSTMs predict each word from the words before it and from those after it.

    Rows are whole sentences, as many as fit, each between its boundary tokens; a longer sentence is cut. The state of
    both LSTMs is carried from row to row; that of the backward LSTM comes from the row's first word, as in the released
    models.

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
    collate: DataCollatorForBidirectionalLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if max_length < 3:
            raise CtxError(
                f"max_length={max_length} leaves no room for a word between boundary tokens.", hint="use 3 or more."
            )
        self.baseline = replace(self.baseline, excluded_ids=[int(tokenizer.pad_token_id)])  # <unk>, <S> are targets
        self.sampling = SamplingPolicy(contiguous=self.options.carry)
        self.collate = DataCollatorForBidirectionalLM(tokenizer, self.options.negatives, seed)

    @property
    def config_fields(self) -> dict[str, Any]:
        """Whether the model returns its state; the number of languages that tag words, if any."""
        fields: dict[str, Any] = {"stateful": self.options.carry}
        if languages := self.tokenizer.languages:
            fields |= {"num_characters": self.tokenizer.num_characters, "num_languages": len(languages)}
        return fields

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and unknown_words."""
        unknown, room = self.tokenizer.unk_token_id, self.max_length
        rows: list[np.ndarray] = []
        words: list[str] = []
        for batch in document_batches(documents):
            sentences = [sentence for document in batch for sentence in document]
            self.statistics["documents"] += len(batch)
            for ids, unknown_words in self.tokenizer.vocabulary_ids(sentences):
                if len(ids) == 2:
                    continue  # boundary tokens only
                self.statistics.update(sentences=1, tokens=len(ids), unknown_tokens=len(unknown_words))
                if rows and sum(map(len, rows)) + len(ids) > room:
                    yield {"input_ids": np.concatenate(rows), "unknown_words": encode_words(words)}
                    rows, words = [], []
                while len(ids) > room:
                    cut = int((ids[:room] == unknown).sum())
                    yield {"input_ids": ids[:room], "unknown_words": encode_words(unknown_words[:cut])}
                    ids, unknown_words = (
                        np.append(self.tokenizer.first_language_tag(ids), ids[room:]),
                        unknown_words[cut:],
                    )
                rows.append(ids)
                words += unknown_words
        if rows:
            yield {"input_ids": np.concatenate(rows), "unknown_words": encode_words(words)}
