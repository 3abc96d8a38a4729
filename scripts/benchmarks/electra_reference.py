"""Reference for ELECTRA pretraining: joint training of the generator and the discriminator of transformers."""

import tempfile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Gumbel
from torch.nn import functional as F
from transformers import ElectraForMaskedLM, ElectraForPreTraining
from transformers.utils import ModelOutput

from hf_ctxmodels.models.electra.pretraining_electra import CtxElectraForPreTraining

Sampling = Literal["everywhere", "at masks", "at masks, logits too"]


class ReferencePair(nn.Module):
    """ELECTRA's generator and discriminator from transformers, with tied embeddings.

    Args:
        model: Model of this package with the weights to use.
        sampling: Positions at which the generator samples: all ("everywhere"), or the masked ones ("at masks"). The
            head of transformers computes logits at all positions; with "logits too", it runs at masked positions only.
        attention: Attention implementation.
    """

    def __init__(self, model: CtxElectraForPreTraining, sampling: Sampling, attention: str) -> None:
        super().__init__()
        with tempfile.TemporaryDirectory() as folder:
            model.export_discriminator(f"{folder}/discriminator")
            model.export_generator(f"{folder}/generator")
            options = {"attn_implementation": attention}
            self.discriminator = ElectraForPreTraining.from_pretrained(f"{folder}/discriminator", **options)
            self.generator = ElectraForMaskedLM.from_pretrained(f"{folder}/generator", **options)
        self.generator.electra.embeddings = self.discriminator.electra.embeddings
        self.generator.generator_lm_head.weight = self.discriminator.get_input_embeddings().weight
        self.config = model.config
        self.sampling = sampling

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.discriminator.device

    def forward(
        self, input_ids: Tensor, labels: Tensor, corrupted_ids: Tensor | None = None, **inputs: Any
    ) -> ModelOutput:
        """Joint loss; `corrupted_ids` replaces sampling, to compare two implementations."""
        inputs = {name: inputs[name] for name in ("attention_mask", "token_type_ids")}
        masked = labels != -100
        if self.sampling == "at masks, logits too":
            states = self.generator.electra(input_ids=input_ids, **inputs).last_hidden_state[masked]
            logits = self.generator.generator_lm_head(self.generator.generator_predictions(states))
            mlm_loss, sampled_ids = F.cross_entropy(logits, labels[masked]), _gumbel_sample(logits)
        else:
            generated = self.generator(input_ids=input_ids, labels=labels, **inputs)
            mlm_loss, logits = generated.loss, generated.logits
            everywhere = self.sampling == "everywhere"
            sampled_ids = _gumbel_sample(logits)[masked] if everywhere else _gumbel_sample(logits[masked])
        if corrupted_ids is None:
            corrupted_ids = input_ids.masked_scatter(masked, sampled_ids)
        originals = input_ids.where(~masked, labels)
        detection = self.discriminator(input_ids=corrupted_ids, labels=(corrupted_ids != originals).long(), **inputs)
        return ModelOutput(loss=mlm_loss + self.config.discriminator_weight * detection.loss)


@torch.no_grad()
def _gumbel_sample(logits: Tensor) -> Tensor:
    """Sample (...) ids from (..., vocabulary) logits with Gumbel noise, as the released code does."""
    zero, one = logits.new_zeros(()), logits.new_ones(())
    return (logits + Gumbel(zero, one).sample(logits.shape)).argmax(-1)
