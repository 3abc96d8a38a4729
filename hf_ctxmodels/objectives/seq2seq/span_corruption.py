"""Span corruption and its relatives (Raffel et al. 2020, "T5", sections 3.1.4 and 3.3)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least, collator_options
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.rates import count_targets, target_rates
from hf_ctxmodels.objectives.components.sentinels import Sentinels
from hf_ctxmodels.objectives.components.spans import alternating_spans, noise_counts
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches
from hf_ctxmodels.objectives.seq2seq.translation import DataCollatorForTranslation

DOCUMENTS_PER_TEXT = 128  # documents that are joined, as in the released `reduce_concat_tokens`

DRAWS = 20  # of a row's noise, until there are sentinels for its spans

Variant = Literal["spans", "iid", "denoise", "prefix-lm"]


@dataclass
class DataCollatorForSpanCorruption(DataCollatorForTranslation):
    """Splits every row into an input with sentinels and a target, as `variant` says.

    Each feature holds:
        input_ids: (tokens,) of text, without special tokens.
        example_index, epoch: Seed the draws.

    Returns: input_ids, attention_mask (batch, width), padded on the tokenizer's side; labels (batch, steps), -100 after
        a target's end. The end token follows every input and every target.

    Args:
        seed: Seed of all draws.
        variant: See `SpanCorruption`.
        noise_density: Share of noise tokens.
        mean_span_length: Mean length of the noise spans; of "spans" only.
        random_roll: Rotate the masks of "spans" by a random offset; a row may then start with noise, and then its first
            noise span has no sentinel before it among the targets, as in the released code.

    Raises:
        CtxError: A tokenizer without end token or sentinels; a text that holds a sentinel, or is empty; more spans than
            sentinels; rates out of range.
    """

    seed: int = 0
    variant: Variant = "spans"
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    random_roll: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer.eos_token_id is None:
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no eos_token, which ends inputs and targets.",
                hint="use a tokenizer with an eos_token.",
            )
        check_choice(get_args(Variant), variant=self.variant)
        if not 0 < self.noise_density < 1:
            raise CtxError(f"noise_density={self.noise_density} is no share.", hint="use 0.15, for example.")
        check_at_least(1, mean_span_length=self.mean_span_length)
        self.sentinels = Sentinels(self.tokenizer)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        pairs = [self._split(feature) for feature in features]
        return super().torch_call([{"input_ids": inputs, "labels": targets} for inputs, targets in pairs])

    def _split(self, feature: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The input and the target of a row, with their ends."""
        ids = np.asarray(feature["input_ids"]).astype(np.int64)
        if not len(ids):
            raise CtxError("A row has no token, so nothing can be predicted.", hint="drop empty texts.")
        self.sentinels.check_text(ids)
        inputs, targets = self.corrupted(ids, feature_generator(feature, self.seed, static=False))
        end = int(self.tokenizer.eos_token_id)
        return np.append(inputs, end), np.append(targets, end)

    def corrupted(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The input and the target of a row, without their ends."""
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
            return self._single_tokens(length, rng)
        if self.variant != "spans":
            return rng.random(length) < self.noise_density
        mask = alternating_spans(length, self.noise_density, self.mean_span_length, rng)
        return np.roll(mask, rng.integers(max(2, length))) if self.random_roll else mask

    def _single_tokens(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Noise of "iid", drawn again where its spans, or those between them, are more than the sentinels."""
        for _ in range(DRAWS):
            noise = rng.random(length) < self.noise_density
            changes = np.count_nonzero(noise[1:] != noise[:-1])
            if (changes + 2) // 2 <= len(self.sentinels.ids):
                break
        return noise


@dataclass(frozen=True)
class SpanCorruptionOptions:
    """Options of `SpanCorruption`; see the collator."""

    variant: Variant = flag(
        "spans",
        "spans: predict random spans; iid: predict single random tokens; denoise: these, and the whole row is the "
        "target; prefix-lm: predict the rest of a row.",
    )
    noise_density: float = flag(0.15, "Share of the tokens that are noise; not of prefix-lm.")
    mean_span_length: float = flag(3.0, "Mean length of the noise spans in tokens.")
    random_roll: bool = flag(False, "Rotate each mask by a random offset, so that a row may start with noise.")


class SpanCorruption(Objective):
    """T5's objective: predict the spans that sentinels stand for.

    128 documents at a time are joined, without separators, and cut into rows; `max_length` is the length of the input,
    so that a row of 568 tokens gives an input of 512 and a target of 114. 15% of its tokens are noise, in spans of
    three on average. A row starts with a kept span and ends with a noise span, so that one of few tokens loses its end
    only (`random_roll` is for these), and no sentinel closes the target, unlike in figure 2 of the paper.

    | variant | input | target |
    |---|---|---|
    | spans | `kept <extra_id_0> kept <extra_id_1> </s>` | `<extra_id_0> span <extra_id_1> span </s>` |
    | iid | the same, each token noise by itself (section 3.3.2, "replace spans") | likewise |
    | denoise | `<extra_id_0>` in place of each noise token (section 3.3.1, "MASS-style") | the row `</s>` |
    | prefix-lm | the row's beginning, of random length, `</s>` (section 3.1.4, "prefix LM") | the rest `</s>` |

    Noise of `iid` that has more spans than the tokenizer has sentinels is drawn again, where the release goes on with
    the last pieces of the vocabulary; lengths and densities with which this would not be rare are an error.

    The rows of `prefix-lm` are of one document each, as in the release. There all variants but "spans" have rows of
    `max_length` tokens, and the end token may push out the last one; here the rows are shorter by it.

    References: Raffel et al. 2020 (arXiv 1910.10683), sections 3.1.4 and 3.3; `preprocessors.py` of its release:
    `span_corruption`, `random_spans_noise_mask`, `denoise`, `random_prefix_noise_mask`.
    Related: `SpanBoundary` masks spans for an encoder.

    Example:
        >>> SpanCorruption(tokenizer, max_length=512, seed=0).row_length
        568
    """

    auto_class = "AutoModelForSeq2SeqLM"
    Options: ClassVar[type] = SpanCorruptionOptions
    collate: DataCollatorForSpanCorruption

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        chosen = collator_options(DataCollatorForSpanCorruption, self.options)
        self.collate = DataCollatorForSpanCorruption(tokenizer, seed=seed, **chosen)
        self.row_length = self._row_length()
        """Tokens of a row, before its corruption."""
        self.baseline = BaselinePolicy(len(tokenizer), [int(tokenizer.pad_token_id)], token_classes=("labels",))

    def _row_length(self) -> int:
        if self.max_length < 3:
            raise CtxError(
                f"max_length={self.max_length} leaves no room for a token, a sentinel and the end.",
                hint="use 3 or more.",
            )
        rates, spans = (self.options.noise_density, self.options.mean_span_length), len(self.collate.sentinels.ids)
        if self.options.variant == "spans":
            length = longest_row(self.max_length, *rates)
            needed = noise_counts(length, *rates)[1] + self.options.random_roll  # which may cut a span in two
        else:
            length = self.max_length - (self.options.variant != "prefix-lm")
            needed = most_single_tokens(length, rates[0]) if self.options.variant == "iid" else 0
        if needed > spans:
            raise CtxError(
                f"Rows of {length} tokens have {needed} spans, but the tokenizer {spans} sentinels.",
                hint="use shorter rows (max_length), less noise, longer spans, or a tokenizer with more sentinels.",
            )
        return length

    @property
    def config_fields(self) -> dict[str, Any]:
        """The end of generation, and its start, the padding token."""
        return {
            "eos_token_id": int(self.tokenizer.eos_token_id),
            "decoder_start_token_id": int(self.tokenizer.pad_token_id),
        }

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids; raises CtxError for a text that holds a sentinel."""
        for text in self._texts(documents):
            self.collate.sentinels.check_text(text)
            for start in range(0, len(text), self.row_length):
                yield {"input_ids": text[start : start + self.row_length]}

    def _texts(self, documents: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """(tokens,) ids of documents joined, or, for a prefix LM, of one."""
        for batch in document_batches(documents, DOCUMENTS_PER_TEXT):
            texts = [" ".join(document) for document in batch]
            encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            rows = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
            self.statistics.update(
                documents=len(batch),
                sentences=sum(map(len, batch)),
                tokens=sum(map(len, rows)),
                words=sum(len(text.split()) for text in texts),
            )
            yield from rows if self.options.variant == "prefix-lm" else [np.concatenate(rows)]

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        sentinels = torch.from_numpy(self.collate.sentinels.ids)
        return {
            **count_targets(batch, self.tokenizer.unk_token_id),
            "input_sentinels": int(torch.isin(batch["input_ids"].cpu(), sentinels).sum()),
            "target_sentinels": int(torch.isin(batch["labels"].cpu(), sentinels).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`; "noise_share" is of the tokens of the text, "span_length" that of the noise spans, of
        which a row of a prefix LM has one, its rest."""
        predicted = counts["targets"] - counts["rows"] - counts["target_sentinels"]
        kept = counts["tokens"] - counts["rows"] - counts["input_sentinels"]
        noise, total = predicted, predicted + kept
        spans = counts["rows" if self.options.variant == "prefix-lm" else "input_sentinels"]
        if self.options.variant == "denoise":
            noise, total = counts["input_sentinels"], predicted
        return {
            **target_rates(counts),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "noise_share": noise / max(1, total),
            "span_length": noise / max(1, spans),
            "spans_per_row": spans / max(1, counts["rows"]),
        }


def most_single_tokens(length: int, density: float) -> int:
    """Spans that all rows of "iid" but about one in 30,000 have at most: four standard deviations over the mean."""
    changes = density * (1 - density)  # per token: half the chance that its neighbour is on the other side
    return math.ceil(length * changes + 1 + 4 * math.sqrt(length * changes * (1 - 3 * changes)))


def longest_row(max_length: int, density: float, mean_span: float) -> int:
    """Tokens of the longest row whose input, with its sentinels and its end, has `max_length` tokens at most
    (`random_spans_helper` of the release)."""

    def sizes(length: int) -> tuple[int, int]:
        noise, spans = noise_counts(length, density, mean_span)
        return length - noise + spans + 1, noise + spans + 1

    length = 2
    while sizes(length + 1)[0] <= max_length:
        length += 1
    inputs, targets = sizes(length)
    return length - 1 if density == 0.5 and targets > inputs else length
