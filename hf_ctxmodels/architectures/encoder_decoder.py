"""Transformer encoder-decoders (Vaswani et al. 2017): two stacks of layers; the second attends to the first."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.transformer_decoder import EncodedSource, LayerStack
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import on_host
from hf_ctxmodels.core.inputs import (
    check_aligned,
    check_ids,
    check_padding_mask,
    check_source_mask,
    nonzero_in_all,
    sequence_numbers,
)
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.seq2seq import DecoderAliases, as_model_output
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL
from hf_ctxmodels.layers.attention.modules import CrossAttention, SelfAttention
from hf_ctxmodels.layers.pooling import build_token_mask
from hf_ctxmodels.layers.transformer import FeedForward, ScaledEmbedding, TransformerBlock


class TransformerStack(LayerStack):
    """An encoder or, with `is_decoder`, a causal decoder that attends to a source. The defaults are BART's.

    Attributes:
        word_embeddings: None for a decoder that shares the encoder's word embeddings.
    """

    def __init__(self, config: Any, *, is_decoder: bool = False) -> None:
        super().__init__()
        self.config = config
        self.is_decoder = is_decoder
        self.masks = CAUSAL if is_decoder else BIDIRECTIONAL
        shares_embeddings = is_decoder and config.shares_word_embeddings
        self.word_embeddings = None if shares_embeddings else self.build_word_embeddings(config)
        num_layers = config.decoder_layers if is_decoder else config.num_hidden_layers
        self.build_modules(config, num_layers, config.hidden_dropout_prob)

    def build_word_embeddings(self, config: Any) -> nn.Embedding:
        """Create the word embeddings."""
        embedding_class = ScaledEmbedding if config.scale_embedding else nn.Embedding
        return embedding_class(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_layer(self, config: Any) -> nn.Module:
        """Create a layer, with cross-attention in a decoder."""
        width, dropout = config.hidden_size, config.attention_probs_dropout_prob
        num_heads = config.decoder_attention_heads if self.is_decoder else config.num_attention_heads
        intermediate_size = config.decoder_ffn_dim if self.is_decoder else config.intermediate_size
        return TransformerBlock(
            width,
            SelfAttention(width, num_heads, dropout=dropout),
            FeedForward(width, intermediate_size, config.hidden_act, dropout=config.activation_dropout),
            norm=self.norm,
            norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
            dropout=config.hidden_dropout_prob,
            cross_attention=CrossAttention(width, num_heads, dropout=dropout) if self.is_decoder else None,
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_mask: Tensor | None = None,
        source: EncodedSource | None = None,
        word_embeddings: nn.Module | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the stack. Other arguments as in `TransformerDecoder.forward`.

        Args:
            sequence_ids: (batch, length), 0 at padding; a run of equal numbers is one sequence, which attends only to
                itself and to the same sequence of the source.
            word_embeddings: Word embeddings for a stack that does not have any.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention instead of sdpa), the arguments of
                `extra_embedding_ids`, and arguments of the attention function.
        """
        outputs = self.run_layers(
            input_ids,
            inputs_embeds,
            self.word_embeddings if word_embeddings is None else word_embeddings,  # type: ignore[arg-type]
            attention_mask=attention_mask,
            position_ids=position_ids,
            sequence_ids=sequence_ids,
            cache=past_key_values,
            output_mask=output_mask,
            source=source,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=None if source is None else outputs.cross_attentions,
        )


@dataclass
class EncoderDecoderOutput(DecoderAliases, Seq2SeqModelOutput):
    """Output of `EncoderDecoder`: transformers' `Seq2SeqModelOutput`, with aliases of two outputs of the decoder."""


