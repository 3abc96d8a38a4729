"""ALBERT (Lan et al. 2019, arXiv 1909.11942): BERT's encoder with factorised embeddings and parameters shared by depth.

Its own here: which parameters the layers share, and masked-LM with sentence-order prediction. The encoder is
`hf_ctxmodels.models._shared.transformer_encoder`; everything else comes from `hf_ctxmodels.layers` and
`hf_ctxmodels.heads`.
"""

from typing import Any

from torch import Tensor, nn

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
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


class CtxAlbertHeadModel(heads.HeadModel, CtxAlbertPreTrainedModel):
    """Binds the generic heads to ALBERT's encoder."""

    encoder_class = CtxAlbertModel


class CtxAlbertForMaskedLM(heads.ForMaskedLM, CtxAlbertHeadModel):
    """ALBERT with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "albert.embeddings.word_embeddings.weight"}


class CtxAlbertForPreTraining(heads.ForMaskedLMWithPair, CtxAlbertForMaskedLM):
    """Both pretraining objectives: masked-LM and sentence-order prediction (section 3.1, "inter-sentence coherence
    loss").

    `sentence_order_label` (batch,) is 0 where the segments are in their order, 1 where they are swapped.
    """

    pair_label = "sentence_order_label"
    pair_logits = "sop_logits"

    def build_head(self, config: CtxAlbertConfig) -> None:
        """The masked-LM head and the sentence-order classifier."""
        super().build_head(config)
        self.dropout = Dropout(config.head_dropout)
        self.sop_head = nn.Linear(config.hidden_size, 2)

    def classify_pair(self, pooled: Tensor) -> Tensor:
        """(batch, hidden) pooled output -> (batch, 2) logits."""
        return self.sop_head(self.dropout(pooled))

    def reference_config(self) -> dict[str, Any]:
        """As for every head, without the names of a task's classes: the reference sizes this classifier by them."""
        values = super().reference_config()
        if self.config.num_labels != 2:
            values.pop("id2label", None)
            values.pop("label2id", None)
        return values


CtxAlbertForPreTrainingOutput = CtxAlbertForPreTraining.output_class


class CtxAlbertForSequenceClassification(heads.ForSequenceClassification, CtxAlbertHeadModel):
    """ALBERT that classifies a sequence, or regresses a number on it, from its pooled output."""


class CtxAlbertForTokenClassification(heads.ForTokenClassification, CtxAlbertHeadModel):
    """ALBERT that classifies each token."""


class CtxAlbertForQuestionAnswering(heads.ForQuestionAnswering, CtxAlbertHeadModel):
    """ALBERT that predicts the start and the end of an answer span."""


class CtxAlbertForMultipleChoice(heads.ForMultipleChoice, CtxAlbertHeadModel):
    """ALBERT that chooses one of several continuations."""
