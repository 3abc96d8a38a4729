"""Infilling generation (Xiao et al. 2020, "ERNIE-GEN"): every token of a target is predicted, while the targets before
it that the model reads are partly noise."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import RowPadder
from hf_ctxmodels.data.seeding import Stream
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least, collator_options
from hf_ctxmodels.objectives.components.features import feature_generator, feature_word_ids
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.rates import count_targets, target_rates
from hf_ctxmodels.objectives.components.spans import Units, place_spans
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    RowTemplate,
    row_bounds,
    tokenized_batches,
)
from hf_ctxmodels.objectives.pairs.unified_lm import generation_config_fields
from hf_ctxmodels.objectives.seq2seq.source_target import DataCollatorForSourceTarget, SourceTarget, SourceTargetOptions

FRAGMENTS = ((0.4, 1, 4), (0.6, 4, 32))
"""Lengths of fragments: probability, shortest and longest, of each of two uniform distributions."""
Noise = Literal["random", "token"]


@dataclass
class DataCollatorForNoisySequenceToSequence(DataCollatorForSourceTarget):
    """Shifts targets to the right, and replaces tokens that the model reads.

    Features are those of `DataCollatorForSourceTarget`. Returns: input_ids, attention_mask (batch, width);
    decoder_input_ids (batch, steps), `[CLS]` and the target without its end, of which each token is replaced with
    probability `noise_probability`; labels (batch, steps), the target, -100 at padding. With `max_span` also span_ids
    (batch, steps), numbers of the target's spans: 1 to `max_span` words each, its end alone.

    Args:
        noise_probability: Probability of each token of the target to be replaced.
        noise: `random` replaces by a uniformly random id of the vocabulary, `token` by `[NOISE]`.
        max_span: Most words of a span, for which features need `target_word_ids`; 0 for no spans.
    """

    given = "decoder_input_ids"

    noise_probability: float = 0.5
    noise: Noise = "random"
    max_span: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, max_span=self.max_span)
        if not 0 <= self.noise_probability <= 1:
            raise CtxError(f"noise_probability={self.noise_probability} is not a probability.", hint="use 0 to 1.")
        check_choice(get_args(Noise), noise=self.noise)
        self.noise_id = self.tokenizer.get_vocab().get("[NOISE]")
        if self.noise == "token" and self.noise_id is None:
            raise CtxError("The vocabulary has no [NOISE].", hint="use noise=random, or a tokenizer of ERNIE-GEN.")

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        batch = super().torch_call(features)
        if self.max_span:
            rows = [self.target_spans(feature) for feature in features]
            batch["span_ids"] = RowPadder([len(row) for row in rows], "right").pad(rows, -1)
        return batch

    def target_spans(self, feature: Mapping[str, Any]) -> np.ndarray:
        """(steps,) numbers of a target's spans."""
        words = feature_word_ids({"word_ids": feature.get("target_word_ids")})[:-1]
        rng = feature_generator(feature, self.seed, self.static, Stream.ORDER)
        return self.spans(words, np.ones(len(words), dtype=bool), rng)

    def spans(self, words: np.ndarray, taken: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(targets,) numbers of the spans, which do not cross the ends of fragments; the last is that of the end."""
        places = np.flatnonzero(taken)
        new_fragment = np.diff(places, prepend=-2) != 1
        new_word = new_fragment | (np.diff(words[places], prepend=-2) != 0)
        numbers, number, left = [], -1, 0
        for fragment, word in zip(new_fragment.tolist(), new_word.tolist()):
            if fragment or (word and not left):
                number, left = number + 1, int(rng.integers(1, self.max_span, endpoint=True))
            left -= word
            numbers.append(number)
        return np.array([*numbers, number + 1], dtype=np.int64)

    def corrupted(
        self, ids: np.ndarray, feature: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `DataCollatorForSourceTarget.corrupted`."""
        read = ids[:-1].astype(np.int64)
        noisy = rng.random(len(read)) < self.noise_probability
        drawn = rng.integers(len(self.tokenizer), size=len(read))
        read = np.where(noisy, drawn if self.noise == "random" else np.int64(self.noise_id or 0), read)
        return np.append(np.int64(self.tokenizer.cls_token_id), read), ids.astype(np.int64)


@dataclass(frozen=True)
class NoiseOptions(SourceTargetOptions):
    """Options of `NoisySequenceToSequence`."""

    noise_probability: float = flag(0.5, "Probability of a token of the target that is read to be replaced.")
    noise: Noise = flag("random", "`random`: any token of the vocabulary; `token`: [NOISE].")
    max_span: int = flag(0, "Targets are predicted by spans of up to so many words as well; 0: word by word alone.")
    static: bool = flag(False, "The same noise in every epoch instead of a new one.")


class NoisyTargets:
    """What objectives with noisy targets share: the token that predicts, and the realised noise."""

    tokenizer: PreTrainedTokenizerBase

    @staticmethod
    def query_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
        """The id of [ATTN], or of the mask token where the vocabulary has no [ATTN]."""
        return tokenizer.get_vocab().get("[ATTN]", tokenizer.mask_token_id)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        labels, read = batch["labels"], batch["decoder_input_ids"]
        known = (labels[:, :-1] != IGNORE_INDEX) & (labels[:, 1:] != IGNORE_INDEX)
        changed = int(((read[:, 1:] != labels[:, :-1]) & known).sum())
        counts = count_targets(batch, int(self.tokenizer.unk_token_id))
        return {**counts, "read_targets": int(known.sum()), "changed_targets": changed}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`; `changed_share` is the share of the target's tokens that are read as others."""
        changed = counts["changed_targets"] / max(1, counts["read_targets"])
        return {**target_rates(counts), "changed_share": changed}


class NoisySequenceToSequence(NoisyTargets, SourceTarget):
    """ERNIE-GEN's fine-tuning: predict every token of the target; of those before it that are read, half are random.

    The model learns to go on after mistakes, as it has to when it reads what it wrote itself. Labels stay as they are.
    With `max_span` each token is predicted from those before its span as well, as in `Infilling`; the released code
    does not. Sources and targets are made as `SourceTarget` says.

    | document | source | read | predicted |
    |---|---|---|---|
    | a source and its target | `[CLS] A [SEP]` | `[CLS] B`, with noise | `B [SEP]` |

    References: Xiao et al. 2020 (arXiv 2001.11314), sections 3.1 and 3.2; the released fine-tuning code, with
    probabilities of 0.5 (Gigaword) and 0.7 (questions).
    Related: `MaskedSequenceToSequence` predicts masked tokens; `Infilling` pretrains.

    Example:
        >>> NoisySequenceToSequence(tokenizer, max_length=512, seed=0, noise_probability=0.7)
    """

    Options: ClassVar[type] = NoiseOptions
    Collator = DataCollatorForNoisySequenceToSequence
    collate: DataCollatorForNoisySequenceToSequence

    @property
    def with_words(self) -> bool:
        """See `SourceTarget`; spans are of whole words."""
        return self.options.max_span > 0


@dataclass
class DataCollatorForInfilling(DataCollatorForNoisySequenceToSequence):
    """Takes fragments out of a text, which are the target in their order, and makes noise in it.

    Each feature holds:
        text_ids: (tokens,) without special tokens.
        word_ids: (tokens,) numbers of the words.
        example_index, epoch: Integers that seed the draws.

    Returns: what `DataCollatorForNoisySequenceToSequence` returns, of the rest of the text as the source. Spans end at a
    fragment's end.

    Args:
        target_share: Share of a text's tokens that are the target, less where no further fragment fits.
        max_span: Most words of a span.
    """

    noise_probability: float = 0.05
    target_share: float = 0.25
    max_span: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target_share < 1:
            raise CtxError(f"target_share={self.target_share} is out of range.", hint="use more than 0, less than 1.")
        check_at_least(1, max_span=self.max_span)
        self.template = RowTemplate(self.tokenizer, segments=1)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = []
        for feature in features:
            rng = feature_generator(feature, self.seed, self.static, Stream.ORDER)
            ids, words = np.asarray(feature["text_ids"]), feature_word_ids(feature)
            taken = self.fragments(len(ids), rng)
            row = {**feature, "input_ids": self.template.fill(ids[~taken]), "span_ids": self.spans(words, taken, rng)}
            rows.append({**row, "target_ids": np.append(ids[taken], np.int32(self.tokenizer.sep_token_id))})
        return super().torch_call(rows)

    def target_spans(self, feature: Mapping[str, Any]) -> np.ndarray:
        """See `DataCollatorForNoisySequenceToSequence.target_spans`."""
        return feature["span_ids"]

    def fragments(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """(length,) bool, True in fragments; some of a text of two tokens or more are, and some are not."""
        kinds = rng.choice(len(FRAGMENTS), size=length, p=[share for share, _, _ in FRAGMENTS])
        bounds = np.array([each[1:] for each in FRAGMENTS])[kinds]
        lengths = rng.integers(bounds[:, 0], bounds[:, 1], endpoint=True)
        budget = min(max(1, round(length * self.target_share)), length - 1)
        units = Units.of(np.ones(length, dtype=bool))
        taken = np.zeros(length, dtype=bool)
        taken[units.in_spans(place_spans(units, lengths, budget, rng))] = True
        return taken


@dataclass(frozen=True)
class InfillingOptions:
    """Options of `Infilling`; see the collator."""

    target_share: float = flag(0.25, "Share of the tokens of a text that are the target.")
    max_span: int = flag(3, "Most words of a span.")
    noise_probability: float = flag(0.05, "Probability of a token of the target that is read to be replaced.")
    noise: Noise = flag("random", "`random`: any token of the vocabulary; `token`: [NOISE].")
    static: bool = flag(False, "The same fragments and noise in every epoch instead of new ones.")


class Infilling(NoisyTargets, Objective):
    """ERNIE-GEN's pretraining: write the fragments that were taken out of a text, word by word and span by span.

    Fragments of 1 to 4 tokens (with probability 0.4) or 4 to 32 are taken out, until a quarter of the text is; the rest
    is the source, the fragments are the target. Each token of it is predicted twice: from all tokens before it, and
    from those before its span of one to three words. Of the tokens that are read 5% are random. Rows hold whole
    sentences of a document, as for `MaskedLM`; texts of one token are left out.

    | document | source | read | predicted |
    |---|---|---|---|
    | sentences | `[CLS] text without fragments [SEP]` | `[CLS] fragments`, with noise | `fragments [SEP]` |

    References: Xiao et al. 2020 (arXiv 2001.11314), sections 3.1 to 3.3. The pretraining code was not released. The
    paper's spans are n-grams that a test of significance finds; here their lengths are drawn.
    Related: `NoisySequenceToSequence` fine-tunes; `UnifiedLM` predicts masked tokens.

    Example:
        >>> Infilling(tokenizer, max_length=512, seed=0)
    """

    auto_class = "AutoModelForSeq2SeqLM"
    Options: ClassVar[type] = InfillingOptions
    collate: DataCollatorForInfilling

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        added = RowTemplate(tokenizer, segments=1).special_tokens + 2  # [CLS] and the end of the target
        self.room = max_length - added
        if self.room < 2:
            raise CtxError(f"max_length={max_length} leaves no room for text.", hint=f"use at least {added + 2}.")
        own = collator_options(DataCollatorForInfilling, self.options)
        self.collate = DataCollatorForInfilling(tokenizer, seed=seed, **own)
        excluded = {*tokenizer.all_special_ids} - {tokenizer.sep_token_id, tokenizer.unk_token_id}
        self.baseline = replace(self.baseline, excluded_ids=sorted(excluded), column="text_ids")

    @property
    def config_fields(self) -> dict[str, Any]:
        """The tokens that the head needs."""
        return generation_config_fields(self.tokenizer, self.query_token(self.tokenizer))

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with text_ids and word_ids."""
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, True):
            for document in batch:
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                for start, stop in row_bounds(document, self.room):
                    if stop - start < 2:
                        self.statistics["left_out"] += 1
                        continue
                    assert document.word_ids is not None
                    yield {"text_ids": document.ids[start:stop], "word_ids": document.word_ids[start:stop]}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Those of `NoisyTargets`."""
        return NoisyTargets.rates(self, counts)
