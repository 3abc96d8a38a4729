"""CoVe (McCann et al. 2017, arXiv 1708.00107): word vectors, and what a translation model's encoder makes of them.

Its own here: what is read beside what, and which part learns. The arithmetic is in `hf_ctxmodels.layers.recurrent`,
`attentional_decoder` and `biattention`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.layers.attentional_decoder import AttentionalDecoder, DecoderState, reset_cell
from hf_ctxmodels.layers.biattention import Biattention, MaxoutClassifier
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.prediction import chunked_cross_entropy
from hf_ctxmodels.layers.recurrent import LSTM, PackedRows, State
from hf_ctxmodels.layers.varlen import check_row_lengths
from hf_ctxmodels.modeling_base import CtxPreTrainedModel, check_ids, is_traced, sequence_numbers
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig

_SPREAD = 0.4  # of random vectors, in every dimension: about that of released ones


class FixedVectors(nn.Embedding):
    """The table of word vectors; its own class, that it be filled and not drawn like other embeddings.

    Args:
        words, width: Shape.
        trainable: Whether the vectors are trained.
    """

    def __init__(self, words: int, width: int, trainable: bool) -> None:
        super().__init__(words, width)
        self.fixed_parameters = () if trainable else ("weight",)
        self.weight.requires_grad_(trainable)


class CtxCovePreTrainedModel(CtxPreTrainedModel):
    """CoVe's part of the model base."""

    config: CtxCoveConfig
    base_model_prefix = "cove"
    supports_gradient_checkpointing = False  # the recurrence keeps little more than its outputs

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LSTM):
            module.reset_parameters()
        elif isinstance(module, nn.LSTMCell):
            reset_cell(module)
        elif isinstance(module, FixedVectors):
            if not getattr(module.weight, "_is_hf_initialized", False):
                self._fill(module)
        else:
            super()._init_weights(module)

    def _fill(self, module: FixedVectors) -> None:
        """The vectors of `config.static_model`, or random ones; those of padding and unknown words are zero."""
        config = self.config
        if config.static_model is None:
            init.normal_(module.weight, std=_SPREAD)
        else:
            init.copy_(module.weight, _vectors_of(config))
        for token in (config.pad_token_id, config.unk_token_id):
            if token is not None and token < module.num_embeddings:
                init.zeros_(module.weight[token])


def _vectors_of(config: CtxCoveConfig) -> Tensor:
    """(vocabulary, embedding) of `config.static_model`.

    Raises:
        CtxError: It cannot be opened, or its vectors are of another number or width.
    """
    source = config.static_model
    try:
        model, tokenizer = AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CtxError(f"Cannot open the model of the fixed vectors: {error}", where=source) from error
    if not hasattr(model, "vectors"):
        raise CtxError(f"{type(model).__name__} has no fixed vector for each word.", where=source)
    vectors = model.vectors().detach()
    expected = (config.vocab_size, config.embedding_size)
    if tuple(vectors.shape) != expected or len(tokenizer) != config.vocab_size:
        raise CtxError(
            f"The vectors are {tuple(vectors.shape)}, but vocab_size and embedding_size are {expected}.",
            where=source,
            mend="train the tokenizer with static_model=..., so that its words are those of the vectors, and set "
            "embedding_size to their width.",
        )
    return vectors


@dataclass
class CtxCoveModelOutput(BaseModelOutputWithPooling):
    """Output of `CtxCoveModel`.

    Attributes:
        last_hidden_state: (batch, length, embedding + hidden): the word's vector, and behind it the top layer's states.
        pooler_output: None.
        hidden_states: Layers + 1 of them: the vectors, the layers below the top, and `last_hidden_state`.
        final_hidden, final_cell: (batch, layers, hidden) every layer's state where each direction ends.
    """

    final_hidden: Tensor | None = None
    final_cell: Tensor | None = None


