"""StructBERT (Wang et al. 2019, arXiv 1908.04577): BERT's network, pretrained on masked words, the order of shuffled
words and the order of two segments."""

from torch import nn

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.bert_reference import ExportsMaskedLM, ReferenceIsBert
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.structbert.configuration_structbert import CtxStructBertConfig

SENTENCE_CLASSES = 3
"""The second segment follows the first, precedes it, or is of another document."""


class CtxStructBertPreTrainedModel(ReferenceIsBert, bert.CtxBertPreTrainedModel):
    """StructBERT's part of the model base; the names of the encoder's weights are BERT's."""

    config: CtxStructBertConfig
    _keys_to_ignore_on_load_unexpected = [
        *bert.CtxBertPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^sentence_head\.",
    ]


class CtxStructBertModel(CtxStructBertPreTrainedModel, bert.CtxBertModel):
    """The encoder."""


class CtxStructBertHeadModel(CtxStructBertPreTrainedModel):
    """Binds BERT's heads to StructBERT's encoder."""

    encoder_class = CtxStructBertModel


class CtxStructBertForMaskedLM(CtxStructBertHeadModel, bert.CtxBertForMaskedLM):
    """StructBERT with the masked-LM head; the decoder is tied to the word embeddings."""


class CtxStructBertForPreTraining(ExportsMaskedLM, heads.ForMaskedLMWithTasks, CtxStructBertForMaskedLM):
    """All pretraining objectives: masked words, word structure and sentence structure (section 2.2).

    The masked-LM head predicts masked tokens, `labels`, and those of shuffled n-grams, `shuffle_labels` (batch, length)
    their original ids. `sentence_label` (batch,) is 0 if the second segment follows the first, 1 if it precedes it, 2
    if it is of another document. The terms have equal weights. transformers has no such head: `export_reference`
    writes the masked-LM model.
    """

    masked_lm_class = CtxStructBertForMaskedLM
    tasks = (
        heads.PretrainingTask("sentence", "sentence_label", "sentence_head", "sentence_logits"),
        heads.PretrainingTask("shuffle", "shuffle_labels", of_tokens=True),
    )

    def build_head(self, config: CtxStructBertConfig) -> None:
        """The masked-LM head and the classifier of pairs."""
        super().build_head(config)
        self.sentence_head = nn.Linear(config.hidden_size, SENTENCE_CLASSES)


CtxStructBertForPreTrainingOutput = CtxStructBertForPreTraining.output_class


class CtxStructBertForSequenceClassification(CtxStructBertHeadModel, bert.CtxBertForSequenceClassification):
    """StructBERT with a classifier or regressor on the pooled output."""


class CtxStructBertForTokenClassification(CtxStructBertHeadModel, bert.CtxBertForTokenClassification):
    """StructBERT with a classifier of each token."""


class CtxStructBertForQuestionAnswering(CtxStructBertHeadModel, bert.CtxBertForQuestionAnswering):
    """StructBERT with start and end logits of an answer span."""


class CtxStructBertForMultipleChoice(CtxStructBertHeadModel, bert.CtxBertForMultipleChoice):
    """StructBERT with a logit for each of several choices."""
