"""ALBERT (Lan et al. 2019, arXiv 1909.11942): BERT's encoder with factorized embeddings and cross-layer parameter
sharing, pretrained by masked language modeling and sentence-order prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder, build_embeddings, build_encoder_layer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import LEGACY_NORM_RENAMINGS, decoder_bias, fused_projections
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.transformer import StackOutput, TokenPositionTypeEmbeddings
from hf_ctxmodels.models.albert.configuration_albert import CtxAlbertConfig
from hf_ctxmodels.models.albert.shared_layers import SHARED_SUBLAYERS, SharedLayers, cache_autocast_casts

ALBERT_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"embeddings\.LayerNorm\.", r"embeddings.norm."),
    WeightRenaming(r"encoder\.embedding_hidden_mapping_in\.", r"embeddings.projection."),
    WeightRenaming(r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.", r"layers.\1."),
    WeightRenaming(r"attention\.dense\.", r"attention.out_proj."),
    WeightRenaming(r"attention\.LayerNorm\.", r"attention_norm."),
    WeightRenaming(r"ffn\.", r"feed_forward.up_proj."),
    WeightRenaming(r"ffn_output\.", r"feed_forward.down_proj."),
    WeightRenaming(r"full_layer_layer_norm\.", r"feed_forward_norm."),
    WeightRenaming(r"pooler\.weight", r"pooler.dense.weight"),
    WeightRenaming(r"pooler\.bias", r"pooler.dense.bias"),
    WeightRenaming(r"predictions\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"predictions\.LayerNorm\.", r"mlm_head.norm."),
    WeightRenaming(r"predictions\.decoder\.weight", r"mlm_head.decoder.weight"),
    WeightRenaming(r"sop_classifier\.classifier\.", r"sop_head."),
    *fused_projections("attention"),
    decoder_bias("predictions"),
]
ALBERT_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_RENAMINGS, *ALBERT_EXPORT]


class CtxAlbertPreTrainedModel(CtxPreTrainedModel):
    """Base class of the ALBERT models."""

    config: CtxAlbertConfig
    base_model_prefix = "albert"
    reference_model_type = "albert"
    export_conversion = ALBERT_EXPORT
    # other heads of the family, and a buffer of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^mlm_head\.", r"^sop_head\.", r"pooler\.", r"position_ids$"]

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers; raise CtxError for partial parameter sharing."""
        values = super().reference_config()
        sharing = values.pop("parameter_sharing", "all")
        layers = self.config.num_hidden_layers
        if sharing in SHARED_SUBLAYERS and self.config.num_hidden_groups != layers:
            raise CtxError(
                f"transformers does not support parameter_sharing={sharing!r}.",
                hint="use save_pretrained; only 'all' and 'none' can be exported.",
            )
        if sharing != "all":
            values["num_hidden_groups"] = layers
        return values


