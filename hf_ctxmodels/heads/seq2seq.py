"""Sequence-to-sequence heads: an encoder, an autoregressive decoder, and logits over the target vocabulary."""

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import is_traced, on_host, select_true
from hf_ctxmodels.core.inputs import check_ids, check_source_mask, check_tensors
from hf_ctxmodels.heads.base import (
    HeadModel,
    ItemCounts,
    language_modeling_loss,
    loss_from_logits,
    mask_of_targets,
    validate_targets,
)
from hf_ctxmodels.heads.stop_strings import GenerationWithStopStrings
from hf_ctxmodels.layers.common import RecurrentDecoderOutput
from hf_ctxmodels.layers.cpu.linear import linear, prepacked_weights


class DecoderAliases:
    """`hidden_states` and `attentions` under the names of the decoder's outputs, for code that handles all models."""

    decoder_hidden_states: tuple[Tensor, ...] | None
    decoder_attentions: tuple[Tensor, ...] | None

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """Alias of `decoder_hidden_states`."""
        return self.decoder_hidden_states

    @property
    def attentions(self) -> tuple[Tensor, ...] | None:
        """Alias of `decoder_attentions`."""
        return self.decoder_attentions


@dataclass
class ConditionalGenerationOutput(DecoderAliases, ModelOutput):
    """Output of sequence-to-sequence heads, with the field names of transformers' `Seq2SeqLMOutput`.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, steps, target vocabulary); with `labels`, see `needs_all_logits`.
        past_key_values: The state of the decoder; None without `use_cache`.
        decoder_hidden_states, decoder_attentions, cross_attentions: See `RecurrentDecoderOutput`; None unless
            requested. A recurrent decoder has no self-attention.
        encoder_last_hidden_state: (batch, length, hidden).
        encoder_hidden_states, encoder_attentions: None unless requested.
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


class Seq2SeqHead(HeadModel, GenerationWithStopStrings):
    """Base class of heads that generate a target from a source.

    The configuration has `target_vocab_size` and `decoder_start_token_id`. A family lists `GenerationMixin` among the
    direct bases of its class, as transformers requires.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    _is_stateful = True  # tokens cannot be removed from a state, as assisted generation would need

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward creates the cache

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as in transformers, with weights prepacked for oneDNN on a CPU."""
        with prepacked_weights(self.prepacked_bytes):
            return super().generate(*args, **kwargs)

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Run the encoder, without the arguments of the decoder, and without targets, which Seq2SeqTrainer passes."""
        encoder_kwargs = {name: value for name, value in model_kwargs.items() if name not in self.loss_targets}
        decoder_kwargs = {
            name: encoder_kwargs.pop(name)
            for name in list(encoder_kwargs)
            if name.startswith("decoder_") or name == "cross_attention_mask"
        }
        prepared = super()._prepare_text_encoder_decoder_kwargs_for_generation(
            inputs_tensor, encoder_kwargs, *args, **kwargs
        )
        return prepared | decoder_kwargs

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Run the first step of `generate` in one chunk: transformers would cut the source's mask to each chunk."""
        if generation_config.prefill_chunk_size is not None:
            generation_config = copy(generation_config)
            generation_config.prefill_chunk_size = None
        return super()._prefill(input_ids, generation_config, model_kwargs, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The inputs of the next step: the target tokens, (batch, steps) `input_ids`, after the tokens in the cache."""
        if past_key_values is not None:
            kwargs["next_sequence_length"] = max(1, input_ids.shape[1] - past_key_values.get_seq_length())
        return super().prepare_inputs_for_generation(input_ids, past_key_values=past_key_values, **kwargs)

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the scores of the generated tokens as in transformers, over the target vocabulary."""
        return GenerationMixin.compute_transition_scores(self._with_target_vocab_size(), *args, **kwargs)

    def _get_logits_processor(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if generation_config.guidance_scale not in (None, 1):
            raise CtxError(
                "Classifier-free guidance replaces the prompt of a decoder, and this model has a source.",
                location=f"guidance_scale={generation_config.guidance_scale}",
                hint="omit guidance_scale.",
            )
        model = self._with_target_vocab_size()
        return GenerationMixin._get_logits_processor(model, generation_config, *args, **kwargs)

    def _with_target_vocab_size(self) -> Any:
        """A shallow copy whose `config.vocab_size`, which transformers reads, is the size of the target vocabulary."""
        if self.config.get_text_config().vocab_size == self.config.target_vocab_size:
            return self
        config = copy(self.config)
        config.vocab_size = self.config.target_vocab_size
        model = object.__new__(type(self))  # `copy.copy` calls `FSDPModule.__new__`, which calls `__init__`
        model.__dict__.update(self.__dict__, config=config)
        return model

    def resolve_decoder_input_ids(
        self,
        batch_size: int | None,
        decoder_input_ids: Tensor | None,
        labels: Tensor | None,
        decoder_inputs_embeds: Tensor | None = None,
    ) -> Any:
        """(batch, steps) ids of the decoder's input: `decoder_input_ids`, or the labels shifted to the right; None with
        embeddings. `batch_size` is the number of sources, None for any.

        Raises:
            CtxError: All are None, or their shapes do not match each other or the source.
        """
        tensors = {
            "decoder_input_ids": decoder_input_ids,
            "decoder_inputs_embeds": decoder_inputs_embeds,
            "labels": labels,
        }
        if all(tensor is None for tensor in tensors.values()):
            raise CtxError("The decoder has no input.", hint="pass decoder_input_ids or labels, or call generate.")
        if decoder_input_ids is not None and decoder_inputs_embeds is not None:
            raise CtxError("decoder_input_ids cannot be combined with decoder_inputs_embeds.", hint="pass only one.")
        check_tensors(**tensors)
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            has_axes = tensor.dim() == (3 if name == "decoder_inputs_embeds" else 2)
            if not has_axes or (batch_size is not None and tensor.shape[0] != batch_size) or not tensor.shape[1]:
                raise CtxError(
                    f"{name} is {tuple(tensor.shape)}, expected ({batch_size}, steps), one row for each source."
                )
        inputs = decoder_input_ids if decoder_input_ids is not None else decoder_inputs_embeds
        if inputs is not None and labels is not None and inputs.shape[:2] != labels.shape:
            raise CtxError(f"labels is {tuple(labels.shape)}, but decoder_input_ids {tuple(inputs.shape[:2])}.")
        check_ids("decoder_input_ids", decoder_input_ids, self.config.target_vocab_size, "target_vocab_size")
        if inputs is None:
            return self.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[arg-type]
        return decoder_input_ids

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """(batch, steps) labels shifted to the right, after `config.decoder_start_token_id`.

        `DataCollatorForSeq2Seq` calls it, so that Trainer can smooth labels, which it then takes from the model.
        """
        config = self.config

        def shift(targets: Tensor) -> Tensor:
            ids = F.pad(targets[:, :-1], (1, 0), value=config.decoder_start_token_id or 0)
            # the loss raises an error for ids outside the vocabulary
            return torch.where((ids < 0) | (ids >= config.target_vocab_size), config.pad_token_id or 0, ids)

        return on_host(shift, labels)


@dataclass(frozen=True)
class RecurrentDecoderInputs:
    """Inputs of a recurrent decoder other than the target ids.

    Attributes:
        attention_mask: (batch, length) mask of the source, or None.
        cache: The state of the decoder before the target ids.
        target_languages: (batch,) indices of the target languages, or None.
        is_recording: Whether hidden states or attention weights are requested.
    """

    encoder_outputs: Any
    attention_mask: Tensor | None
    cache: Any
    target_languages: Tensor | None
    is_recording: bool = False


class RecurrentForConditionalGeneration(Seq2SeqHead):
    """Predicts each target token from the source and the target tokens before it, with a recurrent decoder.

    Transformer decoders have `architectures.encoder_decoder_heads.TransformerForConditionalGeneration`. The
    configuration has `num_languages` if `has_target_languages`.

    Attributes:
        prediction: Linear layer from the decoder's states to logits. `get_output_embeddings` does not return it, since
            `resize_token_embeddings` would give it the size of the source vocabulary.
        has_target_languages: Whether the decoder is conditioned on the target language.
        required_encoder_outputs: Fields of the encoder's output that the decoder reads.
    """

    has_target_languages: ClassVar[bool] = False
    required_encoder_outputs: ClassVar[tuple[str, ...]] = ("last_hidden_state",)
    prediction: nn.Linear

    def start(self, encoder_outputs: Any) -> Any:
        """The initial state of the decoder."""
        raise NotImplementedError

    def decode(
        self, decoder_input_ids: Tensor, target_mask: Tensor | None, inputs: RecurrentDecoderInputs
    ) -> RecurrentDecoderOutput:
        """Run the decoder on (batch, steps) `decoder_input_ids`, each the token before the one to be predicted.

        Returns (targets, hidden) states where `target_mask` (batch, steps) is True; without it (batch, steps, hidden),
        and the state after the last token.
        """
        raise NotImplementedError

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
        past_key_values: Any = None,
        use_cache: bool | None = None,
        target_languages: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ConditionalGenerationOutput:
        """Compute logits, or the loss with `labels`. Other arguments as in the encoder's forward.

        Args:
            decoder_input_ids: (batch, steps) target ids, each the token before the one to be predicted; None for
                `labels` shifted to the right, after `config.decoder_start_token_id`.
            labels: (batch, steps) target ids; -100 is ignored.
            encoder_outputs: The encoder's output if it has been computed, see `as_model_output`.
            past_key_values: The state before `decoder_input_ids`, returned by an earlier forward.
            use_cache: Return `past_key_values`, and with labels the logits as well.
            target_languages: (batch,) indices of the target languages; None for the first.
        """
        labels = None if labels is None else validate_targets(labels, "labels")
        for name in ("decoder_attention_mask", "decoder_inputs_embeds"):
            if kwargs.pop(name, None) is not None:
                raise CtxError(f"The decoder of {type(self).__name__} does not support {name}.", hint=f"remove {name}.")
        output_flags = self.config.resolve_output_flags(kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encode(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        else:
            encoder_outputs = as_model_output(encoder_outputs)
            missing = [name for name in self.required_encoder_outputs if getattr(encoder_outputs, name, None) is None]
            if missing:
                raise CtxError(
                    f"encoder_outputs has no {' and no '.join(missing)}.",
                    hint="pass the output of model.get_encoder().",
                )
            check_source_mask(attention_mask, encoder_outputs.last_hidden_state)
        batch_size = encoder_outputs.last_hidden_state.shape[0]
        decoder_input_ids = self.resolve_decoder_input_ids(batch_size, decoder_input_ids, labels)
        if target_languages is not None:
            if not self.has_target_languages:
                raise CtxError(f"{type(self).__name__} has one target language.", hint="remove target_languages.")
            check_tensors(target_languages=target_languages)
            if tuple(target_languages.shape) != (batch_size,):
                raise CtxError(f"target_languages is {tuple(target_languages.shape)}, expected ({batch_size},).")
            check_ids("target_languages", target_languages, self.config.num_languages, "num_languages")
        cache = self.start(encoder_outputs) if past_key_values is None else past_key_values
        records_states = self.config.returns_hidden_states(output_flags["output_hidden_states"])
        is_recording = records_states or bool(output_flags["output_attentions"])
        inputs = RecurrentDecoderInputs(encoder_outputs, attention_mask, cache, target_languages, is_recording)
        computes_logits = labels is None or bool(use_cache) or self.needs_all_logits(return_logits)
        loss = logits = None
        decoder_outputs: Any = None
        if computes_logits or is_recording:
            logits, decoder_outputs = self.predict(decoder_input_ids, inputs)
        if labels is not None and logits is not None:
            loss = loss_from_logits(logits, labels, num_items_in_batch)
        elif labels is not None:
            loss = self.decoder_loss(decoder_input_ids, labels, inputs, num_items_in_batch)
        return ConditionalGenerationOutput(
            loss=loss,
            logits=logits if computes_logits else None,
            past_key_values=decoder_outputs.cache if use_cache else None,
            decoder_hidden_states=decoder_outputs.hidden_states if records_states else None,
            cross_attentions=decoder_outputs.cross_attentions if output_flags["output_attentions"] else None,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.get("attentions"),
        )

    def predict(
        self, decoder_input_ids: Tensor, inputs: RecurrentDecoderInputs
    ) -> tuple[Tensor, RecurrentDecoderOutput]:
        """(batch, steps, target vocabulary) logits, and the output of `decode` for all steps."""
        outputs = self.decode(decoder_input_ids, None, inputs)
        return linear(self.prediction, self.output_layer_input(outputs.states)), outputs

    def decoder_loss(
        self, decoder_input_ids: Tensor, labels: Tensor, inputs: RecurrentDecoderInputs, num_items: ItemCounts
    ) -> Tensor:
        """Mean cross-entropy in nats of the labels; arguments as in `decode` and `language_modeling_loss`."""
        target_mask = mask_of_targets(labels)
        if is_traced(labels) or not self.config.unpad:
            states = select_true(self.decode(decoder_input_ids, None, inputs).states, target_mask)
        else:
            states = self.decode(decoder_input_ids, target_mask, inputs).states
        return language_modeling_loss(self.prediction, self.output_layer_input(states), labels, num_items)


def as_model_output(encoder_outputs: Any) -> Any:
    """The encoder's output with named fields; with `return_dict=False` it is a tuple of states, hidden states and
    attention weights."""
    if isinstance(encoder_outputs, tuple | list):
        return BaseModelOutput(*encoder_outputs[:3])
    return encoder_outputs
