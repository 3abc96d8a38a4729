"""Span corruption and its variants (Raffel et al. 2020, "T5", sections 3.1.4 and 3.3)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, SourceTargetCollator
from hf_ctxmodels.objectives.base import BaselinePolicy, Objective, check_at_least, count_targets, target_rates
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.sentinels import Sentinels
from hf_ctxmodels.objectives.components.spans import alternating_spans, noise_counts
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches

DOCUMENTS_PER_TEXT = 128  # documents that are joined, as in the released `reduce_concat_tokens`
MAX_TRIES = 20  # of sampling noise with few enough spans for the sentinels

Variant = Literal["spans", "iid", "denoise", "prefix-lm"]


@dataclass
class DataCollatorForSpanCorruption(SourceTargetCollator):
    """Splits every text into an input with sentinels and a target, according to `variant`.

    Each feature holds:
        input_ids: (tokens,) of text, without special tokens.
        example_index, epoch: Integers that seed the noise.

    Returns: input_ids, attention_mask (batch, width), padded on the tokenizer's side; labels (batch, steps), -100 after
        the end of a target. The end token follows every input and every target.

    Args:
        seed: Seed of the noise.
        variant: See `SpanCorruption`.
        noise_density: Share of noise tokens.
        mean_span_length: Mean length of the noise spans; for "spans" only.
        random_roll: Rotate the masks of "spans" by a random offset; a sequence may then start with noise, and its first
            noise span has no sentinel before it among the targets, as in the released code.

    Raises:
        CtxError: The tokenizer has no end token or sentinels; a text contains a sentinel, or is empty; there are more
            spans than sentinels; a rate is out of range.
    """

    seed: int = 0
    variant: Variant = flag(
        "spans",
        "spans: predict random spans; iid: predict single random tokens; denoise: single random tokens, and the target "
        "is the whole text; prefix-lm: predict the rest of a text.",
    )
    noise_density: float = flag(0.15, "Share of the tokens that are noise; not for prefix-lm.")
    mean_span_length: float = flag(3.0, "Mean length of the noise spans in tokens.")
    random_roll: bool = flag(False, "Rotate each mask by a random offset, so that a text may start with noise.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer.eos_token_id is None:
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no eos_token, which ends inputs and targets.",
                hint="use a tokenizer with an eos_token.",
            )
        check_choice(get_args(Variant), variant=self.variant)
        if not 0 < self.noise_density < 1:
            raise CtxError(
                f"noise_density={self.noise_density} is out of range.", hint="use more than 0 and less than 1."
            )
        check_at_least(1, mean_span_length=self.mean_span_length)
        self.sentinels = Sentinels(self.tokenizer)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Corrupt and pad features; see the class for their columns and the returned ones."""
        pairs = [self._split(feature) for feature in features]
        return super().collate([{"input_ids": inputs, "labels": targets} for inputs, targets in pairs])

    def _split(self, feature: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The input and the target of a text, with their end tokens."""
        ids = np.asarray(feature["input_ids"]).astype(np.int64)
        if not len(ids):
            raise CtxError("An example has no token to predict.", hint="drop empty texts.")
        self.sentinels.check_text(ids)
        inputs, targets = self.corrupt(ids, feature_generator(feature, self.seed, static=False))
        end = int(self.tokenizer.eos_token_id)
        return np.append(inputs, end), np.append(targets, end)

    def corrupt(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The input and the target of a text, without their end tokens."""
        if self.variant == "prefix-lm":
            cut = int(rng.integers(1, max(2, len(ids))))
            return ids[:cut], ids[cut:]
        noise = self.noise(len(ids), rng)
        if self.variant == "denoise":
            return np.where(noise, self.sentinels.ids[0], ids), ids
        return self.sentinels.replace(ids, noise), self.sentinels.replace(ids, ~noise)

    def noise(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """(length,) bool, True at noise."""
        if self.variant == "iid":
            return self._single_token_noise(length, rng)
        if self.variant != "spans":
            return rng.random(length) < self.noise_density
        mask = alternating_spans(length, self.noise_density, self.mean_span_length, rng)
        return np.roll(mask, rng.integers(max(2, length))) if self.random_roll else mask

    def _single_token_noise(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Noise of "iid", resampled while its spans, or the spans between them, are more than the sentinels."""
        for _ in range(MAX_TRIES):
            noise = rng.random(length) < self.noise_density
            changes = np.count_nonzero(noise[1:] != noise[:-1])
            if (changes + 2) // 2 <= len(self.sentinels.ids):
                break
        return noise


@dataclass
class SpanCorruption(DataCollatorForSpanCorruption, Objective):
    """T5's objective: predict the spans that sentinels replace.

    128 documents at a time are joined, without separators, and cut into texts; `max_length` is the length of the input,
    so that a text of 568 tokens gives an input of 512 and a target of 114. 15% of its tokens are noise, in spans of
    three on average. A text starts with an uncorrupted span and ends with a noise span, so that a text of few tokens
    only loses its end (`random_roll` avoids this), and no sentinel closes the target, unlike in figure 2 of the paper.

    | variant | input | target |
    |---|---|---|
    | spans | `text <extra_id_0> text <extra_id_1> </s>` | `<extra_id_0> span <extra_id_1> span </s>` |
    | iid | the same, with independent noise tokens (section 3.3.2, "replace spans") | likewise |
    | denoise | `<extra_id_0>` for each noise token (section 3.3.1, "MASS-style") | the text `</s>` |
    | prefix-lm | the beginning of the text, of random length, `</s>` (section 3.1.4, "prefix LM") | the rest `</s>` |

    Noise of `iid` with more spans than the tokenizer has sentinels is resampled, while the release continues with the
    last tokens of the vocabulary; lengths and densities for which this would not be rare are an error.

    The texts of `prefix-lm` are of one document each, as in the release. There the texts of all variants but "spans"
    have `max_length` tokens, and the end token may displace the last one; here they are shorter by one token.

    References: Raffel et al. 2020 (arXiv 1910.10683), sections 3.1.4 and 3.3; `preprocessors.py` of its release:
    `span_corruption`, `random_spans_noise_mask`, `denoise`, `random_prefix_noise_mask`.
    Related: `SpanBoundary` masks spans for an encoder.

    Example:
        >>> SpanCorruption(tokenizer, max_length=512, seed=0).text_length
        568
    """

    auto_class = "AutoModelForSeq2SeqLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text_length = self._text_length()
        """Tokens of a text before its corruption."""
        self.baseline = BaselinePolicy(
            len(self.tokenizer), [int(self.tokenizer.pad_token_id)], token_classes=("labels",)
        )

    def _text_length(self) -> int:
        if self.max_length < 3:
            raise CtxError(
                f"max_length={self.max_length} leaves no room for a token, a sentinel and the end.",
                hint="use 3 or more.",
            )
        sentinels = len(self.sentinels.ids)
        if self.variant == "spans":
            length = max_text_length(self.max_length, self.noise_density, self.mean_span_length)
            # random_roll may split a span
            spans = noise_counts(length, self.noise_density, self.mean_span_length)[1] + self.random_roll
        else:
            length = self.max_length - (self.variant != "prefix-lm")
            spans = max_single_token_spans(length, self.noise_density) if self.variant == "iid" else 0
        if spans > sentinels:
            raise CtxError(
                f"Texts of {length} tokens have {spans} spans, but there are {sentinels} sentinels.",
                hint="use shorter texts (max_length), less noise, longer spans, or a tokenizer with more sentinels.",
            )
        return length

    @property
    def config_fields(self) -> dict[str, Any]:
        """The end token of generation, and its start token, the padding token."""
        return {
            "eos_token_id": int(self.tokenizer.eos_token_id),
            "decoder_start_token_id": int(self.tokenizer.pad_token_id),
        }

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with input_ids; raises CtxError for a text that contains a sentinel."""
        for text in self._texts(documents):
            self.sentinels.check_text(text)
            for start in range(0, len(text), self.text_length):
                yield {"input_ids": text[start : start + self.text_length]}

    def _texts(self, documents: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """(tokens,) ids of joined documents, or, for a prefix LM, of one."""
        for batch in document_batches(documents, DOCUMENTS_PER_TEXT):
            texts = [" ".join(document) for document in batch]
            encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            tokenized = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
            self.statistics.update(
                documents=len(batch),
                sentences=sum(map(len, batch)),
                tokens=sum(map(len, tokenized)),
                words=sum(len(text.split()) for text in texts),
            )
            yield from tokenized if self.variant == "prefix-lm" else [np.concatenate(tokenized)]

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `count_targets`, and sentinels of inputs and targets."""
        sentinels = torch.from_numpy(self.sentinels.ids)
        return {
            **count_targets(batch, self.tokenizer.unk_token_id),
            "input_sentinels": int(torch.isin(batch["input_ids"].cpu(), sentinels).sum()),
            "target_sentinels": int(torch.isin(batch["labels"].cpu(), sentinels).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`; "noise_share" is of the tokens of the text, "span_length" is the mean length of the
        noise spans; the noise span of a prefix LM is the rest of the text."""
        predicted = counts["targets"] - counts["rows"] - counts["target_sentinels"]
        unchanged = counts["tokens"] - counts["rows"] - counts["input_sentinels"]
        noise, total = predicted, predicted + unchanged
        spans = counts["rows" if self.variant == "prefix-lm" else "input_sentinels"]
        if self.variant == "denoise":
            noise, total = counts["input_sentinels"], predicted
        return {
            **target_rates(counts),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "noise_share": noise / max(1, total),
            "span_length": noise / max(1, spans),
            "spans_per_row": spans / max(1, counts["rows"]),
        }


def max_single_token_spans(length: int, density: float) -> int:
    """Maximum number of spans of all but about one in 30,000 texts of "iid": four standard deviations above the
    mean."""
    changes = density * (1 - density)  # per token: half the probability that its neighbour is on the other side
    return math.ceil(length * changes + 1 + 4 * math.sqrt(length * changes * (1 - 3 * changes)))


def max_text_length(max_length: int, density: float, mean_span: float) -> int:
    """Tokens of the longest text whose input, with sentinels and end token, has at most `max_length` tokens
    (`random_spans_helper` of the release)."""

    def sizes(length: int) -> tuple[int, int]:
        noise, spans = noise_counts(length, density, mean_span)
        return length - noise + spans + 1, noise + spans + 1

    length = 2
    while sizes(length + 1)[0] <= max_length:
        length += 1
    inputs, targets = sizes(length)
    return length - 1 if density == 0.5 and targets > inputs else length
