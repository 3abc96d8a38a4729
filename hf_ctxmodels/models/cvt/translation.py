"""Translation by cross-view training (Clark et al. 2018, section 3.4): on unlabeled sources, auxiliary decoders are
trained on the output of the primary decoder."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.caches import RecurrentCache, check_recurrent_cache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host, select_true, to_device
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.heads import IGNORE_INDEX
from hf_ctxmodels.layers.common import RecurrentDecoderOutput
from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.lm_loss.cross_entropy import summed_cross_entropy
from hf_ctxmodels.layers.pooling import build_token_mask, mask_until_last_target
from hf_ctxmodels.layers.recurrent.decoders import global_attention
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.models.cvt.configuration_cvt import TARGET_VIEWS, CtxCvtConfig
from hf_ctxmodels.models.cvt.modeling_cvt import (
    CtxCvtModel,
    CtxCvtPreTrainedModel,
    build_view_modules,
    has_view_targets,
)


class TargetLSTM(nn.Module):
    """Word embeddings and the LSTM layer that all decoders share. Linear layers compute the initial state from the
    encoder's final states, which the paper leaves open."""

    def __init__(self, config: CtxCvtConfig) -> None:
        super().__init__()
        embedding_size, size = config.target_embedding_size, config.hidden_size
        self.embeddings = nn.Embedding(config.target_vocab_size, embedding_size, padding_idx=config.pad_token_id)
        self.layer = LSTM(embedding_size, size, directions=1)
        self.first_hidden = nn.Linear(size, size)
        self.first_cell = nn.Linear(size, size)

    def start(self, final_states: Tensor) -> RecurrentCache:
        """The cache before the first token, from (batch, hidden) final states of the encoder."""
        return RecurrentCache(
            [(linear(self.first_hidden, final_states)[:, None], linear(self.first_cell, final_states)[:, None])]
        )

    def forward(
        self,
        ids: Tensor,
        cache: RecurrentCache,
        token_mask: Tensor | None = None,
        *,
        unpad: bool = True,
        dropout_rates: tuple[float, float] = (0.0, 0.0),
    ) -> RecurrentDecoderOutput:
        """(batch, steps) target ids -> (batch, steps, hidden) states h, with the embeddings as `hidden_states`.

        Args:
            ids: Target ids, each the token before the predicted one.
            cache: The state after the previous tokens.
            token_mask: (batch, steps), nonzero at tokens, at least one in each row; None if all positions are tokens.
            unpad: Skip the other positions.
            dropout_rates: Rates of the embeddings and of the states in training.
        """
        size = self.layer.cell_size
        check_recurrent_cache(cache, [[(len(ids), 1, size), (len(ids), 1, size)]])
        embeddings = self.embeddings(ids)
        packing = PackedSequences.build(build_token_mask(ids, token_mask), directions=1, unpad=unpad)
        inputs = packing.pack(dropout(embeddings, dropout_rates[0], self.training))
        packed, state = self.layer(inputs, packing, packing.pack_state(cache.states[0]))
        states = dropout(packing.unpack(packed)[0], dropout_rates[1], self.training)
        last_cache = RecurrentCache([packing.unpack_state(state)], cache.seen_tokens + ids.shape[1])
        return RecurrentDecoderOutput(states, last_cache, (embeddings,))


class ContextLayer(nn.Module):
    """Bilinear attention (Luong et al. 2015): with the encoder's states H and the decoder's state h,

    alpha = softmax(H W h),  c = H^T alpha,  a = tanh(W_a [c; h])
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(size, size, bias=False)
        self.combine = nn.Linear(2 * size, size, bias=False)

    def forward(
        self,
        states: Tensor,
        memory: Tensor,
        padding: Tensor,
        target_mask: Tensor | None = None,
        dropout_rate: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Returns (batch, steps, hidden) a, or (targets, hidden) where `target_mask` is True; and (batch, steps,
        length) attention weights.

        Args:
            states: (batch, steps, hidden) h.
            memory: (batch, length, hidden) H.
            padding: (batch, length) bool, True at padding of the source.
            target_mask: (batch, steps) bool.
            dropout_rate: Dropout on the attention weights in training.
        """
        rate = dropout_rate if self.training else 0.0
        context, weights = global_attention(linear(self.query, states), memory, memory, padding, rate)
        features = torch.cat([context, states.to(memory.dtype)], -1)
        if target_mask is not None:
            features = select_true(features, target_mask)
        return linear(self.combine, features).tanh(), weights


class AuxiliaryDecoder(nn.Module):
    """The attention and the softmax layer of an auxiliary decoder."""

    def __init__(self, config: CtxCvtConfig) -> None:
        super().__init__()
        self.context = ContextLayer(config.hidden_size)
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)


