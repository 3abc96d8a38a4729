"""Heads of GPT-like decoders: what they stand on, the language model, downstream heads on a row's last token."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin

from hf_ctxmodels.architectures.transformer_decoder import without_trailing_padding
from hf_ctxmodels.core.generation_cache import PreallocatedCache
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.heads.causal_lm import ForCausalLM
from hf_ctxmodels.heads.downstream import SequenceHead
from hf_ctxmodels.layers.pooling import Pooling


class DecoderHeadModel(HeadModel):
    """A head on a decoder, which has no pooler."""

    def build_encoder(self, config: Any) -> CtxPreTrainedModel:
        """Create the decoder."""
        return self.encoder_class(config)


class LastTokenHead(SequenceHead):
    """A head on the last token's state, whatever the padding.

    Without an `attention_mask`, padding tokens at the end of a row are padding, as in transformers.
    """

    @property
    def pooling(self) -> Pooling:
        """Pooling of the tokens' states."""
        return self.config.classifier_pooling or "last"  # not super().pooling, which torch.compile takes for None

    def encode(self, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the decoder; `pooler_output` is the last token's state."""
        input_ids, padding = kwargs.get("input_ids"), self.config.pad_token_id
        if attention_mask is None and isinstance(input_ids, Tensor) and input_ids.dim() == 2 and padding is not None:
            attention_mask = without_trailing_padding(input_ids, padding)
        return super().encode(attention_mask=attention_mask, **kwargs)


class GeneratesAfterAnyPadding(GenerationMixin):
    """`generate` that goes on after each row's last token, wherever the padding is, with a `PreallocatedCache`.

    transformers goes on after the last column, which is padding in a row that is padded on the right.
    """

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache: Any = model_kwargs.get("past_key_values")
        if type(cache) is DynamicCache and not cache.offloading and not hasattr(cache, "_is_user_defined"):
            model_kwargs["past_key_values"] = PreallocatedCache(config=self.config)  # type: ignore[attr-defined]

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. The prompts are returned as they were given.

        Args:
            inputs: (batch, length) token ids, or `input_ids` by name.
            args, kwargs: As in transformers; `attention_mask` (batch, length) says where the padding is.
        """
        ids, mask = kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("attention_mask")
        if not _is_padded_on_the_right(ids, mask):
            return super().generate(inputs, *args, **kwargs)
        order = torch.argsort((mask != 0).long(), dim=1, stable=True)  # type: ignore[union-attr]
        given: dict[str, Any] = {"input_ids": ids} | {
            name: value for name, value in kwargs.items() if name != "input_ids"
        }
        moved = {
            name: value.gather(1, order.to(value.device))
            for name, value in given.items()
            if isinstance(value, Tensor) and value.shape == order.shape
        }
        outputs = super().generate(None, *args, **given | moved)
        sequences = outputs if isinstance(outputs, Tensor) else outputs.sequences
        prompts = ids.repeat_interleave(len(sequences) // len(ids), 0)  # type: ignore[arg-type, union-attr]
        sequences[:, : prompts.shape[1]] = prompts
        return outputs


def _is_padded_on_the_right(ids: Any, mask: Any) -> bool:
    """Whether (batch, length) prompts have padding at a row's end."""
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.dim() != 2 or ids.shape != mask.shape:
        return False
    return bool((mask[:, -1] == 0).any())


class DecoderForCausalLM(GeneratesAfterAnyPadding, ForCausalLM):
    """The language model of a decoder; the output layer has no bias. A family ties it to its word embeddings."""

    output_layer = "lm_head"

    def build_head(self, config: Any) -> None:
        """The output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
