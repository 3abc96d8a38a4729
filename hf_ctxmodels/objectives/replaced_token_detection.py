"""Replaced token detection (Clark et al. 2020, section 2): masked examples, and seeds for the generator's samples."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.objectives.features import feature_generator
from hf_ctxmodels.objectives.masked_lm import DataCollatorForMaskedLM, SingleSegmentObjective
from hf_ctxmodels.objectives.tokenized_documents import SpecialTokensTemplate, TokenizedDocument


@dataclass
class DataCollatorForReplacedTokenDetection(DataCollatorForMaskedLM):
    """Masks as `DataCollatorForMaskedLM` does, and adds the discriminator's targets, and the seed with which the model
    samples an example's replacements from the generator.

    Returns: what `DataCollatorForMaskedLM` returns, and
        token_labels: (batch, width) int64, the original id of each token, including special tokens as in the released
            code; -100 at padding.
        sampling_seed: (batch,) int64.

    The default `mask_share` is the released code's; 1 is the paper's text.
    """

    mask_share: float = flag(0.85, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.0, "Share of the predicted tokens replaced by a random one; the rest is unchanged.")

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask features; see the class for their columns and the returned ones."""
        batch = super().collate(features)
        originals = torch.where(batch["labels"] == IGNORE_INDEX, batch["input_ids"], batch["labels"])
        batch["token_labels"] = originals.masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
        generators = [
            feature_generator(feature, self.seed, Purpose.SAMPLING, period=self.mask_period) for feature in features
        ]
        batch["sampling_seed"] = torch.tensor([int(rng.integers(2**63)) for rng in generators])
        return batch


@dataclass
class ReplacedTokenDetection(DataCollatorForReplacedTokenDetection, SingleSegmentObjective):
    """A generator predicts masked tokens; a discriminator detects the tokens that the generator's samples replaced.

    An example is whole sentences of one document, as many as fit, in two consecutive segments, split at the sentence
    end nearest the middle; one example in ten, and an example of one sentence, is one segment. This is the format of
    the released code: the model is trained on both segment embeddings.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | generator: the masked 15%; discriminator: replaced or original, per token |

    References: Clark et al. 2020, section 2; `build_pretraining_dataset.py` of its release.
    Related: `MaskedLM` is the generator's objective, and stage one of two-stage training.

    Example:
        >>> ReplacedTokenDetection(tokenizer, max_length=128, seed=0, mask_share=1.0)  # the paper's text, not its code
    """

    auto_class = "AutoModelForPreTraining"
    single_segment_share: float = flag(0.1, "Share of one-segment examples among those that could have two.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "single_segment_share", at_least=0, at_most=1)
        self.pair_template = SpecialTokensTemplate(self.tokenizer, segments=2)
        self.max_text_tokens = self.pair_template.num_text_tokens(self.max_length)

    def sequence(self, document: TokenizedDocument, start: int, stop: int, epoch: int, number: int) -> Example:
        """Tokens [start, stop) of a document as one segment or two."""
        cuts = document.bounds[(document.bounds > start) & (document.bounds < stop)]
        rng = generator(self.seed, epoch, number, Purpose.PAIRING)
        if not len(cuts) or rng.random() < self.single_segment_share:
            return self.template.example(document, (start, stop), with_token_types=True)
        cut = int(cuts[np.abs(cuts - (start + stop) / 2).argmin()])
        return self.pair_template.example(document, (start, cut), (cut, stop), with_token_types=True)
