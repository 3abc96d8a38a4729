"""GPT (Radford et al. 2018, Improving Language Understanding by Generative Pre-Training): a causal post-norm
Transformer, pretrained and fine-tuned with language modeling."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.core_model_loading import WeightRenaming

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_decoder import (
    DecoderForSequenceClassification,
    DecoderHeadModel,
    TransformerDecoder,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import on_host
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import gpt_conversions
from hf_ctxmodels.layers.cpu.dropout import Dropout, shared_dropout
from hf_ctxmodels.models.gpt.configuration_gpt import ACTIVATIONS, CtxGptConfig

GPT_EXPORT, GPT_SEQUENCE_EXPORT, GPT_CHOICE_EXPORT, GPT_CONVERSION = gpt_conversions(
    [
        WeightRenaming(r"^transformer\.", r"gpt."),
        WeightRenaming(r"tokens_embed\.", r"word_embeddings."),
        WeightRenaming(r"positions_embed\.", r"position_embeddings."),
    ]
)


class CtxGptPreTrainedModel(CtxPreTrainedModel):
    """Base class of the GPT models."""

    config: CtxGptConfig
    base_model_prefix = "gpt"
    reference_model_type: ClassVar[str | None] = "openai-gpt"
    export_conversion = GPT_EXPORT
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
    """The GPT decoder without the output layer: post-norm, without a norm of the embeddings."""

    reference_architecture = "OpenAIGPTModel"
    normalizes_embeddings = False


class CtxGptHeadModel(DecoderHeadModel, CtxGptPreTrainedModel):
    """Base class of the GPT models with a head."""

    encoder_class = CtxGptModel


class CtxGptForCausalLM(heads.ForCausalLM, CtxGptHeadModel, GenerationMixin):
    """GPT language model; the output layer is tied to the word embeddings."""

    _tied_weights_keys = {"lm_head.weight": "gpt.word_embeddings.weight"}
    reference_architecture = "OpenAIGPTLMHeadModel"


class CtxGptForSequenceClassification(DecoderForSequenceClassification, CtxGptHeadModel):
    """GPT with a classifier or regressor on the state of the last token, _classify_ (section 3.3).

    For similarity tasks `input_ids` (batch, orders, length) hold both orders of a pair; the classifier's input is the
    sum of their states.
    """

    accepts_both_orders = True
    classifier_bias = False
    has_auxiliary_lm_loss = True
    reference_architecture = "OpenAIGPTForSequenceClassification"
    export_conversion = GPT_SEQUENCE_EXPORT

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers; raise CtxError if pairs are read in both orders."""
        if self.config.both_orders:
            raise CtxError(
                "transformers' GPT does not support both_orders=True: it reads a pair in one order.",
                hint="use save_pretrained.",
            )
        return super().reference_config()

    def encode(self, **kwargs: Any) -> Any:
        """Run the decoder; `pooler_output` is the sum of the states of the orders of a pair."""
        input_ids, inputs_embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if isinstance(input_ids, Tensor) and input_ids.dim() == 3:
            num_orders = input_ids.shape[1]
        elif isinstance(inputs_embeds, Tensor) and inputs_embeds.dim() == 4:
            num_orders = inputs_embeds.shape[1]
        else:
            return super().encode(**kwargs)
        rows = {
            name: on_host(lambda tensor: tensor.flatten(0, 1), value)
            if isinstance(value, Tensor) and value.dim() > 2
            else value
            for name, value in kwargs.items()
        }
        outputs = super().encode(**rows)
        outputs.pooler_output = outputs.pooler_output.unflatten(0, (-1, num_orders)).sum(1)
        return outputs


class CtxGptForTokenClassification(heads.ForTokenClassification, CtxGptHeadModel):
    """GPT with a token classifier on the causal states; not in the paper."""

    has_auxiliary_lm_loss = True
    reference_model_type = None


class CtxGptForMultipleChoice(heads.ForMultipleChoice, CtxGptHeadModel):
    """GPT with a multiple-choice classifier on the last token's state (section 3.3)."""

    _tied_weights_keys = {"lm_head.weight": "gpt.word_embeddings.weight"}
    reference_architecture = "OpenAIGPTDoubleHeadsModel"
    export_conversion = GPT_CHOICE_EXPORT
    has_auxiliary_lm_loss = True
    output_layer_name = "lm_head"

    dropout: Dropout

    def score(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) -> (batch * choices, 1) logits, with one dropout mask for all choices of an
        example, as in the released code."""
        batch = len(pooled) // choices
        examples = torch.arange(batch, device=pooled.device).repeat_interleave(choices)
        dropped = shared_dropout(pooled, examples, batch, self.dropout.p, self.training, drop_rows=False)
        return self.classifier(dropped)
