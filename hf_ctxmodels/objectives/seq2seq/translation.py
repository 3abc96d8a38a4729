"""Translation: each word of the target from the source and the words before it (McCann et al. 2017, section 3)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import target_vocabulary_config
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import SourceTargetCollator
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.objectives.components.rates import count_targets, target_rates
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches


@dataclass
class DataCollatorForTranslation(SourceTargetCollator):
    """Pads texts and their translations, see `SourceTargetCollator`."""


@dataclass(frozen=True)
class TranslationOptions:
    """Options of `Translation`: none."""


class Translation(Objective):
    """Predict each word of a translation from the text and from the words before it.

    A pair with a side longer than `max_length` is left out and counted: a cut text would not match its translation.

    | document | input | targets |
    |---|---|---|
    | a text and its translation | the text | the translation and its end |

    References: McCann et al. 2017, section 3; Luong et al. 2015 (arXiv 1508.04025).
    Related: `TranslationToLanguages` has several target languages; `TranslationWithLanguageModels` adds the losses of
    two language models.

    Example:
        >>> objective = Translation(tokenizer, max_length=50, seed=0)
        >>> next(objective.examples(load_documents("train.en", translations=["train.de"])))
    """

    auto_class = "AutoModelForSeq2SeqLM"
    requires_translations = True
    Options: ClassVar[type] = TranslationOptions
    collate: DataCollatorForTranslation

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if not hasattr(tokenizer, "target_words"):
            raise CtxError(
                f"{type(tokenizer).__name__} has no target vocabulary.",
                hint="use the tokenizer of a translation family.",
            )
        if len(tokenizer.target_words) <= 1 + tokenizer.target_end_id:
            raise CtxError(
                "The target vocabulary is empty.",
                hint="train it on text with translations: --translations.",
            )
        excluded = {tokenizer.target_pad_token_id, tokenizer.target_start_id} - {tokenizer.target_end_id}
        self.baseline = BaselinePolicy(len(tokenizer.target_words), sorted(excluded), column="labels")
        self.collate = DataCollatorForTranslation(tokenizer)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The size, special tokens and languages of the target vocabulary."""
        return target_vocabulary_config(self.tokenizer)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and labels; raises CtxError for a document that is not a text with its translation."""
        special = self.tokenizer.num_special_tokens_to_add()
        for batch in document_batches(documents):
            for document in batch:
                if not isinstance(document, TranslatedText):
                    raise CtxError(
                        "A document has no translation.",
                        hint="give a file of them: --translations FILE, line by line the translation of --dataset.",
                    )
            texts, translations = ([document[place] for document in batch] for place in range(2))
            encoded = self.tokenizer(texts, text_target=translations, verbose=False)
            self.statistics["documents"] += len(batch)
            for ids, labels in zip(encoded["input_ids"], encoded["labels"], strict=True):
                if len(ids) == special or max(len(ids), len(labels)) > self.max_length:
                    self.statistics["left_out"] += 1
                    continue
                self.statistics.update(sentences=1, tokens=len(ids), target_tokens=len(labels))
                yield self.example(ids, labels)

    def example(self, ids: list[int], labels: list[int]) -> Example:
        """The example of a text's ids and its translation's."""
        return {"input_ids": np.array(ids, dtype=np.int32), "labels": np.array(labels, dtype=np.int32)}

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        unknown = int((batch["input_ids"] == self.tokenizer.unk_token_id).sum())
        return {**count_targets(batch, self.tokenizer.target_unknown_id), "unknown": unknown}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {
            **target_rates(counts),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "unknown": counts["unknown"] / max(1, counts["tokens"]),
        }


class TranslationToLanguages(Translation):
    """LASER's objective: translation into several languages; the decoder is given the target language.

    A translation begins with the tag of its language, which the tokenizer lists in `languages` and which is not a
    target. The encoder is not given the language of the text.

    | document | input | targets |
    |---|---|---|
    | a text and its tagged translation, `<de> ...` | the text; the number of `<de>` | the translation and its end |

    References: Artetxe & Schwenk 2019 (arXiv 1812.10464), section 3.
    Related: `Translation` has one target language; `SentenceTasks` has a decoder for each.
    """

    requires_language_tags = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if not getattr(tokenizer, "languages", None):
            raise CtxError(
                "The tokenizer has no language tags.",
                hint="train it on translations with tags of their languages: --language_tags '<de>' ...",
            )
        tags = tokenizer.convert_tokens_to_ids(tokenizer.languages)
        self._numbers = {tag: number for number, tag in enumerate(tags)}
        self.baseline = replace(self.baseline, excluded_ids=[*self.baseline.excluded_ids, *tags])

    def example(self, ids: list[int], labels: list[int]) -> Example:
        """The example with the number of the language, and without its tag; raises CtxError if there is no tag."""
        if labels[0] not in self._numbers:
            raise CtxError(
                f"A translation does not begin with one of {', '.join(self.tokenizer.languages)}: "
                f"{self.tokenizer.decode(labels)[:60]!r}.",
                hint="give a tag for each file of translations, as to the tokenizer: --language_tags '<de>' ...",
            )
        return super().example(ids, labels[1:]) | {"target_language": self._numbers[labels[0]]}
