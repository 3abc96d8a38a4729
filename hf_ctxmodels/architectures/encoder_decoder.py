"""Transformer encoder-decoders (Vaswani et al. 2017): two stacks of layers; the second attends to the first."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.transformer_stack import Source, TransformerStack
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids, check_source_mask, sequence_numbers
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.seq2seq import as_model_output
from hf_ctxmodels.layers.pooling import token_mask


@dataclass
class EncoderDecoderOutput(Seq2SeqModelOutput):
    """Output of `EncoderDecoder`: that of transformers; the decoder's outputs also by the names they have elsewhere."""

    @classmethod
    def of(cls, encoded: Any, decoded: BaseModelOutputWithPastAndCrossAttentions) -> Self:
        """Made of the outputs of the encoder and of the decoder."""
        return cls(
            last_hidden_state=decoded.last_hidden_state,
            past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """`decoder_hidden_states`."""
        return self.decoder_hidden_states

    @property
    def attentions(self) -> tuple[Tensor, ...] | None:
        """`decoder_attentions`."""
        return self.decoder_attentions


class ResizesBothTables(CtxPreTrainedModel):
    """A model whose vocabulary may have a second table of words, the decoder's own: resizing changes it, too."""

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder: Any = getattr(self.base_model, "decoder", None)  # T5's encoder alone has none
        table = None if decoder is None else decoder.word_embeddings
        if table is not None:
            size = resized.num_embeddings
            decoder.word_embeddings = self._get_resized_embeddings(table, size, mean_resizing=mean_resizing)
        return resized


class EncoderDecoder(ResizesBothTables):
    """An encoder and a decoder, without the output layer.

    Without a decoder's input, that is the encoder's, shifted by one token after `config.decoder_start_token_id`: each
    state of the decoder has read the tokens before it and, through the encoder, the whole text.

    Attributes:
        encoder, decoder: The stacks, of the `stack_class`; the encoder has the table of words of both.
    """

    stack_class: ClassVar[type[TransformerStack]] = TransformerStack
    supports_reentrant_checkpointing = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = self.stack_class(config)
        self.decoder = self.stack_class(config, is_decoder=True)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The encoder's table of words."""
        return self.encoder.word_embeddings  # type: ignore[return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the encoder's table of words."""
        self.encoder.word_embeddings = value  # type: ignore[assignment]

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, run once by `generate`."""
        return self.encoder

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_sequence_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> EncoderDecoderOutput:
        """Encode a batch, and decode.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), 1 at tokens and 0 at padding.
            position_ids: (batch, length) or (1, length); None for the number of tokens before each.
            sequence_ids: (batch, length), for several sequences in one row, see `TransformerStack.forward`.
            decoder_input_ids: (batch, steps) token ids, or `decoder_inputs_embeds`; None for the encoder's input,
                shifted by one token, with its padding.
            decoder_attention_mask, decoder_position_ids, decoder_sequence_ids: As for the encoder; with a cache the
                mask is (batch, past + steps).
            encoder_outputs: The encoder's output, if it has been computed.
            past_key_values: The cache of the decoder's preceding tokens; it is extended in place.
            use_cache: Return `past_key_values`; None only if given. Without a cache the decoder is computed unpadded.
            output_mask: (batch, steps) bool; `last_hidden_state` then holds only these positions of the decoder,
                (targets, hidden) in row-major order, and the last layer is computed only there.
            kwargs: As in `TransformerStack.forward`.

        Raises:
            CtxError: Inputs do not match each other, the cache or the model.
        """
        refuse_segments(kwargs)
        if encoder_outputs is None:
            read = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
            read |= {"position_ids": position_ids, "sequence_ids": sequence_ids}
            encoder_outputs = self.encoder(**read, **self.encoder_arguments(kwargs), return_dict=True)
        encoder_outputs = as_model_output(encoder_outputs)
        written: dict[str, Any] = {"input_ids": decoder_input_ids, "inputs_embeds": decoder_inputs_embeds}
        written |= {"attention_mask": decoder_attention_mask, "position_ids": decoder_position_ids}
        written |= {"sequence_ids": decoder_sequence_ids}
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            made = self.shifted(input_ids, inputs_embeds, attention_mask, sequence_ids)
            written = made | {"position_ids": position_ids}
        decoded = self.decode(
            Source(encoder_outputs.last_hidden_state, attention_mask, sequence_ids),
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_mask=output_mask,
            **written,
            **self.decoder_arguments(kwargs),
        )
        return EncoderDecoderOutput.of(encoder_outputs, decoded)

    def encoder_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of the further keywords of `forward` that the encoder takes."""
        return {name: value for name, value in given.items() if not name.startswith("decoder_")}

    def decoder_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those that the decoder takes, by their names there."""
        return given

    def decode(
        self,
        source: Source,
        *,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **written: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder.

        Args:
            source: What it attends to.
            past_key_values, use_cache: As in `forward`.
            written: Other arguments of `TransformerStack.forward`.
        """
        check_source_mask(source.attention_mask, source.states)
        check_ids("decoder_input_ids", written.get("input_ids"), self.config.vocab_size, "vocab_size")
        if (source.sequence_ids is None) != (written.get("sequence_ids") is None):
            raise CtxError(
                "sequence_ids are given for one of encoder and decoder.",
                hint="give sequence_ids and decoder_sequence_ids, with the same number of sequences in each row.",
            )
        if past_key_values is None and use_cache:
            past_key_values = self.new_cache()
        written |= {"past_key_values": past_key_values, "words": self.decoder_word_embeddings}
        return self.decoder(source=source, return_dict=True, **written)

    @property
    def decoder_word_embeddings(self) -> nn.Module:
        """The decoder's table of words: the encoder's, unless it has its own."""
        own = self.decoder.word_embeddings
        return self.get_input_embeddings() if own is None else own

    def new_cache(self) -> EncoderDecoderCache:
        """An empty cache of the decoder."""
        config = self.config.get_text_config(decoder=True)
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    def shifted(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
    ) -> dict[str, Any]:
        """The decoder's input made of the encoder's: before each token of a sequence the one before it, and before the
        first `config.decoder_start_token_id`.

        Args: those of `forward`.

        Raises:
            CtxError: There is no input.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise CtxError("Give decoder_input_ids, or input_ids that are shifted to the right in their place.")
        columns = preceding_columns(token_mask(given, attention_mask, sequence_ids), sequence_ids)
        first, start = columns < 0, self.config.decoder_start_token_id or 0
        written: dict[str, Any] = {"attention_mask": attention_mask, "sequence_ids": sequence_ids}
        columns = columns.clamp(min=0)
        if input_ids is not None:
            return written | {"input_ids": input_ids.gather(1, columns).masked_fill(first, start)}
        vector = self.decoder_word_embeddings(torch.tensor(start, device=given.device)).to(given.dtype)
        before = given.gather(1, columns[..., None].expand_as(given))
        return written | {"inputs_embeds": torch.where(first[..., None], vector, before)}


def preceding_columns(tokens: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length) column of the token before each in its sequence; -1 for the first.

    Args:
        tokens: (batch, length) bool, False at padding.
        sequence_ids: (batch, length), a run of equal numbers is one sequence; None for one sequence per row.
    """
    length = tokens.shape[1]
    own, rank = torch.arange(length, device=tokens.device), tokens.cumsum(1) - tokens.long()
    in_order = torch.where(tokens, own, own + length).sort(1).values  # the tokens' columns first; ONNX has no cummax
    before = in_order.gather(1, (rank - 1).clamp(min=0))
    first = rank == 0
    if sequence_ids is not None:
        numbers = sequence_numbers(sequence_ids)
        first = first | (numbers.gather(1, before.clamp(max=length - 1)) != numbers)
    return before.masked_fill(first, -1)


def refuse_segments(given: dict[str, Any]) -> None:
    """Take `token_type_ids` out of the keywords; raise CtxError if there are any."""
    if given.pop("token_type_ids", None) is not None:
        raise CtxError("The model has no segments.", location="token_type_ids", hint="leave them out.")
