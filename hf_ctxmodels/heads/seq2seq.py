"""A head that writes: an encoder, a decoder that reads its own text so far, and a softmax over the target's words."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, is_traced
from hf_ctxmodels.heads.base import IGNORED, HeadModel, ItemCounts, vocabulary_loss
from hf_ctxmodels.layers.lm_loss.chunked import summed_cross_entropy


@dataclass
class ConditionalGenerationOutput(ModelOutput):
    """Output of `ForConditionalGeneration`.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, steps, target vocabulary); None with `labels`.
        past_key_values: What the decoder remembers; None unless asked for, and with `labels`.
        hidden_states: Of the encoder.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None


class ForConditionalGeneration(HeadModel):
    """Predicts a text's translation, each token from the text and from the tokens before it.

    The configuration has `target_vocab_size` and `decoder_start_token_id`, and `num_languages` where one is told. A
    family names `GenerationMixin` among the bases of its own class, where transformers looks for it.

    Attributes:
        prediction: From the decoder's states to logits.
        reads_languages: Whether the decoder is told which language to write.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    reads_languages: ClassVar[bool] = False
    prediction: nn.Linear

    @abstractmethod
    def start(self, encoded: Any) -> Any:
        """What the decoder remembers before the first token."""

    @abstractmethod
    def decode(
        self,
        ids: Tensor,
        target_mask: Tensor | None,
        encoded: Any,
        attention_mask: Tensor | None,
        state: Any,
        languages: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """Run the decoder.

        Args:
            ids: (batch, steps) each token before the one that is to be predicted.
            asked: (batch, steps) bool, where a token is to be predicted; None for everywhere.
            encoded: The encoder's output.
            attention_mask: Of the text.
            state: What it remembers.
            languages: (batch,) which one to write, or None.

        Returns:
            (asked, hidden) states, or (batch, steps, hidden), and what it then remembers (None where `asked`).
        """

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which `generate` runs once."""
        return self.base_model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first step makes the cache

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        target_languages: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> ConditionalGenerationOutput:
        """The loss where `labels` are given, else logits. Other arguments as in the encoder's forward.

        Args:
            decoder_input_ids: (batch, steps) target ids, each the one before that to be predicted; None makes them of
                `labels`, behind `config.decoder_start_token_id`.
            labels: (batch, steps) target ids; -100 where none is to be predicted.
            encoder_outputs: The encoder's, where it ran before.
            past_key_values: What an earlier forward gave; `decoder_input_ids` go on from there.
            use_cache: Give `past_key_values`.
            target_languages: (batch,) the number of the language to write, of decoders that are told; None for the
                first.

        Raises:
            CtxError: Input that does not fit together or the model.
        """
        if encoder_outputs is None:
            inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
            encoder_outputs = self.encode(attention_mask=attention_mask, **inputs, **kwargs)
        decoder_input_ids = self.decoder_ids(encoder_outputs, decoder_input_ids, labels)
        self._check_languages(len(decoder_input_ids), target_languages)
        state = self.start(encoder_outputs) if past_key_values is None else past_key_values
        given = (encoder_outputs, attention_mask, state, target_languages)
        loss = logits = None
        if labels is None:
            logits, state = self.predict(decoder_input_ids, *given)
        else:
            loss = self.written_loss(decoder_input_ids, labels, *given, num_items_in_batch)
        return ConditionalGenerationOutput(
            loss=loss,
            logits=logits,
            past_key_values=state if use_cache and labels is None else None,
            hidden_states=encoder_outputs.hidden_states,
        )

    def predict(
        self, ids: Tensor, encoded: Any, attention_mask: Tensor | None, state: Any, languages: Tensor | None
    ) -> tuple[Tensor, Any]:
        """(batch, steps, target vocabulary) logits, and what the decoder then remembers; see `decode`."""
        states, state = self.decode(ids, None, encoded, attention_mask, state, languages)
        return self.prediction(states), state

    def written_loss(
        self,
        ids: Tensor,
        labels: Tensor,
        encoded: Any,
        attention_mask: Tensor | None,
        state: Any,
        languages: Tensor | None,
        counts: ItemCounts,
    ) -> Tensor:
        """Mean cross-entropy in nats of the labels; see `decode` and `vocabulary_loss`."""
        given, target_mask = (encoded, attention_mask, state, languages), labels != IGNORED
        if is_traced(labels) or not self.config.unpad:
            states = self.decode(ids, None, *given)[0][target_mask]
        else:
            states, _ = self.decode(ids, target_mask, *given)
        return vocabulary_loss(self._summed_loss, states, labels, self.config.target_vocab_size, counts)

    def decoder_ids(self, encoded: Any, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """(batch, steps) what the decoder reads: what is given, or the labels, shifted.

        Raises:
            CtxError: Neither is given, or they do not fit together or the text.
        """
        rows = len(encoded.last_hidden_state)
        if ids is None and labels is None:
            raise CtxError("Give decoder_input_ids, or labels, or call generate.")
        for name, tensor in {"decoder_input_ids": ids, "labels": labels}.items():
            if tensor is not None and (tensor.dim() != 2 or len(tensor) != rows or not tensor.shape[1]):
                raise CtxError(f"{name} is {tuple(tensor.shape)}, expected ({rows}, steps), as many rows as texts.")
        if ids is not None and labels is not None and ids.shape != labels.shape:
            raise CtxError(f"labels is {tuple(labels.shape)}, but decoder_input_ids {tuple(ids.shape)}.")
        check_ids("decoder_input_ids", ids, self.config.target_vocab_size, "target_vocab_size")
        return self._shifted(labels) if ids is None else ids  # type: ignore[arg-type]

    def _check_languages(self, rows: int, languages: Tensor | None) -> None:
        if languages is None:
            return
        if not self.reads_languages:
            raise CtxError(f"{type(self).__name__} writes one language.", hint="leave target_languages out.")
        if tuple(languages.shape) != (rows,):
            raise CtxError(f"target_languages is {tuple(languages.shape)}, expected ({rows},): one for each text.")
        check_ids("target_languages", languages, self.config.num_languages, "num_languages")

    def _shifted(self, labels: Tensor) -> Tensor:
        """(batch, steps) what the decoder reads before it predicts each label."""
        size = self.config.target_vocab_size
        ids = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id or 0)
        # ids outside the vocabulary are refused with the loss
        return torch.where((ids < 0) | (ids >= size), self.config.pad_token_id or 0, ids)

    def _summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(self.prediction, states, targets)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        use_cache: bool | None = None,
        target_languages: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The target's text so far, or, with a state, its last token."""
        return {
            "decoder_input_ids": input_ids if past_key_values is None else input_ids[:, -1:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
            "use_cache": bool(use_cache),
            "target_languages": target_languages,
        }
