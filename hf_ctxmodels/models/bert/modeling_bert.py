"""BERT (Devlin et al. 2019, arXiv 1810.04805): a bidirectional Transformer encoder, pretrained by masked language
modelling and next-sentence prediction."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.core_model_loading import WeightTransform
from transformers.modeling_outputs import NextSentencePredictorOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads import ItemCounts, cross_entropy_over_targets
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.bert.conversion_bert import BERT_EXPORT, DISTILBERT_EXPORT
from hf_ctxmodels.models.bert.distilbert import reject_distilbert_head
from hf_ctxmodels.models.bert.distilbert_export import distilbert_config


class CtxBertPreTrainedModel(CtxPreTrainedModel):
    """BERT's part of the model base."""

    config: CtxBertConfig
    base_model_prefix = "bert"
    reference_model_type: ClassVar[str | None] = "bert"
    _no_split_modules = ["TransformerBlock"]
    # Other heads of the family, and a buffer of old checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^mlm_head\.", r"^nsp_head\.", r"pooler\.", r"position_ids$"]

    @property
    def export_conversion(self) -> list[WeightTransform]:  # type: ignore[override]
        """That of BERT, or of DistilBERT without segment embeddings."""
        return BERT_EXPORT if self.config.type_vocab_size else DISTILBERT_EXPORT

    def reference_config(self) -> dict[str, Any]:
        """As of every model; DistilBERT's without segment embeddings."""
        if self.config.type_vocab_size:
            return super().reference_config()
        has_pooler = getattr(self.base_model, "pooler", None) is not None
        return distilbert_config(self.config, type(self).__name__, has_pooler)


class CtxBertModel(TransformerEncoder, CtxBertPreTrainedModel):
    """The encoder."""


class CtxBertHeadModel(heads.HeadModel, CtxBertPreTrainedModel):
    """Binds the generic heads to BERT's encoder."""

    encoder_class = CtxBertModel


class CtxBertForMaskedLM(heads.ForMaskedLM, CtxBertHeadModel):
    """BERT with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "bert.embeddings.word_embeddings.weight"}


class CtxBertForPreTraining(heads.ForMaskedLMWithTasks, CtxBertForMaskedLM):
    """Both pretraining objectives: masked-LM and next-sentence prediction (section 3.1).

    `next_sentence_label` (batch,) is 0 if the second segment follows the first, 1 if it is random.
    """

    tasks = (heads.PretrainingTask("next_sentence", "next_sentence_label", "nsp_head", "seq_relationship_logits"),)

    def build_head(self, config: CtxBertConfig) -> None:
        """The masked-LM head and the next-sentence classifier."""
        super().build_head(config)
        self.nsp_head = nn.Linear(config.hidden_size, 2)


CtxBertForPreTrainingOutput = CtxBertForPreTraining.output_class


class CtxBertForNextSentencePrediction(CtxBertHeadModel):
    """BERT with the next-sentence classifier only (section 3.1, task 2)."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    pools = True

    def build_head(self, config: CtxBertConfig) -> None:
        """The next-sentence classifier."""
        self.nsp_head = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> NextSentencePredictorOutput:
        """Logits (batch, 2), and the loss with `labels` (batch,): 0 = follows, 1 = random."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.nsp_head(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = cross_entropy_over_targets(
                logits, heads.validate_sequence_targets(labels, "labels", len(logits)), "labels", num_items_in_batch
            )
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class CtxBertForSequenceClassification(heads.ForSequenceClassification, CtxBertHeadModel):
    """BERT with a classifier or regressor on the pooled output."""

    def build_head(self, config: CtxBertConfig) -> None:
        """The classifier; raises CtxError for a checkpoint with DistilBERT's, see `reject_distilbert_head`."""
        reject_distilbert_head(type(self).__name__, config.architectures)
        super().build_head(config)


class CtxBertForTokenClassification(heads.ForTokenClassification, CtxBertHeadModel):
    """BERT with a classifier of each token."""


class CtxBertForQuestionAnswering(heads.ForQuestionAnswering, CtxBertHeadModel):
    """BERT with start and end logits of an answer span."""


class CtxBertForMultipleChoice(heads.ForMultipleChoice, CtxBertHeadModel):
    """BERT with a logit for each of several choices."""

    def build_head(self, config: CtxBertConfig) -> None:
        """The scores; raises CtxError for a checkpoint with DistilBERT's, see `reject_distilbert_head`."""
        reject_distilbert_head(type(self).__name__, config.architectures)
        super().build_head(config)
