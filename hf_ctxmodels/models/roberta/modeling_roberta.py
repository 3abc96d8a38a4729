"""RoBERTa (Liu et al. 2019, arXiv 1907.11692): BERT's encoder with positions from `pad_token_id + 1`, pretrained longer
by masked language modeling only."""

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming, WeightTransform

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.inputs import cumulative_token_counts, padding_mask_or_none
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import LEGACY_NORM_RENAMINGS, POST_NORM_RENAMINGS, decoder_bias, fused_projections
from hf_ctxmodels.layers.pooling import build_token_mask
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings
from hf_ctxmodels.models.roberta.configuration_roberta import CtxRobertaConfig

ROBERTA_EXPORT: list[WeightTransform] = [
    *POST_NORM_RENAMINGS,
    WeightRenaming(r"^lm_head\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"^lm_head\.layer_norm\.", r"mlm_head.norm."),
    WeightRenaming(r"^lm_head\.decoder\.weight", r"mlm_head.decoder.weight"),
    *fused_projections("attention.self"),
    decoder_bias("^lm_head"),
]
ROBERTA_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_RENAMINGS, *ROBERTA_EXPORT]


class CtxRobertaPreTrainedModel(CtxPreTrainedModel):
    """Base class of the RoBERTa models."""

    config: CtxRobertaConfig
    base_model_prefix = "roberta"
    reference_model_type = "roberta"
    export_conversion = ROBERTA_EXPORT
    # other heads of the family, and a buffer of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^mlm_head\.", r"pooler\.", r"position_ids$"]


class CtxRobertaModel(TransformerEncoder, CtxRobertaPreTrainedModel):
    """The RoBERTa encoder; pretraining does not train its pooler."""

    def build_embeddings(self, config: CtxRobertaConfig) -> TokenPositionTypeEmbeddings:
        """Create embeddings with a position of padding."""
        embeddings = super().build_embeddings(config)
        embeddings.position_embeddings.padding_idx = config.pad_token_id
        return embeddings

    def default_positions(self, words: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor:
        """(batch, length): the tokens of each sequence counted from `pad_token_id + 1`, and `pad_token_id` at padding.

        The masks and the padding token define the padding. transformers uses the token only, so that `inputs_embeds`
        with left padding, and other ids at masked columns, have wrong positions there.
        """
        token_mask = build_token_mask(words, padding_mask_or_none(attention_mask), sequence_ids)
        if not words.is_floating_point():
            token_mask = token_mask & (words != self.config.pad_token_id)
        return cumulative_token_counts(token_mask, sequence_ids) * token_mask + self.config.pad_token_id


class CtxRobertaHeadModel(heads.HeadModel, CtxRobertaPreTrainedModel):
    """Base class of the RoBERTa models with a head."""

    encoder_class = CtxRobertaModel


class CtxRobertaForMaskedLM(heads.ForMaskedLM, CtxRobertaHeadModel):
    """RoBERTa with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"}
    transform_activation = "gelu"  # independent of `hidden_act`, as in transformers


class CtxRobertaForSequenceClassification(heads.ForSequenceClassification, CtxRobertaHeadModel):
    """RoBERTa with a classifier or regressor on the state of <s>: dense layer, tanh and linear layer."""

    classifier_activation = "tanh"

    def build_encoder(self, config: CtxRobertaConfig) -> CtxPreTrainedModel:
        """Create the encoder; `pooler_output` is the state of the first token, unless the head pools all tokens."""
        encoder: Any = self.encoder_class(config, add_pooling_layer=False)
        if self.pooling is None:
            encoder.pooler = nn.Identity()
        return encoder


class CtxRobertaForTokenClassification(heads.ForTokenClassification, CtxRobertaHeadModel):
    """RoBERTa with a token classifier."""


class CtxRobertaForQuestionAnswering(heads.ForQuestionAnswering, CtxRobertaHeadModel):
    """RoBERTa with a span classifier for extractive question answering."""


class CtxRobertaForMultipleChoice(heads.ForMultipleChoice, CtxRobertaHeadModel):
    """RoBERTa with a multiple-choice classifier."""
