"""The peer of a generator/discriminator pair: transformers has the two models, and no way to train them together."""

import tempfile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Gumbel
from torch.nn import functional as F
from transformers import ElectraForMaskedLM, ElectraForPreTraining
from transformers.utils import ModelOutput

from hf_ctxmodels.models.electra.pretraining_electra import CtxElectraForPreTraining

Wiring = Literal["everywhere", "at masks", "at masks, logits too"]


class ReferencePair(nn.Module):
    """The two models of transformers with shared embeddings, wired as their users do.

    Args:
        ours: Gives the weights.
        wiring: Where the generator draws: "everywhere" in the batch, or "at masks" alone. Its head, as the model calls
            it, gives logits everywhere; with "logits too" it is taken apart, and called at the masks alone.
        attention: Attention implementation.
    """

    def __init__(self, ours: CtxElectraForPreTraining, wiring: Wiring, attention: str) -> None:
        super().__init__()
        with tempfile.TemporaryDirectory() as folder:
            ours.export_discriminator(f"{folder}/discriminator")
            ours.export_generator(f"{folder}/generator")
            options = {"attn_implementation": attention}
            self.discriminator = ElectraForPreTraining.from_pretrained(f"{folder}/discriminator", **options)
            self.generator = ElectraForMaskedLM.from_pretrained(f"{folder}/generator", **options)
        self.generator.electra.embeddings = self.discriminator.electra.embeddings
        self.generator.generator_lm_head.weight = self.discriminator.get_input_embeddings().weight
        self.config = ours.config
        self.wiring = wiring

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.discriminator.device

    def forward(
        self, input_ids: Tensor, labels: Tensor, corrupted_ids: Tensor | None = None, **inputs: Any
    ) -> ModelOutput:
        """The joint loss; with `corrupted_ids` of another implementation's draws, to compare the two."""
        inputs = {name: inputs[name] for name in ("attention_mask", "token_type_ids")}
        masked = labels != -100
        if self.wiring == "at masks, logits too":
            states = self.generator.electra(input_ids=input_ids, **inputs).last_hidden_state[masked]
            logits = self.generator.generator_lm_head(self.generator.generator_predictions(states))
            mlm_loss, drawn = F.cross_entropy(logits, labels[masked]), _gumbel_draw(logits)
        else:
            generated = self.generator(input_ids=input_ids, labels=labels, **inputs)
            mlm_loss, logits = generated.loss, generated.logits
            drawn = _gumbel_draw(logits)[masked] if self.wiring == "everywhere" else _gumbel_draw(logits[masked])
        if corrupted_ids is None:
            corrupted_ids = input_ids.masked_scatter(masked, drawn)
        originals = input_ids.where(~masked, labels)
        found = self.discriminator(input_ids=corrupted_ids, labels=(corrupted_ids != originals).long(), **inputs)
        return ModelOutput(loss=mlm_loss + self.config.discriminator_weight * found.loss)


@torch.no_grad()
def _gumbel_draw(logits: Tensor) -> Tensor:
    """(..., vocabulary) -> (...) ids drawn from the softmax, as the released code and its replications draw."""
    zero, one = logits.new_zeros(()), logits.new_ones(())
    return (logits + Gumbel(zero, one).sample(logits.shape)).argmax(-1)
