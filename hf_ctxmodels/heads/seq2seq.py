"""The sequence-to-sequence head: an encoder, an autoregressive decoder, and logits over the target vocabulary."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.cache import RecurrentCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, check_padding_mask, check_tensors, is_traced
from hf_ctxmodels.heads.base import (
    IGNORED,
    HeadModel,
    ItemCounts,
    as_targets,
    language_modeling_loss,
    loss_of_logits,
)
from hf_ctxmodels.layers.recurrent.decoded import Decoded


@dataclass
class ConditionalGenerationOutput(ModelOutput):
    """Output of `ForConditionalGeneration`; the names are those of transformers' Seq2SeqLMOutput.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, steps, target vocabulary); with `labels`, see `returns_logits`.
        past_key_values: The decoder's state; None without `use_cache`.
        decoder_hidden_states, cross_attentions: As recorded, see `Decoded`; None if they were not asked for.
        decoder_attentions: None: a recurrent decoder does not attend to what it wrote.
        encoder_hidden_states, encoder_attentions: Of the encoder, as asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class DecoderInputs:
    """Inputs of a decoder besides its ids.

    Attributes:
        encoded: The encoder's output.
        attention_mask: (batch, length) mask of the source, or None.
        cache: The decoder's state before the ids.
        languages: (batch,) numbers of the target languages, or None.
        record: Whether hidden states and attention weights are asked for.
    """

    encoded: Any
    attention_mask: Tensor | None
    cache: RecurrentCache
    languages: Tensor | None
    record: bool = False


