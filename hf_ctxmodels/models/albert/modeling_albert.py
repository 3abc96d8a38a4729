"""ALBERT (Lan et al. 2019, arXiv 1909.11942): BERT's encoder with factorised embeddings and parameters shared by depth.

Its own here: which parameters the layers share, and masked-LM with sentence-order prediction. The encoder is
`hf_ctxmodels.models._shared.transformer_encoder`; everything else comes from `hf_ctxmodels.layers` and
`hf_ctxmodels.heads`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.transformer.pooler import FirstTokenPooler
from hf_ctxmodels.layers.transformer.stack import StackOutput
from hf_ctxmodels.models._shared.transformer_encoder import Encoder, build_embeddings, build_layer
from hf_ctxmodels.models.albert.configuration_albert import CtxAlbertConfig
from hf_ctxmodels.models.albert.conversion_albert import ALBERT_EXPORT
from hf_ctxmodels.models.albert.sharing import SHARED_PARTS, SharedLayers, cache_autocast_casts


class CtxAlbertPreTrainedModel(CtxPreTrainedModel):
    """ALBERT's part of the model base."""

    config: CtxAlbertConfig
    base_model_prefix = "albert"
    reference_model_type = "albert"
    export_conversion = ALBERT_EXPORT
    _no_split_modules = ["TransformerBlock"]
    # Other heads of the same family, and a buffer that old checkpoints carry.
    _keys_to_ignore_on_load_unexpected = [r"^mlm_head\.", r"^sop_head\.", r"pooler\.", r"position_ids$"]

    def reference_config(self) -> dict[str, Any]:
        """This model's configuration as the reference class reads it: it knows sharing by groups only.

        Raises:
            CtxError: The layers share a part of their parameters, which the reference cannot.
        """
        values = super().reference_config()
        sharing = values.pop("parameter_sharing", "all")
        layers = self.config.num_hidden_layers
        if sharing in SHARED_PARTS and self.config.num_hidden_groups != layers:
            raise CtxError(
                f"parameter_sharing={sharing!r} has no form in transformers, whose ALBERT shares whole layers.",
                hint="keep the model in this package's layout (save_pretrained); 'all' and 'none' can be exported.",
            )
        if sharing != "all":
            values["num_hidden_groups"] = layers
        return values


class CtxAlbertModel(Encoder, CtxAlbertPreTrainedModel):
    """The encoder.

    Args:
        config: Its shape.
        add_pooling_layer: Whether to compute `pooler_output`.
    """

    def __init__(self, config: CtxAlbertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = build_embeddings(config, width=config.embedding_size, projected_size=config.hidden_size)
        self.layers = SharedLayers(
            lambda: build_layer(config),
            config.num_hidden_layers,
            scope=config.parameter_sharing,
            num_groups=config.num_hidden_groups,
            inner=config.inner_group_num,
        )
        self.pooler = FirstTokenPooler(config.hidden_size) if add_pooling_layer else None
        self.post_init()

    def run_layers(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> StackOutput:
        """As in every encoder; a shared layer's weights are cast once."""
        with cache_autocast_casts(hidden_states.device):
            return super().run_layers(hidden_states, *args, **kwargs)


@dataclass
class CtxAlbertForPreTrainingOutput(ModelOutput):
    """Output of `CtxAlbertForPreTraining`.

    Attributes:
        loss: Sum of the two terms whose targets were given.
        prediction_logits: (batch, length, vocabulary); None when `labels` are given.
        sop_logits: (batch, 2), 0 = the segments are in their order, 1 = they are swapped.
        mlm_loss: Masked-LM cross-entropy in nats, detached.
        sentence_order_loss: Sentence-order cross-entropy in nats, detached.
        metrics: "sentence_order_accuracy", as in `accuracy_counts`; None without such targets.
        hidden_states, attentions: As asked for.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    sop_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    sentence_order_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxAlbertHeadModel(heads.HeadModel, CtxAlbertPreTrainedModel):
    """Binds the generic heads to ALBERT's encoder."""

    encoder_class = CtxAlbertModel


class CtxAlbertForMaskedLM(heads.ForMaskedLM, CtxAlbertHeadModel):
    """ALBERT with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "albert.embeddings.word_embeddings.weight"}


class CtxAlbertForPreTraining(heads.ForMaskedLMWithPair, CtxAlbertForMaskedLM):
    """Both pretraining objectives: masked-LM and sentence-order prediction (section 3.1, "inter-sentence coherence
    loss")."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "sentence_order_label")
    output_class = CtxAlbertForPreTrainingOutput
    pair_logits_name = "sop_logits"

    def build_head(self, config: CtxAlbertConfig) -> None:
        """The masked-LM head and the sentence-order classifier."""
        super().build_head(config)
        self.dropout = Dropout(config.head_dropout)
        self.sop_head = nn.Linear(config.hidden_size, 2)

    def classify_pair(self, pooled: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, 2)."""
        return self.sop_head(self.dropout(pooled))

    def reference_config(self) -> dict[str, Any]:
        """As for every head, without the names of a task's classes: the reference sizes this classifier by them."""
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
        **kwargs: Any,
    ) -> ModelOutput:
        """Logits of both heads, and the loss, as in `CtxAlbertForPreTrainingOutput`.

        Args:
            labels: (batch, length) ids of the masked tokens, -100 elsewhere; given, the last layer and the vocabulary
                logits are computed only there, and `prediction_logits` is None.
            sentence_order_label: (batch,), 0 where the segments are in their order, 1 where they are swapped.
        """
        return self.predict_words_and_pair(
            labels,
            sentence_order_label,
            num_items_in_batch,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class CtxAlbertForSequenceClassification(heads.ForSequenceClassification, CtxAlbertHeadModel):
    """ALBERT with a classifier or regressor on the pooled output."""


class CtxAlbertForTokenClassification(heads.ForTokenClassification, CtxAlbertHeadModel):
    """ALBERT with a classifier on every token."""


class CtxAlbertForQuestionAnswering(heads.ForQuestionAnswering, CtxAlbertHeadModel):
    """ALBERT with start and end scores."""


class CtxAlbertForMultipleChoice(heads.ForMultipleChoice, CtxAlbertHeadModel):
    """ALBERT with one score per choice."""
