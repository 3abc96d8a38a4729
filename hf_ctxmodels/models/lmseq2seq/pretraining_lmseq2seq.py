"""Joint training of translation and both language models (Ramachandran et al. 2016, section 2.2)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.layers.pooling import mask_until_last_target
from hf_ctxmodels.models.lmseq2seq.configuration_lmseq2seq import CtxLmSeq2SeqConfig
from hf_ctxmodels.models.lmseq2seq.modeling_lmseq2seq import CtxLmSeq2SeqForConditionalGeneration


@dataclass
class CtxLmSeq2SeqForPreTrainingOutput(heads.ConditionalGenerationOutput):
    """Output of `CtxLmSeq2SeqForPreTraining`, see `ConditionalGenerationOutput`.

    Attributes:
        loss: Sum of the three losses.
        translation_loss, source_lm_loss, target_lm_loss: Cross-entropies in nats per target, detached.
        source_logits: (batch, length, vocabulary) of the source language model; None with targets and in `generate`.
        target_logits: (batch, steps, target vocabulary) of the target language model; None in the same cases.
    """

    translation_loss: Tensor | None = None
    source_lm_loss: Tensor | None = None
    target_lm_loss: Tensor | None = None
    source_logits: Tensor | None = None
    target_logits: Tensor | None = None


class CtxLmSeq2SeqForPreTraining(CtxLmSeq2SeqForConditionalGeneration, GenerationMixin):
    """The translation model, whose pretrained layers are also trained as language models, against forgetting."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "source_labels", "target_labels")
    accepts_loss_kwargs = False
    output_layer = "source_prediction"

    def build_head(self, config: CtxLmSeq2SeqConfig) -> None:
        """Create the decoder and the output layers."""
        super().build_head(config)
        self.source_prediction = nn.Linear(config.hidden_size, config.vocab_size)

    def source_modules(self) -> dict[str, nn.Module]:
        """Part of the source language model -> the module initialised with it."""
        return {**super().source_modules(), "softmax": self.source_prediction}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        source_labels: Tensor | None = None,
        target_labels: Tensor | None = None,
        encoder_outputs: Any = None,
        use_cache: bool = False,
        num_items_in_batch: heads.ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxLmSeq2SeqForPreTrainingOutput:
        """Compute the losses with `labels`, otherwise logits. Other arguments as in `ForConditionalGeneration.forward`.

        Args:
            source_labels: (batch, length) next source word of each position; -100 is ignored. None omits the source
                language model.
            target_labels: (batch, steps) next target words, predicted by the decoder's pretrained layers. None omits
                the target language model.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encode(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        translation = super().forward(
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            labels=labels,
            encoder_outputs=encoder_outputs,
            use_cache=use_cache,
            num_items_in_batch=num_items_in_batch,
            return_logits=return_logits,
            **{**kwargs, "return_dict": True},
        )
        output = CtxLmSeq2SeqForPreTrainingOutput(**translation)
        if labels is None and use_cache:
            return output
        source = encoder_outputs.memory[..., : self.config.hidden_size]
        ids = self.resolve_decoder_input_ids(encoder_outputs.last_hidden_state.shape[0], decoder_input_ids, labels)
        if labels is None:
            output["source_logits"] = self.source_prediction(self.dropout(source))
            output["target_logits"] = self.prediction(self.dropout(self._target_states(ids, None)))
            return output
        losses: dict[str, Any] = {"translation_loss": translation.loss}
        if source_labels is not None:
            losses["source_lm_loss"] = self._language_model_loss(
                "source_labels", source, source_labels, attention_mask, num_items_in_batch
            )
        if target_labels is not None:
            target_labels = heads.validate_targets(target_labels, "target_labels", ids.shape)
            states = self._target_states(ids, target_labels != heads.IGNORE_INDEX)
            losses["target_lm_loss"] = self._language_model_loss(
                "target_labels", states, target_labels, None, num_items_in_batch
            )
        output["loss"] = torch.stack([*losses.values()]).sum()
        for name, loss in losses.items():
            output[name] = loss.detach()
        return output

    def _target_states(self, ids: Tensor, target_mask: Tensor | None) -> Tensor:
        """(batch, steps, hidden) states of the decoder's pretrained layers, which do not depend on the source."""
        mask = None if target_mask is None else mask_until_last_target(target_mask)
        layers = self.config.pretrained_layers
        return self.decoder(input_ids=ids, attention_mask=mask, layers=layers).last_hidden_state

    def _language_model_loss(
        self, name: str, states: Tensor, labels: Tensor, attention_mask: Tensor | None, counts: heads.ItemCounts
    ) -> Tensor:
        """Mean cross-entropy of a language model."""
        labels = heads.validate_targets(labels, name, states.shape[:2])
        target_mask = labels != heads.IGNORE_INDEX
        self.check_encoder_input(None, states, attention_mask, None, output_mask=target_mask)
        head = self.source_prediction if name == "source_labels" else self.prediction
        return heads.language_modeling_loss(head, self.dropout(states[target_mask]), labels, counts, name)
