"""The encoder that BERT (Devlin et al. 2019) and its heirs share: embeddings, post-norm layers, perhaps a pooler."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import merge_with_config_defaults

from hf_ctxmodels.core.model import (
    CtxPreTrainedModel,
    EncoderOutput,
    capture_unpacked_outputs,
    check_ids,
    default_positions,
)
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.embeddings import TokenPositionTypeEmbeddings
from hf_ctxmodels.layers.transformer.block import PostNormLayer


def build_embeddings(config: Any, *, width: int, projected_size: int | None = None) -> TokenPositionTypeEmbeddings:
    """The input embeddings a configuration describes.

    Args:
        config: A family's configuration, with the Hub's standard names.
        width: Width of the tables.
        projected_size: Width of the encoder where the embeddings are projected to it; None for no projection.
    """
    return TokenPositionTypeEmbeddings(
        config.vocab_size,
        width,
        config.max_position_embeddings,
        config.type_vocab_size,
        layer_norm_eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        padding_idx=config.pad_token_id,
        projected_size=projected_size,
    )


def build_layer(config: Any) -> PostNormLayer:
    """One layer a configuration describes, by the Hub's standard names."""
    return PostNormLayer(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        activation=config.hidden_act,
        layer_norm_eps=config.layer_norm_eps,
        attention_dropout=config.attention_probs_dropout_prob,
        dropout=config.hidden_dropout_prob,
        config=config,
    )


class Encoder(CtxPreTrainedModel):
    """The forward of a post-norm encoder.

    Attributes:
        embeddings: Words, positions and segments -> (..., hidden).
        layers: The layers in the order they are applied; one object may stand at several depths.
        pooler: What makes `pooler_output` of the first tokens' states, or None.
    """

    embeddings: TokenPositionTypeEmbeddings
    layers: Iterable[nn.Module]
    pooler: nn.Module | None

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings (used when the vocabulary is resized)."""
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_unpacked_outputs
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
    ) -> EncoderOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), 1 at tokens and 0 at padding; or a ready 4-D mask.
            token_type_ids: (batch, length), 0 for the first segment, 1 for the second; None is all 0.
            position_ids: (batch, length) or (1, length); None takes `default_positions`.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal
                numbers is one sequence, whose tokens attend to each other only.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, hidden) in
                row-major order, and the last layer is computed only there (and at the first tokens, for the pooler).
            kwargs: `output_hidden_states`, `output_attentions` (eager only), and what the attention function takes.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        words = self.check_encoder_input(
            input_ids,
            inputs_embeds,
            attention_mask,
            self.config.max_sequence_length,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
        )
        check_ids("token_type_ids", token_type_ids, self.config.type_vocab_size, "type_vocab_size")
        check_ids("position_ids", position_ids, self.config.max_position_embeddings, "max_position_embeddings")
        if position_ids is None:
            position_ids = self.default_positions(words, attention_mask, sequence_ids)
        layout = self.encoder_layout(words, attention_mask, sequence_ids, **kwargs)
        hidden_states = self.embeddings(
            layout.pack(words),
            layout.pack(position_ids.expand(words.shape[:2])),
            None if token_type_ids is None else layout.pack(token_type_ids),
        )
        final_layout = layout if output_mask is None else layout.select(output_mask, and_first=self.pooler is not None)
        hidden_states = self.apply_layers(hidden_states, layout, final_layout)
        return EncoderOutput(
            last_hidden_state=final_layout.output(hidden_states),
            pooler_output=None if self.pooler is None else self.pooler(final_layout.first(hidden_states)),
            layout=layout,
        )

    def default_positions(self, words: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor:
        """(batch, length) positions: the columns of the batch, or, with `sequence_ids`, of each sequence."""
        return default_positions(words, None, sequence_ids)

    def apply_layers(self, hidden_states: Tensor, layout: Layout, final_layout: Layout) -> Tensor:
        """(..., hidden) as packed by `layout` -> the last layer's output, as packed by `final_layout`."""
        layers = list(self.layers)
        for depth, layer in enumerate(layers, start=1):
            hidden_states = layer(hidden_states, final_layout if depth == len(layers) else layout)
        return hidden_states
