"""Joint training of translation and the language models of both languages (Ramachandran et al. 2016, section 2.2)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.padding import RowPadder
from hf_ctxmodels.objectives.base import Batch
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.seq2seq.translation import DataCollatorForTranslation, Translation


@dataclass
class DataCollatorForTranslationWithLanguageModels(DataCollatorForTranslation):
    """As `DataCollatorForTranslation`, with the next word of each language as additional targets.

    Returns also:
        source_labels: (batch, width) the word after each word of a text; -100 for none.
        target_labels: (batch, steps) the labels again, for the decoder's language model.

    Attributes:
        source, target: Whether to give these targets; otherwise they are -100.
    """

    source: bool = True
    target: bool = True

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        batch = super().torch_call(features)
        rows = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        following = [np.append(row[1:], IGNORE_INDEX) for row in rows]
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        batch["source_labels"] = padder.pad(following, IGNORE_INDEX)
        batch["target_labels"] = batch["labels"].clone()
        for name, required in {"source_labels": self.source, "target_labels": self.target}.items():
            if not required:
                batch[name].fill_(IGNORE_INDEX)
        return batch


@dataclass(frozen=True)
class TranslationWithLanguageModelsOptions:
    """Options of `TranslationWithLanguageModels`."""

    source_lm: bool = flag(True, "Keep training the encoder's language model on the text.")
    target_lm: bool = flag(True, "Keep training the decoder's language model on the translation.")


class TranslationWithLanguageModels(Translation):
    """Translation, and language modelling of both languages, so that the pretrained language models are not forgotten.

    The three losses have equal weight and use both sides of each pair.

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
    Options: ClassVar[type] = TranslationWithLanguageModelsOptions

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.baseline = replace(self.baseline, targets=("labels", "target_labels"))
        self.collate = DataCollatorForTranslationWithLanguageModels(
            tokenizer, source=self.options.source_lm, target=self.options.target_lm
        )
