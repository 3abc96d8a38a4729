"""InferSent (Conneau et al. 2017, arXiv 1705.02364): sentence vectors that tell how two sentences are related.

Its own here: what of two vectors is compared. The encoder is in `hf_ctxmodels.recurrent_sentences`, its words' vectors
in `hf_ctxmodels.fixed_vectors`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels import heads
from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.fixed_vectors import FixedVectorsEncoder, FixedVectorsPreTrainedModel
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.linear import Linear
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.modeling_base import is_traced
from hf_ctxmodels.models.infersent.configuration_infersent import CtxInferSentConfig
from hf_ctxmodels.recurrent import check_words
from hf_ctxmodels.recurrent_sentences import RecurrentSentenceEncoder


class CtxInferSentPreTrainedModel(FixedVectorsPreTrainedModel):
    """InferSent's part of the model base."""

    config: CtxInferSentConfig
    base_model_prefix = "infersent"


class CtxInferSentModel(RecurrentSentenceEncoder, FixedVectorsEncoder, CtxInferSentPreTrainedModel):
    """Fixed word vectors, an LSTM of both directions, and the largest value of every dimension (section 3.2.3)."""

    def __init__(self, config: CtxInferSentConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.build_vectors(config)
        self.build_layers(config, add_pooling_layer)
        self.post_init()

    def tokens_read(self, input_ids: Tensor | None, tokens: Tensor) -> Tensor:
        """(batch, length) bool: not unknown words, unless a row has no other."""
        if input_ids is None or not self.config.skip_unknown:
            return tokens
        known = tokens & (input_ids != self.config.unk_token_id)
        return torch.where(known.any(1, keepdim=True), known, tokens)


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
        *,
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
        given = check_words(self, input_ids, inputs_embeds, attention_mask, **aligned)
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
