"""Causal language modeling: running text for recurrent models, in either direction (Merity et al. 2017, section 5),
and documents for transformers (Radford et al. 2018, section 3.1)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.control_codes import control_code_ids
from hf_ctxmodels.data.documents import TextWithCode
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, required_token
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.data.training_set import ExampleSampling
from hf_ctxmodels.objectives.base import Objective, target_rates
from hf_ctxmodels.objectives.features import padded_columns
from hf_ctxmodels.objectives.tokenized_documents import document_batches, pack_sequences

_HALF_LENGTH_SHARE = 0.05  # of the sequences
_MIN_LENGTH = 5


@dataclass
class DataCollatorForCausalLM(PaddingCollator):
    """Pads sequences of running text and adds the word after each sequence as the last target.

    Each feature holds:
        input_ids: (words,).
        following: Optional, the id of the next word in reading order; -100 for none.
        sequence_ids: (words,), optional: a run of equal numbers is one sequence, whose last word has no target.
        langs: (words,), optional: language ids.

    Returns, padded on the tokenizer's side:
        input_ids, attention_mask: (batch, words).
        sequence_ids, langs: (batch, words), if the features hold them.
        labels: (batch, words + 1) the words and the following one, which is on the left for a backward model; -100 for
            the first word in reading order and for a missing following word.
    """

    backward: bool = False

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Pad features; see the class for their columns and the returned ones."""
        sequences = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        padder, inputs = self.pad_inputs(sequences)
        targets = [self.targets(ids, feature) for ids, feature in zip(sequences, features, strict=True)]
        # the first word in reading order has no target
        first_column = (0, 1) if self.backward else (1, 0)
        return {
            **inputs,
            "labels": torch.nn.functional.pad(padder.pad(targets, IGNORE_INDEX), first_column, value=IGNORE_INDEX),
            **padded_columns(features, ("sequence_ids", "langs"), padder, self.tokenizer),
        }

    def targets(self, ids: np.ndarray, feature: Mapping[str, Any]) -> np.ndarray:
        """(words,) ids -> (words,) the next word of each in reading order."""
        following = int(feature.get("following", IGNORE_INDEX))
        targets = np.append(following, ids[:-1]) if self.backward else np.append(ids[1:], following)
        if (sequences := feature.get("sequence_ids")) is not None:
            ends = np.flatnonzero(np.diff(np.asarray(sequences)))
            targets[ends + 1 if self.backward else ends] = IGNORE_INDEX
        return targets