class CtxCoveModel(CtxCovePreTrainedModel):
    """Fixed word vectors and the MT-LSTM; its output is [GloVe(w); MT-LSTM(GloVe(w))] (section 4).

    Attributes:
        gives_states: Whether `forward` gives the states where a row ends, which a decoder starts from.
    """

    gives_states = False

    def __init__(self, config: CtxCoveConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.word_embeddings = FixedVectors(config.vocab_size, config.embedding_size, config.train_vectors)
        widths = [config.embedding_size, *[config.hidden_size] * (config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList(LSTM(width, config.hidden_size // 2, state_bias=True) for width in widths)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The fixed vectors."""
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the fixed vectors."""
        self.word_embeddings = value.requires_grad_(self.config.train_vectors)  # type: ignore[assignment]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        wanted: Tensor | None = None,
        use_states: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CtxCoveModelOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, length) ids; or `inputs_embeds` (batch, length, embedding) in their place.
            attention_mask: (batch, length), 1 at words and 0 at padding, which does not enter any state.
            token_type_ids: (batch, length), 0 for a first text and 1 for a second one: for heads that tell them apart.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, which starts from zero.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, width).
            use_states: Give `final_hidden` and `final_cell`; None for `gives_states`.
            output_hidden_states: Give `hidden_states`.
            kwargs: What other families' models read, such as `position_ids`.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        aligned = {"sequence_ids": sequence_ids, "wanted": wanted, "token_type_ids": token_type_ids}
        given = self.check_encoder_input(input_ids, inputs_embeds, attention_mask, None, **aligned)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise CtxError(f"attention_mask must be (batch, length); got {tuple(attention_mask.shape)}.")
        if inputs_embeds is not None and inputs_embeds.shape[2] != self.config.embedding_size:
            raise CtxError(
                f"inputs_embeds is {tuple(inputs_embeds.shape)}, expected width {self.config.embedding_size}."
            )
        rows = self._rows(given, attention_mask, sequence_ids)
        states = [given if input_ids is None else self.word_embeddings(input_ids)]
        after = []
        for depth, layer in enumerate(self.layers):
            read = self.dropout(states[-1]) if depth else states[-1]
            packed, state = layer(rows.pack(read), rows)
            states.append(_side_by_side(rows.unpack(packed)))
            after.append(rows.unsorted(state))
        vectors = (states[0] * token_mask(given, attention_mask, sequence_ids)[..., None]).to(states[-1].dtype)
        last = torch.cat([vectors, states[-1]], -1)
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        use_states = self.gives_states if use_states is None else use_states
        if use_states and sequence_ids is not None:
            raise CtxError("use_states asks for the state behind a row, but sequence_ids say it is several sequences.")
        hidden, cell = _final(after) if use_states else (None, None)
        return CtxCoveModelOutput(
            last_hidden_state=last if wanted is None else last[wanted],
            hidden_states=(vectors, *states[1:-1], last) if wants else None,
            final_hidden=hidden,
            final_cell=cell,
        )

    def _rows(self, given: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None) -> PackedRows:
        """Where the words are: packed, unless `config.unpad` is off or a graph is traced."""
        tokens = token_mask(given, attention_mask, sequence_ids)
        numbers = None if sequence_ids is None else sequence_numbers(sequence_ids)
        if is_traced(given):
            return PackedRows.with_padding(tokens, numbers)
        check_row_lengths(tokens.sum(1))
        build = PackedRows.build if self.config.unpad else PackedRows.with_padding
        return build(tokens, numbers)


def token_mask(given: Tensor, *masks: Tensor | None) -> Tensor:
    """(batch, length) bool: where no mask (batch, length) is 0."""
    tokens = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
    for mask in masks:
        if mask is not None:
            tokens = tokens & (mask != 0)
    return tokens


def _side_by_side(states: Tensor) -> Tensor:
    """(2, ..., width) -> (..., 2 * width)."""
    return torch.cat([states[0], states[1]], -1)


def _final(states: list[State]) -> tuple[Tensor, Tensor]:
    """(rows, layers, hidden) last outputs and cells of all layers."""
    hidden, cell = (torch.stack([_side_by_side(part) for part in parts], 1) for parts in zip(*states, strict=True))
    return hidden, cell


class CtxCoveHeadModel(heads.HeadModel, CtxCovePreTrainedModel):
    """Binds the generic heads to the vectors and the encoder's states, or to the vectors alone."""

    encoder_class = CtxCoveModel
    for_tasks: ClassVar[bool] = True

    def train(self, mode: bool = True) -> "CtxCoveHeadModel":
        """A frozen encoder has no dropout."""
        super().train(mode)
        if self.for_tasks and self.config.freeze_context and hasattr(self, self.base_model_prefix):
            self.base_model.eval()
        return self

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder; `last_hidden_state` is what the configuration says a task reads."""
        if not self.for_tasks:
            return super().encode(**kwargs)
        if self.config.freeze_context:
            with torch.no_grad():
                outputs = super().encode(**kwargs)
        else:
            outputs = super().encode(**kwargs)
        if not self.config.task_context:
            outputs.last_hidden_state = outputs.last_hidden_state[..., : self.config.embedding_size]
        return outputs


@dataclass
class CtxCoveTranslationOutput(ModelOutput):
    """Output of `CtxCoveForConditionalGeneration`.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, steps, target vocabulary); None with `labels`.
        past_key_values: What the decoder remembers; None unless asked for, and with `labels`.
        hidden_states: Of the encoder, see `CtxCoveModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: DecoderState | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class CtxCoveForConditionalGeneration(CtxCoveHeadModel, GenerationMixin):
    """The translation model (section 3). The decoder starts from the encoder's last states."""

    for_tasks = False
    decoder: AttentionalDecoder
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """The encoder; `generate` runs it by itself."""
        encoder = CtxCoveModel(config)
        encoder.gives_states = True
        return encoder

    def build_head(self, config: CtxCoveConfig) -> None:
        """The decoder, and the softmax's weights."""
        self.decoder = AttentionalDecoder(
            config.target_vocab_size,
            config.embedding_size,
            config.hidden_size,
            config.num_hidden_layers,
            dropout=config.hidden_dropout_prob,
            attends=config.decoder_attention,
            padding_idx=config.pad_token_id,
        )
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which `generate` runs once."""
        return self.base_model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the cache is a `DecoderState`, which the first step makes

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: CtxCoveModelOutput | None = None,
        past_key_values: DecoderState | None = None,
        use_cache: bool = False,
        num_items_in_batch: heads.ItemCounts = None,
        **kwargs: Any,
    ) -> CtxCoveTranslationOutput:
        """The loss where `labels` are given, else logits. Other arguments as in `CtxCoveModel.forward`.

        Args:
            decoder_input_ids: (batch, steps) target ids, each the one before that to be predicted; None makes them of
                `labels`, behind `config.decoder_start_token_id`.
            labels: (batch, steps) target ids; -100 where none is to be predicted.
            encoder_outputs: The encoder's, where it ran before.
            past_key_values: What an earlier forward gave; `decoder_input_ids` go on from there.
            use_cache: Give `past_key_values`.

        Raises:
            CtxError: Input that does not fit together or the model.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encode(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        read = encoder_outputs.last_hidden_state
        self._check_targets(read, decoder_input_ids, labels)
        if decoder_input_ids is None:
            decoder_input_ids = self._shifted(labels)
        state = past_key_values
        if state is None:
            hidden, cell = encoder_outputs.final_hidden, encoder_outputs.final_cell
            if hidden is None or cell is None:
                raise CtxError("encoder_outputs have no states to start from.", mend="run it with use_states=True.")
            state = self.decoder.start(hidden, cell)
        memory, tokens = read[..., self.config.embedding_size :], token_mask(read, attention_mask)
        loss = logits = None
        if labels is None:
            states, state = self.decoder(decoder_input_ids, memory, tokens, state)
            logits = self.prediction(states)
        else:
            states, state = self._asked_states(decoder_input_ids, labels, memory, tokens, state)
            size = self.config.target_vocab_size
            loss = heads.vocabulary_loss(self._summed_loss, states, labels, size, num_items_in_batch)
        return CtxCoveTranslationOutput(
            loss=loss,
            logits=logits,
            past_key_values=state if use_cache and labels is None else None,
            hidden_states=encoder_outputs.hidden_states,
        )

    def _asked_states(
        self, ids: Tensor, labels: Tensor, memory: Tensor, tokens: Tensor, state: DecoderState
    ) -> tuple[Tensor, DecoderState | None]:
        """(targets, hidden) the decoder's states where a word is to be predicted."""
        asked = labels != heads.IGNORED
        if is_traced(ids) or not self.config.unpad:
            states, after = self.decoder(ids, memory, tokens, state)
            return states[asked], after
        return self.decoder.asked_states(ids, asked, memory, tokens, state), None

    def _check_targets(self, read: Tensor, ids: Tensor | None, labels: Tensor | None) -> None:
        if ids is None and labels is None:
            raise CtxError("Give decoder_input_ids, or labels, or call generate.")
        for name, tensor in {"decoder_input_ids": ids, "labels": labels}.items():
            if tensor is not None and (tensor.dim() != 2 or len(tensor) != len(read) or not tensor.shape[1]):
                raise CtxError(
                    f"{name} is {tuple(tensor.shape)}, expected ({len(read)}, steps), as many rows as texts."
                )
        if ids is not None and labels is not None and ids.shape != labels.shape:
            raise CtxError(f"labels is {tuple(labels.shape)}, but decoder_input_ids {tuple(ids.shape)}.")
        check_ids("decoder_input_ids", ids, self.config.target_vocab_size, "target_vocab_size")

    def _shifted(self, labels: Tensor | None) -> Tensor:
        """(batch, steps) what the decoder reads before it predicts each label."""
        size = self.config.target_vocab_size
        ids = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id or 0)  # type: ignore[index]
        # ids outside the vocabulary are refused with the loss
        return torch.where((ids < 0) | (ids >= size), self.config.pad_token_id or 0, ids)

    def _summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(states, self.prediction.weight, self.prediction.bias, targets, reduction="sum")

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: DecoderState | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: CtxCoveModelOutput | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The target's text so far, or, with a state, its last token."""
        return {
            "decoder_input_ids": input_ids if past_key_values is None else input_ids[:, -1:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
            "use_cache": bool(use_cache),
        }


class CtxCoveForSequenceClassification(heads.ForSequenceClassification, CtxCoveHeadModel):
    """The biattentive classification network (section 5), for one text or two."""

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """The encoder; what pools stands beside it."""
        self.biattention = Biattention(config.task_size, config.biattention_size, config.head_dropout)
        return CtxCoveModel(config)

    def build_head(self, config: CtxCoveConfig) -> None:
        """Maxout layers."""
        self.dropout = Dropout(0.0)  # it stands behind the normalisations
        self.classifier = MaxoutClassifier(
            config.pooled_size,
            2 * config.biattention_size,
            config.num_labels,
            pieces=config.maxout_pieces,
            dropout=config.head_dropout,
        )

    def encode(
        self,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the encoder, over a second text anew; `pooler_output` is what the biattention pools."""
        apart = sequence_ids
        if token_type_ids is not None and sequence_ids is None:
            apart = 1 + token_type_ids
        outputs = super().encode(
            attention_mask=attention_mask, token_type_ids=token_type_ids, sequence_ids=apart, **kwargs
        )
        states = outputs.last_hidden_state
        tokens = token_mask(states, attention_mask, sequence_ids)
        second = torch.zeros_like(tokens) if token_type_ids is None else token_type_ids != 0
        unpad = self.config.unpad and not is_traced(states)
        outputs.pooler_output = self.biattention(states, tokens, second & tokens, unpad)
        return outputs


class CtxCoveForTokenClassification(heads.ForTokenClassification, CtxCoveHeadModel):
    """A linear classifier on each word's vector and the encoder's state."""
