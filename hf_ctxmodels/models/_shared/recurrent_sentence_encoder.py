"""The encoder of families whose sentence vectors are pooled from bidirectional recurrent layers."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.pooling import RowPooler
from hf_ctxmodels.layers.recurrent.bidirectional import run_bidirectional
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.models._shared.inputs import prepare_inputs, zero_padding
from hf_ctxmodels.models._shared.sentence_encoder import SentenceEncoder


class RecurrentSentenceEncoder(SentenceEncoder):
    """Embeddings, bidirectional recurrent layers, and pooling.

    Attributes:
        layers: Bidirectional layers, of `build_layer`.
        pooler: Pools the states to `pooler_output`, or None.
    """

    layers: nn.ModuleList
    pooler: RowPooler | None

    def build_layers(self, config: Any, add_pooling_layer: bool) -> None:
        """Create the layers and the pooling, by `layer_sizes`, `pooling` and `hidden_dropout_prob`."""
        *widths, hidden = config.layer_sizes
        self.layers = nn.ModuleList(self.build_layer(width, hidden // 2) for width in widths)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.pooler = RowPooler(config.pooling) if add_pooling_layer else None

    def build_layer(self, input_size: int, hidden_size: int) -> nn.Module:
        """One bidirectional layer, each direction of this width: an LSTM."""
        return LSTM(input_size, hidden_size, state_bias=True)

    def select_tokens(self, input_ids: Tensor | None, tokens: Tensor) -> Tensor:
        """(batch, length) bool: the tokens that are read, of `tokens`, True where there is no padding."""
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

        Args:
            input_ids: (batch, length) ids; or `inputs_embeds` (batch, length, embedding) in their place.
            attention_mask: (batch, length), 1 at tokens and 0 at padding positions.
            token_type_ids: (batch, length), ignored here: heads use them to separate two texts.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, whose initial state is zero. `pooler_output` pools over all of them.
            output_mask: (batch, length) bool; given, `last_hidden_state` holds only these positions, (targets, hidden).
            output_hidden_states: Return `hidden_states`: the embeddings, and the output of every layer.
            kwargs: Arguments of other families' models, ignored.

        Returns:
            `pooler_output` (batch, hidden) is the sentence's vector. States are zero where no token is read.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
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
