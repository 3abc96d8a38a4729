"""The Transformer decoder of GPT (Radford et al. 2018) and its successors, and the base class of its heads."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.layer_stack import LayerStack, mask_of_new_tokens
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import HeadModel, ItemCounts, mean_over_targets
from hf_ctxmodels.heads.causal_lm import next_token_targets
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy, summed_cross_entropy
from hf_ctxmodels.layers.pooling import Pooling
from hf_ctxmodels.layers.transformer import FeedForward, TransformerBlock


class TransformerDecoder(LayerStack, CtxPreTrainedModel):
    """A causal Transformer, by default post-norm with normalised embeddings."""

    accepts_4d_masks = True
    _input_embed_layer = "word_embeddings"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.word_embeddings = self.build_word_embeddings(config)
        self.build_modules(config, config.num_hidden_layers, config.embedding_dropout_prob)
        self.post_init()

    def build_word_embeddings(self, config: Any) -> nn.Embedding:
        """Create the word embeddings."""
        return nn.Embedding(config.vocab_size, config.hidden_size)

    def build_layer(self, config: Any) -> nn.Module:
        """Create a layer."""
        return TransformerBlock(
            config.hidden_size,
            SelfAttention(config.hidden_size, config.num_attention_heads, dropout=config.attention_probs_dropout_prob),
            FeedForward(config.hidden_size, config.feed_forward_size, config.hidden_act),
            norm=self.norm,
            norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
            dropout=config.hidden_dropout_prob,
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Encode a batch.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length), with a cache (batch, past + length): 1 at tokens and 0 at padding; or a
                4-D mask of the attention function.
            position_ids: (batch, length) or (1, length); None for the number of tokens before each token.
            sequence_ids: (batch, length), 0 at padding; a run of equal numbers is one sequence, which attends to itself
                only.
            past_key_values: The cache of the preceding tokens, from an earlier forward; it is extended in place.
            use_cache: Return `past_key_values`; None returns them if they are passed. Without a cache the batch is
                computed unpadded.
            output_mask: (batch, length) bool; `last_hidden_state` then has only these positions, (targets, hidden) in
                row-major order, and the last layer is computed only there.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention instead of sdpa), and arguments of
                the attention function.

        Raises:
            CtxError: Inputs do not match each other, the cache or the model.
        """
        cache = DynamicCache(config=self.config) if use_cache and past_key_values is None else past_key_values
        words = self.check_encoder_input(
            input_ids,
            inputs_embeds,
            mask_of_new_tokens(attention_mask, inputs_embeds if input_ids is None else input_ids, cache),
            None,
            width=self.config.hidden_size,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            position_ids=position_ids,
        )
        outputs = self.run_layers(
            words,
            self.word_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            sequence_ids=sequence_ids,
            cache=cache,
            output_mask=output_mask,
            **kwargs,
        )
        return BaseModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class DecoderHeadModel(HeadModel):
    """A head on a decoder, which has no pooler: sequence heads read the state of the last token.

    For these heads, trailing padding tokens are masked if there is no `attention_mask`, as in transformers.

    With `has_auxiliary_lm_loss`, training adds a language modelling loss, weighted by `config.lm_loss_weight`, to the
    loss of the task (Radford et al. 2018, section 3.2, equation 5). It is the mean over the tokens of a row and then
    over rows, as in the released code of GPT. A target with several rows (choices) contributes their mean, and a row
    with several targets (tokens) contributes its loss once per target. The number of targets is therefore the same as
    in the loss of the task, and `num_items_in_batch` makes gradient accumulation exact for both terms. The term is
    omitted with `inputs_embeds`, whose tokens are unknown, and in evaluation mode.

    Attributes:
        has_auxiliary_lm_loss: Whether the head adds the language modelling loss. It is computed by the `output_layer`,
            or without one by the word embeddings, to which it is tied.
    """

    has_auxiliary_lm_loss: ClassVar[bool] = False

    def build_encoder(self, config: Any) -> CtxPreTrainedModel:
        """Create the decoder."""
        return self.encoder_class(config)

    @property
    def pooling(self) -> Pooling | None:
        """Pooling of the token states, by default "last"; None for heads that do not pool."""
        return self.config.classifier_pooling or "last" if self.has_configurable_pooling else None

    def encode(self, *, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the decoder; with an auxiliary loss, the output has the attribute `encoded_tokens`: the (batch, length)
        `input_ids` (None with `inputs_embeds`), `attention_mask` and `sequence_ids`."""
        input_ids, pad_token_id = inputs.get("input_ids"), self.config.pad_token_id
        is_unmasked = attention_mask is None and isinstance(input_ids, Tensor) and input_ids.dim() == 2
        if is_unmasked and self.uses_pooled_output and pad_token_id is not None:
            attention_mask = mask_trailing_padding(inputs["input_ids"], pad_token_id)
        outputs = super().encode(attention_mask=attention_mask, **inputs)
        if self.has_auxiliary_lm_loss:
            outputs.encoded_tokens = (input_ids, attention_mask, inputs.get("sequence_ids"))
        return outputs

    def add_regularization(
        self, loss: Tensor, outputs: Any, targets: Tensor, name: str, num_items: ItemCounts
    ) -> Tensor:
        """Add the `penalty` and the weighted language modelling loss, in training."""
        loss = super().add_regularization(loss, outputs, targets, name, num_items)
        has_lm_loss = self.has_auxiliary_lm_loss and self.training and self.config.lm_loss_weight
        if not has_lm_loss or outputs.encoded_tokens[0] is None:
            return loss
        total = self._summed_lm_loss(outputs, targets)
        return loss + self.config.lm_loss_weight * mean_over_targets(total, targets, name, num_items)

    def _summed_lm_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The sum of the losses of the rows, each times its number of targets; the rows of an example are adjacent."""
        is_target = targets != IGNORE_INDEX
        if targets.is_floating_point():
            is_target = torch.ones_like(is_target)
        target_counts = is_target.flatten(1).sum(1).float() if targets.dim() > 1 else is_target.float()
        input_ids, mask, sequence_ids = outputs.encoded_tokens
        mask = mask if mask is not None and mask.dim() == 2 else None
        labels = input_ids if mask is None else input_ids.masked_fill(mask == 0, IGNORE_INDEX)
        next_tokens = next_token_targets(labels, input_ids.shape[1], mask, sequence_ids)
        token_mask = next_tokens != IGNORE_INDEX
        rows_per_example = len(input_ids) // len(target_counts)
        row_weights = target_counts.repeat_interleave(rows_per_example) / rows_per_example
        row_weights = row_weights / token_mask.sum(1).clamp(min=1)
        weights = row_weights[:, None].expand_as(next_tokens)[token_mask]
        states = self.decoder_input(outputs.last_hidden_state[token_mask])
        output_layer = self.get_output_embeddings()
        if output_layer is not None:
            return summed_cross_entropy(output_layer, states, next_tokens[token_mask], weights)
        if not self.config.tie_word_embeddings:
            raise CtxError(
                f"{type(self).__name__} has no output layer, and tie_word_embeddings is false, but "
                f"lm_loss_weight={self.config.lm_loss_weight}.",
                hint="set lm_loss_weight=0.",
            )
        embeddings = self.get_input_embeddings()
        if type(embeddings) is nn.Embedding:
            matrix = embeddings.weight
        else:  # a module that replaces them, such as an adapter
            matrix = embeddings(torch.arange(self.config.vocab_size, device=self.device))
        return chunked_cross_entropy(states, matrix, None, next_tokens[token_mask], reduction="sum", weights=weights)


def mask_trailing_padding(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """(batch, length) bool: False at the padding tokens at the end of a row; True in a row of padding tokens only."""
    is_token = input_ids != pad_token_id
    before_last_token = is_token.flip(1).cumsum(1).flip(1) > 0
    return before_last_token | ~is_token.any(1, keepdim=True)
