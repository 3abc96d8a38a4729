"""CoVe's pretraining: a translator with attention on the encoder (McCann et al. 2017, section 3)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.layers.attentional_decoder import AttentionalDecoder, DecoderState
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.prediction import chunked_cross_entropy
from hf_ctxmodels.modeling_base import check_ids, is_traced
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.modeling_cove import CtxCoveHeadModel, CtxCoveModel, CtxCoveModelOutput


@dataclass
class CtxCoveTranslationOutput(ModelOutput):
    """Output of `CtxCoveForConditionalGeneration`.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, steps, target vocabulary); None with `labels`.
        past_key_values: What the decoder remembers; None unless asked for, and with `labels`.
        hidden_states: Of the encoder, see `CtxCoveModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: DecoderState | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class CtxCoveForConditionalGeneration(CtxCoveHeadModel, GenerationMixin):
    """The translation model (section 3). The decoder starts from the encoder's last states."""

    for_tasks = False
    decoder: AttentionalDecoder
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """The encoder; `generate` runs it by itself."""
        encoder = CtxCoveModel(config)
        encoder.gives_states = True
        return encoder

    def build_head(self, config: CtxCoveConfig) -> None:
        """The decoder, and the softmax's weights."""
        self.decoder = AttentionalDecoder(
            config.target_vocab_size,
            config.embedding_size,
            config.hidden_size,
            config.num_hidden_layers,
            dropout=config.hidden_dropout_prob,
            attends=config.decoder_attention,
            padding_idx=config.pad_token_id,
        )
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which `generate` runs once."""
        return self.base_model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the cache is a `DecoderState`, which the first step makes

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: CtxCoveModelOutput | None = None,
        past_key_values: DecoderState | None = None,
        use_cache: bool = False,
        num_items_in_batch: heads.ItemCounts = None,
        **kwargs: Any,
    ) -> CtxCoveTranslationOutput:
        """The loss where `labels` are given, else logits. Other arguments as in `CtxCoveModel.forward`.

        Args:
            decoder_input_ids: (batch, steps) target ids, each the one before that to be predicted; None makes them of
                `labels`, behind `config.decoder_start_token_id`.
            labels: (batch, steps) target ids; -100 where none is to be predicted.
            encoder_outputs: The encoder's, where it ran before.
            past_key_values: What an earlier forward gave; `decoder_input_ids` go on from there.
            use_cache: Give `past_key_values`.

        Raises:
            CtxError: Input that does not fit together or the model.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encode(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        read = encoder_outputs.last_hidden_state
        self._check_targets(read, decoder_input_ids, labels)
        if decoder_input_ids is None:
            decoder_input_ids = self._shifted(labels)
        state = past_key_values
        if state is None:
            hidden, cell = encoder_outputs.final_hidden, encoder_outputs.final_cell
            if hidden is None or cell is None:
                raise CtxError("encoder_outputs have no states to start from.", mend="run it with use_states=True.")
            state = self.decoder.start(hidden, cell)
        memory, tokens = read[..., self.config.embedding_size :], token_mask(read, attention_mask)
        loss = logits = None
        if labels is None:
            states, state = self.decoder(decoder_input_ids, memory, tokens, state)
            logits = self.prediction(states)
        else:
            states, state = self._asked_states(decoder_input_ids, labels, memory, tokens, state)
            size = self.config.target_vocab_size
            loss = heads.vocabulary_loss(self._summed_loss, states, labels, size, num_items_in_batch)
        return CtxCoveTranslationOutput(
            loss=loss,
            logits=logits,
            past_key_values=state if use_cache and labels is None else None,
            hidden_states=encoder_outputs.hidden_states,
        )

    def _asked_states(
        self, ids: Tensor, labels: Tensor, memory: Tensor, tokens: Tensor, state: DecoderState
    ) -> tuple[Tensor, DecoderState | None]:
        """(targets, hidden) the decoder's states where a word is to be predicted."""
        asked = labels != heads.IGNORED
        if is_traced(ids) or not self.config.unpad:
            states, after = self.decoder(ids, memory, tokens, state)
            return states[asked], after
        return self.decoder.asked_states(ids, asked, memory, tokens, state), None

    def _check_targets(self, read: Tensor, ids: Tensor | None, labels: Tensor | None) -> None:
        if ids is None and labels is None:
            raise CtxError("Give decoder_input_ids, or labels, or call generate.")
        for name, tensor in {"decoder_input_ids": ids, "labels": labels}.items():
            if tensor is not None and (tensor.dim() != 2 or len(tensor) != len(read) or not tensor.shape[1]):
                raise CtxError(
                    f"{name} is {tuple(tensor.shape)}, expected ({len(read)}, steps), as many rows as texts."
                )
        if ids is not None and labels is not None and ids.shape != labels.shape:
            raise CtxError(f"labels is {tuple(labels.shape)}, but decoder_input_ids {tuple(ids.shape)}.")
        check_ids("decoder_input_ids", ids, self.config.target_vocab_size, "target_vocab_size")

    def _shifted(self, labels: Tensor | None) -> Tensor:
        """(batch, steps) what the decoder reads before it predicts each label."""
        size = self.config.target_vocab_size
        ids = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id or 0)  # type: ignore[index]
        # ids outside the vocabulary are refused with the loss
        return torch.where((ids < 0) | (ids >= size), self.config.pad_token_id or 0, ids)

    def _summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(states, self.prediction.weight, self.prediction.bias, targets, reduction="sum")

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: DecoderState | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: CtxCoveModelOutput | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The target's text so far, or, with a state, its last token."""
        return {
            "decoder_input_ids": input_ids if past_key_values is None else input_ids[:, -1:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
            "use_cache": bool(use_cache),
        }
