"""Families whose sentence vectors are pooled from recurrent layers of both directions: the encoder they share."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.pooling import RowPooler, token_mask
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.models._shared.recurrent import check_words, rows_of, run_both_ways
from hf_ctxmodels.models._shared.sentence_encoder import SentenceEncoder


class RecurrentSentenceEncoder(SentenceEncoder):
    """Looks words up, runs over them in both directions, and pools the states.

    Attributes:
        layers: LSTM layers of both directions, or what `build_layer` makes.
        pooler: What makes `pooler_output`, or None.
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
        """One layer, each direction of this width."""
        return LSTM(input_size, hidden_size, state_bias=True)

    def tokens_read(self, input_ids: Tensor | None, tokens: Tensor) -> Tensor:
        """(batch, length) bool: which of the `tokens`, which are no padding, are read at all."""
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
            attention_mask: (batch, length), 1 at tokens and 0 at padding, which enters neither a state nor the vector.
            token_type_ids: (batch, length), not read: a row is one text, unless a head tells two apart.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, which starts from zero. They are one to `pooler_output`.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, hidden).
            output_hidden_states: Give `hidden_states`: the embeddings, and the output of every layer.
            kwargs: What other families' models read, such as `position_ids`.

        Returns:
            `pooler_output` (batch, hidden) is the sentence's vector. States are zero where nothing is read.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        aligned = {"sequence_ids": sequence_ids, "output_mask": output_mask, "token_type_ids": token_type_ids}
        given = check_words(self, input_ids, inputs_embeds, attention_mask, **aligned)
        tokens = self.tokens_read(input_ids, token_mask(given, attention_mask, sequence_ids))
        rows = rows_of(self.config, given, tokens, sequence_ids, 2)
        words = given if input_ids is None else self.get_input_embeddings()(input_ids)
        words = words * tokens[..., None].to(words.dtype)
        states, _ = run_both_ways(self.layers, self.dropout(words), rows, self.dropout)
        last = states[-1]
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPooling(
            last_hidden_state=last if output_mask is None else last[output_mask],
            pooler_output=None if self.pooler is None else self.pooler(last, tokens),
            hidden_states=(words, *states[1:]) if wants else None,
        )
