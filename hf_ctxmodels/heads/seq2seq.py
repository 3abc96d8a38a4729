"""The sequence-to-sequence head: an encoder, an autoregressive decoder, and logits over the target vocabulary."""

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import (
    check_aligned,
    check_ids,
    check_source_mask,
    check_tensors,
    is_traced,
    sequence_starts,
)
from hf_ctxmodels.heads.base import (
    IGNORE_INDEX,
    HeadModel,
    ItemCounts,
    language_modeling_loss,
    loss_from_logits,
    validate_targets,
)
from hf_ctxmodels.heads.generation import PrepackingGenerationMixin
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.decoder_output import DecoderOutput


@dataclass
class ConditionalGenerationOutput(ModelOutput):
    """Output of `ForConditionalGeneration`; the names are those of transformers' Seq2SeqLMOutput.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, steps, target vocabulary); with `labels`, see `returns_logits`.
        past_key_values: The decoder's state; None without `use_cache`.
        decoder_hidden_states, decoder_attentions, cross_attentions: As recorded, see `DecoderOutput`; None if they were not
            asked for. A recurrent decoder does not attend to what it wrote.
        encoder_last_hidden_state: (batch, length, hidden) the encoder's output.
        encoder_hidden_states, encoder_attentions: Of the encoder, as asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """`decoder_hidden_states`, by the name that other heads have for their own."""
        return self.decoder_hidden_states

    @property
    def attentions(self) -> tuple[Tensor, ...] | None:
        """`decoder_attentions`, likewise."""
        return self.decoder_attentions


@dataclass(frozen=True)
class DecoderInputs:
    """Inputs of a decoder besides its ids.

    Attributes:
        encoded: The encoder's output.
        attention_mask: (batch, length) mask of the source, or None.
        cache: The decoder's state before the ids; None for a Transformer without a cache.
        languages: (batch,) numbers of the target languages, or None.
        recorded: Which hidden states and attention weights are asked for, see `config.resolve_output_flags`.
        further: What else the decoder takes, by the names in `decoder_arguments`.
        sequence_ids: (batch, length) of the source, see `TransformerStack.forward`, or None.
    """

    encoded: Any
    attention_mask: Tensor | None
    cache: Any
    languages: Tensor | None
    recorded: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)
    sequence_ids: Tensor | None = None

    @property
    def record(self) -> bool:
        """Whether any are asked for."""
        return any(value is not None and value is not False for value in self.recorded.values())


class Seq2SeqHead(HeadModel, PrepackingGenerationMixin):
    """The base of heads that write a target for a source.

    The configuration has `target_vocab_size` and `decoder_start_token_id`. A family's class lists `GenerationMixin`
    among its direct bases, as transformers requires.

    Attributes:
        decoder_arguments: Further arguments of `forward` that the decoder takes.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    decoder_arguments: ClassVar[tuple[str, ...]] = ()
    _is_stateful = True  # no token is taken back, which assisted generation would need

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward creates the cache

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Run the encoder, without what the decoder takes. Targets, which Seq2SeqTrainer passes, are left out."""
        given = {name: value for name, value in model_kwargs.items() if name not in self.loss_targets}
        for_decoder = {name: given.pop(name) for name in self.decoder_arguments if name in given}
        prepared = super()._prepare_text_encoder_decoder_kwargs_for_generation(inputs_tensor, given, *args, **kwargs)
        return prepared | for_decoder

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """The first step of `generate`, always at once: of several parts, transformers would cut the source's mask to
        the length of each."""
        if generation_config.prefill_chunk_size is not None:
            generation_config = copy(generation_config)
            generation_config.prefill_chunk_size = None
        return super()._prefill(input_ids, generation_config, model_kwargs, **kwargs)

    def resolve_decoder_input_ids(
        self, rows: int | None, ids: Tensor | None, labels: Tensor | None, embeddings: Tensor | None = None
    ) -> Any:
        """(batch, steps) the decoder's input: `ids`, or the labels shifted to the right; None with embeddings.

        Args:
            rows: Number of texts; None does not check it.
            ids, labels, embeddings: As `decoder_input_ids`, `labels` and `decoder_inputs_embeds` in `forward`.

        Raises:
            CtxError: None is given, or their shapes do not match each other or the source.
        """
        if ids is None and labels is None and embeddings is None:
            raise CtxError("Give decoder_input_ids, or labels, or call generate.")
        if ids is not None and embeddings is not None:
            raise CtxError("Give one of decoder_input_ids and decoder_inputs_embeds.")
        given = {"decoder_input_ids": ids, "decoder_inputs_embeds": embeddings, "labels": labels}
        check_tensors(**given)
        for name, tensor in given.items():
            axes = 3 if name == "decoder_inputs_embeds" else 2
            if tensor is None:
                continue
            if tensor.dim() != axes or (rows is not None and tensor.shape[0] != rows) or not tensor.shape[1]:
                raise CtxError(f"{name} is {tuple(tensor.shape)}, expected ({rows}, steps), as many rows as texts.")
        read = ids if ids is not None else embeddings
        if read is not None and labels is not None and read.shape[:2] != labels.shape:
            raise CtxError(f"labels is {tuple(labels.shape)}, but decoder_input_ids {tuple(read.shape[:2])}.")
        check_ids("decoder_input_ids", ids, self.config.target_vocab_size, "target_vocab_size")
        return ids if read is not None else self.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[arg-type]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """(batch, steps) labels shifted to the right, after `config.decoder_start_token_id`.

        `DataCollatorForSeq2Seq` calls it, so that Trainer can smooth labels, which it then takes from the model.
        """
        size = self.config.target_vocab_size
        ids = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id or 0)
        # the loss raises for ids outside the vocabulary
        return torch.where((ids < 0) | (ids >= size), self.config.pad_token_id or 0, ids)


class ForConditionalGeneration(Seq2SeqHead):
    """Predicts each target token from the source and the target tokens before it.

    Encoder and decoder are recurrent, or Transformers (`architectures.encoder_decoder`). The configuration has
    `num_languages` if `has_target_languages`.

    Attributes:
        prediction: Linear map from the decoder's states to logits.
        has_target_languages: Whether the decoder is conditioned on the target language.
        required_encoder_outputs: What it needs of the encoder's output.
    """

    has_target_languages: ClassVar[bool] = False
    required_encoder_outputs: ClassVar[tuple[str, ...]] = ("last_hidden_state",)
    prediction: nn.Linear

    @abstractmethod
    def start(self, encoded: Any) -> Any:
        """The decoder's initial state."""

    @abstractmethod
    def decode(self, ids: Any, target_mask: Tensor | None, given: DecoderInputs) -> DecoderOutput:
        """Run the decoder.

        Args:
            ids: (batch, steps) target ids, each the token before the one to be predicted; where the decoder takes
                `decoder_inputs_embeds`, None with these.
            target_mask: (batch, steps) bool, True at positions with a target; None for all positions.
            given: The other inputs.

        Returns:
            (targets, hidden) states; without `target_mask` (batch, steps, hidden), and the state after the last token.
        """

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, run once by `generate`."""
        return self.base_model

    def first_state(self, encoded: Any, use_cache: bool | None) -> Any:
        """The decoder's state before its first token; None for a decoder that needs none without `use_cache`."""
        return self.start(encoded)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        target_languages: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ConditionalGenerationOutput:
        """The loss with `labels`, else logits. Other arguments as in the encoder's forward.

        Args:
            decoder_input_ids: (batch, steps) target ids, each the token before the one to be predicted; None for
                `labels` shifted to the right, after `config.decoder_start_token_id`.
            decoder_attention_mask: (batch, steps), with a cache (batch, past + steps): 0 at padding; for decoders that
                attend to what they wrote.
            decoder_inputs_embeds: (batch, steps, hidden) in place of `decoder_input_ids`, for the same decoders.
            labels: (batch, steps) target ids; -100 is ignored.
            encoder_outputs: The encoder's output, if it has been computed; as a tuple, states, hidden states, weights.
            past_key_values: The state before `decoder_input_ids`, returned by an earlier forward.
            use_cache: Return `past_key_values`, and with labels the logits as well.
            target_languages: (batch,) numbers of the target languages; None for the first.
            return_logits: See `returns_logits`.
        """
        labels = None if labels is None else validate_targets(labels, "labels")
        written = {"decoder_attention_mask": decoder_attention_mask, "decoder_inputs_embeds": decoder_inputs_embeds}
        further = self._further(written, kwargs)
        recorded = self.config.resolve_output_flags(kwargs)
        given_outputs = encoder_outputs is not None
        if not given_outputs:
            inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
            encoder_outputs = self.encode_source(attention_mask=attention_mask, **inputs, **kwargs)
        encoder_outputs = self._read_from(encoder_outputs)
        if given_outputs:  # else the encoder has checked its mask
            check_source_mask(attention_mask, encoder_outputs.last_hidden_state)
        rows = encoder_outputs.last_hidden_state.shape[0]
        ids = self.resolve_decoder_input_ids(rows, decoder_input_ids, labels, decoder_inputs_embeds)
        ids = ids if decoder_input_ids is not None else self._begun(ids, further.get("decoder_sequence_ids"))
        self._check_languages(rows, target_languages)
        before = self.first_state(encoder_outputs, use_cache) if past_key_values is None else past_key_values
        sides = (encoder_outputs, attention_mask, before, target_languages, recorded, further)
        given = DecoderInputs(*sides, sequence_ids=kwargs.get("sequence_ids"))
        wants_logits = labels is None or bool(use_cache) or self.returns_logits(return_logits)
        loss = logits = decoded = None
        if wants_logits or given.record:
            logits, decoded = self.predict(ids, given)
        if labels is not None and logits is not None:
            loss = loss_from_logits(logits, labels, num_items_in_batch)
        elif labels is not None:
            loss = self.decoder_loss(ids, labels, given, num_items_in_batch)
        return _output(encoder_outputs, decoded, recorded, loss, logits if wants_logits else None, use_cache)

    def _read_from(self, encoded: Any) -> Any:
        """The encoder's output by names; raises CtxError if it lacks what the decoder reads."""
        encoded = as_model_output(encoded)
        missing = [name for name in self.required_encoder_outputs if getattr(encoded, name, None) is None]
        if missing:
            raise CtxError(
                f"encoder_outputs has no {' and no '.join(missing)}.", hint="give what model.get_encoder() returns."
            )
        return encoded

    def _begun(self, ids: Tensor | None, sequence_ids: Tensor | None) -> Tensor | None:
        """(batch, steps) shifted labels, if any, each sequence of a row after `config.decoder_start_token_id`."""
        if sequence_ids is None or ids is None:
            return ids
        check_aligned({"decoder_sequence_ids": sequence_ids}, *ids.shape)
        return ids.masked_fill(sequence_starts(sequence_ids), self.config.decoder_start_token_id or 0)

    def encode_source(self, token_type_ids: Tensor | None = None, **inputs: Any) -> Any:
        """Run the encoder."""
        return self.encode(token_type_ids=token_type_ids, **inputs)

    def _further(self, written: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """The `decoder_arguments` among the named ones and those of `given`, where they are taken out.

        Raises:
            CtxError: The decoder does not take a named one.
        """
        for name, value in written.items():
            if value is not None and name not in self.decoder_arguments:
                raise CtxError(f"The decoder of {type(self).__name__} takes no {name}.", hint="leave it out.")
        further = {name: given.pop(name, None) for name in self.decoder_arguments if name not in written}
        return further | {name: value for name, value in written.items() if name in self.decoder_arguments}

    def predict(self, ids: Any, given: DecoderInputs) -> tuple[Tensor, DecoderOutput]:
        """(batch, steps, target vocabulary) logits, and the output of `decode` for all steps."""
        decoded = self.decode(ids, None, given)
        return linear(self.prediction, self.decoder_input(decoded.states)), decoded

    def decoder_loss(self, ids: Any, labels: Tensor, given: DecoderInputs, counts: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats of the labels; see `decode` and `language_modeling_loss`."""
        target_mask = labels != IGNORE_INDEX
        if is_traced(labels) or not self.config.unpad:
            states = self.decode(ids, None, given).states[target_mask]
        else:
            states = self.decode(ids, target_mask, given).states
        return language_modeling_loss(self.prediction, self.decoder_input(states), labels, counts)

    def _check_languages(self, rows: int, languages: Tensor | None) -> None:
        if languages is None:
            return
        if not self.has_target_languages:
            if "decoder_langs" in self.decoder_arguments and self.config.embeds_languages:
                raise CtxError(
                    f"{type(self).__name__} reads no target_languages.",
                    hint="give decoder_langs, (batch, steps) numbers, in their place.",
                )
            raise CtxError(f"{type(self).__name__} has one target language.", hint="leave target_languages out.")
        check_tensors(target_languages=languages)
        if tuple(languages.shape) != (rows,):
            raise CtxError(f"target_languages is {tuple(languages.shape)}, expected ({rows},): one for each text.")
        check_ids("target_languages", languages, self.config.num_languages, "num_languages")

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The target tokens, (batch, steps) `input_ids`, after those in the cache."""
        if past_key_values is not None:
            kwargs["next_sequence_length"] = max(1, input_ids.shape[1] - past_key_values.get_seq_length())
        return super().prepare_inputs_for_generation(input_ids, past_key_values=past_key_values, **kwargs)


def as_model_output(encoded: Any) -> Any:
    """An encoder's output by names: with `return_dict=False` it is a tuple of states, hidden states and weights."""
    return BaseModelOutput(*encoded[:3]) if isinstance(encoded, tuple | list) else encoded


def _output(
    encoded: Any,
    decoded: DecoderOutput | None,
    recorded: Mapping[str, Any],
    loss: Tensor | None,
    logits: Tensor | None,
    use_cache: bool | None,
) -> ConditionalGenerationOutput:
    """The head's output, with what was recorded as far as it was asked for."""
    states, weights = (recorded[name] for name in ("output_hidden_states", "output_attentions"))
    shows_states = decoded is not None and states is not None and states is not False
    return ConditionalGenerationOutput(
        loss=loss,
        logits=logits,
        past_key_values=decoded.cache if use_cache and decoded is not None else None,
        decoder_hidden_states=decoded.hidden_states if decoded is not None and shows_states else None,
        decoder_attentions=decoded.attentions if decoded is not None and weights else None,
        cross_attentions=decoded.cross_attentions if decoded is not None and weights else None,
        encoder_last_hidden_state=encoded.last_hidden_state,
        encoder_hidden_states=encoded.hidden_states,
        encoder_attentions=encoded.get("attentions"),
    )
