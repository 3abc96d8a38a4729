"""Transformer encoder-decoders (Vaswani et al. 2017): two stacks of layers; the second attends to the first."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.transformer_decoder import check_cache, default_positions, mask_of_new_tokens
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation_cache import get_targets_per_source
from hf_ctxmodels.core.inputs import check_encoder_input, check_ids, check_source_mask, sequence_numbers
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.seq2seq import as_model_output
from hf_ctxmodels.layers.attention.layouts import Layout, build_layout, build_memory_layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import CrossAttention, SelfAttention
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.hook_points import HookPoint
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.transformer import FeedForward, Memory, TransformerBlock, run_stack


@dataclass(frozen=True, eq=False)
class EncodedSource:
    """The encoder's output that a decoder attends to.

    Attributes:
        states: (batch, length, hidden).
        attention_mask: (batch, length), 0 at positions that are hidden from the decoder; None for none.
        sequence_ids: (batch, length) `sequence_ids` of the encoder's input, or None.
    """

    states: Tensor
    attention_mask: Tensor | None = None
    sequence_ids: Tensor | None = None


class TransformerStack(nn.Module):
    """An encoder or a decoder: embeddings, layers and final norm. The defaults are BART's; families override them.

    The position of a token is the number of tokens before it in its sequence, wherever the padding is.

    Args:
        config: The configuration of the model.
        is_decoder: Whether the stack is causal and attends to a source.

    Attributes:
        word_embeddings: None for a decoder that shares the encoder's word embeddings.
        embedding_norm: The norm of the embeddings.
        layers: The layers in the order of application.
        final_norm: The norm of the last layer's output, identity with post-norm.
        zeros_padding: Whether the states at padding positions are 0 in all layers.
        embedding_output: Hook point of the embeddings.
    """

    zeros_padding: ClassVar[bool] = False

    def __init__(self, config: Any, *, is_decoder: bool = False) -> None:
        super().__init__()
        self.config = config
        self.is_decoder = is_decoder
        shares_embeddings = is_decoder and config.shares_word_embeddings
        self.word_embeddings = None if shares_embeddings else self.build_word_embeddings(config)
        self.build_embeddings(config)
        self.embedding_norm = self.build_embedding_norm(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        num_layers = config.decoder_layers if is_decoder else config.num_hidden_layers
        self.layers = nn.ModuleList(self.build_layer(config) for _ in range(num_layers))
        self.final_norm = self.build_final_norm(config)
        self.embedding_output = HookPoint()

    def build_word_embeddings(self, config: Any) -> nn.Embedding:
        """Create the word embeddings."""
        return nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_embeddings(self, config: Any) -> None:
        """Create the embeddings that are added to the word embeddings."""
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def build_embedding_norm(self, config: Any) -> nn.Module:
        """Create the norm of the embeddings."""
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def build_layer(self, config: Any) -> nn.Module:
        """Create a layer: post-norm, and with cross-attention in a decoder."""
        width, dropout = config.hidden_size, config.attention_probs_dropout_prob
        num_heads = config.decoder_attention_heads if self.is_decoder else config.num_attention_heads
        intermediate_size = config.decoder_ffn_dim if self.is_decoder else config.intermediate_size
        activation_dropout = getattr(config, "activation_dropout", 0.0)
        return TransformerBlock(
            width,
            SelfAttention(width, num_heads, dropout=dropout),
            FeedForward(width, intermediate_size, config.hidden_act, dropout=activation_dropout),
            norm="post",
            norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
            dropout=config.hidden_dropout_prob,
            cross_attention=CrossAttention(width, num_heads, dropout=dropout) if self.is_decoder else None,
        )

    def build_final_norm(self, config: Any) -> nn.Module:
        """Create the norm of the last layer's output."""
        return nn.Identity()

    def mask_spec(self) -> MaskSpec:
        """The attention pattern of self-attention, with its bias, in all layers."""
        return CAUSAL if self.is_decoder else BIDIRECTIONAL

    def extra_embedding_ids(self, words: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the (batch, length) arguments of `embed` other than words and positions, by name.

        Args:
            words: (batch, length, ...) ids or embeddings.
            kwargs: Keyword arguments of `forward`, from which the arguments of the embeddings are popped.
        """
        return {}

    def embed(self, words: Tensor, position_ids: Tensor, **extra_ids: Tensor) -> Tensor:
        """(..., hidden) word embeddings and (...) positions -> (..., hidden)."""
        return self.dropout(self.embedding_norm(words + self.position_embeddings(position_ids)))

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
        """Run the stack.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length), with a cache (batch, past + length): 1 at tokens and 0 at padding.
            position_ids: (batch, length) or (1, length); None for the number of tokens before each token.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, whose tokens attend to each other only, and to the same sequence of the source.
            past_key_values: The cache of a decoder's preceding tokens; it is extended in place. Without one the batch
                is computed unpadded.
            output_mask: (batch, length) bool; `last_hidden_state` then has only these positions, (targets, hidden) in
                row-major order, and the last layer is computed only there.
            source: The encoder's output that a decoder attends to.
            word_embeddings: Word embeddings for a stack that does not have any.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention instead of sdpa), the arguments of
                `extra_embedding_ids`, and arguments of the attention function.

        Raises:
            CtxError: Inputs do not match each other, the cache or the model.
        """
        output_flags = self.config.resolve_output_flags(kwargs)
        embeddings: Any = self.word_embeddings if word_embeddings is None else word_embeddings
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        limit = self.config.max_sequence_length
        words = check_encoder_input(
            input_ids,
            inputs_embeds,
            mask_of_new_tokens(attention_mask, inputs_embeds if input_ids is None else input_ids, past_key_values),
            limit,
            limit=self.config.vocab_size,
            width=self.config.hidden_size,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            aligned={"position_ids": position_ids},
            dtype=None if inputs_embeds is None or torch.compiler.is_compiling() else embeddings.weight.dtype,
        )
        if past_key_values is not None:
            self_attention_cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            check_cache(self_attention_cache, words, past_length, limit)
        if limit is not None:
            check_ids("position_ids", position_ids, limit, "max_position_embeddings")
        if position_ids is None:
            position_ids = default_positions(words, attention_mask, sequence_ids, past_length)
        embedding_ids = self.extra_embedding_ids(words, kwargs) | {"position_ids": position_ids.expand(words.shape[:2])}
        kwargs |= output_flags | {"past_key_values": past_key_values}
        layout = build_layout(words, attention_mask, sequence_ids, self.config, **kwargs)
        packed_ids = {name: layout.pack(tensor) for name, tensor in embedding_ids.items()}
        outputs = run_stack(
            self.layers,
            self._embed_packed(layout.pack(words), embeddings, packed_ids),  # no reference, so that it can be freed
            layout,
            self.mask_spec(),
            memory=None if source is None else build_memory(layout, source, get_targets_per_source(past_key_values)),
            past_key_values=past_key_values,
            final_norm=self.final_norm,
            output_mask=output_mask,
            zero_padding=self.zeros_padding,
            **output_flags,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=None if source is None else outputs.cross_attentions,
        )

    def _embed_packed(self, words: Tensor, embeddings: nn.Module, extra_ids: dict[str, Tensor]) -> Tensor:
        """(...) ids or (..., hidden) word embeddings -> (..., hidden) input of the first layer."""
        vectors = words if words.is_floating_point() else embeddings(words)
        return self.embedding_output(self.embed(vectors, **extra_ids))


def build_memory(layout: Layout, source: EncodedSource, targets_per_source: int) -> Memory:
    """The input of cross-attention: the first of each group of `targets_per_source` equal rows of the source."""
    states, mask = source.states[::targets_per_source], source.attention_mask
    mask = None if mask is None else mask[::targets_per_source]
    memory_layout = build_memory_layout(layout, states, mask, source.sequence_ids)
    return Memory(memory_layout.pack(states), memory_layout, BIDIRECTIONAL, targets_per_source)


@dataclass
class EncoderDecoderOutput(Seq2SeqModelOutput):
    """Output of `EncoderDecoder`: transformers' `Seq2SeqModelOutput`, with aliases of two outputs of the decoder."""

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """Alias of `decoder_hidden_states`."""
        return self.decoder_hidden_states

    @property
    def attentions(self) -> tuple[Tensor, ...] | None:
        """Alias of `decoder_attentions`."""
        return self.decoder_attentions


