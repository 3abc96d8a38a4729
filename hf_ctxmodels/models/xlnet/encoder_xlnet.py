"""The encoder of XLNet: one stream for tasks, two for permutation language modelling, memory for both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import reject_unused_tensors
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.adapter_slots import EMBEDDING_SLOT, InvertibleSlot, after_embeddings
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.transformer import recorded_layer_numbers
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.conversion_xlnet import XLNET_EXPORT
from hf_ctxmodels.models.xlnet.encoder_inputs import EncoderInputs
from hf_ctxmodels.models.xlnet.input_validation import check_combination, check_memory, check_permutation, check_tokens
from hf_ctxmodels.models.xlnet.relative_attention import distance_encodings
from hf_ctxmodels.models.xlnet.stream_layouts import Streams, build_streams
from hf_ctxmodels.models.xlnet.two_stream_attention import CtxXLNetLayer, RelativeAttention


@dataclass
class CtxXLNetModelOutput(BaseModelOutputWithPooling):
    """Output of the encoder.

    Attributes:
        last_hidden_state: (batch, length, hidden), or (outputs, hidden) with an output mask; with a query stream
            (batch, targets, hidden), of that stream.
        pooler_output: (batch, hidden), set by heads with a summary.
        mems: What the next segment may be given as `mems`: (batch, memory, hidden) for each layer, without gradient,
            zeros at padding.
        hidden_states: The input of every layer and the output of the last, None in place of those not chosen. With a
            query stream, of both streams in turn: content 0, query 0, content 1, ...
        attentions: (batch, heads, rows, keys) of every layer. With a query stream (content, query); of the last layer
            the query stream's alone, unless hidden states are recorded.
    """

    mems: tuple[Tensor, ...] | None = None


class CtxXLNetPreTrainedModel(CtxPreTrainedModel):
    """XLNet's part of the model base."""

    config: CtxXLNetConfig
    base_model_prefix = "xlnet"
    reference_model_type = "xlnet"
    export_conversion = XLNET_EXPORT
    mask_hint = "to hide keys from some rows only, give permutation_order or perm_mask (batch, length, length)."
    _supports_flash_attn = False
    _supports_flex_attn = False
    _no_split_modules = ["CtxXLNetLayer"]
    _keys_to_ignore_on_load_unexpected = [  # other heads of the same family
        r"^(lm_head|lm_loss|classifier|logits_proj|qa_outputs|start_logits|end_logits|answer_class)\.",
        r"^(sequence_summary|summary)\.",
    ]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RelativeAttention):
            for parameter in module.biases:
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, CtxXLNetModel):
            init.normal_(module.mask_embedding, mean=0.0, std=self.config.initializer_range)


