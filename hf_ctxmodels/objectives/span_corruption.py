"""Span corruption and its variants (Raffel et al. 2020, "T5", sections 3.1.4 and 3.3)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from hf_ctxmodels.core.constants import SENTINEL_TOKEN
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, SourceTargetCollator, required_token
from hf_ctxmodels.objectives.base import Objective, batch_statistics, target_rates
from hf_ctxmodels.objectives.features import check_token_ids, feature_generator

DOCUMENTS_PER_TEXT = 128  # documents that are joined, as in the released `reduce_concat_tokens`
MAX_TRIES = 20  # of sampling noise with few enough spans for the sentinels

Variant = Literal["spans", "iid", "denoise", "prefix-lm"]


@dataclass
class DataCollatorForSpanCorruption(SourceTargetCollator):
    """Splits every text into an input with sentinels, <extra_id_0>, <extra_id_1>, ..., and a target.

    Each feature holds:
        input_ids: (tokens,) of text, without special tokens.

    Returns: input_ids, attention_mask (batch, width), padded on the tokenizer's side; labels (batch, steps), -100 after
        the end of a target. The end token follows every input and every target.

    Args:
        variant: See `SpanCorruption`.
        random_roll: Rotate the masks of "spans" by a random offset; a sequence may then start with noise, and its first
            noise span has no sentinel before it among the targets, as in the released code.
    """

    seed: int = 0
    variant: Variant = flag(
        "spans",
        "spans: predict random spans; iid: predict single random tokens; denoise: single random tokens, and the target "
        "is the whole text; prefix-lm: predict the rest of a text.",
    )
    noise_density: float = flag(0.15, "Share of the tokens that are noise; not for prefix-lm.")
    mean_span_length: float = flag(3.0, "Mean length of the noise spans in tokens; for spans only.")
    random_roll: bool = flag(False, "Rotate each mask by a random offset, so that a text may start with noise.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.end = required_token(self.tokenizer, "eos_token", "ends inputs and targets")
        check_choice(get_args(Variant), variant=self.variant)
        check_range(self, "noise_density", above=0, below=1)
        check_range(self, "mean_span_length", at_least=1)
        vocab = self.tokenizer.get_vocab()
        sentinels: list[int] = []
        while (token := SENTINEL_TOKEN.format(len(sentinels))) in vocab:
            sentinels.append(vocab[token])
        if not sentinels:
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no sentinel {SENTINEL_TOKEN.format(0)} to replace a span.",
                hint="use a tokenizer of the family t5, or call add_tokens(['<extra_id_99>', ..., '<extra_id_0>']), "
                "and resize the model's embeddings.",
            )
        self.sentinels = np.array(sentinels)
        """(sentinels,) ids of the first, second, ... sentinel."""
        self.is_sentinel = np.isin(np.arange(max(vocab.values()) + 1), self.sentinels)
        """(largest id + 1,) bool."""

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Corrupt and pad features; see the class for their columns and the returned ones."""
        pairs = []
        for feature in features:
            ids = np.asarray(feature["input_ids"]).astype(np.int64)
            if not len(ids):
                raise CtxError("An example has no token to predict.", hint="drop empty texts.")
            self.check_text(ids)
            inputs, targets = self.corrupt(ids, feature_generator(feature, self.seed))
            pairs.append({"input_ids": np.append(inputs, self.end), "labels": np.append(targets, self.end)})
        return super().collate(pairs)

    def check_text(self, ids: np.ndarray) -> None:
        """Raise CtxError if a text contains a sentinel, or an id outside the vocabulary."""
        check_token_ids(ids, len(self.is_sentinel))
        if (is_sentinel := self.is_sentinel[ids]).any():
            position = int(is_sentinel.argmax())
            sentinel = SENTINEL_TOKEN.format(int((self.sentinels == ids[position]).argmax()))
            raise CtxError(
                f"The text contains the sentinel {sentinel}, at token {position} of a sequence.",
                hint="remove such strings from the text; a sentinel represents a span to be predicted.",
            )

    def corrupt(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The input and the target of a text, without their end tokens."""
        if self.variant == "prefix-lm":
            cut = int(rng.integers(1, max(2, len(ids))))
            return ids[:cut], ids[cut:]
        noise_mask = self.sample_noise_mask(len(ids), rng)
        if self.variant == "denoise":
            return np.where(noise_mask, self.sentinels[0], ids), ids
        return self.replace_spans(ids, noise_mask), self.replace_spans(ids, ~noise_mask)

    def replace_spans(self, ids: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """The sequence with its first span, a run of True in `spans`, replaced by the first sentinel, and so on."""
        starts = spans & ~np.append(False, spans[:-1])
        num_spans = int(starts.sum())
        self.check_spans(len(ids), num_spans)
        replaced = ids.copy()
        replaced[starts] = self.sentinels[:num_spans]
        return replaced[starts | ~spans]

    def check_spans(self, length: int, num_spans: int) -> None:
        """Raise CtxError if there are more spans than sentinels."""
        if num_spans > len(self.sentinels):
            raise CtxError(
                f"A text of {length} tokens has {num_spans} spans, but there are {len(self.sentinels)} sentinels.",
                hint="use a smaller max_length, less noise, longer spans, or a tokenizer with more sentinels.",
            )

    def sample_noise_mask(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """(length,) bool, True at noise."""
        if self.variant == "spans":
            mask = alternating_spans(length, self.noise_density, self.mean_span_length, rng)
            return np.roll(mask, rng.integers(max(2, length))) if self.random_roll else mask
        for _ in range(MAX_TRIES if self.variant == "iid" else 1):
            mask = rng.random(length) < self.noise_density
            changes = np.count_nonzero(mask[1:] != mask[:-1])
            if (changes + 2) // 2 <= len(self.sentinels):  # of the noise spans, and of the spans between them
                break
        return mask


@dataclass
class SpanCorruption(DataCollatorForSpanCorruption, Objective):
    """T5's objective: predict the spans that sentinels replace.

    128 documents at a time are joined, without separators, and cut into texts; `max_length` is the length of the input,
    so that a text of 568 tokens gives an input of 512 and a target of 114. A text starts with an uncorrupted span and
    ends with a noise span (unless `random_roll` is set), and no sentinel closes the target, unlike in figure 2.

    | variant | input | target |
    |---|---|---|
    | spans | `text <extra_id_0> text <extra_id_1> </s>` | `<extra_id_0> span <extra_id_1> span </s>` |
    | iid | the same, with independent noise tokens (section 3.3.2, "replace spans") | likewise |
    | denoise | `<extra_id_0>` for each noise token (section 3.3.1, "MASS-style") | the text `</s>` |
    | prefix-lm | the beginning of the text, of random length, `</s>` (section 3.3.1, "prefix LM") | the rest `</s>` |

    Noise of `iid` with more spans than the tokenizer has sentinels is resampled; lengths and densities for which this
    would not be rare are an error. The texts of `prefix-lm` are of one document each, as in the release.

    References: Raffel et al. 2020 (arXiv 1910.10683), sections 3.1.4 and 3.3; `preprocessors.py` of its release:
    `span_corruption`, `random_spans_noise_mask`, `denoise`, `random_prefix_noise_mask`.
    Related: `SpanBoundary` masks spans for an encoder.

    Example:
        >>> SpanCorruption(tokenizer, max_length=512, seed=0).text_length
        568
    """

    auto_class = "AutoModelForSeq2SeqLM"
    predicts_special_tokens = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", at_least=3)
        if self.variant == "spans":
            length = max_text_length(self.max_length, self.noise_density, self.mean_span_length)
            # random_roll may split a span
            num_spans = noise_counts(length, self.noise_density, self.mean_span_length)[1] + self.random_roll
        else:
            length = self.max_length - (self.variant != "prefix-lm")
            num_spans = max_single_token_spans(length, self.noise_density) if self.variant == "iid" else 0
        self.check_spans(length, num_spans)
        self.text_length = length
        """Tokens of a text before its corruption."""
        self.baseline = replace(self.baseline, token_classes=("labels",))
        self.config_fields = {"eos_token_id": self.end, "decoder_start_token_id": int(self.tokenizer.pad_token_id)}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids; raises CtxError for a text that contains a sentinel."""
        for batch in self.joined_batches(documents, DOCUMENTS_PER_TEXT):
            for text in batch if self.variant == "prefix-lm" else [np.concatenate(batch)]:
                self.check_text(text)
                for start in range(0, len(text), self.text_length):
                    yield {"input_ids": text[start : start + self.text_length]}

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `batch_statistics`, and sentinels of inputs and targets."""
        sentinels = torch.from_numpy(self.sentinels)
        return {
            **batch_statistics(batch, self.tokenizer.unk_token_id),
            "input_sentinels": int(torch.isin(batch["input_ids"].cpu(), sentinels).sum()),
            "target_sentinels": int(torch.isin(batch["labels"].cpu(), sentinels).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, share of noise in the text, and mean length and number of the noise spans; the rest
        of the text is the noise span of a prefix LM."""
        predicted = counts["targets"] - counts["examples"] - counts["target_sentinels"]
        unchanged = counts["tokens"] - counts["examples"] - counts["input_sentinels"]
        num_noise, total = predicted, predicted + unchanged
        num_spans = counts["examples" if self.variant == "prefix-lm" else "input_sentinels"]
        if self.variant == "denoise":
            num_noise, total = counts["input_sentinels"], predicted
        return {
            **target_rates(counts),
            "noise_share": num_noise / max(1, total),
            "span_length": num_noise / max(1, num_spans),
            "spans_per_example": num_spans / max(1, counts["examples"]),
        }


def random_composition(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) positive integers with the sum `total`, all compositions equally likely; 1 <= count <= total."""
    inner = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1 if count > 1 else np.empty(0, dtype=np.int64)
    return np.diff(inner, prepend=0, append=total)


def noise_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Noise tokens and noise spans of a sequence of 2 or more tokens, in the arithmetic of T5's release (float32,
    rounded to even); unlike there, at most one span for each token of text, since a text span precedes each."""
    num_noise = int(np.rint(np.float32(length) * np.float32(density)))
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = int(np.rint(np.float32(num_noise) / np.float32(mean_span)))
    return num_noise, min(max(num_spans, 1), num_noise, length - num_noise)


def alternating_spans(length: int, density: float, mean_span: float, rng: np.random.Generator) -> np.ndarray:
    """(length,) bool, True at noise: alternating text and noise spans, starting with text (Raffel et al. 2020, section
    3.3.4; `random_spans_noise_mask` of the release).

    All masks with the numbers of `noise_counts` are equally likely.
    """
    if length < 2:
        return np.zeros(length, dtype=bool)
    num_noise, num_spans = noise_counts(length, density, mean_span)
    text_lengths = random_composition(length - num_noise, num_spans, rng)
    noise_lengths = random_composition(num_noise, num_spans, rng)
    return np.repeat(np.tile([False, True], num_spans), np.stack([text_lengths, noise_lengths], axis=1).ravel())


def max_single_token_spans(length: int, density: float) -> int:
    """Maximum number of spans of all but about one in 30,000 texts of "iid": four standard deviations above the
    mean."""
    changes = density * (1 - density)  # per token: half the probability that its neighbor is on the other side
    return math.ceil(length * changes + 1 + 4 * math.sqrt(length * changes * (1 - 3 * changes)))


def max_text_length(max_length: int, density: float, mean_span: float) -> int:
    """Tokens of the longest text whose input, with sentinels and end token, has at most `max_length` tokens
    (`random_spans_helper` of the release)."""

    def sizes(length: int) -> tuple[int, int]:
        num_noise, num_spans = noise_counts(length, density, mean_span)
        return length - num_noise + num_spans + 1, num_noise + num_spans + 1

    length = 2
    while sizes(length + 1)[0] <= max_length:
        length += 1
    inputs, targets = sizes(length)
    return length - 1 if density == 0.5 and targets > inputs else length