class EncoderDecoder(CtxPreTrainedModel):
    """An encoder and a decoder, without the output layer.

    The input of the decoder defaults to the encoder's input, shifted by one token after
    `config.decoder_start_token_id`: each state of the decoder depends on the tokens before it and, through the encoder,
    on the whole text.

    Attributes:
        encoder, decoder: The stacks, of class `stack_class`.
    """

    stack_class: ClassVar[type[TransformerStack]] = TransformerStack
    supports_reentrant_checkpointing = False

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

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        resize_decoder_embeddings(self, resized.num_embeddings, mean_resizing)
        return resized

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
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length), 1 at tokens and 0 at padding.
            position_ids: (batch, length) or (1, length); None for the number of tokens before each token.
            sequence_ids: (batch, length), for several sequences in one row, see `TransformerStack.forward`.
            decoder_input_ids: (batch, steps) token ids, or `decoder_inputs_embeds`; None for the encoder's input,
                shifted by one token, with its padding.
            decoder_attention_mask, decoder_position_ids, decoder_sequence_ids: As for the encoder; with a cache the
                mask is (batch, past + steps).
            encoder_outputs: The encoder's output, if it has been computed.
            past_key_values: The cache of the decoder's preceding tokens; it is extended in place.
            use_cache: Return `past_key_values`; None returns them if they are passed. Without a cache the decoder is
                computed unpadded.
            output_mask: (batch, steps) bool; `last_hidden_state` then has only these positions of the decoder,
                (targets, hidden) in row-major order, and the last layer is computed only there.
            kwargs: As in `TransformerStack.forward`.

        Raises:
            CtxError: Inputs do not match each other, the cache or the model.
        """
        reject_segments(kwargs)
        encoder_kwargs, decoder_kwargs = self.split_kwargs(kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                sequence_ids=sequence_ids,
                return_dict=True,
                **encoder_kwargs,
            )
        encoder_outputs = as_model_output(encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids, decoder_inputs_embeds = self.shift_right(
                input_ids, inputs_embeds, attention_mask, sequence_ids
            )
            decoder_attention_mask, decoder_sequence_ids = attention_mask, sequence_ids
            decoder_position_ids = position_ids
        decoder_outputs = self.decode(
            EncodedSource(encoder_outputs.last_hidden_state, attention_mask, sequence_ids),
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            inputs_embeds=decoder_inputs_embeds,
            sequence_ids=decoder_sequence_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_mask=output_mask,
            **decoder_kwargs,
        )
        return EncoderDecoderOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )

    def split_kwargs(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the additional keyword arguments of `forward` into arguments of the encoder and of the decoder."""
        return {name: value for name, value in kwargs.items() if not name.startswith("decoder_")}, kwargs

    def decode(
        self,
        source: EncodedSource,
        *,
        input_ids: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder.

        Args:
            source: The encoder's output.
            input_ids, sequence_ids: (batch, steps).
            past_key_values, use_cache: As in `forward`.
            kwargs: Other arguments of `TransformerStack.forward`.
        """
        check_source_mask(source.attention_mask, source.states)
        check_ids("decoder_input_ids", input_ids, self.config.vocab_size, "vocab_size")
        if (source.sequence_ids is None) != (sequence_ids is None):
            raise CtxError(
                "Only one of sequence_ids and decoder_sequence_ids was passed.",
                hint="pass sequence_ids and decoder_sequence_ids, with the same number of sequences in each row.",
            )
        if past_key_values is None and use_cache:
            past_key_values = self.new_cache()
        return self.decoder(
            input_ids=input_ids,
            sequence_ids=sequence_ids,
            past_key_values=past_key_values,
            source=source,
            word_embeddings=self.decoder_word_embeddings,
            return_dict=True,
            **kwargs,
        )

    @property
    def decoder_word_embeddings(self) -> nn.Module:
        """The word embeddings of the decoder: the encoder's, if they are shared."""
        embeddings = self.decoder.word_embeddings
        return self.get_input_embeddings() if embeddings is None else embeddings

    def new_cache(self) -> EncoderDecoderCache:
        """An empty cache of the decoder."""
        config = self.config.get_text_config(decoder=True)
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    def shift_right(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Shift the encoder's input to the right: returns ids and None, or None and embeddings, for the decoder.

        Every token is replaced by the token before it in its sequence, the first by `config.decoder_start_token_id`.

        Raises:
            CtxError: There is no input.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise CtxError(
                "The decoder has no input.", hint="pass decoder_input_ids, or input_ids that are shifted to the right."
            )
        columns = preceding_columns(token_mask(inputs, attention_mask, sequence_ids), sequence_ids)
        is_first, start = columns < 0, self.config.decoder_start_token_id or 0
        columns = columns.clamp(min=0)
        if input_ids is not None:
            return input_ids.gather(1, columns).masked_fill(is_first, start), None
        start_vector = self.decoder_word_embeddings(torch.tensor(start, device=inputs.device)).to(inputs.dtype)
        shifted = inputs.gather(1, columns[..., None].expand_as(inputs))
        return None, torch.where(is_first[..., None], start_vector, shifted)


def preceding_columns(tokens: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length) column of the token before each token in its sequence; -1 for the first.

    Args:
        tokens: (batch, length) bool, False at padding.
        sequence_ids: (batch, length), a run of equal numbers is one sequence; None for one sequence per row.
    """
    length = tokens.shape[1]
    columns, rank = torch.arange(length, device=tokens.device), tokens.cumsum(1) - tokens.long()
    token_columns = torch.where(tokens, columns, columns + length).sort(1).values  # tokens first; ONNX has no cummax
    preceding = token_columns.gather(1, (rank - 1).clamp(min=0))
    is_first = rank == 0
    if sequence_ids is not None:
        numbers = sequence_numbers(sequence_ids)
        is_first = is_first | (numbers.gather(1, preceding.clamp(max=length - 1)) != numbers)
    return preceding.masked_fill(is_first, -1)


def resize_decoder_embeddings(model: Any, size: int, mean_resizing: bool) -> None:
    """Resize separate word embeddings of the decoder, if any, in an encoder-decoder or a head on it."""
    decoder = getattr(model.base_model, "decoder", None)  # None in T5's encoder
    if decoder is not None and decoder.word_embeddings is not None:
        decoder.word_embeddings = model._get_resized_embeddings(
            decoder.word_embeddings, size, mean_resizing=mean_resizing
        )


def reject_segments(kwargs: dict[str, Any]) -> None:
    """Pop `token_type_ids` from the keyword arguments; raise CtxError unless they are None."""
    if kwargs.pop("token_type_ids", None) is not None:
        raise CtxError("The model has no segments.", location="token_type_ids", hint="remove token_type_ids.")
