"""ALBERT (Lan et al. 2019, arXiv 1909.11942): BERT's encoder with factorised embeddings and cross-layer parameter
sharing, pretrained by masked language modelling and sentence-order prediction."""

from typing import Any

from torch import Tensor, nn

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder, build_embeddings, build_layer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.transformer import StackOutput, TokenPositionTypeEmbeddings
from hf_ctxmodels.models.albert.configuration_albert import CtxAlbertConfig
from hf_ctxmodels.models.albert.conversion_albert import ALBERT_EXPORT
from hf_ctxmodels.models.albert.shared_layers import SHARED_SUBLAYERS, SharedLayers, cache_autocast_casts


class CtxAlbertPreTrainedModel(CtxPreTrainedModel):
    """ALBERT's part of the model base."""

    config: CtxAlbertConfig
    base_model_prefix = "albert"
    reference_model_type = "albert"
    export_conversion = ALBERT_EXPORT
    _no_split_modules = ["TransformerBlock"]
    # Other heads of the family, and a buffer of old checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^mlm_head\.", r"^sop_head\.", r"pooler\.", r"position_ids$"]

    def reference_config(self) -> dict[str, Any]:
        """The reference class's configuration; raises CtxError if layers share only a part of their parameters."""
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
    """The encoder."""

    def build_embeddings(self, config: CtxAlbertConfig) -> TokenPositionTypeEmbeddings:
        """Create factorised embeddings."""
        return build_embeddings(config, width=config.embedding_size, projected_size=config.hidden_size)

    def build_layers(self, config: CtxAlbertConfig) -> SharedLayers:
        """Create layers with shared parameters."""
        return SharedLayers(
            lambda: build_layer(config),
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
    """Binds the generic heads to ALBERT's encoder."""

    encoder_class = CtxAlbertModel


class CtxAlbertForMaskedLM(heads.ForMaskedLM, CtxAlbertHeadModel):
    """ALBERT with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "albert.embeddings.word_embeddings.weight"}


class CtxAlbertForPreTraining(heads.ForMaskedLMWithTasks, CtxAlbertForMaskedLM):
    """Both pretraining objectives: masked-LM and sentence-order prediction (section 3.1).

    `sentence_order_label` (batch,) is 0 if the segments are in order, 1 if they are swapped.
    """

    tasks = (heads.PretrainingTask("sentence_order", "sentence_order_label", "sop_head", "sop_logits"),)

    def build_head(self, config: CtxAlbertConfig) -> None:
        """The masked-LM head and the sentence-order classifier."""
        super().build_head(config)
        self.dropout = Dropout(config.head_dropout)
        self.sop_head = nn.Linear(config.hidden_size, 2)

    def classify(self, task: heads.PretrainingTask, states: Tensor) -> Tensor:
        """(batch, hidden) pooled output -> (batch, 2) logits."""
        return super().classify(task, self.dropout(states))

    def reference_config(self) -> dict[str, Any]:
        """The configuration of the reference class, without class names, which set this classifier's size there."""
        values = super().reference_config()
        if self.config.num_labels != 2:
            values.pop("id2label", None)
            values.pop("label2id", None)
        return values


CtxAlbertForPreTrainingOutput = CtxAlbertForPreTraining.output_class


class CtxAlbertForSequenceClassification(heads.ForSequenceClassification, CtxAlbertHeadModel):
    """ALBERT with a classifier or regressor on the pooled output."""


class CtxAlbertForTokenClassification(heads.ForTokenClassification, CtxAlbertHeadModel):
    """ALBERT with a classifier of each token."""


class CtxAlbertForQuestionAnswering(heads.ForQuestionAnswering, CtxAlbertHeadModel):
    """ALBERT with start and end logits of an answer span."""


class CtxAlbertForMultipleChoice(heads.ForMultipleChoice, CtxAlbertHeadModel):
    """ALBERT with a logit for each of several choices."""
