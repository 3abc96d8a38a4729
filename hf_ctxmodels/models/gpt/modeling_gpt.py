"""GPT (Radford et al. 2018, Improving Language Understanding by Generative Pre-Training): a causal Transformer with
post-norm layers, pretrained by language modelling and fine-tuned with it."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.decoder_heads import DecoderForCausalLM, DecoderHeadModel, LastTokenHead
from hf_ctxmodels.architectures.transformer_decoder import TransformerDecoder, build_layer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.cpu.dropout import shared_dropout
from hf_ctxmodels.models.gpt.configuration_gpt import ACTIVATIONS, CtxGptConfig
from hf_ctxmodels.models.gpt.conversion_gpt import GPT_CHOICE_EXPORT, GPT_EXPORT, GPT_SEQUENCE_EXPORT


class CtxGptPreTrainedModel(CtxPreTrainedModel):
    """GPT's part of the model base."""

    config: CtxGptConfig
    base_model_prefix = "gpt"
    reference_model_type: ClassVar[str | None] = "openai-gpt"
    export_conversion = GPT_EXPORT
    _no_split_modules = ["TransformerBlock"]
    # The output layer, and buffers of old checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"attn\.bias$", r"position_ids$"]

    def reference_config(self) -> dict[str, Any]:
        """The reference class's configuration; raises CtxError for layers that it has not."""
        config = self.config
        names = {own: name for name, own in reversed(ACTIVATIONS.items())}
        if config.hidden_act not in names:
            raise CtxError(
                f"transformers' GPT has no hidden_act={config.hidden_act!r}; it has {', '.join(names)}.",
                hint="use save_pretrained.",
            )
        if config.feed_forward_size != 4 * config.hidden_size:
            raise CtxError(
                f"transformers' GPT has feed-forward layers of 4 * hidden_size={4 * config.hidden_size}, this one of "
                f"{config.feed_forward_size}.",
                hint="use save_pretrained.",
            )
        return {**super().reference_config(), "afn": names[config.hidden_act]}


class CtxGptModel(TransformerDecoder, CtxGptPreTrainedModel):
    """The decoder, without the output layer. There is no norm after the embeddings, and none after the last layer's."""

    reference_architecture = "OpenAIGPTModel"

    def build_layer(self, config: CtxGptConfig) -> nn.Module:
        """Create a post-norm layer."""
        return build_layer(config, "post")

    def build_final_norm(self, config: CtxGptConfig) -> nn.Module:
        """None: a post-norm layer's output is normalised."""
        return nn.Identity()


class CtxGptHeadModel(DecoderHeadModel, CtxGptPreTrainedModel):
    """Binds the generic heads to GPT."""

    encoder_class = CtxGptModel


class CtxGptForCausalLM(DecoderForCausalLM, CtxGptHeadModel, GenerationMixin):
    """The language model; the output layer is tied to the word embeddings."""

    _tied_weights_keys = {"lm_head.weight": "gpt.word_embeddings.weight"}
    reference_architecture = "OpenAIGPTLMHeadModel"


class CtxGptForSequenceClassification(
    LastTokenHead, heads.ForSequenceClassification, heads.WithLanguageModeling, CtxGptHeadModel
):
    """GPT with a classifier or regressor on the last token's state, which is that of _classify_ (section 3.3).

    For similarity, `input_ids` (batch, orders, length) hold both orders of a pair; the sum of their states is
    classified.
    """

    accepts_both_orders = True
    reference_architecture = "OpenAIGPTForSequenceClassification"
    export_conversion = GPT_SEQUENCE_EXPORT

    def build_head(self, config: CtxGptConfig) -> None:
        """Dropout and the classifier, which has no bias."""
        super().build_head(config)
        self.classifier = nn.Linear(config.pooler_size, config.num_labels, bias=False)

    def encode(self, **kwargs: Any) -> Any:
        """Run the decoder; `pooler_output` is the sum of the states of a row's orders."""
        orders = _orders(**kwargs)
        if orders is None:
            return super().encode(**kwargs)
        outputs = super().encode(**{name: _flat(each) for name, each in kwargs.items()})
        outputs.pooler_output = outputs.pooler_output.unflatten(0, (-1, orders)).sum(1)
        return outputs


class CtxGptForTokenClassification(heads.ForTokenClassification, heads.WithLanguageModeling, CtxGptHeadModel):
    """GPT with a classifier of each token, which has read the tokens before it only; not in the paper."""

    reference_model_type = None


class ChoiceDropout(nn.Module):
    """Dropout with one mask for all choices of an example, as in the released code."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) -> the same."""
        batch = len(pooled) // choices
        examples = torch.arange(batch, device=pooled.device).repeat_interleave(choices)
        return shared_dropout(pooled, examples, batch, self.p, self.training, drop_rows=False)


class CtxGptForMultipleChoice(LastTokenHead, heads.ForMultipleChoice, heads.WithLanguageModeling, CtxGptHeadModel):
    """GPT that chooses among continuations or answers by a linear map of the last token's state (section 3.3)."""

    _tied_weights_keys = {"lm_head.weight": "gpt.word_embeddings.weight"}
    reference_architecture = "OpenAIGPTDoubleHeadsModel"
    export_conversion = GPT_CHOICE_EXPORT
    output_layer = "lm_head"

    def build_head(self, config: CtxGptConfig) -> None:
        """Dropout, the classifier, and the output layer of the language model."""
        super().build_head(config)
        self.dropout = ChoiceDropout(config.head_dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def score(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) -> (batch * choices, 1) logits."""
        return self.classifier(self.dropout(pooled, choices))


def _orders(*, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any) -> int | None:
    """The number of orders of each pair; None for one text or pair in a row."""
    if isinstance(input_ids, Tensor) and input_ids.dim() == 3:
        return input_ids.shape[1]
    if isinstance(inputs_embeds, Tensor) and inputs_embeds.dim() == 4:
        return inputs_embeds.shape[1]
    return None


def _flat(given: Any) -> Any:
    """A (batch, orders, length, ...) tensor as (batch * orders, length, ...)."""
    return given.flatten(0, 1) if isinstance(given, Tensor) and given.dim() > 2 else given
