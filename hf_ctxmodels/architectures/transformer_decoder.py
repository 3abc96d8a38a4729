"""Transformers with a cache: the stack of layers that decoders and encoder-decoders share, the decoder of GPT (Radford
et al. 2018) and its successors, and the base class of its heads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import is_traced, on_host, select_true
from hf_ctxmodels.core.inputs import (
    check_encoder_input,
    check_ids,
    cumulative_token_counts,
    mask_of_inputs,
    packed_sequence_ids,
    padding_mask_or_none,
)
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import (
    HeadModel,
    ItemCounts,
    ignore_padding,
    labeled_targets,
    mask_of_targets,
    mean_over_targets,
)
from hf_ctxmodels.heads.causal_lm import next_token_targets
from hf_ctxmodels.heads.downstream import ForSequenceClassification
from hf_ctxmodels.layers.attention.layouts import (
    Layout,
    build_layout,
    build_memory_layout,
    pack_tokens,
    prefix_lengths,
)
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.common import HookPoint, embedding_matrix
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy, summed_cross_entropy
from hf_ctxmodels.layers.pooling import Pooling, build_token_mask
from hf_ctxmodels.layers.transformer import (
    BlockOutput,
    FeedForward,
    Memory,
    Norm,
    StackOutput,
    TransformerBlock,
    run_stack,
)


@dataclass(frozen=True, eq=False)
class EncodedSource:
    """The encoder's output that a decoder attends to.

    Attributes:
        states: (batch, length, hidden).
        attention_mask: (batch, length), 0 at positions that are hidden from the decoder; None for none.
        sequence_ids: (batch, length) `sequence_ids` of the encoder's input, or None.
    """

    states: Tensor
    attention_mask: Tensor | None = None
    sequence_ids: Tensor | None = None


class LayerStack(nn.Module):
    """Embeddings, layers and final norm; families override them.

    The position of a token is the number of tokens before it in its sequence, wherever the padding is, so that left,
    right and no padding give the same states without `position_ids`. transformers counts columns.

    Attributes:
        norm: Position of the norms in a layer; "pre" adds a final norm.
        has_relative_positions: Whether `position_ids` are an error.
        masks: The attention pattern: one for all layers, or one for each layer.
        zeros_padding: Whether the states at padding positions are 0 in all layers.
        word_embeddings, position_embeddings: The embeddings, which are summed.
        embedding_output: Hook point of the embeddings.
    """

    norm: ClassVar[Norm] = "post"
    normalizes_embeddings: ClassVar[bool] = True
    has_relative_positions: ClassVar[bool] = False
    masks: MaskSpec | Sequence[MaskSpec] = CAUSAL
    zeros_padding: ClassVar[bool] = False
    config: Any
    _no_split_modules = ["TransformerBlock"]

    def build_modules(self, config: Any, num_layers: int, embedding_dropout: float) -> None:
        """Create all modules except the word embeddings."""
        self.build_embeddings(config)
        norm = partial(nn.LayerNorm, config.hidden_size, eps=config.layer_norm_eps)
        self.embedding_norm = norm() if self.normalizes_embeddings else nn.Identity()
        self.dropout = Dropout(embedding_dropout)
        self.layers = nn.ModuleList(self.build_layer(config) for _ in range(num_layers))
        self.final_norm = self.build_final_norm(config)
        self.embedding_output = HookPoint()

    def build_embeddings(self, config: Any) -> None:
        """Create the embeddings that are added to the word embeddings."""
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def build_layer(self, config: Any) -> nn.Module:
        """Create a layer."""
        raise NotImplementedError

    def build_final_norm(self, config: Any) -> nn.Module:
        """Create the norm of the last layer's output."""
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if self.norm == "pre" else nn.Identity()

    def mask_specs(self) -> MaskSpec | Sequence[MaskSpec]:
        """The attention pattern of a forward pass."""
        return self.masks

    def extra_embedding_ids(self, tokens: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the (batch, length) arguments of `embed` other than word embeddings and positions, by name.

        Args:
            tokens: (batch, length) ids, or (batch, length, hidden) word embeddings.
            kwargs: Keyword arguments of `forward`, from which the arguments of the embeddings are popped.
        """
        return {}

    def layers_for(self, packed_ids: Mapping[str, Tensor]) -> Iterable[Callable[..., BlockOutput]]:
        """The layers of a forward pass; `packed_ids` are the (...) arguments of `embed` except the embeddings."""
        return self.layers

    def embed(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """(..., hidden) word embeddings and (...) positions -> (..., hidden)."""
        return self.dropout(self.embedding_norm(embeddings + self.position_embeddings(position_ids)))

    def run_layers(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        word_embeddings: nn.Module,
        *,
        attention_mask: Any,
        position_ids: Tensor | None,
        sequence_ids: Tensor | None,
        cache: Cache | None,
        output_mask: Tensor | None,
        source: EncodedSource | None = None,
        prefix_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> StackOutput:
        """Validate and embed a batch, and run the layers; arguments as in `forward`."""
        tokens = check_encoder_input(
            self,
            input_ids,
            inputs_embeds,
            mask_of_inputs(input_ids, inputs_embeds, attention_mask, cache),
            None,
            width=self.config.hidden_size,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            position_ids=position_ids,
            prefix_mask=prefix_mask,
        )
        if position_ids is not None and self.has_relative_positions:
            raise CtxError(
                "The model has relative positions and takes no position_ids.",
                hint="remove position_ids; separate packed sequences by sequence_ids.",
            )
        output_flags = self.config.resolve_output_flags(kwargs)
        past_length = 0 if cache is None else cache.get_seq_length()
        limit = self.config.max_sequence_length
        check_cache(cache, tokens, past_length, limit)
        if limit is not None:
            check_ids("position_ids", position_ids, limit, "max_position_embeddings")
        masks = self.mask_specs()
        if position_ids is None:
            position_ids = token_positions(tokens, attention_mask, sequence_ids, past_length)
        elif all(value is None for value in (attention_mask, sequence_ids, cache, source)) and _is_causal(masks):
            sequence_ids = packed_sequence_ids(position_ids, tokens.shape[:2])
        embedding_ids = self.extra_embedding_ids(tokens, kwargs)
        embedding_ids["position_ids"] = position_ids.expand(tokens.shape[:2])
        kwargs |= output_flags
        layout = build_layout(tokens, attention_mask, sequence_ids, self.config, past_key_values=cache, **kwargs)
        if prefix_mask is not None:
            if (not is_traced(tokens) and int(past_length)) or getattr(layout, "custom_mask", None) is not None:
                raise CtxError(
                    "prefix_mask cannot be combined with a custom attention_mask, or past_key_values with tokens.",
                    hint="encode the whole prefix in the first forward pass, with a dynamic cache.",
                )
            prefixes = prefix_lengths(layout, prefix_mask)
            if isinstance(masks, MaskSpec):
                masks = replace(masks, prefix_lengths=prefixes)
            else:
                specs = {mask: replace(mask, prefix_lengths=prefixes) for mask in masks}  # layers share prepared masks
                masks = [specs[mask] for mask in masks]
        packed_ids = {name: layout.pack(tensor) for name, tensor in embedding_ids.items()}
        return run_stack(
            self.layers_for(packed_ids),
            # no reference to the embeddings: they can be freed
            self._embed_packed(pack_tokens(layout, tokens, word_embeddings), word_embeddings, packed_ids),
            layout,
            masks,
            memory=None if source is None else build_memory(source, layout, cache),
            past_key_values=cache,
            final_norm=self.final_norm,
            output_mask=output_mask,
            zero_padding=self.zeros_padding,
            **output_flags,
        )

    def _embed_packed(self, tokens: Tensor, word_embeddings: nn.Module, extra_ids: dict[str, Tensor]) -> Tensor:
        """(...) ids or (..., hidden) word embeddings -> (..., hidden) input of the first layer."""
        vectors = tokens if tokens.is_floating_point() else word_embeddings(tokens)
        return self.embedding_output(self.embed(vectors, **extra_ids))


def build_memory(source: EncodedSource, layout: Layout, cache: Cache | None) -> Memory:
    """The memory of cross-attention for a decoder's `layout`.

    Consecutive rows of the batch may share a row of the source, see `SharedSourceCache`.
    """
    targets_per_source = getattr(getattr(cache, "cross_attention_cache", None), "targets_per_source", 1)
    # the first of each group of equal rows
    states, mask = source.states[::targets_per_source], source.attention_mask
    if mask is not None and targets_per_source > 1:
        mask = on_host(lambda rows: rows[::targets_per_source], mask)
    memory_layout = build_memory_layout(layout, states, mask, source.sequence_ids)
    return Memory(memory_layout.pack(states), memory_layout, BIDIRECTIONAL, targets_per_source)


def token_positions(
    tokens: Tensor, attention_mask: Any, sequence_ids: Tensor | None, past_length: int | Tensor
) -> Tensor:
    """(batch, length) number of tokens before each token in its sequence, 0 at leading padding.

    `attention_mask` is (batch, past + length), where `past_length` columns are in the cache; other masks are ignored.
    """
    length = tokens.shape[1]
    padding = padding_mask_or_none(attention_mask)
    if sequence_ids is not None:
        return (cumulative_token_counts(build_token_mask(tokens, padding, sequence_ids), sequence_ids) - 1).clamp(min=0)
    if padding is not None:
        return ((padding != 0).cumsum(1)[:, -length:] - 1).clamp(min=0)
    return torch.arange(length, device=tokens.device)[None] + past_length


def _is_causal(masks: MaskSpec | Sequence[MaskSpec]) -> bool:
    """Whether the attention of all layers is causal."""
    return all(mask.causal for mask in ([masks] if isinstance(masks, MaskSpec) else masks))


def extend_languages(langs: Tensor, length: int) -> Tensor:
    """Truncate or extend (batch, steps) language ids to (batch, length); new tokens have the last language."""
    return nn.functional.pad(langs, (0, max(0, length - langs.shape[1])), mode="replicate")[:, :length]


def check_cache(cache: Cache | None, tokens: Tensor, past_length: int | Tensor, limit: int | None) -> None:
    """Raise CtxError if cache and input have different batch sizes, or together exceed the maximum length, if any."""
    if is_traced(tokens):
        return
    length, past_length = tokens.shape[1], int(past_length)
    if limit is not None and past_length + length > limit:
        cached = f", {past_length} of them in past_key_values" if past_length else ""
        raise CtxError(
            f"The sequence has {past_length + length} tokens{cached}, above the model's max_sequence_length={limit} "
            "(see max_position_embeddings).",
            hint=f"truncate it (tokenizer(..., truncation=True, max_length={limit})), generate fewer new tokens, or "
            "split it into windows.",
        )
    self_attention_cache = getattr(cache, "self_attention_cache", cache)
    for layer in getattr(self_attention_cache, "layers", []) if past_length else []:
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[0] != tokens.shape[0]:
            raise CtxError(
                f"past_key_values has batch size {keys.shape[0]}, but the input has {tokens.shape[0]}.",
                hint="pass a cache of the same batch, or repeat its rows with batch_repeat_interleave.",
            )


class TransformerDecoder(LayerStack, CtxPreTrainedModel):
    """A Transformer with one stack of layers, by default causal and post-norm with normalized embeddings.

    XLM also uses it bidirectionally.
    """

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
        prefix_mask: Tensor | None = None,
        source: EncodedSource | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Encode a batch. Other arguments and errors as in `TransformerEncoder.forward`.

        Args:
            attention_mask: (batch, length), with a cache (batch, past + length): 1 at tokens and 0 at padding; or a
                4-D mask of the attention function.
            position_ids: (batch, length) or (1, length); None for the number of tokens before each token. In a causal
                model without `attention_mask`, `sequence_ids` and cache, positions that do not increase by 1 separate
                packed sequences, as in transformers' GPT-2; the labels of their first tokens must be -100.
            past_key_values: The cache of the preceding tokens, from an earlier forward; it is extended in place.
            use_cache: Return `past_key_values`; None returns them if they are passed. Without a cache the batch is
                computed unpadded.
            prefix_mask: (batch, length), 1 at the first tokens of each sequence, to which all of its tokens attend
                (Raffel et al. 2020, section 3.2.1); None for none. Not with a cache that holds tokens.
            source: The encoder's output, for layers with cross-attention.
        """
        cache = DynamicCache(config=self.config) if use_cache and past_key_values is None else past_key_values
        outputs = self.run_layers(
            input_ids,
            inputs_embeds,
            self.word_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            sequence_ids=sequence_ids,
            cache=cache,
            output_mask=output_mask,
            prefix_mask=prefix_mask,
            source=source,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=None if source is None else outputs.cross_attentions,
        )


class DecoderHeadModel(HeadModel):
    """A head on a decoder, which has no pooler: sequence heads read the state of the last token, or `default_pooling`.

    For these heads, trailing padding tokens are masked if there is no `attention_mask`, as in transformers.

    With `has_auxiliary_lm_loss`, training adds a language modeling loss, weighted by `config.lm_loss_weight`, to the
    loss of the task (Radford et al. 2018, section 3.2, equation 5). It is the mean over the tokens of a row and then
    over rows, as in the released code of GPT. A target with several rows (choices) contributes their mean, and a row
    with several targets (tokens) contributes its loss once per target. The number of targets is therefore the same as
    in the loss of the task, and `num_items_in_batch` makes gradient accumulation exact for both terms. The term is
    omitted with `inputs_embeds`, whose tokens are unknown, and in evaluation mode.

    Attributes:
        has_auxiliary_lm_loss: Whether the head adds the language modeling loss. It is computed by the output layer,
            or without one by the word embeddings, to which it is tied.
    """

    has_auxiliary_lm_loss: ClassVar[bool] = False
    default_pooling: ClassVar[Pooling] = "last"

    def build_encoder(self, config: Any) -> CtxPreTrainedModel:
        """Create the decoder."""
        return self.encoder_class(config)

    @property
    def supports_label_smoothing(self) -> bool:
        """Whether Trainer can smooth the loss, which has no auxiliary language modeling loss."""
        return super().supports_label_smoothing and not (self.has_auxiliary_lm_loss and self.config.lm_loss_weight)

    @property
    def pooling(self) -> Pooling | None:
        """Pooling of the token states, by default `default_pooling`; None for heads that do not pool."""
        return self.config.classifier_pooling or self.default_pooling if self.has_configurable_pooling else None

    def encode(self, *, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the decoder; with an auxiliary loss, the output has the attribute `encoded_tokens`: the (batch, length)
        `input_ids` (None with `inputs_embeds`), `attention_mask` and `sequence_ids`."""
        input_ids, pad_token_id = inputs.get("input_ids"), self.config.pad_token_id
        cache = inputs.get("past_key_values")
        if (
            attention_mask is None
            and isinstance(input_ids, Tensor)
            and input_ids.dim() == 2
            and self.uses_pooled_output
            and pad_token_id is not None
        ):
            attention_mask = on_host(lambda ids: is_not_trailing_padding(ids, pad_token_id), input_ids)
            if cache is not None:  # all tokens in the cache are visible
                past_length = cache.get_seq_length()
                attention_mask = on_host(lambda mask: F.pad(mask, (past_length, 0), value=True), attention_mask)
        outputs = super().encode(attention_mask=attention_mask, **inputs)
        if self.has_auxiliary_lm_loss:
            mask = mask_of_inputs(input_ids, None, attention_mask, cache)
            outputs.encoded_tokens = (input_ids, mask, inputs.get("sequence_ids"))
        return outputs

    def add_regularization(
        self, loss: Tensor, outputs: Any, targets: Tensor, name: str, num_items: ItemCounts
    ) -> Tensor:
        """Add the `penalty` and the weighted language modeling loss, in training."""
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
        mask = padding_mask_or_none(mask)
        next_tokens = next_token_targets(ignore_padding(input_ids, mask), input_ids.shape[1], mask, sequence_ids)
        has_target = mask_of_targets(next_tokens)
        rows_per_example = len(input_ids) // len(target_counts)
        row_weights = target_counts.repeat_interleave(rows_per_example) / rows_per_example
        row_weights = row_weights / has_target.sum(1).clamp(min=1)
        weights = select_true(row_weights[:, None].expand_as(next_tokens), has_target)
        states = self.output_layer_input(select_true(outputs.last_hidden_state, has_target))
        output_layer = self.get_output_embeddings()
        if output_layer is not None:
            return summed_cross_entropy(output_layer, states, labeled_targets(next_tokens), weights)
        if not self.config.tie_word_embeddings:
            raise CtxError(
                f"{type(self).__name__} has no output layer, and tie_word_embeddings is false, but "
                f"lm_loss_weight={self.config.lm_loss_weight}.",
                hint="set lm_loss_weight=0.",
            )
        matrix = embedding_matrix(self.get_input_embeddings(), self.config.vocab_size)
        return chunked_cross_entropy(states, matrix, None, labeled_targets(next_tokens), weights)


class DecoderForSequenceClassification(ForSequenceClassification):
    """A sequence classifier with a named argument `past_key_values`, which PEFT's prefix tuning looks for."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute logits (batch, num_labels), and the loss with `labels`. Other arguments as in the encoder's forward.

        Args:
            labels: As in `heads.ForSequenceClassification.forward`.
            past_key_values: The cache of a prefix; `attention_mask` is then (batch, prefix + length).
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            past_key_values=past_key_values,
            **{**kwargs, "return_dict": True},
        )


def is_not_trailing_padding(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """(batch, length) bool: False at the padding tokens at the end of a row; True in a row of padding tokens only."""
    is_token = input_ids != pad_token_id
    before_last_token = is_token.flip(1).cumsum(1).flip(1) > 0
    return before_last_token | ~is_token.any(1, keepdim=True)
