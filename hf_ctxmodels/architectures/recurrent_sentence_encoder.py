"""The encoder of families with sentence vectors pooled from bidirectional recurrent layers."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.recurrent_inputs import prepare_inputs, zero_padding
from hf_ctxmodels.architectures.sentence_encoder import SentenceEncoder
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import PoolingLayer
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.recurrent.packing import run_bidirectional


class RecurrentSentenceEncoder(SentenceEncoder):
    """Embeddings, bidirectional recurrent layers, and pooling.

    Args:
        config: With `layer_sizes`, `pooling` and `hidden_dropout_prob`.
        add_pooling_layer: Whether to compute `pooler_output`.

    Attributes:
        layers: The bidirectional layers.
        pooler: Pools the states to `pooler_output`, or None.
    """

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.build_embeddings(config)
        *widths, hidden = config.layer_sizes
        self.layers = nn.ModuleList(self.build_layer(width, hidden // 2) for width in widths)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.pooler = PoolingLayer(config.pooling) if add_pooling_layer else None
        self.post_init()

    def build_embeddings(self, config: Any) -> None:
        """Create the embeddings: `embeddings`, unless a family overrides this."""
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_size, padding_idx=config.pad_token_id)

    def build_layer(self, input_size: int, hidden_size: int) -> nn.Module:
        """Create a bidirectional layer with this width per direction, by default an LSTM."""
        return LSTM(input_size, hidden_size, state_bias=True)

    def select_tokens(self, input_ids: Tensor | None, tokens: Tensor) -> Tensor:
        """(batch, length) bool: the tokens to encode, among `tokens`, which is False at padding."""
        return tokens

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch.

        Args: those of `prepare_inputs`, whose errors it raises, and
            token_type_ids: (batch, length), checked only: heads use them to separate two texts.
            output_hidden_states: Return `hidden_states`: the embeddings and the layers' outputs.
            kwargs: Ignored arguments of other families' models.

        Returns:
            `pooler_output` (batch, hidden) is the sentence vector, pooled over all sequences of a row. States are zero
            at positions that `select_tokens` excludes.
        """
        aligned = {"output_mask": output_mask, "token_type_ids": token_type_ids}
        given = (input_ids, inputs_embeds, attention_mask, sequence_ids)
        inputs = prepare_inputs(self, *given, width=self.config.embedding_size, **aligned)
        tokens = self.select_tokens(input_ids, inputs.tokens)
        words = zero_padding(inputs.embed(self.get_input_embeddings()), tokens)
        states, _ = run_bidirectional(self.layers, self.dropout(words), inputs.pack(2, tokens), self.dropout)
        last = states[-1]
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPooling(
            last_hidden_state=last if output_mask is None else last[output_mask],
            pooler_output=None if self.pooler is None else self.pooler(last, tokens),
            hidden_states=(words, *states[1:]) if wants else None,
        )
