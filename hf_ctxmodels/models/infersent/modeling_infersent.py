"""InferSent (Conneau et al. 2017, arXiv 1705.02364): sentence vectors that tell how two sentences are related.

Its own here: what of two vectors is compared. The vectors of words are in `hf_ctxmodels.fixed_vectors`, the recurrence
in `hf_ctxmodels.layers.recurrent`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.fixed_vectors import FixedVectorsEncoder, FixedVectorsPreTrainedModel
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.linear import Linear
from hf_ctxmodels.layers.pooling import RowPooler
from hf_ctxmodels.layers.recurrent import LSTM
from hf_ctxmodels.modeling_base import is_traced
from hf_ctxmodels.models.infersent.configuration_infersent import CtxInferSentConfig
from hf_ctxmodels.recurrent import rows_of, run_both_ways, token_mask
from hf_ctxmodels.sentences import SentenceEncoder


class CtxInferSentPreTrainedModel(FixedVectorsPreTrainedModel):
    """InferSent's part of the model base."""

    config: CtxInferSentConfig
    base_model_prefix = "infersent"


class CtxInferSentModel(SentenceEncoder, FixedVectorsEncoder, CtxInferSentPreTrainedModel):
    """Fixed word vectors, an LSTM of both directions, and the largest value of every dimension (section 3.2.3)."""

    def __init__(self, config: CtxInferSentConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.build_vectors(config)
        widths = config.layer_sizes[:-1]
        self.layers = nn.ModuleList(LSTM(width, config.hidden_size // 2, state_bias=True) for width in widths)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.pooler = RowPooler(config.pooling) if add_pooling_layer else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        wanted: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch.

        Args:
            input_ids: (batch, length) ids; or `inputs_embeds` (batch, length, embedding) in their place.
            attention_mask: (batch, length), 1 at words and 0 at padding, which enters neither a state nor the vector.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, which starts from zero. They are one to `pooler_output`.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, hidden).
            output_hidden_states: Give `hidden_states`: the vectors, and the output of every layer.
            kwargs: What other families' models read, such as `token_type_ids`: a row is a text here.

        Returns:
            `pooler_output` (batch, hidden) is the sentence's vector. States are zero at padding, and at unknown words
            that are left out.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        aligned = {"sequence_ids": sequence_ids, "wanted": wanted, "token_type_ids": kwargs.get("token_type_ids")}
        given = self.check_words(input_ids, inputs_embeds, attention_mask, **aligned)
        tokens = token_mask(given, attention_mask, sequence_ids)
        if input_ids is not None and self.config.skip_unknown:
            known = tokens & (input_ids != self.config.unk_token_id)
            tokens = torch.where(known.any(1, keepdim=True), known, tokens)
        rows = rows_of(self.config, given, tokens, sequence_ids, 2)
        vectors = given if input_ids is None else self.word_embeddings(input_ids)
        vectors = vectors * tokens[..., None].to(vectors.dtype)
        states, _ = run_both_ways(self.layers, self.dropout(vectors), rows, self.dropout)
        last = states[-1]
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPooling(
            last_hidden_state=last if wanted is None else last[wanted],
            pooler_output=None if self.pooler is None else self.pooler(last, tokens),
            hidden_states=(vectors, *states[1:]) if wants else None,
        )


class CtxInferSentForSequenceClassification(heads.ForSequenceClassification, CtxInferSentPreTrainedModel):
    """How two texts are related: a classifier of (u, v, |u - v|, u * v), either text encoded by itself (section 3.1).

    A text alone is compared with itself; with `config.text_pairs` off, a linear classifier reads its vector.
    """

    encoder_class = CtxInferSentModel

    def build_head(self, config: CtxInferSentConfig) -> None:
        """Dropout, and the released code's layers."""
        self.dropout = Dropout(config.head_dropout)
        width, size = config.hidden_size, config.classifier_size
        if not config.text_pairs:
            self.classifier = Linear(width, config.num_labels)
            return
        layers: list[nn.Module] = [Linear(4 * width, size)]
        for output in (size, config.num_labels):
            if config.classifier_nonlinear:
                layers += [nn.Tanh(), Dropout(config.head_dropout)]
            layers.append(Linear(size, output))
        self.classifier = nn.Sequential(*layers)

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the encoder over both texts, each a row of its own; `pooler_output` is what the classifier reads.

        Raises:
            CtxError: There is a second text, and `config.text_pairs` is off.
        """
        aligned = {"token_type_ids": token_type_ids, "sequence_ids": sequence_ids}
        given = self.check_words(input_ids, inputs_embeds, attention_mask, **aligned)
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "sequence_ids": sequence_ids}
        if not self.config.text_pairs:
            if token_type_ids is not None and not is_traced(given) and bool(token_type_ids.any()):
                raise CtxError("There is a second text.", mend="set text_pairs=true, and train the classifier anew.")
            return super().encode(attention_mask=attention_mask, **inputs, **kwargs)
        first, second = self._texts(given, attention_mask, token_type_ids)
        twice = {name: None if each is None else torch.cat([each, each]) for name, each in inputs.items()}
        outputs = super().encode(attention_mask=torch.cat([first, second]), **twice, **kwargs)

        def joined(states: Tensor) -> Tensor:
            one, other = states.chunk(2)
            return torch.where(first[..., None], one, other)

        u, v = outputs.pooler_output.chunk(2)
        outputs.pooler_output = torch.cat([u, v, (u - v).abs(), u * v], -1)
        outputs.last_hidden_state = joined(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(joined(states) for states in outputs.hidden_states)
        return outputs

    def _texts(self, given: Tensor, mask: Tensor | None, types: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two of (batch, length) bool: where the words of either text are; a text alone is both."""
        tokens = token_mask(given, mask)
        second = torch.zeros_like(tokens) if types is None else types != 0
        parts = (tokens & ~second, tokens & second)
        first, second = (torch.where(part.any(1, keepdim=True), part, tokens) for part in parts)
        return first, second
