"""Translation: each word of the target from the source and its predecessors (McCann et al. 2017, section 3)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.generation import check_target_vocabulary, target_vocabulary_config
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, RowPadder, SourceTargetCollator
from hf_ctxmodels.objectives.base import BaselineOptions, Objective, batch_statistics, target_rates
from hf_ctxmodels.objectives.tokenized_documents import translation_batches, untagged_translation


@dataclass
class DataCollatorForTranslation(SourceTargetCollator):
    """Pads texts and their translations, see `SourceTargetCollator`."""


@dataclass
class Translation(DataCollatorForTranslation, Objective):
    """Predict each word of a translation from the text and from its predecessors.

    A pair with a side longer than `max_length` is skipped and counted.

    | document | input | targets |
    |---|---|---|
    | a text and its translation | the text | the translation and its end |

    References: McCann et al. 2017, section 3; Luong et al. 2015 (arXiv 1508.04025).
    Related: `TranslationToLanguages` has several target languages; `TranslationWithLanguageModels` adds the losses of
    two language models.

    Example:
        >>> from hf_ctxmodels.data.document_sources import load_documents
        >>> objective = Translation(tokenizer, max_length=50, seed=0)
        >>> next(objective.examples(load_documents("train.en", translations=["train.de"])))
    """

    auto_class = "AutoModelForSeq2SeqLM"
    requires_translations = True

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = self.tokenizer
        check_target_vocabulary(tokenizer)
        if len(tokenizer.target_words) <= 1 + tokenizer.target_end_id:
            raise CtxError(
                "The target vocabulary is empty.", hint="train the tokenizer on text with translations: --translations."
            )
        excluded = {tokenizer.target_pad_token_id, tokenizer.target_start_id} - {tokenizer.target_end_id}
        self.baseline = BaselineOptions(len(tokenizer.target_words), sorted(excluded), column="labels")
        self.config_fields = target_vocabulary_config(self.tokenizer)

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids and labels; raises CtxError for a document that is not a `TranslatedText`."""
        special_tokens = self.tokenizer.num_special_tokens_to_add()
        for batch in translation_batches(documents):
            texts, translations = ([document[side] for document in batch] for side in range(2))
            encoded = self.tokenizer(texts, text_target=translations, verbose=False)
            self.statistics["documents"] += len(batch)
            for ids, labels in zip(encoded["input_ids"], encoded["labels"], strict=True):
                if len(ids) == special_tokens or max(len(ids), len(labels)) > self.max_length:
                    self.statistics["left_out"] += 1
                    continue
                self.statistics.update(sentences=1, tokens=len(ids), target_tokens=len(labels))
                yield self.example(ids, labels)

    def example(self, ids: list[int], labels: list[int]) -> Example:
        """The example of the ids of a text and of its translation."""
        return {"input_ids": np.array(ids, dtype=np.int32), "labels": np.array(labels, dtype=np.int32)}

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `batch_statistics`, and unknown source tokens."""
        unknown = int((batch["input_ids"] == self.tokenizer.unk_token_id).sum())
        return {**batch_statistics(batch, self.tokenizer.target_unknown_id), "unknown_sources": unknown}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, and the share of unknown source tokens."""
        unknown_share = counts["unknown_sources"] / max(1, counts["tokens"])
        return {**target_rates(counts), "unknown_source_share": unknown_share}


@dataclass
class TranslationToLanguages(Translation):
    """LASER's objective: translation into several languages; the decoder receives the target language.

    A translation begins with the tag of its language, which the tokenizer lists in `languages` and which is not a
    target. The encoder does not receive the language of the text.

    | document | input | targets |
    |---|---|---|
    | a text and its tagged translation, `<de> ...` | the text; the id of `<de>` | the translation and its end |

    References: Artetxe & Schwenk 2019 (arXiv 1812.10464), section 3.
    Related: `Translation` has one target language; `SentenceTasks` has a decoder for each.

    Example:
        >>> TranslationToLanguages(tokenizer, max_length=50, seed=0)
    """

    requires_language_tags = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not getattr(self.tokenizer, "languages", None):
            raise CtxError(
                "The tokenizer has no language tags.",
                hint="train it on translations with language tags: --language_tags '<de>' ...",
            )
        tags = self.tokenizer.convert_tokens_to_ids(self.tokenizer.languages)
        self._language_ids = {tag: number for number, tag in enumerate(tags)}
        self.baseline = replace(self.baseline, excluded_ids=[*self.baseline.excluded_ids, *tags])

    def example(self, ids: list[int], labels: list[int]) -> Example:
        """The example with the id of the language, and without its tag; raises CtxError if there is no tag."""
        if labels[0] not in self._language_ids:
            raise untagged_translation(self.tokenizer.decode(labels), self.tokenizer.languages)
        return super().example(ids, labels[1:]) | {"target_language": self._language_ids[labels[0]]}


@dataclass
class DataCollatorForTranslationWithLanguageModels(DataCollatorForTranslation):
    """As `DataCollatorForTranslation`, with the next word of each language as additional targets.

    Returns, in addition:
        source_labels: (batch, width) the word after each word of a text, -100 for none; all -100 without `source_lm`.
        target_labels: (batch, steps) the labels again, for the decoder's language model; all -100 without `target_lm`.
    """

    source_lm: bool = flag(True, "Keep training the encoder's language model on the text.")
    target_lm: bool = flag(True, "Keep training the decoder's language model on the translation.")

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Pad features; see the class for their columns and the returned ones."""
        batch = super().collate(features)
        sequences = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        following = [np.append(sequence[1:], IGNORE_INDEX) for sequence in sequences]
        padder = RowPadder([len(sequence) for sequence in sequences], self.tokenizer.padding_side)
        source_labels, target_labels = padder.pad(following, IGNORE_INDEX), batch["labels"].clone()
        batch["source_labels"] = source_labels if self.source_lm else source_labels.fill_(IGNORE_INDEX)
        batch["target_labels"] = target_labels if self.target_lm else target_labels.fill_(IGNORE_INDEX)
        return batch


@dataclass
class TranslationWithLanguageModels(DataCollatorForTranslationWithLanguageModels, Translation):
    """Translation and language modeling of both sides of each pair, three losses with equal weight, so that pretrained
    language models are not forgotten.

    | document | input | targets |
    |---|---|---|
    | a text and its translation | the text | the translation; each next word of the text and of the translation |

    References: Ramachandran et al. 2016 (arXiv 1611.02683), section 2.2, where the language models are trained on
    monolingual text.
    Related: `Translation`; `CausalLM` pretrains the two language models.

    Example:
        >>> TranslationWithLanguageModels(tokenizer, max_length=50, seed=0, source_lm=False)
    """

    auto_class = "AutoModelForPreTraining"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.baseline = replace(self.baseline, targets=("labels", "target_labels"))