class CtxXLNetModel(CtxXLNetPreTrainedModel):
    """The encoder: one stream, or two where targets are given."""

    invertible: InvertibleSlot | None

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mask_embedding = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.layers = nn.ModuleList(CtxXLNetLayer(config) for _ in range(config.num_hidden_layers))
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.register_module(EMBEDDING_SLOT, None)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def invertible_adapters(self) -> InvertibleSlot | None:
        """Those of the embeddings, if any."""
        return self.invertible

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings (used when the vocabulary is resized)."""
        self.word_embeddings = value

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        permutation_order: Tensor | None = None,
        target_positions: Tensor | None = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        position_ids: None = None,
        input_mask: None = None,
        use_mems: bool | None = None,
        **kwargs: Any,
    ) -> CtxXLNetModelOutput:
        """Encode a batch; `Permutation` explains the two forms of an order and its targets.

        Args:
            input_ids: (batch, length) token ids, also at targets; or `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length), 1 at tokens and 0 at padding, on either side.
            token_type_ids: (batch, length) segments of any numbering; None leaves the segment term out.
            mems: (batch, memory, hidden) of earlier segments for each layer, as returned; zeros are hidden.
            permutation_order: (batch, length) ranks in the factorisation order; -1 is visible to every row.
            target_positions: (batch, targets) columns to predict, -1 for none; switches the query stream on.
            perm_mask: (batch, length, length), 1 where key j is hidden from row i: in place of `permutation_order`.
            target_mapping: (batch, targets, length), one-hot: in place of `target_positions`.
            sequence_ids: (batch, length), 0 at padding; a run of equal numbers is one sequence.
            output_mask: (batch, length) bool, for one stream: the positions that `last_hidden_state` holds, row-major.
            position_ids, input_mask: Not taken: positions are relative, and padding is said by `attention_mask`.
            use_mems: Whether to return `mems`; by default as the configuration says for training and evaluation.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention in place of sdpa).

        Raises:
            CtxError: Input that does not fit together or the model.
        """
        if position_ids is not None:
            raise CtxError("position_ids are not taken: positions are relative here. Leave them out.")
        if input_mask is not None:
            raise CtxError("input_mask is not taken.", hint="give attention_mask = 1 - input_mask.")
        reject_unused_tensors(**kwargs)
        width, places = self.config.hidden_size, {"sequence_ids": sequence_ids, "output_mask": output_mask}
        words = self.check_encoder_input(
            input_ids, inputs_embeds, attention_mask, None, width=width, token_type_ids=token_type_ids, **places
        )
        tokens = check_tokens(attention_mask, sequence_ids)
        memory = check_memory(mems, self.config, words.shape[0])
        permutation = check_permutation(words, tokens, permutation_order, target_positions, perm_mask, target_mapping)
        inputs = EncoderInputs(words, tokens, token_type_ids, sequence_ids, memory, permutation, output_mask)
        check_combination(self.config, inputs)
        if self.training:  # so that the segments' parameters take part, as DDP expects
            inputs = inputs.with_token_types()
        return self._run_layers(inputs, use_mems, **kwargs)

    def _run_layers(self, inputs: EncoderInputs, use_mems: bool | None, **kwargs: Any) -> CtxXLNetModelOutput:
        """The layers over a batch; arguments as in `forward`."""
        config, count = self.config, len(self.layers)
        if use_mems is None:
            use_mems = config.use_mems_train if self.training else config.use_mems_eval
        choice, wants_attentions = config.resolve_output_flags(kwargs).values()
        chosen = recorded_layer_numbers(choice, count + 1)
        streams = build_streams(inputs, self._encodings(inputs), config, output_attentions=wants_attentions)
        last = streams.for_last_layer(content=bool(chosen))
        hidden_states = after_embeddings(self.invertible_adapters, self._embed(inputs, streams))
        mems, attentions = [], []
        recorded: list[Tensor | None] = []
        nothing = (None,) * (1 if inputs.target_positions is None else 2)
        for number, layer in enumerate(self.layers):
            memory = None if inputs.memory is None else inputs.memory[number]
            states = streams.unpack(hidden_states) if number in chosen else nothing
            recorded.extend(states)
            if number in chosen:  # gradients with respect to what is recorded pass through it
                hidden_states = streams.repack([each for each in states if each is not None])
            if use_mems:
                mems.append(updated_memory(streams.content(hidden_states), memory, config.mem_len, config.reuse_len))
            hidden_states, probabilities = layer(hidden_states, last if number + 1 == count else streams, memory)
            if wants_attentions:
                attentions.append(probabilities)
        outputs = last.unpack(self.dropout(hidden_states))
        recorded.extend(outputs if count in chosen else nothing)
        return CtxXLNetModelOutput(
            last_hidden_state=outputs[-1],
            mems=tuple(mems) or None,
            hidden_states=None if choice is None or choice is False else tuple(recorded),
            attentions=tuple(attentions) if wants_attentions else None,
        )

    def _encodings(self, inputs: EncoderInputs) -> Tensor:
        """(groups, memory + 2 * length, hidden) encodings of the distances memory + length, ..., 1 - length.

        One dropout mask serves the whole batch; the reference draws one for each row and projects each by itself.
        """
        distances = torch.arange(inputs.memory_length + inputs.length, -inputs.length, -1, device=self.device)
        if self.config.clamp_len > 0:
            distances = distances.clamp(-self.config.clamp_len, self.config.clamp_len)
        groups = [distances, -distances] if self.config.bi_data else [distances]
        encodings = [distance_encodings(group, self.config.hidden_size, self.dtype) for group in groups]
        return self.dropout(torch.stack(encodings))

    def _embed(self, inputs: EncoderInputs, streams: Streams) -> Tensor:
        """(..., hidden) rows of the first layer: the words', and appended to them those of the query stream, if any."""
        words = streams.pack(inputs.words)
        content = words if words.is_floating_point() else self.word_embeddings(words)
        if inputs.target_positions is not None:
            queries = self.mask_embedding.expand(*inputs.target_positions.shape, -1)
            return self.dropout(torch.cat([content, queries.to(content.dtype)], 1))
        if self.training:  # so that the mask embedding takes part, as DDP expects
            content = content + 0 * self.mask_embedding.view(-1)
        return self.dropout(content)


def updated_memory(states: Tensor, memory: Tensor | None, mem_len: int | None, reuse_len: int | None) -> Tensor:
    """What the next segment remembers of one layer's input (section 2.5), without gradient.

    Args:
        states: (batch, length, hidden) of this segment.
        memory: (batch, memory, hidden) of earlier ones.
        mem_len: How many positions are kept, the latest; None or 0 keeps all.
        reuse_len: Only the first positions of the segment are remembered; None or 0 remembers all.
    """
    if reuse_len:
        states = states[:, :reuse_len]
    if memory is not None:
        states = torch.cat([memory, states], 1)
    return (states[:, -mem_len:] if mem_len else states).detach()