def resize_token_embeddings(
    self: Any, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> nn.Embedding:
    """Resize as in transformers, including separate word embeddings of the decoder."""
    resized = PreTrainedModel._resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
    decoder = getattr(self.base_model, "decoder", None)  # None in T5's encoder
    if decoder is not None and decoder.word_embeddings is not None:
        decoder.word_embeddings = self._get_resized_embeddings(
            decoder.word_embeddings, resized.num_embeddings, mean_resizing=mean_resizing
        )
    return resized


class EncoderDecoder(CtxPreTrainedModel):
    """An encoder and a decoder, without the output layer.

    The input of the decoder defaults to the encoder's input, shifted by one token after
    `config.decoder_start_token_id`: each state of the decoder depends on the tokens before it and, through the encoder,
    on the whole text.

    Attributes:
        encoder, decoder: The stacks, of class `stack_class`.
        has_segments: Whether the encoder may have segments (`token_type_ids`).
    """

    has_segments: ClassVar[bool] = False
    stack_class: ClassVar[type[TransformerStack]] = TransformerStack
    supports_reentrant_checkpointing = False
    _skip_keys_device_placement = ["word_embeddings"]  # a module: accelerate would move it to the decoder's device
    _resize_token_embeddings = resize_token_embeddings

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = self.stack_class(config)
        self.decoder = self.stack_class(config, is_decoder=True)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings of the encoder."""
        return self.encoder.word_embeddings  # type: ignore[return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embeddings of the encoder."""
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
        cross_attention_mask: Tensor | None = None,
        langs: Tensor | None = None,
        decoder_langs: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> EncoderDecoderOutput:
        """Encode a batch, and decode. Other arguments as in `TransformerStack.forward`.

        Args:
            decoder_input_ids: (batch, steps) token ids, or `decoder_inputs_embeds`; None for the encoder's input,
                shifted by one token.
            decoder_attention_mask, decoder_position_ids, decoder_sequence_ids: As for the encoder, whose values are the
                default of a shifted input; with a cache the mask is (batch, past + steps).
            cross_attention_mask: (batch, length), 0 at tokens that are hidden from the decoder.
            langs, decoder_langs: (batch, length) and (batch, steps) language ids, for models with language embeddings;
                `decoder_langs` defaults to `langs`.
            encoder_outputs: The encoder's output, if it has been computed.
            use_cache: Return `past_key_values`; None returns them if they are passed. Without a cache the decoder is
                computed unpadded.
            output_mask: (batch, steps) bool, for the decoder.

        Raises:
            CtxError: Inputs do not match each other, the cache or the model.
        """
        if not self.has_segments:
            reject_segments(kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                sequence_ids=sequence_ids,
                return_dict=True,
                **({} if langs is None else {"langs": langs}),
                **kwargs,
            )
        encoder_outputs = as_model_output(encoder_outputs)
        states = encoder_outputs.last_hidden_state
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids, decoder_inputs_embeds = self.shift_right(
                input_ids, inputs_embeds, attention_mask, sequence_ids
            )
            decoder_attention_mask = attention_mask if decoder_attention_mask is None else decoder_attention_mask
            decoder_sequence_ids = sequence_ids if decoder_sequence_ids is None else decoder_sequence_ids
            decoder_position_ids = position_ids if decoder_position_ids is None else decoder_position_ids
        decoder_langs = langs if decoder_langs is None else decoder_langs
        check_source_mask(attention_mask, states)
        source_mask = attention_mask
        if cross_attention_mask is not None:
            check_aligned({"cross_attention_mask": cross_attention_mask}, *states.shape[:2])
            check_padding_mask(cross_attention_mask, "cross_attention_mask")
            source_mask = nonzero_in_all(cross_attention_mask, attention_mask)
        check_ids("decoder_input_ids", decoder_input_ids, self.config.target_vocab_size, "vocab_size")
        if (sequence_ids is None) != (decoder_sequence_ids is None):
            raise CtxError(
                "Only one of sequence_ids and decoder_sequence_ids was passed.",
                hint="pass sequence_ids and decoder_sequence_ids, with the same number of sequences in each row.",
            )
        if past_key_values is None and use_cache:
            config = self.config.get_text_config(decoder=True)
            past_key_values = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        decoder_outputs = self.decode(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            inputs_embeds=decoder_inputs_embeds,
            sequence_ids=decoder_sequence_ids,
            past_key_values=past_key_values,
            output_mask=output_mask,
            source=EncodedSource(states, source_mask, sequence_ids),
            **({} if decoder_langs is None else {"langs": decoder_langs}),
            **kwargs,
        )
        return EncoderDecoderOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=states,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )

    def decode(self, **inputs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder; arguments as in `TransformerStack.forward`."""
        return self.decoder(word_embeddings=self.decoder_word_embeddings, return_dict=True, **inputs)

    @property
    def decoder_word_embeddings(self) -> nn.Module:
        """The word embeddings of the decoder: the encoder's, if they are shared."""
        embeddings = self.decoder.word_embeddings
        return self.get_input_embeddings() if embeddings is None else embeddings

    def shift_right(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The encoder's input, shifted to the right: ids and None, or None and embeddings, for the decoder.

        Every token is replaced by the token before it in its sequence, the first by `config.decoder_start_token_id`.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise CtxError(
                "The decoder has no input.", hint="pass decoder_input_ids, or input_ids that are shifted to the right."
            )
        start = self.config.decoder_start_token_id or 0
        token_mask = build_token_mask(inputs, attention_mask, sequence_ids)
        masks = (token_mask,) if sequence_ids is None else (token_mask, sequence_ids)
        columns = on_host(preceding_columns, *masks)
        if input_ids is not None:

            def shift(ids: Tensor, preceding: Tensor) -> Tensor:
                return ids.gather(1, preceding.clamp(min=0)).masked_fill(preceding < 0, start)

            return on_host(shift, input_ids, columns), None
        is_first, columns = columns < 0, columns.clamp(min=0)
        start_vector = self.decoder_word_embeddings(torch.tensor(start, device=inputs.device)).to(inputs.dtype)
        shifted = inputs.gather(1, columns[..., None].expand_as(inputs))
        return None, torch.where(is_first[..., None], start_vector, shifted)


def preceding_columns(token_mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """(batch, length) column of the token before each token in its sequence, -1 for the first; `token_mask`
    (batch, length) is False at padding."""
    length = token_mask.shape[1]
    columns, rank = torch.arange(length, device=token_mask.device), token_mask.cumsum(1) - token_mask.long()
    # tokens first; ONNX has no cummax
    token_columns = torch.where(token_mask, columns, columns + length).sort(1).values
    preceding = token_columns.gather(1, (rank - 1).clamp(min=0))
    is_first = rank == 0
    if sequence_ids is not None:
        numbers = sequence_numbers(sequence_ids)
        is_first = is_first | (numbers.gather(1, preceding.clamp(max=length - 1)) != numbers)
    return preceding.masked_fill(is_first, -1)


def reject_segments(kwargs: dict[str, Any]) -> None:
    """Pop `token_type_ids` from the keyword arguments; raise CtxError unless they are None."""
    if kwargs.pop("token_type_ids", None) is not None:
        raise CtxError("The model has no segments.", location="token_type_ids", hint="remove token_type_ids.")