class TokenStream:
    """Running text that is cut into sequences of `length` tokens, each with the token that follows it; `remaining` are
    the (tokens,) int32 that are not yet part of a sequence."""

    def __init__(self, length: int, start: Sequence[int] = ()) -> None:
        self.length, self.remaining = length, np.array(start, dtype=np.int32)

    def add(self, ids: Sequence[int] | np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Append tokens; yields the full sequences and the following token of each."""
        text, start = np.concatenate([self.remaining, ids], dtype=np.int32), 0
        self.remaining = text
        while start + self.length < len(text):
            stop = start + self.length
            self.remaining = text[stop:]
            yield text[start:stop], int(text[stop])
            start = stop


@dataclass
class ControllableLM(DataCollatorForCausalLM, Objective):
    """Base class of causal objectives with control codes.

    With `control_codes`, each document is cut separately, and each of its windows begins with the code of the document
    (`TextWithCode`), which is not a target; the separator, the tokenizer's `eos_token`, ends the document. Windows of a
    document without a code begin with the separator. pretrain sets the codes by `--control_codes`, one code for each
    `--dataset`, or `--control_column`.

    References: Keskar et al. 2019 (arXiv 1909.05858), section 3: the code of a text's domain precedes each sequence.
    """

    auto_class = "AutoModelForCausalLM"
    predicts_special_tokens = True
    control_codes: str = flag(
        "", "Control codes, separated by commas; by default of --control_codes, --control_column."
    )
    control_dropout: float = flag(0.0, "Probability of the separator instead of the code, for text without a code.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "control_dropout", at_least=0, at_most=1)
        names = [name.strip() for name in self.control_codes.split(",") if name.strip()]
        if self.control_dropout and not names:
            raise CtxError(
                f"control_dropout={self.control_dropout}, but there are no control codes to replace.",
                location="--objective",
                hint="pass --control_codes or --control_column, or omit control_dropout.",
            )
        self.code_ids = control_code_ids(self.tokenizer, names)
        if self.code_ids:
            check_range(self, "max_length", at_least=2)
            self.config_fields = {"control_codes": self.code_ids}

    def coded_windows(self, documents: Iterable[list[str]], epoch: int) -> Iterator[np.ndarray]:
        """(tokens,) ids of windows of up to `max_length` tokens; each token of a text is in one window."""
        separator, number = required_token(self.tokenizer, "eos_token", "ends documents"), 0
        for batch in document_batches(documents):
            [texts] = self.joined_batches(batch)
            for document, text in zip(batch, texts, strict=True):
                first, text = self._first_token(document, separator), np.append(text, separator)
                if self.backward:
                    text = text[::-1]
                for start in range(0, len(text) if len(text) > 1 else 0, self.max_length - 1):
                    is_dropped = self.control_dropout > 0 and (
                        generator(self.seed, epoch, number, Purpose.CORRUPTION).random() < self.control_dropout
                    )
                    window = text[start : start + self.max_length - 1]
                    yield np.concatenate([[separator if is_dropped else first], window], dtype=np.int32)
                    number += 1

    def _first_token(self, document: list[str], separator: int) -> int:
        """The code of a document, or the separator; raises CtxError for an unknown code."""
        if not isinstance(document, TextWithCode):
            return separator
        if document.code not in self.code_ids:
            raise CtxError(
                f"The document {' '.join(document)[:60]!r} has the control code {document.code!r}, which is unknown.",
                hint=f"use one of {', '.join(self.code_ids)}, or add it to the objective's control_codes.",
            )
        return self.code_ids[document.code]


@dataclass
class CausalLM(ControllableLM):
    """Predict each word from its predecessors, in sequences of random length cut from the concatenated documents.

    Lengths are sampled from a normal distribution around `bptt`, one in twenty around half of it. The sequences of a
    batch differ in length; the loop's `lr_reference_targets` scales the learning rate by the number of targets. With
    `backward` the text is cut from its end, and each word is predicted from its successors. With `control_codes` the
    sequences are windows of `max_length` words that are shuffled, and no state is carried.

    | document | example | targets |
    |---|---|---|
    | running text | about `bptt` words, continued by the next example | every word |
    | text, `control_codes` | `code` and up to `max_length` - 1 words of a document | every word |

    References: Merity et al. 2017 (arXiv 1708.02182), sections 5 and 4.1; Howard & Ruder 2018, sections 3.1 and 3.3.
    Related: `BidirectionalLM` trains a model of each direction jointly; `SequenceAutoencoding` predicts a text from
    itself; `DocumentLM` is for transformers.

    Example:
        >>> CausalLM(tokenizer, max_length=80, seed=0, bptt=70, backward=True)
    """

    backward: bool = flag(False, "Read from right to left: predict each word from its successors.")
    bptt: int = flag(0, "Mean length of a sequence; 0: max_length minus two standard deviations.")
    bptt_deviation: float = flag(5.0, "Standard deviation of the lengths; 0: sequences of equal length.")
    carry: bool = flag(True, "Carry the model's state between examples, which are then contiguous, not shuffled.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "bptt", "bptt_deviation", at_least=0)
        if self.max_length < 2 or self.bptt > self.max_length:
            raise CtxError(
                f"max_length={self.max_length} and bptt={self.bptt} are incompatible.",
                hint="use a max_length of 2 or more, and a bptt of at most that, or 0.",
            )
        is_stateful = self.carry and not self.code_ids
        self.sampling = ExampleSampling(contiguous=is_stateful)
        default_length = max(-(-self.max_length // 2), round(self.max_length - 2 * self.bptt_deviation))
        self.mean_length = self.bptt or default_length
        self.config_fields |= {"stateful": is_stateful, "backward": self.backward}
        self.immutable_config_fields = ("backward",)

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids and following."""
        if self.code_ids:
            for window in self.coded_windows(documents, epoch):
                yield self._example(window, IGNORE_INDEX)
            return
        number = 0
        stream = TokenStream(self._length(epoch, number))
        for batch in document_batches(documents):
            encodings = self.tokenizer([" ".join(document) for document in batch], verbose=False).encodings or []
            text = np.concatenate([np.array(encoding.ids, dtype=np.int32) for encoding in encodings])
            self.statistics.update(documents=len(batch), sentences=sum(map(len, batch)), tokens=len(text))
            for words, following in stream.add(text[::-1] if self.backward else text):
                number += 1
                stream.length = self._length(epoch, number)
                yield self._example(words, following)
        if len(stream.remaining):
            yield self._example(stream.remaining, IGNORE_INDEX)

    def _length(self, epoch: int, number: int) -> int:
        """Number of words of an example, without the following one."""
        if not self.bptt_deviation:
            return self.mean_length
        rng = generator(self.seed, epoch, number, Purpose.CORRUPTION)
        mean = self.mean_length / 2 if rng.random() < _HALF_LENGTH_SHARE else self.mean_length
        length = round(rng.normal(mean, self.bptt_deviation))
        return int(np.clip(length, min(_MIN_LENGTH, self.max_length), self.max_length))

    def _example(self, words: np.ndarray, following: int) -> Example:
        """An example, in the order of the text, from words in reading order."""
        return {"input_ids": words[::-1].copy() if self.backward else words, "following": following}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, and words per example."""
        return {**target_rates(counts), "words_per_example": counts["tokens"] / max(1, counts["examples"])}


@dataclass
class SegmentLM(CausalLM):
    """Predict each token of running text from its predecessors, in segments of equal length.

    With `carry` the model remembers the states of the preceding segments (`mems`).

    | text | example | targets |
    |---|---|---|
    | running text | `max_length` tokens, continued by the next example | every token |

    References: Dai et al. 2019 (arXiv 1901.02860), section 3.2.
    Related: `CausalLM` cuts sequences of random lengths.

    Example:
        >>> SegmentLM(tokenizer, max_length=150, seed=0)
    """

    bptt_deviation: float = flag(0.0, "Standard deviation of the lengths; 0: segments of equal length.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean_length = self.bptt or self.max_length
        if self.backward:
            raise CtxError("Segments are read from left to right.", location="backward", hint="remove this option.")
        self.config_fields["use_mems_train"] = self.config_fields.pop("stateful")
        del self.config_fields["backward"]
        self.immutable_config_fields = ()


@dataclass
class DocumentLM(ControllableLM):
    """Predict each token from its predecessors, in full sequences of documents.

    The separator, the tokenizer's `eos_token`, precedes and follows every document. Documents are joined and cut into
    sequences of `max_length` tokens; the last token predicts the first one of the next sequence. With `packing` an
    example consists of several documents that do not attend to each other (`sequence_ids`); a document longer than an
    example becomes several sequences, each beginning with the last token of the previous one.

    | document | example | targets |
    |---|---|---|
    | text | `max_length` tokens of joined documents | every token |
    | text, `packing` | `sep A sep` `sep B sep` ... as sequences | every token but the first of a sequence |
    | text, `control_codes` | `code A`, `code A sep`: windows of a document, packed or not | every token but the code |

    References: Radford et al. 2018, section 3.1; Radford et al. 2019, section 2; Brown et al. 2020, appendix B: joined
    documents with a special token between them.
    Related: `CausalLM` cuts sequences for recurrent models, which carry their state between examples; `PrefixLM`
    predicts the end of a sequence from its beginning.

    Example:
        >>> DocumentLM(tokenizer, max_length=1024, seed=0, packing=True)
    """

    packing: bool = flag(False, "Whole documents in a sequence, without attention between them; False: joined and cut.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", at_least=2)
        self.separator = required_token(self.tokenizer, "eos_token", "separates documents")
        self.config_fields |= {"prefix_lm": False}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids and following, or with sequence_ids when packed."""
        if self.code_ids:
            windows: Iterator[Example] = ({"input_ids": window} for window in self.coded_windows(documents, epoch))
            return pack_sequences(windows, self.max_length) if self.packing else windows
        texts = (text for batch in self.joined_batches(documents) for text in batch if len(text))
        return pack_sequences(self._windows(texts), self.max_length) if self.packing else self._joined(texts)

    def _joined(self, texts: Iterable[np.ndarray]) -> Iterator[Example]:
        """Examples of `max_length` tokens, the last one shorter, each with the following token."""
        stream = TokenStream(self.max_length, [self.separator])
        for text in texts:
            for ids, following in stream.add(np.append(text, self.separator)):
                yield {"input_ids": ids, "following": following}
        if len(stream.remaining) > 1:
            yield {"input_ids": stream.remaining[:-1], "following": int(stream.remaining[-1])}

    def _windows(self, texts: Iterable[np.ndarray]) -> Iterator[Example]:
        """The sequences of each document."""
        for text in texts:
            tokens = np.concatenate([[self.separator], text, [self.separator]], dtype=np.int32)
            for start in range(0, len(tokens) - 1, self.max_length - 1):
                yield {"input_ids": tokens[start : start + self.max_length]}
