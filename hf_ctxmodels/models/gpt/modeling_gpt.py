"""GPT (Radford et al. 2018, Improving Language Understanding by Generative Pre-Training): a causal post-norm
Transformer, pretrained and fine-tuned with language modelling."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_decoder import DecoderHeadModel, TransformerDecoder, build_decoder_layer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.cpu.dropout import shared_dropout
from hf_ctxmodels.models.gpt.configuration_gpt import ACTIVATIONS, CtxGptConfig
from hf_ctxmodels.models.gpt.conversion_gpt import GPT_CHOICE_EXPORT, GPT_EXPORT, GPT_SEQUENCE_EXPORT


class CtxGptPreTrainedModel(CtxPreTrainedModel):
    """Base class of the GPT models."""

    config: CtxGptConfig
    base_model_prefix = "gpt"
    reference_model_type: ClassVar[str | None] = "openai-gpt"
    export_conversion = GPT_EXPORT
    _no_split_modules = ["TransformerBlock"]
    # the output layer, and buffers of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"attn\.bias$", r"position_ids$"]

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers; raise CtxError if it does not support the layers."""
        config = self.config
        reference_names = {hidden_act: name for name, hidden_act in reversed(ACTIVATIONS.items())}
        if config.hidden_act not in reference_names:
            raise CtxError(
                f"transformers' GPT does not support hidden_act={config.hidden_act!r}, only "
                f"{', '.join(reference_names)}.",
                hint="use save_pretrained.",
            )
        if config.feed_forward_size != 4 * config.hidden_size:
            raise CtxError(
                f"transformers' GPT has an intermediate size of 4 * hidden_size={4 * config.hidden_size}, this model "
                f"{config.feed_forward_size}.",
                hint="use save_pretrained.",
            )
        return {**super().reference_config(), "afn": reference_names[config.hidden_act]}


class CtxGptModel(TransformerDecoder, CtxGptPreTrainedModel):
    """The GPT decoder without the output layer; it has no embedding norm and no final norm."""

    reference_architecture = "OpenAIGPTModel"

    def build_layer(self, config: CtxGptConfig) -> nn.Module:
        """Create a post-norm layer."""
        return build_decoder_layer(config, "post")

    def build_final_norm(self, config: CtxGptConfig) -> nn.Module:
        """Create an identity: the output of a post-norm layer is normalised."""
        return nn.Identity()


class CtxGptHeadModel(DecoderHeadModel, CtxGptPreTrainedModel):
    """Base class of the GPT models with a head."""

    encoder_class = CtxGptModel


class CtxGptForCausalLM(heads.ForCausalLM, CtxGptHeadModel, GenerationMixin):
    """GPT language model; the output layer is tied to the word embeddings."""

    _tied_weights_keys = {"lm_head.weight": "gpt.word_embeddings.weight"}
    reference_architecture = "OpenAIGPTLMHeadModel"


class CtxGptForSequenceClassification(heads.ForSequenceClassification, CtxGptHeadModel):
    """GPT with a classifier or regressor on the state of the last token, _classify_ (section 3.3).

    For similarity tasks `input_ids` (batch, orders, length) hold both orders of a pair; the classifier's input is the
    sum of their states.
    """

    accepts_both_orders = True
    has_auxiliary_lm_loss = True
    reference_architecture = "OpenAIGPTForSequenceClassification"
    export_conversion = GPT_SEQUENCE_EXPORT

    def build_head(self, config: CtxGptConfig) -> None:
        """Create dropout and a classifier without bias."""
        super().build_head(config)
        self.classifier = nn.Linear(config.pooler_size, config.num_labels, bias=False)

    def encode(self, **kwargs: Any) -> Any:
        """Run the decoder; `pooler_output` is the sum of the states of the orders of a pair."""
        num_orders = _number_of_orders(**kwargs)
        if num_orders is None:
            return super().encode(**kwargs)
        outputs = super().encode(**{name: _flatten_orders(value) for name, value in kwargs.items()})
        outputs.pooler_output = outputs.pooler_output.unflatten(0, (-1, num_orders)).sum(1)
        return outputs


class CtxGptForTokenClassification(heads.ForTokenClassification, CtxGptHeadModel):
    """GPT with a token classifier on the causal states; not in the paper."""

    has_auxiliary_lm_loss = True
    reference_model_type = None


class ChoiceDropout(nn.Module):
    """Dropout with one mask for all choices of an example, as in the released code."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) -> (batch * choices, hidden)."""
        batch = len(pooled) // choices
        examples = torch.arange(batch, device=pooled.device).repeat_interleave(choices)
        return shared_dropout(pooled, examples, batch, self.p, self.training, drop_rows=False)


class CtxGptForMultipleChoice(heads.ForMultipleChoice, CtxGptHeadModel):
    """GPT with a multiple-choice classifier on the last token's state (section 3.3)."""

    _tied_weights_keys = {"lm_head.weight": "gpt.word_embeddings.weight"}
    reference_architecture = "OpenAIGPTDoubleHeadsModel"
    export_conversion = GPT_CHOICE_EXPORT
    has_auxiliary_lm_loss = True
    output_layer = "lm_head"

    def build_head(self, config: CtxGptConfig) -> None:
        """Create dropout, the classifier, and the output layer of the language model."""
        super().build_head(config)
        self.dropout = ChoiceDropout(config.head_dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def score(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) -> (batch * choices, 1) logits."""
        return self.classifier(self.dropout(pooled, choices))


def _number_of_orders(
    *, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
) -> int | None:
    """The number of orders of each pair; None for inputs (batch, length)."""
    if isinstance(input_ids, Tensor) and input_ids.dim() == 3:
        return input_ids.shape[1]
    if isinstance(inputs_embeds, Tensor) and inputs_embeds.dim() == 4:
        return inputs_embeds.shape[1]
    return None


def _flatten_orders(value: Any) -> Any:
    """Tensor (batch, orders, length, ...) -> (batch * orders, length, ...); other values are unchanged."""
    return value.flatten(0, 1) if isinstance(value, Tensor) and value.dim() > 2 else value
