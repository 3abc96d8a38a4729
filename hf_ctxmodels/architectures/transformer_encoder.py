"""The Transformer encoder of BERT (Devlin et al. 2019) and its successors: embeddings, post-norm layers, pooler."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.transformer_decoder import (
    EncodedSource,
    build_memory,
    check_cache,
    token_positions,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, cumulative_token_counts, mask_of_inputs
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.convolutional_initialization import initialize_as_convolution
from hf_ctxmodels.layers.attention.layouts import Layout, build_layout, pack_tokens
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.transformer import (
    FeedForward,
    FirstTokenPooler,
    Memory,
    StackOutput,
    TokenPositionTypeEmbeddings,
    TransformerBlock,
    run_stack,
)


def build_embeddings(
    config: Any,
    *,
    width: int,
    projected_size: int | None = None,
    embeddings_class: Callable[..., TokenPositionTypeEmbeddings] = TokenPositionTypeEmbeddings,
) -> TokenPositionTypeEmbeddings:
    """Create the input embeddings, of a `width` and possibly projected, from a configuration with standard names."""
    return embeddings_class(
        config.vocab_size,
        width,
        config.max_position_embeddings,
        config.type_vocab_size,
        layer_norm_eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        padding_idx=config.pad_token_id,
        projected_size=projected_size,
    )


def build_encoder_layer(config: Any) -> TransformerBlock:
    """Create a layer from a configuration with standard names."""
    return TransformerBlock(
        config.hidden_size,
        SelfAttention(config.hidden_size, config.num_attention_heads, dropout=config.attention_probs_dropout_prob),
        FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act),
        norm="post",
        norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
        dropout=config.hidden_dropout_prob,
    )


class TransformerEncoder(CtxPreTrainedModel):
    """A post-norm encoder. The defaults are BERT's; families override them.

    Attributes:
        embeddings: Word, position and segment embeddings -> (..., hidden).
        layers: The layers in the order of application; a layer may occur several times.
        pooler: Computes `pooler_output` from the states of the first tokens, or None.
        extra_input_ids: Name of a further (batch, length) input of the embeddings -> configuration field with the
            number of ids. Such a family declares the input in the forward of its encoder, see also `HeadModel`.
        is_decoder: Whether attention is causal, with a cache, as in the decoder of `CtxEncoderDecoderModel`.
    """

    accepts_4d_masks = True
    is_decoder: bool = False
    extra_input_ids: ClassVar[Mapping[str, str]] = {}
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["TransformerBlock"]

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = self.build_embeddings(config)
        self.layers: Any = self.build_layers(config)
        self.pooler: nn.Module | None = self.build_pooler(config) if add_pooling_layer else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module. The encoder itself comes last: with `convolutional_initialization`, the first layer and
        the position embeddings are initialized again."""
        super()._init_weights(module)
        if module is self and getattr(self.config, "convolutional_initialization", False):
            positions = self.embeddings.position_embeddings
            initialize_as_convolution(self.layers[0].attention, positions, self.config.initializer_range)

    def build_embeddings(self, config: Any) -> TokenPositionTypeEmbeddings:
        """Create the embeddings."""
        return build_embeddings(config, width=config.hidden_size)

    def build_layers(self, config: Any) -> nn.Module:
        """Create the layers."""
        return nn.ModuleList(build_encoder_layer(config) for _ in range(config.num_hidden_layers))

    def build_pooler(self, config: Any) -> nn.Module:
        """Create the pooler."""
        return FirstTokenPooler(config.hidden_size, getattr(config, "pooler_act", "tanh"))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        source: EncodedSource | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Encode a batch.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length), 1 at tokens and 0 at padding; or a 4-D mask of the attention function.
            token_type_ids: (batch, length), 0 for the first segment, 1 for the second; None for 0. Ignored with
                `type_vocab_size=0`.
            position_ids: (batch, length) or (1, length); None for `default_positions`.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, whose tokens attend to each other only.
            output_mask: (batch, length) bool; `last_hidden_state` then has only these positions, (targets, hidden) in
                row-major order, and the last layer is computed only there and at the pooler's first tokens.
            past_key_values: Cache of the preceding tokens, only if `is_decoder`; `attention_mask` is then (batch, past
                + length).
            source: Output of the encoder, for layers with cross-attention.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention instead of sdpa), the ids of
                `extra_input_ids`, and arguments of the attention function.

        Raises:
            CtxError: Inputs do not match each other or the model, see `check_encoder_input`; or an argument is not
                supported.
        """
        output_flags = self.config.resolve_output_flags(kwargs)
        extra_ids = {name: kwargs.pop(name, None) for name in self.extra_input_ids}
        if past_key_values is not None and not self.is_decoder:
            raise CtxError("An encoder does not support past_key_values.", hint="remove past_key_values.")
        tokens = self.check_encoder_input(
            input_ids,
            inputs_embeds,
            mask_of_inputs(input_ids, inputs_embeds, attention_mask, past_key_values),
            self.config.max_sequence_length,
            width=getattr(self.config, "embedding_size", self.config.hidden_size),
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **extra_ids,
        )
        check_ids("position_ids", position_ids, self.config.max_position_embeddings, "max_position_embeddings")
        if self.config.type_vocab_size:
            check_ids("token_type_ids", token_type_ids, self.config.type_vocab_size, "type_vocab_size")
        for name, size_field in self.extra_input_ids.items():
            check_ids(name, extra_ids[name], getattr(self.config, size_field), size_field)
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        check_cache(past_key_values, tokens, past_length, self.config.max_sequence_length)
        if position_ids is None and self.is_decoder:
            counts = token_positions(tokens, attention_mask, sequence_ids, past_length)
            position_ids = counts + self.config.first_position
        elif position_ids is None:
            position_ids = self.default_positions(tokens, attention_mask, sequence_ids)
        layout = build_layout(
            tokens,
            attention_mask,
            sequence_ids,
            self.config,
            past_key_values=past_key_values,
            **kwargs | output_flags,
        )
        hidden_states = self.embeddings(
            pack_tokens(layout, tokens, self.get_input_embeddings()),
            layout.pack(position_ids.expand(tokens.shape[:2])),
            None if token_type_ids is None else layout.pack(token_type_ids),
            **{name: layout.pack(ids) for name, ids in extra_ids.items() if ids is not None},
        )
        outputs = self.run_layers(
            hidden_states,
            layout,
            output_mask,
            CAUSAL if self.is_decoder else self.mask_spec(layout, token_type_ids),
            None if source is None else build_memory(source, layout, past_key_values),
            past_key_values,
            **output_flags,
        )
        first_tokens = None if self.pooler is None else outputs.layout.first_tokens(outputs.computed_states)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=None if self.pooler is None else self.pooler(first_tokens),
            past_key_values=past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=None if source is None else outputs.cross_attentions,
        )

    def default_positions(self, tokens: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor:
        """(1, length) positions within the row, or (batch, length) within the sequence with `sequence_ids`."""
        if sequence_ids is None:
            return torch.arange(tokens.shape[1], device=tokens.device)[None]
        columns = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return cumulative_token_counts(columns, sequence_ids) - 1

    def mask_spec(self, layout: Layout, token_type_ids: Tensor | None) -> MaskSpec:
        """The attention pattern within a sequence; `token_type_ids` (batch, length) as in `forward`."""
        return BIDIRECTIONAL

    def run_layers(
        self,
        hidden_states: Tensor,
        layout: Layout,
        output_mask: Tensor | None,
        mask: MaskSpec,
        memory: Memory | None,
        past_key_values: Cache | None,
        **output_flags: Any,
    ) -> StackOutput:
        """Run the layers on (..., hidden) states packed by `layout`; other arguments as in `run_stack`."""
        return run_stack(
            self.layers,
            hidden_states,
            layout,
            mask,
            memory=memory,
            past_key_values=past_key_values,
            output_mask=output_mask,
            include_first_tokens=self.pooler is not None,
            **output_flags,
        )