class CtxAlbertModel(TransformerEncoder, CtxAlbertPreTrainedModel):
    """The ALBERT encoder without a head."""

    def build_embeddings(self, config: CtxAlbertConfig) -> TokenPositionTypeEmbeddings:
        """Create the factorized embeddings."""
        return build_embeddings(config, width=config.embedding_size, projected_size=config.hidden_size)

    def build_layers(self, config: CtxAlbertConfig) -> SharedLayers:
        """Create layers with shared parameters."""
        return SharedLayers(
            lambda: build_encoder_layer(config),
            config.num_hidden_layers,
            scope=config.parameter_sharing,
            num_groups=config.num_hidden_groups,
            inner=config.inner_group_num,
        )

    def run_layers(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> StackOutput:
        """Run the layers; under autocast, shared weights are cast once."""
        with cache_autocast_casts(hidden_states.device):
            return super().run_layers(hidden_states, *args, **kwargs)


class CtxAlbertHeadModel(heads.HeadModel, CtxAlbertPreTrainedModel):
    """Base class of the ALBERT models with a head."""

    encoder_class = CtxAlbertModel


class CtxAlbertForMaskedLM(heads.ForMaskedLM, CtxAlbertHeadModel):
    """ALBERT with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "albert.embeddings.word_embeddings.weight"}


@dataclass
class CtxAlbertForPreTrainingOutput(ModelOutput):
    """Output of `CtxAlbertForPreTraining`.

    Attributes:
        loss: The sum of the losses that have targets.
        prediction_logits: (batch, length, vocabulary); with `labels`, only if `needs_all_logits`.
        sop_logits: (batch, 2).
        mlm_loss, sentence_order_loss: Cross-entropy in nats per target, detached; None without targets.
        metrics: "sentence_order_accuracy", see `heads.accuracy_counts`; None without `sentence_order_label`.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    sop_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    sentence_order_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxAlbertForPreTraining(CtxAlbertHeadModel):
    """Model for both pretraining objectives: masked language modeling and sentence-order prediction (section 3.1).

    With `labels`, the last layer and the vocabulary's logits are computed at the labeled positions only, unless
    `needs_all_logits`.
    """

    uses_pooled_output = True
    accepts_loss_kwargs = False  # a single number of targets cannot describe two losses
    output_layer_name = "mlm_head.decoder"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "sentence_order_label")
    logits_fields: ClassVar[Mapping[str, str]] = {"sentence_order_label": "sop_logits"}
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", "sentence_order_loss")
    _tied_weights_keys = CtxAlbertForMaskedLM._tied_weights_keys

    def build_head(self, config: CtxAlbertConfig) -> None:
        """Create the masked-LM head and the sentence-order classifier."""
        self.mlm_head = heads.build_mlm_head(config, config.embedding_size)
        self.dropout = Dropout(config.head_dropout)
        self.sop_head = nn.Linear(config.hidden_size, 2)

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers, without label names, which set the size of its
        classifier."""
        values = super().reference_config()
        if self.config.num_labels != 2:
            values.pop("id2label", None)
            values.pop("label2id", None)
        return values

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxAlbertForPreTrainingOutput:
        """Compute the logits of both heads, and the loss. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) ids of the masked tokens; -100 is ignored.
            sentence_order_label: (batch,) 0 if the segments are in order, 1 if they are swapped; -100 is ignored.
        """
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        output_mask = self.target_output_mask(return_logits, labels)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=output_mask,
            **kwargs,
        )
        states = outputs.last_hidden_state
        prediction_logits = self.mlm_head(states) if output_mask is None else None
        sop_logits = self.sop_head(self.dropout(outputs.pooler_output))
        mlm_loss = heads.masked_lm_loss(self.mlm_head, states, labels, num_items_in_batch, logits=prediction_logits)
        sentence_order_loss, accuracy = heads.sequence_classification_loss(
            sop_logits, sentence_order_label, "sentence_order_label", num_items_in_batch
        )
        return CtxAlbertForPreTrainingOutput(
            loss=self.total_loss(mlm_loss, sentence_order_loss),
            prediction_logits=prediction_logits,
            sop_logits=sop_logits,
            mlm_loss=heads.detached_loss(mlm_loss, labels),
            sentence_order_loss=heads.detached_loss(sentence_order_loss, sentence_order_label),
            metrics=None if accuracy is None else {"sentence_order_accuracy": accuracy},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class CtxAlbertForSequenceClassification(heads.ForSequenceClassification, CtxAlbertHeadModel):
    """ALBERT with a classifier or regressor on the pooled output."""


class CtxAlbertForTokenClassification(heads.ForTokenClassification, CtxAlbertHeadModel):
    """ALBERT with a token classifier."""


class CtxAlbertForQuestionAnswering(heads.ForQuestionAnswering, CtxAlbertHeadModel):
    """ALBERT with a span classifier for extractive question answering."""


class CtxAlbertForMultipleChoice(heads.ForMultipleChoice, CtxAlbertHeadModel):
    """ALBERT with a multiple-choice classifier."""
