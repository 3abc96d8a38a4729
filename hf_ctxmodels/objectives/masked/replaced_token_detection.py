"""Replaced token detection (Clark et al. 2020, section 2): masked rows, and seeds for the generator's samples."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.objectives.base import Batch
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import RowTemplate, TokenizedDocument
from hf_ctxmodels.objectives.masked.masked_lm import DataCollatorForMaskedLM, MaskedLM, MaskedLMOptions


@dataclass
class DataCollatorForReplacedTokenDetection(DataCollatorForMaskedLM):
    """Masks as `DataCollatorForMaskedLM` does, and adds the discriminator's targets and a seed.

    The model samples the replacements from the generator's distribution. Each row's seed is made of (seed, epoch,
    example index): the same example gets the same random numbers in any batch, worker or device.

    Returns: what the masking collator returns, and
        token_labels: (batch, width) int64, the original id of every token, special tokens included as in the released
            code; -100 at padding.
        sampling_seed: (batch,) int64.

    Args:
        mask_share, random_share: By default 85% of the selected tokens become the mask token and 15% are kept, as in
            the released code; mask_share=1 is the paper's text.
    """

    mask_share: float = 0.85
    random_share: float = 0.0

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        batch = super().torch_call(features)
        originals = torch.where(batch["labels"] == IGNORE_INDEX, batch["input_ids"], batch["labels"])
        batch["token_labels"] = originals.masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
        generators = [feature_generator(feature, self.seed, self.static, Stream.SAMPLING) for feature in features]
        batch["sampling_seed"] = torch.tensor([int(each.integers(2**63)) for each in generators])
        return batch


@dataclass(frozen=True)
class ReplacedTokenOptions(MaskedLMOptions):
    """Options of `ReplacedTokenDetection`."""

    mask_share: float = flag(0.85, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.0, "Share of the predicted tokens replaced by a random one; the rest is kept.")
    single_segment_share: float = flag(0.1, "Share of one-segment rows among those that could have two.")


class ReplacedTokenDetection(MaskedLM):
    """A generator predicts masked tokens; a discriminator detects those that the generator's samples replaced.

    Rows are whole sentences of one document, as many as fit, in two consecutive segments, cut at the sentence end
    nearest the middle; one row in ten, and a row of one sentence, is one segment. This is the format of the released
    code: the model is trained on both segment embeddings.

    | document | row | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | generator: the masked 15%; discriminator: replaced or original, per token |

    References: Clark et al. 2020, section 2; `build_pretraining_dataset.py` of its release.
    Related: `MaskedLM` is the generator's objective, and stage one of two-stage training.

    Example:
        >>> ReplacedTokenDetection(tokenizer, max_length=128, seed=0, mask_share=1.0)  # the paper's text, not its code
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = ReplacedTokenOptions
    Collator = DataCollatorForReplacedTokenDetection
    collate: DataCollatorForReplacedTokenDetection

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        share = self.options.single_segment_share
        if not 0 <= share <= 1:
            raise CtxError(f"single_segment_share={share} is out of range.", hint="use 0 to 1.")
        self.pair_template = RowTemplate(tokenizer, segments=2)
        self.room = self.pair_template.room(max_length)

    def _row(self, document: TokenizedDocument, start: int, stop: int, pass_index: int, number: int) -> Example:
        cuts = document.bounds[(document.bounds > start) & (document.bounds < stop)]
        rng = generator(self.seed, pass_index, number, Stream.PAIRING)
        if not len(cuts) or rng.random() < self.options.single_segment_share:
            row = super()._row(document, start, stop, pass_index, number)
            row["token_type_ids"] = self.template.token_types(stop - start)
            return row
        cut = int(cuts[np.abs(cuts - (start + stop) / 2).argmin()])
        row = {
            "input_ids": self.pair_template.fill(document.ids[start:cut], document.ids[cut:stop]),
            "token_type_ids": self.pair_template.token_types(cut - start, stop - cut),
        }
        if document.word_ids is not None:
            words = document.word_ids
            row["word_ids"] = self.pair_template.fill_words(words[start:cut], words[cut:stop])
        return row
