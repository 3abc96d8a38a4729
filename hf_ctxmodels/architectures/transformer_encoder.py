"""The encoder of BERT (Devlin et al. 2019) and its successors: embeddings, post-norm layers, optional pooler."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, cumulative_token_counts
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import Layout, build_layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.transformer import (
    FeedForward,
    FirstTokenPooler,
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
    kind: Callable[..., TokenPositionTypeEmbeddings] = TokenPositionTypeEmbeddings,
) -> TokenPositionTypeEmbeddings:
    """The input embeddings of a configuration.

    Args:
        config: A configuration with the Hub's standard names.
        width: Width of the tables.
        projected_size: Width to which the embeddings are projected; None for no projection.
        kind: Makes them.
    """
    return kind(
        config.vocab_size,
        width,
        config.max_position_embeddings,
        config.type_vocab_size,
        layer_norm_eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        padding_idx=config.pad_token_id,
        projected_size=projected_size,
    )


def build_layer(config: Any) -> TransformerBlock:
    """A layer of a configuration with the Hub's standard names."""
    return TransformerBlock(
        config.hidden_size,
        SelfAttention(config.hidden_size, config.num_attention_heads, dropout=config.attention_probs_dropout_prob),
        FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act),
        norm="post",
        norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
        dropout=config.hidden_dropout_prob,
    )


class TransformerEncoder(CtxPreTrainedModel):
    """A post-norm encoder, BERT's unless a family overrides its parts.

    Args:
        config: A configuration with the Hub's standard names.
        add_pooling_layer: Whether to compute `pooler_output`.

    Attributes:
        embeddings: Words, positions and segments -> (..., hidden).
        layers: The layers in the order of application; a layer may occur several times.
        pooler: Makes `pooler_output` of the first tokens' states, or None.
        extra_input_ids: Names of further ids of every token, (batch, length) each, that the embeddings take as arguments ->
            the configuration's field with their number.
    """

    accepts_4d_masks = True
    extra_input_ids: ClassVar[Mapping[str, str]] = {}
    _input_embed_layer = "word_embeddings"

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = self.build_embeddings(config)
        self.layers: Any = self.build_layers(config)
        self.pooler: nn.Module | None = self.build_pooler(config) if add_pooling_layer else None
        self.post_init()

    def build_embeddings(self, config: Any) -> TokenPositionTypeEmbeddings:
        """Create the embeddings."""
        return build_embeddings(config, width=config.hidden_size)

    def build_layers(self, config: Any) -> nn.Module:
        """Create the layers."""
        return nn.ModuleList(build_layer(config) for _ in range(config.num_hidden_layers))

    def build_pooler(self, config: Any) -> nn.Module:
        """Create the pooler."""
        return FirstTokenPooler(config.hidden_size)

    @merge_with_config_defaults
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
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), 1 at tokens and 0 at padding; or a ready 4-D mask.
            token_type_ids: (batch, length), 0 for the first segment, 1 for the second; None is all 0. Not read with
                `type_vocab_size=0`.
            position_ids: (batch, length) or (1, length); None for `default_positions`.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal
                numbers is one sequence, whose tokens attend to each other only.
            output_mask: (batch, length) bool; `last_hidden_state` then holds only these positions, (targets, hidden) in
                row-major order, and the last layer is computed only there and at the pooler's first tokens.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention in place of sdpa), `extra_input_ids`,
                and arguments of the attention function.

        Raises:
            CtxError: Inputs do not match each other or the model, see `check_encoder_input`; or one is not read.
        """
        recorded = self.config.resolve_output_flags(kwargs)
        further = {name: kwargs.pop(name, None) for name in self.extra_input_ids}
        if kwargs.get("past_key_values") is not None:
            raise CtxError("past_key_values is given, but an encoder has no cache.", hint="leave it out.")
        places = {"sequence_ids": sequence_ids, "output_mask": output_mask}
        ids = {"token_type_ids": token_type_ids, "position_ids": position_ids, **further}
        words = self._checked_input(input_ids, inputs_embeds, attention_mask, ids, **places)
        if position_ids is None:
            position_ids = self.default_positions(words, attention_mask, sequence_ids)
        layout = build_layout(words, attention_mask, sequence_ids, self.config, **kwargs | recorded)
        hidden_states = self.embeddings(
            layout.pack(words),
            layout.pack(position_ids.expand(words.shape[:2])),
            None if token_type_ids is None else layout.pack(token_type_ids),
            **{name: layout.pack(ids) for name, ids in further.items() if ids is not None},
        )
        mask = self.mask_spec(layout, token_type_ids)
        outputs = self.run_layers(hidden_states, layout, output_mask, mask, **recorded)
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=None
            if self.pooler is None
            else self.pooler(outputs.layout.first_tokens(outputs.computed_states)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _checked_input(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        ids: Mapping[str, Tensor | None],
        **places: Tensor | None,
    ) -> Tensor:
        """(batch, length) ids or (batch, length, hidden) embeddings; raises CtxError if an argument does not fit."""
        width = getattr(self.config, "embedding_size", self.config.hidden_size)
        limit = self.config.max_sequence_length
        words = self.check_encoder_input(input_ids, inputs_embeds, attention_mask, limit, width=width, **places, **ids)
        limits = {
            "token_type_ids": "type_vocab_size",
            "position_ids": "max_position_embeddings",
            **self.extra_input_ids,
        }
        for name, field in limits.items():
            if name != "token_type_ids" or self.config.type_vocab_size:  # without segments they are not read
                check_ids(name, ids[name], getattr(self.config, field), field)
        return words

    def default_positions(self, words: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor:
        """(batch, length) positions within the row, or within the sequence with `sequence_ids`."""
        return (
            cumulative_token_counts(torch.ones(words.shape[:2], dtype=torch.bool, device=words.device), sequence_ids)
            - 1
        )

    def mask_spec(self, layout: Layout, token_type_ids: Tensor | None) -> MaskSpec:
        """Which tokens of its sequence each token sees: all. `token_type_ids` (batch, length) as in `forward`."""
        return BIDIRECTIONAL

    def run_layers(
        self,
        hidden_states: Tensor,
        layout: Layout,
        output_mask: Tensor | None,
        mask: MaskSpec = BIDIRECTIONAL,
        **recorded: Any,
    ) -> StackOutput:
        """Run the layers on (..., hidden) states packed by `layout`; `mask` and `recorded`, outputs to record, as in
        `run_stack`."""
        return run_stack(
            self.layers,
            hidden_states,
            layout,
            mask,
            output_mask=output_mask,
            include_first_tokens=self.pooler is not None,
            **recorded,
        )
