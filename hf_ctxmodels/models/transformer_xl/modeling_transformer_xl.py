"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): a causal language model with relative positions, whose layers
attend to the states of earlier segments, and with an adaptive softmax."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import on_host, select_true
from hf_ctxmodels.core.inputs import check_tensors, reject_unused_tensors
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import pack_tokens
from hf_ctxmodels.layers.common import HookPoint
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import build_token_mask, pool_tokens
from hf_ctxmodels.models.transformer_xl.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from hf_ctxmodels.models.transformer_xl.configuration_transformer_xl import CtxTransformerXLConfig
from hf_ctxmodels.models.xlnet.modeling_xlnet import CtxXLNetLayer, RelativeAttention
from hf_ctxmodels.models.xlnet.segment_recurrence import (
    GenerationWithMemory,
    SegmentRecurrence,
    SegmentRecurrenceOutput,
    token_mask_or_none,
)
from hf_ctxmodels.models.xlnet.streams import EncoderInputs, StreamLayout, check_memory


class CtxTransformerXLPreTrainedModel(CtxPreTrainedModel):
    """Base class of the Transformer-XL models."""

    config: CtxTransformerXLConfig
    base_model_prefix = "transformer"
    _supports_flash_attn = False
    _no_split_modules = ["CtxXLNetLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, RelativeAttention):
            for parameter in (module.content_bias, module.position_bias):
                init.normal_(parameter, mean=0.0, std=std)
        elif isinstance(module, AdaptiveSoftmax):
            for bias in (*module.biases, module.cluster_bias):
                if bias is not None:
                    init.zeros_(bias)
            if module.cluster_weight is not None:
                init.normal_(module.cluster_weight, mean=0.0, std=std)
        elif isinstance(module, nn.LayerNorm):
            init.normal_(module.weight, mean=1.0, std=std)
        if isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax):
            for projection in module.projections.parameters():
                init.normal_(projection, mean=0.0, std=self.config.projection_initializer_range)

    def _get_resized_embeddings(self, old_embeddings: Any, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise CtxError(
            "The vocabulary of Transformer-XL is divided into clusters and cannot be resized.",
            hint="train a tokenizer with all tokens, and a new model.",
        )


class CtxTransformerXLModel(SegmentRecurrence, CtxTransformerXLPreTrainedModel):
    """The Transformer-XL layers with adaptive embeddings."""

    _input_embed_layer = "word_embeddings"

    def __init__(self, config: CtxTransformerXLConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.word_embeddings = AdaptiveEmbedding(config.cluster_sizes, config.hidden_size)
        self.layers = nn.ModuleList(CtxXLNetLayer(config, has_segments=False) for _ in range(config.num_hidden_layers))
        if not config.untie_r and config.num_hidden_layers > 1:
            layers: Any = self.layers
            first = layers[0].attention
            for layer in layers[1:]:
                layer.attention.content_bias, layer.attention.position_bias = first.content_bias, first.position_bias
            self._tied_weights_keys = {
                rf"layers.(?!0\.)\d+.attention.{name}": f"layers.0.attention.{name}"
                for name in ("content_bias", "position_bias")
            }
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.embedding_output = HookPoint()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        use_mems: bool | None = None,
        **kwargs: Any,
    ) -> SegmentRecurrenceOutput:
        """Encode a segment.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length), 1 at tokens and 0 at padding, on either side.
            mems: (batch, memory, hidden) of earlier segments per layer, as returned; zeros are masked.
            sequence_ids: (batch, length), 0 at padding; a run of equal numbers is one sequence.
            output_mask: (batch, length) bool, the positions in `last_hidden_state`, row-major.
            use_mems: Whether to return `mems`; by default in evaluation, unless `config.mem_len` is 0, and in training
                with `config.use_mems_train`.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention instead of sdpa).

        Raises:
            CtxError: The inputs do not match each other or the model.
        """
        reject_unused_tensors(**kwargs)
        tokens = self.check_encoder_input(
            input_ids,
            inputs_embeds,
            attention_mask,
            None,
            width=self.config.hidden_size,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
        )
        token_mask = token_mask_or_none(tokens, attention_mask, sequence_ids)
        inputs = EncoderInputs(
            self.config,
            tokens,
            token_mask,
            None,
            sequence_ids,
            check_memory(mems, self.config, tokens.shape[0]),
            output_mask=output_mask,
        )
        return self.run_layers(inputs, use_mems if self.config.mem_len else False, **kwargs)

    def embed(self, inputs: EncoderInputs, streams: StreamLayout) -> Tensor:
        """The embeddings of the tokens, in the layout of `streams`."""
        tokens = pack_tokens(streams.layout, inputs.tokens, self.word_embeddings)
        return self.dropout(tokens if tokens.is_floating_point() else self.word_embeddings(tokens))


class CtxTransformerXLHeadModel(heads.HeadModel, CtxTransformerXLPreTrainedModel):
    """Base class of the Transformer-XL models with a head."""

    encoder_class = CtxTransformerXLModel

    def encode(self, *, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the layers; returns a model output, without memory unless `use_mems`."""
        outputs = super().encode(attention_mask=attention_mask, **{"use_mems": False, **inputs})
        if self.uses_pooler:
            states = outputs.last_hidden_state
            token_mask = build_token_mask(states, attention_mask, inputs.get("sequence_ids"))
            outputs.pooler_output = pool_tokens(states, token_mask, "last")
        return outputs


@dataclass
class CtxTransformerXLForCausalLMOutput(ModelOutput):
    """Output of `CtxTransformerXLForCausalLM`.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, length, vocabulary) log-probabilities; with `labels`, only if `needs_all_logits`.
        mems, hidden_states, attentions: See `SegmentRecurrenceOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


class CtxTransformerXLForCausalLM(GenerationWithMemory, heads.ForCausalLM, CtxTransformerXLHeadModel, GenerationMixin):
    """Transformer-XL with the adaptive softmax, which shares the weights of the embeddings."""

    output_layer_name = None
    _is_stateful = True  # tokens cannot be removed from a memory, as assisted generation would need

    def build_head(self, config: CtxTransformerXLConfig) -> None:
        """Create the parameters of the softmax that the embeddings do not have."""
        self.softmax = AdaptiveSoftmax(config.cluster_sizes, config.hidden_size, config.tie_projs or [])

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_mems: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: heads.ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxTransformerXLForCausalLMOutput:
        """Compute log-probabilities, or the loss with `labels`. Other arguments as in `CtxTransformerXLModel.forward`.

        Args:
            labels, logits_to_keep: As in `heads.ForCausalLM.forward`.
        """
        check_tensors(attention_mask=attention_mask)
        targets = self.resolve_targets(
            input_ids, attention_mask, inputs_embeds, labels, kwargs.pop("shift_labels", None), sequence_ids
        )
        target_mask = None if targets is None else heads.mask_of_targets(targets)
        computes_logits = targets is None or self.needs_all_logits(return_logits)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            mems=mems,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=None if computes_logits else target_mask,
            use_mems=use_mems,
            **kwargs,
        )
        states = self.output_layer_input(outputs.last_hidden_state)
        embedding, loss, logits = self.base_model.word_embeddings, None, None
        if computes_logits:
            logits = self.softmax.log_probabilities(slice_logits_to_keep(states, logits_to_keep), embedding)
        if targets is not None and target_mask is not None:
            states = select_true(states, target_mask) if computes_logits else states
            heads.check_classes(targets, self.config.vocab_size, "labels", "vocab_size")
            # on the host, where the softmax reads the clusters of the targets
            selected_targets = on_host(select_true, targets, target_mask)
            total = self.softmax.loss(states, selected_targets, embedding).sum()
            loss = heads.mean_over_targets(total, targets, "labels", num_items_in_batch)
        return CtxTransformerXLForCausalLMOutput(
            loss=loss,
            logits=logits,
            mems=outputs.mems,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The text; after the first step only the last token, with the memory of the others."""
        passed_arguments = ("output_hidden_states", "output_attentions", "return_dict", "logits_to_keep")
        tail = slice(-1 if past_key_values else None, None)
        inputs: dict[str, Any] = {
            **{name: kwargs[name] for name in passed_arguments if name in kwargs},
            "input_ids": input_ids[:, tail],
            "use_mems": True,
        }
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask[:, tail]
        if past_key_values:
            inputs["mems"] = past_key_values
        return inputs


class CtxTransformerXLForSequenceClassification(heads.ForSequenceClassification, CtxTransformerXLHeadModel):
    """Transformer-XL with a classifier or regressor on the last token's state."""


class CtxTransformerXLForTokenClassification(heads.ForTokenClassification, CtxTransformerXLHeadModel):
    """Transformer-XL with a token classifier."""