class WritingHead(HeadModel, GenerationMixin):
    """The base of heads that write a target for a source.

    The configuration has `target_vocab_size` and `decoder_start_token_id`. A family's class lists `GenerationMixin`
    among its direct bases, as transformers requires.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    _is_stateful = True  # no token is taken back, which assisted generation would need

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward creates the cache

    def decoder_ids(self, rows: int | None, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """(batch, steps) the decoder's input: `ids`, or the labels shifted to the right.

        Args:
            rows: Number of texts; None does not check it.
            ids, labels: As in `forward`.

        Raises:
            CtxError: Neither is given, or their shapes do not match each other or the source.
        """
        if ids is None and labels is None:
            raise CtxError("Give decoder_input_ids, or labels, or call generate.")
        given = {"decoder_input_ids": ids, "labels": labels}
        check_tensors(**given)
        for name, tensor in given.items():
            if tensor is not None and (tensor.dim() != 2 or rows not in (None, len(tensor)) or not tensor.shape[1]):
                raise CtxError(f"{name} is {tuple(tensor.shape)}, expected ({rows}, steps), as many rows as texts.")
        if ids is not None and labels is not None and ids.shape != labels.shape:
            raise CtxError(f"labels is {tuple(labels.shape)}, but decoder_input_ids {tuple(ids.shape)}.")
        check_ids("decoder_input_ids", ids, self.config.target_vocab_size, "target_vocab_size")
        return self._shifted(labels) if ids is None else ids  # type: ignore[arg-type]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """(batch, steps) labels shifted to the right: transformers' collator asks for them where Trainer smooths
        labels."""
        return self._shifted(labels)

    def _shifted(self, labels: Tensor) -> Tensor:
        """(batch, steps) labels shifted to the right."""
        size = self.config.target_vocab_size
        ids = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id or 0)
        # the loss raises for ids outside the vocabulary
        return torch.where((ids < 0) | (ids >= size), self.config.pad_token_id or 0, ids)


class ForConditionalGeneration(WritingHead):
    """Predicts each target token from the source and the target tokens before it.

    The decoder is recurrent. The configuration has `num_languages` if `takes_languages`.

    Attributes:
        prediction: Linear map from the decoder's states to logits.
        takes_languages: Whether the decoder is conditioned on the target language.
    """

    takes_languages: ClassVar[bool] = False
    prediction: nn.Linear

    @abstractmethod
    def start(self, encoded: Any) -> RecurrentCache:
        """The decoder's initial state."""

    @abstractmethod
    def decode(self, ids: Tensor, target_mask: Tensor | None, given: DecoderInputs) -> Decoded:
        """Run the decoder.

        Args:
            ids: (batch, steps) target ids, each the token before the one to be predicted.
            target_mask: (batch, steps) bool, True at positions with a target; None for all positions.
            given: The other inputs.

        Returns:
            (targets, hidden) states; without `target_mask` (batch, steps, hidden), and the state after the last token.
        """

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, run once by `generate`."""
        return self.base_model

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
        past_key_values: RecurrentCache | None = None,
        use_cache: bool = False,
        target_languages: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ConditionalGenerationOutput:
        """The loss with `labels`, else logits. Other arguments as in the encoder's forward.

        Args:
            decoder_input_ids: (batch, steps) target ids, each the token before the one to be predicted; None for
                `labels` shifted to the right, after `config.decoder_start_token_id`.
            labels: (batch, steps) target ids; -100 is ignored.
            encoder_outputs: The encoder's output, if it has been computed.
            past_key_values: The state before `decoder_input_ids`, returned by an earlier forward.
            use_cache: Return `past_key_values`.
            target_languages: (batch,) numbers of the target languages; None for the first.
            return_logits: See `returns_logits`.
        """
        labels = None if labels is None else as_targets(labels, "labels")
        if encoder_outputs is None:
            inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
            encoder_outputs = self.encode(attention_mask=attention_mask, **inputs, **kwargs)
        else:
            check_tensors(attention_mask=attention_mask)
            check_padding_mask(attention_mask)
        decoder_input_ids = self.decoder_ids(encoder_outputs.last_hidden_state.shape[0], decoder_input_ids, labels)
        self._check_languages(decoder_input_ids.shape[0], target_languages)
        before = self.start(encoder_outputs) if past_key_values is None else past_key_values
        recorded = self.config.recorded_outputs(kwargs)
        given = DecoderInputs(encoder_outputs, attention_mask, before, target_languages, any(recorded.values()))
        wants_logits = labels is None or self.returns_logits(return_logits)
        loss = logits = decoded = None
        if wants_logits or given.record:
            logits, decoded = self.predict(decoder_input_ids, given)
        if labels is not None and logits is not None:
            loss = loss_of_logits(logits, labels, num_items_in_batch)
        elif labels is not None:
            loss = self.decoder_loss(decoder_input_ids, labels, given, num_items_in_batch)
        return ConditionalGenerationOutput(
            loss=loss,
            logits=logits if wants_logits else None,
            past_key_values=decoded.cache if use_cache and decoded is not None else None,
            decoder_hidden_states=decoded.hidden_states if decoded and recorded["output_hidden_states"] else None,
            cross_attentions=decoded.cross_attentions if decoded and recorded["output_attentions"] else None,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.get("attentions"),
        )

    def predict(self, ids: Tensor, given: DecoderInputs) -> tuple[Tensor, Decoded]:
        """(batch, steps, target vocabulary) logits, and the output of `decode` for all steps."""
        decoded = self.decode(ids, None, given)
        return self.prediction(decoded.states), decoded

    def decoder_loss(self, ids: Tensor, labels: Tensor, given: DecoderInputs, counts: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats of the labels; see `decode` and `language_modeling_loss`."""
        target_mask = labels != IGNORED
        if is_traced(labels) or not self.config.unpad:
            states = self.decode(ids, None, given).states[target_mask]
        else:
            states = self.decode(ids, target_mask, given).states
        return language_modeling_loss(self.prediction, states, labels, counts)

    def _check_languages(self, rows: int, languages: Tensor | None) -> None:
        if languages is None:
            return
        if not self.takes_languages:
            raise CtxError(f"{type(self).__name__} has one target language.", hint="leave target_languages out.")
        check_tensors(target_languages=languages)
        if tuple(languages.shape) != (rows,):
            raise CtxError(f"target_languages is {tuple(languages.shape)}, expected ({rows},): one for each text.")
        check_ids("target_languages", languages, self.config.num_languages, "num_languages")

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: RecurrentCache | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The target tokens, (batch, steps) `input_ids`, after those in the cache."""
        if past_key_values is not None:
            kwargs["next_sequence_length"] = max(1, input_ids.shape[1] - past_key_values.get_seq_length())
        return super().prepare_inputs_for_generation(input_ids, past_key_values=past_key_values, **kwargs)
