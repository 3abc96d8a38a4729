"""GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners): a causal Transformer with pre-norm
layers, pretrained by language modelling."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init

from hf_ctxmodels import heads
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.feed_forward import FeedForward
from hf_ctxmodels.layers.pooling import Pooling
from hf_ctxmodels.models._shared.transformer_decoder import Decoder, without_trailing_padding
from hf_ctxmodels.models.gpt2.configuration_gpt2 import CtxGpt2Config
from hf_ctxmodels.models.gpt2.conversion_gpt2 import GPT2_EXPORT, GPT2_SEQUENCE_EXPORT


class CtxGpt2PreTrainedModel(CtxPreTrainedModel):
    """GPT-2's part of the model base."""

    config: CtxGpt2Config
    base_model_prefix = "gpt2"
    reference_model_type: ClassVar[str | None] = "gpt2"
    export_conversion = GPT2_EXPORT
    _no_split_modules = ["TransformerBlock"]
    # The output layer, and buffers of old checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"attn\.(masked_)?bias$"]

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights; those of the maps onto the residual stream are scaled by 1 / sqrt(residual sub-layers)
        (section 2.3)."""
        super()._init_weights(module)
        std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
        if isinstance(module, SelfAttention):
            init.normal_(module.out_proj.weight, std=std)
        elif isinstance(module, FeedForward):
            init.normal_(module.down_proj.weight, std=std)


class CtxGpt2Model(Decoder, CtxGpt2PreTrainedModel):
    """The decoder, without the output layer."""

    reference_architecture = "GPT2Model"


class CtxGpt2HeadModel(heads.HeadModel, CtxGpt2PreTrainedModel):
    """Binds the generic heads to GPT-2."""

    encoder_class = CtxGpt2Model

    def build_encoder(self, config: CtxGpt2Config) -> CtxPreTrainedModel:
        """Create the decoder."""
        return self.encoder_class(config)


class CtxGpt2ForCausalLM(CtxGpt2HeadModel, heads.ForCausalLM, GenerationMixin):
    """The language model; the output layer is tied to the word embeddings."""

    _tied_weights_keys = {"lm_head.weight": "gpt2.word_embeddings.weight"}
    reference_architecture = "GPT2LMHeadModel"
    output_layer = "lm_head"

    def build_head(self, config: CtxGpt2Config) -> None:
        """The output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class CtxGpt2ForSequenceClassification(heads.ForSequenceClassification, CtxGpt2HeadModel):
    """GPT-2 with a classifier or regressor on the last token's state, whatever the padding.

    Without an `attention_mask`, padding tokens at the end of a row are padding, as in transformers.
    """

    reference_architecture = "GPT2ForSequenceClassification"
    export_conversion = GPT2_SEQUENCE_EXPORT

    @property
    def pooling(self) -> Pooling:
        """Pooling of the tokens' states."""
        return super().pooling or "last"

    def encode(self, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the decoder; `pooler_output` is the last token's state."""
        input_ids, padding = kwargs.get("input_ids"), self.config.pad_token_id
        if attention_mask is None and isinstance(input_ids, Tensor) and input_ids.dim() == 2 and padding is not None:
            attention_mask = without_trailing_padding(input_ids, padding)
        return super().encode(attention_mask=attention_mask, **kwargs)

    def build_head(self, config: CtxGpt2Config) -> None:
        """Dropout and the classifier, which has no bias."""
        super().build_head(config)
        self.classifier = nn.Linear(config.pooled_size, config.num_labels, bias=False)


class CtxGpt2ForTokenClassification(heads.ForTokenClassification, CtxGpt2HeadModel):
    """GPT-2 with a classifier of each token."""

    reference_architecture = "GPT2ForTokenClassification"


class CtxGpt2ForQuestionAnswering(heads.ForQuestionAnswering, CtxGpt2HeadModel):
    """GPT-2 with start and end logits of an answer span."""

    reference_architecture = "GPT2ForQuestionAnswering"
