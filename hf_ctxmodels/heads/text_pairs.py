"""Heads on the vectors of two separately encoded texts (Conneau et al. 2017, section 3.1)."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.heads.downstream import ForSequenceClassification
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import pair_features, token_mask


class SiameseEncoder(HeadModel):
    """Encodes the two texts of a row separately with the same encoder; `token_type_ids` separate them."""

    def encode_texts(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Tensor, Tensor]:
        """Run the encoder on both texts. A single text is used as both.

        Returns:
            The output, with each token's state from its own text, and the (batch, width) vectors of both texts.
        """
        aligned = {"token_type_ids": token_type_ids, "sequence_ids": sequence_ids}
        given = self.check_word_input(input_ids, inputs_embeds, attention_mask, **aligned)
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "sequence_ids": sequence_ids}
        if token_type_ids is None or not (is_traced(given) or bool(token_type_ids.any())):
            outputs = HeadModel.encode(self, attention_mask=attention_mask, **inputs, **kwargs)
            return outputs, outputs.pooler_output, outputs.pooler_output
        first, second = _texts(given, attention_mask, token_type_ids)
        twice = {name: None if each is None else torch.cat([each, each]) for name, each in inputs.items()}
        outputs = HeadModel.encode(self, attention_mask=torch.cat([first, second]), **twice, **kwargs)

        def joined(states: Tensor) -> Tensor:
            one, other = states.chunk(2)
            return torch.where(first[..., None], one, other)

        vectors = outputs.pooler_output.chunk(2)
        outputs.last_hidden_state = joined(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(joined(states) for states in outputs.hidden_states)
        return outputs, *vectors


def _texts(given: Tensor, mask: Tensor | None, types: Tensor) -> tuple[Tensor, Tensor]:
    """Two (batch, length) masks of the first and the second text's tokens; a single text is used as both."""
    tokens, second = token_mask(given, mask), types != 0
    parts = (tokens & ~second, tokens & second)
    first, second = (part | (tokens & ~part.any(1, keepdim=True)) for part in parts)
    return first, second


class ForTextPairClassification(SiameseEncoder, ForSequenceClassification):
    """A classifier of text pairs on the features (u, v, |u - v|, u * v) of their vectors u and v.

    A single text is used as both; without `config.text_pairs`, a linear classifier of a single text's vector.
    """

    def build_head(self, config: Any) -> None:
        """Dropout and the classifier."""
        self.dropout = Dropout(config.head_dropout)
        if config.text_pairs:
            self.classifier = self.build_pair_classifier(config)
        else:
            self.classifier = nn.Linear(config.pooler_size, config.num_labels)

    def build_pair_classifier(self, config: Any) -> nn.Module:
        """The classifier of (u, v, |u - v|, u * v)."""
        raise NotImplementedError

    def encode(self, *, token_type_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the encoder on both texts; `pooler_output` is the classifier's input.

        Raises:
            CtxError: There is a second text without `config.text_pairs`.
        """
        if self.config.text_pairs:
            outputs, first, second = self.encode_texts(token_type_ids=token_type_ids, **kwargs)
            outputs.pooler_output = pair_features(first, second)
            return outputs
        if token_type_ids is not None and not is_traced(token_type_ids) and bool(token_type_ids.any()):
            raise CtxError("text_pairs is off, but there is a second text.", hint="train with text_pairs=true.")
        return super().encode(**kwargs)