@dataclass
class CtxCvtForConditionalGenerationOutput(heads.ConditionalGenerationOutput):
    """Output of `CtxCvtForConditionalGeneration`; `loss` is the sum of the two losses.

    Attributes:
        supervised_loss: Cross-entropy of the primary decoder, in nats per target; None without labels.
        cross_view_loss: `view_weight` times the summed cross-entropies of the auxiliary decoders, in nats per target,
            averaged over the sources; None without `views`.
    """

    supervised_loss: Tensor | None = None
    cross_view_loss: Tensor | None = None


class CtxCvtForConditionalGeneration(heads.RecurrentForConditionalGeneration, CtxCvtPreTrainedModel, GenerationMixin):
    """The translator (section 3.4): an LSTM decoder with bilinear attention to the encoder's last layer, from which
    softmax(W_s a) predicts the next word, see `ContextLayer`.

    Two auxiliary decoders share the word embeddings and the LSTM, and have a separate attention and softmax layer:

    - "attention" has dropout on its attention weights;
    - "future" predicts the word after the next one.

    On unlabeled sources they are trained by cross-entropy on the output of beam search with the primary decoder,
    without dropout (hard targets). The encoder and the shared LSTM learn from this loss, the primary attention and
    softmax layer do not.
    """

    encoder_class = CtxCvtModel
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "views")
    accepts_loss_kwargs = False
    required_encoder_outputs = ("last_hidden_state", "pooler_output")

    def __init__(self, config: CtxCvtConfig) -> None:
        config.is_encoder_decoder = True  # for `generate`; the other heads of the family are encoders
        super().__init__(config)

    def build_encoder(self, config: CtxCvtConfig) -> CtxCvtModel:
        """Create the encoder."""
        encoder = CtxCvtModel(config)
        encoder.returns_final_states = True
        return encoder

    def build_head(self, config: CtxCvtConfig) -> None:
        """Create the decoders."""
        self.decoder = TargetLSTM(config)
        self.context = ContextLayer(config.hidden_size)
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)
        self.auxiliary = build_view_modules(config, TARGET_VIEWS, lambda: AuxiliaryDecoder(config))

    def start(self, encoder_outputs: BaseModelOutputWithPooling) -> RecurrentCache:
        """The decoder's initial state, from the encoder's final states."""
        assert encoder_outputs.pooler_output is not None  # in `required_encoder_outputs`
        return self.decoder.start(encoder_outputs.pooler_output)

    def decode(
        self, decoder_input_ids: Tensor, target_mask: Tensor | None, inputs: heads.RecurrentDecoderInputs
    ) -> RecurrentDecoderOutput:
        """Run the decoder on target ids, see `RecurrentForConditionalGeneration.decode`."""
        outputs = self.decoder(
            decoder_input_ids,
            inputs.cache,
            None if target_mask is None else mask_until_last_target(target_mask),
            unpad=self.config.unpad and not is_traced(decoder_input_ids),
            dropout_rates=(self.config.word_dropout, self.config.hidden_dropout_prob),
        )
        memory = inputs.encoder_outputs.last_hidden_state
        padding = ~build_token_mask(memory, inputs.attention_mask)
        states, weights = self.context(outputs.states, memory, padding, target_mask)
        recorded = ((*outputs.hidden_states, states), (weights[:, None],)) if inputs.is_recording else ()
        return RecurrentDecoderOutput(states, outputs.cache, *recorded)

    def prepare_inputs_for_generation(self, *args: Any, views: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The inputs of the next step, without `views`, which Seq2SeqTrainer passes."""
        return super().prepare_inputs_for_generation(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        views: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxCvtForConditionalGenerationOutput:
        """Compute logits, or the losses with `labels` or `views`. Other arguments as in
        `RecurrentForConditionalGeneration.forward`.

        Args:
            labels: (batch, steps) target ids; -100 is ignored.
            views: (batch,): 1 for sources on which the auxiliary decoders are trained, else -100. If all `labels` are
                ignored, only these are trained, with `config.view_dropout`.
        """
        sources = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        labels = None if labels is None else heads.validate_targets(labels, "labels")
        trains_views = False
        if views is not None and (shape := self.input_shape(input_ids, inputs_embeds)) is not None:
            views = heads.validate_targets(views, "views", shape[:1])
            trains_views = has_view_targets(views)
        if trains_views and (encoder_outputs is not None or past_key_values is not None):
            name = "past_key_values" if encoder_outputs is None else "encoder_outputs"
            raise CtxError(f"views cannot be combined with {name}.", hint="pass input_ids.")
        if trains_views and not self.auxiliary:
            raise CtxError(
                f"The model has no auxiliary decoder: config.views is {self.config.views}.",
                hint=f"use one or more of {', '.join(TARGET_VIEWS)}, or None for all.",
            )
        is_unlabeled = trains_views and not heads.has_targets(labels)
        if trains_views:
            rate = self.config.view_dropout if is_unlabeled else None
            encoder_outputs = self.encode(**sources, **kwargs, dropout_rate=rate)
        supervised_loss = cross_view_loss = None
        if is_unlabeled:
            output = CtxCvtForConditionalGenerationOutput(
                encoder_last_hidden_state=encoder_outputs.last_hidden_state,
                encoder_hidden_states=encoder_outputs.hidden_states,
            )
        else:
            translation = super().forward(
                **sources,
                decoder_input_ids=decoder_input_ids,
                labels=labels,
                encoder_outputs=encoder_outputs,
                past_key_values=past_key_values,
                use_cache=use_cache,
                num_items_in_batch=num_items_in_batch,
                return_logits=return_logits,
                **{**kwargs, "return_dict": True},
            )
            output, supervised_loss = CtxCvtForConditionalGenerationOutput(**translation), translation.loss
        if trains_views and views is not None:
            summed_loss = self._summed_view_loss(encoder_outputs, heads.mask_of_targets(views), sources, is_unlabeled)
            mean_loss = heads.mean_over_targets(summed_loss, views, "views", num_items_in_batch)
            cross_view_loss = self.config.view_weight * mean_loss
        losses = {"supervised_loss": supervised_loss, "cross_view_loss": cross_view_loss}
        if (loss := self.total_loss(*losses.values())) is not None:
            output["loss"] = loss
        for name, term in losses.items():
            if term is not None:
                output[name] = term.detach()
        return output

    def generate_hard_targets(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Targets of sources, by beam search with the primary decoder, without dropout and without gradient.

        Returns (batch, steps) ids on the CPU, -100 after the end token; a text of `config.hard_target_max_length`
        tokens has no end token.
        """
        with evaluation_mode(self):
            encoder_outputs = self.encode(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds
            )
            generated = self.generate(
                encoder_outputs=encoder_outputs,
                attention_mask=attention_mask,
                num_beams=self.config.hard_target_beams,
                max_new_tokens=self.config.hard_target_max_length,
                do_sample=False,
                num_return_sequences=1,
                return_dict_in_generate=False,
            )
        targets, ends = host_copy(generated)[:, 1:], self.config.eos_token_id
        if ends is None:
            return targets
        is_end = torch.isin(targets, torch.tensor(ends))
        return targets.masked_fill(is_end.long().cumsum(1) > is_end.long(), IGNORE_INDEX)

    @torch.compiler.disable
    def _summed_view_loss(
        self, encoder_outputs: Any, source_mask: Tensor, sources: dict[str, Tensor | None], is_unlabeled: bool
    ) -> Tensor:
        """The cross-entropy of each auxiliary decoder, averaged over the tokens of a source's hard targets and summed
        over decoders and over the sources in the (batch,) bool mask."""
        config = self.config
        memory = select_true(encoder_outputs.last_hidden_state, source_mask)
        selected = {
            name: tensor if tensor is None else on_host(select_true, tensor, source_mask)
            for name, tensor in sources.items()
        }
        padding = ~build_token_mask(memory, selected["attention_mask"])
        total = memory.new_zeros((), dtype=torch.float32)
        targets = self.generate_hard_targets(**selected)
        rates = (config.view_dropout,) * 2 if is_unlabeled else (config.word_dropout, config.hidden_dropout_prob)
        states = self.decoder(
            to_device(self.prepare_decoder_input_ids_from_labels(targets), memory.device),
            self.decoder.start(select_true(encoder_outputs.pooler_output, source_mask)),
            to_device(mask_until_last_target(targets != IGNORE_INDEX), memory.device),
            unpad=config.unpad,
            dropout_rates=rates,
        ).states
        for name, auxiliary in self.auxiliary.items():
            # the targets of each state
            view_targets = F.pad(targets[:, 1:], (0, 1), value=IGNORE_INDEX) if name == "future_view" else targets
            target_mask = view_targets != IGNORE_INDEX
            rate = config.attention_view_dropout if name == "attention_view" else 0.0
            view_states, _ = auxiliary.context(  # type: ignore[union-attr,operator]
                states, memory, padding, to_device(target_mask, memory.device), rate
            )
            weights = target_mask / target_mask.sum(1, keepdim=True).clamp(min=1)
            total = total + summed_cross_entropy(
                auxiliary.prediction,  # type: ignore[union-attr,arg-type]
                view_states,
                to_device(view_targets[target_mask], memory.device),
                to_device(weights[target_mask].float(), memory.device),
            )
        return total
