"""ERNIE 1.0 (Sun et al. 2019, arXiv 1904.09223) and 2.0 (Sun et al. 2020, arXiv 1907.12412): BERT's network, pretrained
on masked units (words, phrases, entities), and in 2.0 on a growing set of tasks, with an embedding of the task.

Pretraining by tasks is in `pretraining_ernie`.
"""

from functools import partial

from hf_ctxmodels.architectures.transformer_encoder import build_embeddings
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.ernie.configuration_ernie import CtxErnieConfig
from hf_ctxmodels.models.ernie.task_embeddings import TaskEmbeddings


class CtxErniePreTrainedModel(bert.CtxBertPreTrainedModel):
    """ERNIE's part of the model base."""

    config: CtxErnieConfig
    base_model_prefix = "ernie"
    reference_model_type = "ernie"
    # Other heads of the family, and a buffer of old checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^\w+_head\.", r"pooler\.", r"position_ids$"]


class CtxErnieModel(CtxErniePreTrainedModel, bert.CtxBertModel):
    """The encoder; it takes `task_type_ids` (batch, length) if `config.use_task_id`."""

    extra_input_ids = {"task_type_ids": "task_type_vocab_size"}

    def build_embeddings(self, config: CtxErnieConfig) -> TokenPositionTypeEmbeddings:
        """Create the embeddings, with those of the task if `config.use_task_id`."""
        tasks = config.task_type_vocab_size if config.use_task_id else None
        return build_embeddings(config, width=config.hidden_size, kind=partial(TaskEmbeddings, tasks))


class CtxErnieHeadModel(CtxErniePreTrainedModel):
    """Binds BERT's heads to ERNIE's encoder. They take `task_type_ids`, too, which the encoder explains."""

    encoder_class = CtxErnieModel


class CtxErnieForMaskedLM(CtxErnieHeadModel, bert.CtxBertForMaskedLM):
    """ERNIE with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "ernie.embeddings.word_embeddings.weight"}


class CtxErnieForMaskedLMWithPair(CtxErnieHeadModel, bert.CtxBertForPreTraining):
    """ERNIE 1.0's pretraining heads as the reference has them, masked LM and pairs: ErnieForPreTraining in
    `transformers`."""

    reference_architecture = "ErnieForPreTraining"
    _tied_weights_keys = CtxErnieForMaskedLM._tied_weights_keys


class CtxErnieForNextSentencePrediction(CtxErnieHeadModel, bert.CtxBertForNextSentencePrediction):
    """ERNIE with the classifier of pairs only."""


class CtxErnieForSequenceClassification(CtxErnieHeadModel, bert.CtxBertForSequenceClassification):
    """ERNIE with a classifier or regressor on the pooled output."""


class CtxErnieForTokenClassification(CtxErnieHeadModel, bert.CtxBertForTokenClassification):
    """ERNIE with a classifier of each token."""


class CtxErnieForQuestionAnswering(CtxErnieHeadModel, bert.CtxBertForQuestionAnswering):
    """ERNIE with start and end logits of an answer span."""


class CtxErnieForMultipleChoice(CtxErnieHeadModel, bert.CtxBertForMultipleChoice):
    """ERNIE with a logit for each of several choices."""
