"""RoBERTa (Liu et al. 2019, arXiv 1907.11692): BERT's encoder, trained longer on masked words alone.

Its own here: positions that count tokens from `pad_token_id + 1`, and a classifier on <s> in place of BERT's pooler.
The encoder is `hf_ctxmodels.models._shared.transformer_encoder`; everything else comes from `hf_ctxmodels.layers` and
`hf_ctxmodels.heads`.
"""

from torch import Tensor, nn

from hf_ctxmodels import heads
from hf_ctxmodels.core.inputs import count_tokens
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.transformer.pooler import FirstTokenPooler
from hf_ctxmodels.models._shared.transformer_encoder import Encoder, build_embeddings, build_layer
from hf_ctxmodels.models.roberta.configuration_roberta import CtxRobertaConfig
from hf_ctxmodels.models.roberta.conversion_roberta import ROBERTA_EXPORT


class CtxRobertaPreTrainedModel(CtxPreTrainedModel):
    """RoBERTa's part of the model base."""

    config: CtxRobertaConfig
    base_model_prefix = "roberta"
    reference_model_type = "roberta"
    export_conversion = ROBERTA_EXPORT
    _no_split_modules = ["TransformerBlock"]
    # Other heads of the same family, and a buffer that old checkpoints carry.
    _keys_to_ignore_on_load_unexpected = [r"^mlm_head\.", r"pooler\.", r"position_ids$"]


class CtxRobertaModel(Encoder, CtxRobertaPreTrainedModel):
    """The encoder.

    Args:
        config: Its shape.
        add_pooling_layer: Whether to compute `pooler_output`, by a layer that RoBERTa's pretraining does not train.
    """

    def __init__(self, config: CtxRobertaConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = build_embeddings(config, width=config.hidden_size)
        self.embeddings.position_embeddings.padding_idx = config.pad_token_id
        self.layers = nn.ModuleList(build_layer(config) for _ in range(config.num_hidden_layers))
        self.pooler: nn.Module | None = FirstTokenPooler(config.hidden_size) if add_pooling_layer else None
        self.post_init()

    def default_positions(self, words: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor:
        """(batch, length): the tokens of each sequence counted from `pad_token_id + 1`, wherever the padding is,
        and `pad_token_id` at padding.

        Padding is what a mask or the padding token says. transformers looks at the token alone, so that embeddings with
        left padding, and other ids at masked columns, get wrong positions there.
        """
        padding_only = attention_mask is not None and attention_mask.dim() == 2
        tokens = token_mask(words, attention_mask if padding_only else None, sequence_ids)
        if not words.is_floating_point():
            tokens = tokens & (words != self.config.pad_token_id)
        return count_tokens(tokens, sequence_ids) * tokens + self.config.pad_token_id


class CtxRobertaHeadModel(heads.HeadModel, CtxRobertaPreTrainedModel):
    """Binds the generic heads to RoBERTa's encoder."""

    encoder_class = CtxRobertaModel


class CtxRobertaForMaskedLM(heads.ForMaskedLM, CtxRobertaHeadModel):
    """RoBERTa with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"}
    transform_activation = "gelu"  # whatever `hidden_act` is, as in the reference


class CtxRobertaForSequenceClassification(heads.ForSequenceClassification, CtxRobertaHeadModel):
    """RoBERTa that classifies a sequence, or regresses a number on it, from <s>: dense, tanh and linear."""

    classifier_activation = "tanh"

    def build_encoder(self, config: CtxRobertaConfig) -> CtxPreTrainedModel:
        """The encoder, whose `pooler_output` is the first token's state as it is."""
        encoder = self.encoder_class(config, add_pooling_layer=False)
        if self.pooling is None:
            encoder.pooler = nn.Identity()
        return encoder


class CtxRobertaForTokenClassification(heads.ForTokenClassification, CtxRobertaHeadModel):
    """RoBERTa that classifies each token."""


class CtxRobertaForQuestionAnswering(heads.ForQuestionAnswering, CtxRobertaHeadModel):
    """RoBERTa that predicts the start and the end of an answer span."""


class CtxRobertaForMultipleChoice(heads.ForMultipleChoice, CtxRobertaHeadModel):
    """RoBERTa that chooses one of several continuations."""
