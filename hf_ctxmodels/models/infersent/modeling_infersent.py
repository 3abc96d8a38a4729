"""InferSent (Conneau et al. 2017, arXiv 1705.02364): sentence embeddings trained on natural language inference."""

from torch import Tensor, nn

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.pretrained_word_vectors import (
    PretrainedEmbeddingEncoder,
    PretrainedEmbeddingPreTrainedModel,
)
from hf_ctxmodels.architectures.sentence_encoder import RecurrentSentenceEncoder
from hf_ctxmodels.core.host_copies import on_host
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import LinearLayers
from hf_ctxmodels.models.infersent.configuration_infersent import CtxInferSentConfig


class CtxInferSentPreTrainedModel(PretrainedEmbeddingPreTrainedModel):
    """Base class of the InferSent models."""

    config: CtxInferSentConfig
    base_model_prefix = "infersent"


class CtxInferSentModel(PretrainedEmbeddingEncoder, RecurrentSentenceEncoder, CtxInferSentPreTrainedModel):
    """Pretrained word vectors, a bidirectional LSTM, and max pooling (section 3.2.2)."""

    def select_tokens(self, input_ids: Tensor | None, token_mask: Tensor) -> Tensor:
        """(batch, length) bool: the words of the vocabulary; all tokens of a text without such words."""
        if input_ids is None or not self.config.skip_unknown:
            return token_mask
        unknown_id = self.config.unk_token_id

        def select(ids: Tensor, mask: Tensor) -> Tensor:
            in_vocabulary = mask & (ids != unknown_id)
            return in_vocabulary | (mask & ~in_vocabulary.any(1, keepdim=True))

        return on_host(select, input_ids, token_mask)


class CtxInferSentForSequenceClassification(heads.ForTextPairClassification, CtxInferSentPreTrainedModel):
    """A classifier of text pairs (section 3.1); see `ForTextPairClassification`."""

    encoder_class = CtxInferSentModel

    def build_pair_classifier(self, config: CtxInferSentConfig) -> nn.Module:
        """Create the classifier of the released code."""
        size = config.classifier_size
        layers: list[nn.Module] = [nn.Linear(4 * config.hidden_size, size)]
        for output in (size, config.num_labels):
            if config.classifier_nonlinear:
                layers += [nn.Tanh(), Dropout(config.head_dropout)]
            layers.append(nn.Linear(size, output))
        return LinearLayers(*layers)
