"""Bidirectional language modeling: a forward and a backward model (Peters et al. 2018, section 3.1)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, RowPadder
from hf_ctxmodels.data.seeding import Purpose
from hf_ctxmodels.data.training_set import ExampleSampling
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.features import check_token_ids, feature_generator
from hf_ctxmodels.objectives.tokenized_documents import document_batches

_SEPARATOR = bytes([0xFF])  # never occurs in UTF-8


@dataclass
class DataCollatorForBidirectionalLM(PaddingCollator):
    """Collates words as characters, with the next and the previous word of each as targets.

    Each feature holds:
        input_ids: (words,) vocabulary ids, including sentence boundaries.
        unknown_words: The words outside the vocabulary, see `encode_words`.

    Returns, padded on the tokenizer's side:
        input_ids: (batch, words, characters).
        attention_mask: (batch, words).
        labels: (batch, words, 2) the next and the previous word; -100 at padding, at the ends of a sequence, and for
            the boundary token of the neighboring sentence, which the word itself implies.
        negatives: (batch, negatives) ids for a sampled softmax, see `layers.lm_loss.sampling`; absent with 0.
    """

    negatives: int = flag(0, "Negatives of a sampled softmax for every sequence; 0: the full softmax.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "negatives", at_least=0)
        if not hasattr(self.tokenizer, "character_ids"):
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no characters, which this objective requires.",
                hint="use the tokenizer of a character-based family.",
            )
        characters = self.tokenizer.character_ids(range(len(self.tokenizer)), self.tokenizer.words)
        self.characters = characters.astype(np.int16)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for their columns and the returned ones."""
        sequences = [np.asarray(feature["input_ids"]) for feature in features]
        padder = RowPadder([len(sequence) for sequence in sequences], self.tokenizer.padding_side)
        ids = np.concatenate(sequences)
        check_token_ids(ids, len(self.characters))
        unknown_id = self.tokenizer.unk_token_id
        unknown_words = [word for feature in features for word in decode_words(np.asarray(feature["unknown_words"]))]
        table = self.characters[ids]
        table[ids == unknown_id] = self.tokenizer.character_ids([unknown_id] * len(unknown_words), unknown_words)
        table = self.tokenizer.apply_language_tags(ids, table)
        characters = np.zeros((*padder.filled.shape, table.shape[1]), dtype=np.int64)
        characters[padder.filled] = table
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        following, previous = [], []
        for sequence in sequences:
            words = sequence.astype(np.int64)
            following.append(np.append(np.where(words == bos, IGNORE_INDEX, words)[1:], IGNORE_INDEX))
            previous.append(np.append(IGNORE_INDEX, np.where(words == eos, IGNORE_INDEX, words)[:-1]))
        batch = {
            "input_ids": torch.from_numpy(characters),
            "attention_mask": padder.attention_mask(),
            "labels": torch.stack([padder.pad(targets, IGNORE_INDEX) for targets in (following, previous)], -1),
        }
        if self.negatives:
            generators = [feature_generator(feature, self.seed, Purpose.SAMPLING) for feature in features]
            uniforms = np.stack([rng.random(self.negatives) for rng in generators])
            batch["negatives"] = log_uniform_samples(torch.from_numpy(uniforms), len(self.characters))
        return batch


@dataclass
class BidirectionalLM(DataCollatorForBidirectionalLM, Objective):
    """ELMo's objective: two LSTMs predict each word from its predecessors and from its successors.

    An example is whole sentences, as many as fit, each between its boundary tokens; a longer sentence is cut. The state
    of both LSTMs is carried between examples, of the backward one from the first word, as in the released models.

    | document | example | targets |
    |---|---|---|
    | sentences | `<S> words </S>` of several sentences, as characters | each word's next and previous word |

    References: Peters et al. 2018, section 3.1; Jozefowicz et al. 2016 (arXiv 1602.02410) for words from characters.
    Related: `CausalLM` has one direction; `MaskedLM` reads both sides in one model.

    Example:
        >>> BidirectionalLM(tokenizer, max_length=128, seed=0, negatives=8192)
    """

    auto_class = "AutoModelForPreTraining"
    predicts_special_tokens = True
    carry: bool = flag(True, "Carry the LSTM's state between examples, which are then contiguous, not shuffled.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", at_least=3)
        self.sampling = ExampleSampling(contiguous=self.carry)
        self.config_fields = {"stateful": self.carry}
        if languages := self.tokenizer.languages:
            self.config_fields |= {"num_characters": self.tokenizer.num_characters, "num_languages": len(languages)}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids and unknown_words."""
        unknown_id = self.tokenizer.unk_token_id
        sentences: list[np.ndarray] = []
        words: list[str] = []
        for batch in document_batches(documents):
            texts = [sentence for document in batch for sentence in document]
            self.statistics["documents"] += len(batch)
            for ids, unknown_words in self.tokenizer.vocabulary_ids(texts):
                if len(ids) == 2:
                    continue  # boundary tokens only
                self.statistics.update(sentences=1, tokens=len(ids), unknown_tokens=len(unknown_words))
                if sentences and sum(map(len, sentences)) + len(ids) > self.max_length:
                    yield {"input_ids": np.concatenate(sentences), "unknown_words": encode_words(words)}
                    sentences, words = [], []
                while len(ids) > self.max_length:
                    cut = int((ids[: self.max_length] == unknown_id).sum())
                    yield {"input_ids": ids[: self.max_length], "unknown_words": encode_words(unknown_words[:cut])}
                    ids = np.append(self.tokenizer.first_language_tag(ids), ids[self.max_length :])
                    unknown_words = unknown_words[cut:]
                sentences.append(ids)
                words += unknown_words
        if sentences:
            yield {"input_ids": np.concatenate(sentences), "unknown_words": encode_words(words)}


def log_uniform_samples(uniforms: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Ids distributed as `layers.lm_loss.sampling.log_uniform_probability`, from uniform numbers in [0, 1)."""
    ids = (uniforms.double() * math.log(vocab_size + 1)).exp().long() - 1
    return ids.clamp(0, vocab_size - 1)


def encode_words(words: Iterable[str]) -> np.ndarray:
    """(bytes,) uint8: the UTF-8 bytes of the words, each followed by a separator."""
    text = b"".join(word.encode("utf-8", "surrogatepass") + _SEPARATOR for word in words)
    return np.frombuffer(text, dtype=np.uint8)


def decode_words(encoded: np.ndarray) -> list[str]:
    """The inverse of `encode_words`."""
    words = encoded.astype(np.uint8).tobytes().split(_SEPARATOR)
    return [word.decode("utf-8", "surrogatepass") for word in words[:-1]]
