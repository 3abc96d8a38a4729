"""XLM's objectives (Lample & Conneau 2019, section 3): causal and masked language modeling on a stream of text for
each language, and translation language modeling."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.core.generation import split_language_tag
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import Batch, PaddingCollator, required_token
from hf_ctxmodels.data.training_set import ExampleSampling
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.causal_lm import DataCollatorForCausalLM, TokenStream
from hf_ctxmodels.objectives.features import check_token_ids, feature_generator, padded_columns
from hf_ctxmodels.objectives.masking import MaskingRule, corrupt, count_selected, masking_rates
from hf_ctxmodels.objectives.tokenized_documents import SENTENCES_PER_CALL, document_batches, require_translation

Sentence = tuple[int, np.ndarray]
"""The language id of a sentence, and its (tokens,) ids without special tokens."""


class LanguageReader:
    """Tokenizes the sentences of documents, and determines the language id of each: its tag ("<de> Ein Satz."), else
    the language of the previous sentence of the document, else `language`.

    The tokenizer's `languages` are the valid names; with fewer than two every text has the language 0. An empty
    `language` makes texts without a tag an error.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, language: str) -> None:
        self.tokenizer, self.language = tokenizer, language
        self.names: list[str] = list(getattr(tokenizer, "languages", ()))
        self.is_multilingual = len(self.names) > 1
        if language and self.names:
            tokenizer.language_id(language)  # raises for an unknown name

    def read(self, documents: list[list[str]]) -> list[list[Sentence]]:
        """The tokenized sentences of each document; raises CtxError for a text with no tag or an unknown one."""
        tagged_documents = [list(self._with_languages(document)) for document in documents]
        texts: dict[int, list[str]] = {}
        for language, text in (sentence for document in tagged_documents for sentence in document):
            texts.setdefault(language, []).append(text)
        ids = {language: self._tokenize(language, language_texts) for language, language_texts in texts.items()}
        return [[(language, next(ids[language])) for language, _ in document] for document in tagged_documents]

    def _tokenize(self, language: int, texts: list[str]) -> Iterator[np.ndarray]:
        """(tokens,) ids of each text of a language, without special tokens."""
        arguments = {"language": self.names[language]} if self.names else {}
        for batch in document_batches(texts, SENTENCES_PER_CALL):
            encoded = self.tokenizer(batch, add_special_tokens=False, verbose=False, **arguments)
            yield from (np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"])

    def _with_languages(self, document: list[str]) -> Iterator[tuple[int, str]]:
        previous: str | None = None
        for sentence in document:
            if not self.is_multilingual:
                yield 0, sentence
                continue
            tag, text = split_language_tag(sentence)
            inherited = None if isinstance(document, TranslatedText) else previous
            name = tag or inherited or self.language
            if not name:
                raise CtxError(
                    f"A text has no language tag: {sentence[:60]!r}.",
                    hint="set a tag for each --dataset: --language_tags '<de>' ...; for texts with translations, whose "
                    "tag is the translation's, set --objective NAME:language=LANGUAGE.",
                )
            previous = name
            yield self.tokenizer.language_id(name), text


@dataclass
class StreamObjective(Objective):
    """Base class of objectives on streams of one language each.

    A stream is the sentences of a language with one end token before, between and after them. Documents are texts whose
    sentences begin with a language tag (`--language_tags`); both sides of a text with its translation are sentences. A
    tokenizer with fewer than two languages requires no tags, and examples then have no `langs`.
    """

    predicts_special_tokens = True
    language: str = flag("", "Name of the language of texts without a tag, such as texts with a translation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", at_least=2)
        self.end = required_token(self.tokenizer, "eos_token", "separates sentences")
        self.reader = LanguageReader(self.tokenizer, self.language)
        self.config_fields = {
            "n_langs": max(1, len(self.reader.names)),
            "lang2id": {name: number for number, name in enumerate(self.reader.names)} or None,
            "causal": self.auto_class == "AutoModelForCausalLM",
        }
        self.immutable_config_fields = ("n_langs", "lang2id")

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples of the streams; raises CtxError for a text without language."""
        streams: dict[int, TokenStream] = {}
        for batch in document_batches(documents):
            for document, sentences in zip(batch, self.reader.read(batch), strict=True):
                tokens = sum(len(ids) for _, ids in sentences)
                self.statistics.update(documents=1, sentences=len(sentences), tokens=tokens)
                yield from self.document_examples(document, sentences, streams)
        for language, stream in sorted(streams.items()):
            if len(stream.remaining) > 1:
                yield self.example(language, stream.remaining, IGNORE_INDEX)

    def document_examples(
        self, document: list[str], sentences: list[Sentence], streams: dict[int, TokenStream]
    ) -> Iterator[Example]:
        """The examples that a document completes."""
        for language, ids in sentences:
            if len(ids):
                stream = streams.setdefault(language, TokenStream(self.max_length, [self.end]))
                for sequence, following in stream.add(np.append(ids, self.end)):
                    yield self.example(language, sequence, following)

    def example(self, language: int, ids: np.ndarray, following: int) -> Example:
        """The example of a sequence of a stream."""
        return {"input_ids": ids, **self.langs((language, len(ids))), "following": following}

    def langs(self, *segments: tuple[int, int]) -> dict[str, np.ndarray]:
        """The column of language ids, from the language and the number of tokens of each segment."""
        if not self.reader.is_multilingual:
            return {}
        return {"langs": np.concatenate([np.full(length, language, dtype=np.int16) for language, length in segments])}


@dataclass
class StreamCausalLM(DataCollatorForCausalLM, StreamObjective):
    """XLM's causal language modeling: predict each token of a stream from its predecessors.

    | document | example | targets |
    |---|---|---|
    | sentences of one language | `max_length` tokens of `</s> sentence </s> sentence </s> ...` | every token |

    Unlike in the released code, the last token of an example has a target, the first one of the next example.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.2.
    Related: `DocumentLM` has the end token after documents; `StreamMaskedLM` masks the same sequences.

    Example:
        >>> StreamCausalLM(tokenizer, max_length=256, seed=0, language="en")
    """

    auto_class = "AutoModelForCausalLM"


STREAM, TRANSLATION = 0, 1
"""Values of `task`."""


@dataclass
class DataCollatorForStreamMaskedLM(PaddingCollator):
    """Pads a batch and masks it by the rule of XLM's released code, with languages and positions.

    Each token except the first is selected with probability `mlm_probability`; or, with `sample_alpha` > 0, exactly
    that share of the tokens, rounded up, sampled without replacement by frequency ** -sample_alpha. Of the selected
    tokens 80% become the mask token, 10% a random token, 10% are unchanged. As in the released code, and unlike in all
    other collators, **special tokens are included**: an inner </s> may be selected, and a random token is any of the
    vocabulary. In the release the share is of the whole batch instead of each sequence.

    Each feature holds:
        input_ids: (tokens,).
        langs: (tokens,), optional.
        second: Optional, the column at which positions restart at 0; 0 for none.

    Returns: input_ids, attention_mask, position_ids, labels (batch, width); and langs if the features hold them.
    For `sample_alpha` the tokenizer has `token_counts`.
    """

    mlm_probability: float = flag(0.15, "Probability of each token to be predicted.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is unchanged.")
    sample_alpha: float = flag(0.0, "Predict exactly the share, by frequency to the power of minus this; 0: uniform.")
    static: bool = flag(False, "The same mask in every epoch instead of a new one.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = MaskingRule(self.mlm_probability, self.mask_share, self.random_share)
        check_range(self, "sample_alpha", at_least=0)
        self.mask_id = required_token(self.tokenizer, "mask_token", "masked language modeling requires")
        self.vocabulary = np.arange(len(self.tokenizer))
        self.weights: np.ndarray | None = None  # (vocabulary,), 0 for padding and tokens that do not occur
        if self.sample_alpha:
            token_counts = getattr(self.tokenizer, "token_counts", None)
            if token_counts is None:
                raise CtxError(
                    f"sample_alpha={self.sample_alpha} requires token frequencies, which this tokenizer does not have.",
                    hint="train it with `hf-ctxmodels data tokenizer --family xlm`, or set its token_counts.",
                )
            counts = np.zeros(len(self.vocabulary))
            counts[: len(token_counts)] = token_counts
            counts[self.tokenizer.pad_token_id] = 0
            self.weights = np.zeros(len(self.vocabulary))
            self.weights[counts > 0] = counts[counts > 0] ** -self.sample_alpha

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and pad features; see the class for their columns and the returned ones."""
        originals = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        corrupted, labels, positions = [], [], []
        for feature, ids in zip(features, originals, strict=True):
            check_token_ids(ids, len(self.vocabulary))
            rng = feature_generator(feature, self.seed, period=1 if self.static else None)
            selected = self._select(ids, rng)
            corrupted_ids, targets = corrupt(ids, selected, self.rule, self.mask_id, self.vocabulary, rng)
            corrupted.append(corrupted_ids)
            labels.append(targets)
            columns, second = np.arange(len(ids)), int(feature.get("second", 0))
            positions.append(np.where(columns < second, columns, columns - second))
        padder, inputs = self.pad_inputs(corrupted)
        return {
            **inputs,
            "position_ids": padder.pad(positions, 0),
            "labels": padder.pad(labels, IGNORE_INDEX),
            **padded_columns(features, ("langs",), padder, self.tokenizer),
        }

    def _select(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Positions of the selected tokens, ascending; never the first."""
        if self.weights is None:
            selected = rng.random(len(ids)) < self.mlm_probability
            selected[:1] = False
            return np.flatnonzero(selected)
        weights = self.weights[ids]
        weights[:1] = 0
        count = min(math.ceil(self.mlm_probability * len(ids)), int((weights > 0).sum()))
        return np.sort(rng.choice(len(ids), count, replace=False, p=weights / weights.sum())) if count else ids[:0]

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking, and examples with a translation."""
        ids, labels, token_mask = batch["input_ids"], batch["labels"], batch["attention_mask"] != 0
        counts = count_selected(ids, labels, token_mask, self.mask_id)
        counts["maskable_tokens"] -= len(ids)  # the first token is never selected
        restarts = (batch["position_ids"] == 0) & token_mask
        return counts | {"translations": int((restarts.sum(1) > 1).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, and of examples with a translation."""
        return {**masking_rates(counts), "translation_share": counts["translations"] / max(1, counts["examples"])}


@dataclass
class StreamMaskedLM(DataCollatorForStreamMaskedLM, StreamObjective):
    """XLM's masked language modeling: sequences cut from streams of one language each.

    | document | example | targets |
    |---|---|---|
    | sentences | `max_length` tokens of `</s> sentence </s> sentence </s> ...` in one language | 15% of the tokens |

    For the masking rule, which includes special tokens, see `DataCollatorForStreamMaskedLM`. Without `--sampling_alpha`
    every example is used once per epoch; with it languages are sampled, and each --dataset is one language.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.3, and the released code.
    Related: `MaskedLM` and `FullSentences` keep sentences whole; `CrossLingualLM` adds `TranslationLM`.

    Example:
        >>> StreamMaskedLM(tokenizer, max_length=256, seed=0, sample_alpha=0.5)
    """

    auto_class = "AutoModelForMaskedLM"

    def example(self, language: int, ids: np.ndarray, following: int) -> Example:
        """The example of a sequence of a stream."""
        return {"input_ids": ids, **self.langs((language, len(ids))), "second": 0, "task": STREAM}

    def translation_examples(self, sentences: list[Sentence]) -> Iterator[Example]:
        """The example of a pair, none if a side is empty or it would be longer than `max_length`."""
        (language, ids), (target_language, target_ids) = sentences
        end = np.array([self.end], dtype=np.int32)
        if not len(ids) or not len(target_ids) or len(ids) + len(target_ids) + 4 > self.max_length:
            self.statistics["left_out"] += 1
            return
        self.statistics["translations"] += 1
        yield {
            "input_ids": np.concatenate([end, ids, end, end, target_ids, end], dtype=np.int32),
            **self.langs((language, len(ids) + 2), (target_language, len(target_ids) + 2)),
            "second": len(ids) + 2,
            "task": TRANSLATION,
        }


@dataclass
class TranslationLM(StreamMaskedLM):
    """Translation language modeling: mask a text and its translation in one sequence.

    | document | example | targets |
    |---|---|---|
    | a text and its translation | `</s> text </s></s> translation </s>` | 15% of the tokens of both |

    Positions restart at 0 with the translation, and `langs` changes there. A pair longer than `max_length` is skipped
    and counted. The text's language is the option `language`, the translation's is its tag.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.4, and the released code.
    Related: `CrossLingualLM` alternates with `StreamMaskedLM`; `TranslationToLanguages` generates the translation.

    Example:
        >>> TranslationLM(tokenizer, max_length=256, seed=0, language="en")
    """

    requires_translations = True
    requires_language_tags = True

    def document_examples(
        self, document: list[str], sentences: list[Sentence], streams: dict[int, TokenStream]
    ) -> Iterator[Example]:
        """The example of a pair; raises CtxError for a document that is not a `TranslatedText`."""
        require_translation(document)
        return self.translation_examples(sentences)


@dataclass
class CrossLingualLM(StreamMaskedLM):
    """MLM + TLM: masked language modeling on streams in some steps, translation language modeling in others.

    Documents with a translation (`--translations FILE`) are examples of `TranslationLM`, others (`--translations -`)
    are streams. With `alternate=False` examples are shuffled, or sampled by `--sampling_alpha`.

    | document | example | targets |
    |---|---|---|
    | a text and its translation | `</s> text </s></s> translation </s>` | 15% of the tokens of both |
    | sentences | `max_length` tokens of a stream | 15% of the tokens |

    References: Lample & Conneau 2019 (arXiv 1901.07291), sections 3.4 and 5.1.
    Related: `StreamMaskedLM` and `TranslationLM` alone.

    Example:
        >>> CrossLingualLM(tokenizer, max_length=256, seed=0, language="en", alternate=False)
    """

    alternate: bool = flag(True, "Each step has either streams or translations, equally likely; False: shuffled.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate:
            self.sampling = ExampleSampling(task_column="task")

    def check(self, examples: ExampleSet) -> None:
        """Raise CtxError if there are only translations, or none."""
        if len(tasks := {task for values in examples.column_values("task") for task in np.unique(values)}) > 1:
            return
        if TRANSLATION in tasks:
            problem, hint = "Every text has a translation", "add text with `-` as its translation, or use tlm"
        elif skipped := examples.statistics.get("left_out"):
            problem, hint = f"{skipped:,} pairs are longer than max_length, or empty on one side", "raise --max_length"
        else:
            problem, hint = "No text has a translation", "set a file of translations, line by line, or use mlm"
        raise CtxError(
            f"{problem}, so that MLM or TLM has no example.", location="--translations, --max_length", hint=f"{hint}."
        )

    def document_examples(
        self, document: list[str], sentences: list[Sentence], streams: dict[int, TokenStream]
    ) -> Iterator[Example]:
        """The example of a pair, or the examples that a text completes."""
        if isinstance(document, TranslatedText):
            return self.translation_examples(sentences)
        return super().document_examples(document, sentences, streams)
