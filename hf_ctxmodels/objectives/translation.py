"""Translation, word by word (McCann et al. 2017, section 3)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.objectives.base import Batch, Objective
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.objectives.common.features import require_padding_token
from hf_ctxmodels.objectives.common.masking import IGNORED
from hf_ctxmodels.objectives.common.padding import RowPadder

DOCUMENTS_PER_BATCH = 1000  # tokenised together


@dataclass
class DataCollatorForTranslation(DataCollatorMixin):
    """Pads texts on the tokenizer's side, and their translations on the right.

    Each feature holds:
        input_ids: (tokens,) of the text.
        labels: (tokens,) of the translation, its end included.
        target_language: of the translation, a number; where the objective gives it.

    Returns: input_ids, attention_mask (batch, width); labels (batch, steps), -100 behind a translation's end;
        target_languages (batch,), where the features hold one.

    Attributes:
        tokenizer: of both languages.
    """

    tokenizer: PreTrainedTokenizerBase
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        require_padding_token(self.tokenizer)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows, targets = ([np.asarray(feature[name]) for feature in features] for name in ("input_ids", "labels"))
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        batch = {
            "input_ids": padder.pad(rows, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "labels": RowPadder([len(row) for row in targets], "right").pad(targets, IGNORED),
        }
        if "target_language" in features[0]:
            batch["target_languages"] = torch.tensor([int(feature["target_language"]) for feature in features])
        return batch


@dataclass
class DataCollatorForTranslationWithLanguageModels(DataCollatorForTranslation):
    """As `DataCollatorForTranslation`, with the next word of each language as a target besides.

    Returns also:
        source_labels: (batch, width) the word behind each word of a text; -100 for none.
        target_labels: (batch, steps) the labels again, for the decoder's language model.

    Attributes:
        source, target: Whether there are such targets; without, all are -100.
    """

    source: bool = True
    target: bool = True

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        batch = super().torch_call(features)
        rows = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        following = [np.append(row[1:], IGNORED) for row in rows]
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        batch["source_labels"] = padder.pad(following, IGNORED)
        batch["target_labels"] = batch["labels"].clone()
        for name, required in {"source_labels": self.source, "target_labels": self.target}.items():
            if not required:
                batch[name].fill_(IGNORED)
        return batch


@dataclass(frozen=True)
class TranslationOptions:
    """Options of `Translation`: none."""


class Translation(Objective):
    """A text's translation, each word from the text and from the words before it.

    A pair of which one is longer than `max_length` is left out, and counted: a cut text is no translation of the other.

    References: McCann et al. 2017, section 3; Luong et al. 2015 (arXiv 1508.04025).
    """

    auto_class = "AutoModelForSeq2SeqLM"
    reads_translations = True
    Options: ClassVar[type] = TranslationOptions
    collate: DataCollatorForTranslation

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if not hasattr(tokenizer, "target_words"):
            raise CtxError(
                f"{type(tokenizer).__name__} has no words of a target language.",
                hint="use the tokenizer of a family that translates.",
            )
        if len(tokenizer.target_words) <= 1 + tokenizer.target_end_id:
            raise CtxError(
                "The tokenizer knows no word of the target language.",
                hint="train it on text with translations: --translations.",
            )
        excluded = {tokenizer.target_pad_token_id, tokenizer.target_start_id} - {tokenizer.target_end_id}
        self.baseline = BaselinePolicy(len(tokenizer.target_words), sorted(excluded), column="labels")
        self.collate = DataCollatorForTranslation(tokenizer)

    @property
    def config_fields(self) -> dict[str, Any]:
        """What the target language's vocabulary is like."""
        return {
            "target_vocab_size": self.baseline.num_tokens,
            "decoder_start_token_id": self.tokenizer.target_start_id,
            "eos_token_id": self.tokenizer.target_end_id,
        }

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and labels.

        Raises:
            CtxError: A document is not a text with its translation.
        """
        iterator, special = iter(documents), self.tokenizer.num_special_tokens_to_add()
        while batch := list(islice(iterator, DOCUMENTS_PER_BATCH)):
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
        """A text's ids and its translation's, as an example holds them."""
        return {"input_ids": np.array(ids, dtype=np.int32), "labels": np.array(labels, dtype=np.int32)}

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        target_mask = batch["labels"] != IGNORED
        return {
            "words": int(batch["attention_mask"].sum()),
            "places": batch["attention_mask"].numel(),
            "unknown": int((batch["input_ids"] == self.tokenizer.unk_token_id).sum()),
            "targets": int(target_mask.sum()),
            "target_places": target_mask.numel(),
            "unknown_targets": int((batch["labels"] == self.tokenizer.target_unknown_id).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {
            "fill": counts["words"] / max(1, counts["places"]),
            "target_fill": counts["targets"] / max(1, counts["target_places"]),
            "targets_per_word": counts["targets"] / max(1, counts["words"]),
            "unknown": counts["unknown"] / max(1, counts["words"]),
            "unknown_targets": counts["unknown_targets"] / max(1, counts["targets"]),
        }


class TranslationToLanguages(Translation):
    """Translation into several languages, of which the decoder is told the one. A translation begins with its
    language's mark, which the tokenizer names among its `languages` and which is not predicted.

    References: Artetxe & Schwenk 2019 (arXiv 1812.10464), section 3.
    """

    reads_language_tags = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if not getattr(tokenizer, "languages", None):
            raise CtxError(
                "The tokenizer knows no language.",
                hint="train it on text whose translations have a mark for their language: --language_tags '<de>' ...",
            )
        marks = tokenizer.convert_tokens_to_ids(tokenizer.languages)
        self._numbers = {mark: number for number, mark in enumerate(marks)}
        self.baseline = replace(self.baseline, excluded_ids=[*self.baseline.excluded_ids, *marks])

    @property
    def config_fields(self) -> dict[str, Any]:
        """As there, and how many languages there are."""
        return super().config_fields | {"num_languages": len(self._numbers)}

    def example(self, ids: list[int], labels: list[int]) -> Example:
        """With the language, and without its mark.

        Raises:
            CtxError: There is no mark.
        """
        if labels[0] not in self._numbers:
            raise CtxError(
                f"A translation does not begin with one of {', '.join(self.tokenizer.languages)}: "
                f"{self.tokenizer.decode(labels)[:60]!r}.",
                hint="give a mark for each file of translations, as to the tokenizer: --language_tags '<de>' ...",
            )
        found = super().example(ids, labels[1:])
        return found | {"target_language": self._numbers[labels[0]]}


@dataclass(frozen=True)
class TranslationWithLanguageModelsOptions:
    """Options of `TranslationWithLanguageModels`."""

    source_lm: bool = flag(True, "The encoder goes on predicting the next word of the text.")
    target_lm: bool = flag(True, "The decoder goes on predicting the next word of the translation without the text.")


class TranslationWithLanguageModels(Translation):
    """Translation, and beside it the language models of both languages from which the translator was made, so that
    they are not forgotten: three losses of equal weight, on the two sides of each pair.

    References: Ramachandran et al. 2016 (arXiv 1611.02683), section 2.2, where the language models read text without
    translations.

    Related: `Translation` alone.
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = TranslationWithLanguageModelsOptions

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.baseline = replace(self.baseline, targets=("labels", "target_labels"))
        self.collate = DataCollatorForTranslationWithLanguageModels(
            tokenizer, source=self.options.source_lm, target=self.options.target_lm
        )
