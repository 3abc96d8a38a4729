"""The encoder of XLNet: one stream for tasks, two for permutation language modelling, memory for both."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import merge_with_config_defaults

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_row_lengths, is_traced, sequence_numbers
from hf_ctxmodels.core.model import CtxPreTrainedModel, EncoderOutput, capture_unpacked_outputs
from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.feed_forward import FeedForward
from hf_ctxmodels.models.xlnet.checks_xlnet import (
    Permutation,
    check_combination,
    check_memory,
    check_permutation,
)
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.conversion_xlnet import XLNET_EXPORT
from hf_ctxmodels.models.xlnet.relative_attention import distance_encodings
from hf_ctxmodels.models.xlnet.two_stream import (
    PackedStreams,
    PaddedStreams,
    RecordedStreams,
    RelativeAttention,
    Streams,
    updated_memory,
)
from hf_ctxmodels.models.xlnet.visibility import visible_keys


class CtxXLNetLayer(GradientCheckpointingLayer):
    """Relative attention and feed-forward, each followed by dropout, the residual sum and a LayerNorm (post-norm)."""

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(
            config.hidden_size, config.num_attention_heads, dropout=config.attention_dropout, config=config
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(
            config.hidden_size, config.intermediate_size, config.hidden_act, dropout=config.hidden_dropout_prob
        )
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, streams: Streams, memory: Tensor | None = None) -> Tensor:
        """(..., hidden), the rows of `streams` -> (..., hidden) at the rows it computes."""
        attended, _ = self.attention(hidden_states, streams, memory)
        hidden_states = self.attention_norm(streams.query_rows(hidden_states) + self.dropout(attended))
        return self.feed_forward_norm(hidden_states + self.dropout(self.feed_forward(hidden_states)))


@dataclass
class CtxXLNetModelOutput(EncoderOutput):
    """Output of the encoder.

    Attributes:
        last_hidden_state: (batch, length, hidden); with a query stream (batch, targets, hidden), of that stream.
        pooler_output: (batch, hidden), set by heads with a summary.
        mems: What the next segment may be given as `mems`: (batch, memory, hidden) for each layer, without gradient,
            zeros at padding.
        hidden_states: With a query stream, of both streams in turn: content 0, query 0, content 1, ...
        attentions: With a query stream, (content, query) for each layer.
    """

    mems: tuple[Tensor, ...] | None = None


class CtxXLNetPreTrainedModel(CtxPreTrainedModel):
    """XLNet's part of the model base."""

    config: CtxXLNetConfig
    base_model_prefix = "xlnet"
    reference_model_type = "xlnet"
    export_conversion = XLNET_EXPORT
    _supports_flash_attn = False
    _supports_flex_attn = False
    _no_split_modules = ["CtxXLNetLayer"]
    _can_record_outputs = {"hidden_states": CtxXLNetLayer, "attentions": RelativeAttention}
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

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mask_embedding = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.layers = nn.ModuleList(CtxXLNetLayer(config) for _ in range(config.num_hidden_layers))
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings (used when the vocabulary is resized)."""
        self.word_embeddings = value

    @merge_with_config_defaults
    @capture_unpacked_outputs
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
        use_mems: bool | None = None,
        **kwargs: Any,
    ) -> CtxXLNetModelOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, length) token ids, also at targets: the content stream sees the tokens; or
                `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), 1 at tokens and 0 at padding, on either side.
            token_type_ids: (batch, length) segments of any numbering; attention asks only whether two are equal.
                None leaves the segment term out.
            mems: Memory of earlier segments, (batch, memory, hidden) for each layer, as `mems` of the output; positions
                where the last layer's is zero hold nothing and are not seen.
            permutation_order: (batch, length) ranks in the factorisation order. The content at i sees j if
                order[j] <= order[i], the query of target i sees j if order[j] < order[i]; -1 is what all see.
            target_positions: (batch, targets) columns to predict, -1 for none: switches the query stream on.
            perm_mask: The reference's form of `permutation_order`: (batch, length, length), 1 where row i does not see
                key j. Content rows see themselves all the same.
            target_mapping: The reference's form of `target_positions`: (batch, targets, length), one-hot.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal
                numbers is one sequence, whose tokens attend to each other only.
            wanted: (batch, length) bool, for a single stream; given, `last_hidden_state` holds only these positions,
                (wanted, hidden) in row-major order.
            position_ids: Not taken: positions are relative.
            use_mems: Whether to return `mems`; by default as the configuration says for training and evaluation.
            kwargs: `output_hidden_states`, `output_attentions` (eager only).

        Raises:
            CtxError: Input that does not fit together or the model.
        """
        words = self.check_encoder_input(
            input_ids,
            inputs_embeds,
            attention_mask,
            None,
            width=self.config.hidden_size,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            token_type_ids=token_type_ids,
        )
        if position_ids is not None:
            raise CtxError("position_ids are not taken: positions are relative here. Leave them out.")
        tokens = _tokens(attention_mask, sequence_ids)
        memory = check_memory(mems, self.config, len(words))
        permutation = check_permutation(
            (words.shape[0], words.shape[1]),
            permutation_order=permutation_order,
            target_positions=target_positions,
            perm_mask=perm_mask,
            target_mapping=target_mapping,
            tokens=tokens,
        )
        check_combination(self.config, words, permutation, memory, sequence_ids, output_mask)
        if self.training and token_type_ids is None:  # so that the segments' parameters take part, as DDP expects
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        encodings = self._encodings(words.shape[1], 0 if memory is None else memory[0].shape[1])
        make_padded = partial(
            self._padded_streams, words, tokens, token_type_ids, memory, permutation, sequence_ids, encodings
        )
        streams: Streams
        if memory is None and permutation.is_empty and self._packs(words, tokens, sequence_ids, **kwargs):
            layout = PackedLayout.build(words.shape[0], words.shape[1], attention_mask, sequence_ids, words.device)
            types = None if token_type_ids is None else layout.pack(token_type_ids)
            streams = PackedStreams(encodings, layout, words.shape[1], types, cache(make_padded))
            words = layout.pack(words)
        else:
            streams = make_padded()
        if use_mems is None:
            use_mems = self.config.use_mems_train if self.training else self.config.use_mems_eval
        return self._run_layers(self._embed(words, permutation), streams, memory, output_mask, bool(use_mems), **kwargs)

    def _packs(self, words: Tensor, tokens: Tensor | None, sequence_ids: Tensor | None, **kwargs: Any) -> bool:
        """Whether a single stream without memory is computed on its tokens alone: where that is exact.

        Padding between the tokens of a sequence would be lost from their distances.
        """
        config = self.config
        wants_weights = kwargs.get("output_attentions") or config.output_attentions
        plain = config.attn_type == "bi" and not config.bi_data
        exact = plain and config._attn_implementation != "eager" and not wants_weights
        if not config.unpad or not exact or is_traced(words):
            return False
        if tokens is None:
            return True
        if sequence_ids is not None:
            return bool((tokens == (sequence_ids != 0)).all())
        runs = tokens[:, 0].long() + (tokens[:, 1:] & ~tokens[:, :-1]).sum(1)
        return bool((runs == 1).all())

    def _padded_streams(
        self,
        words: Tensor,
        tokens: Tensor | None,
        token_types: Tensor | None,
        memory: tuple[Tensor, ...] | None,
        permutation: Permutation,
        sequence_ids: Tensor | None,
        encodings: Tensor,
    ) -> PaddedStreams:
        """Every position of the batch, and the query rows."""
        memory_length = 0 if memory is None else memory[0].shape[1]
        visible = visible_keys(
            (words.shape[0], words.shape[1]),
            words.device,
            tokens=tokens,
            same_sequence=None if sequence_ids is None else sequence_numbers(sequence_ids),
            order=permutation.order,
            hidden_pairs=permutation.hidden_pairs,
            target_positions=permutation.target_positions,
            memory_length=memory_length,
            memory_tokens=None if memory is None else _memory_tokens(memory),
            causal=self.config.attn_type == "uni",
            same_length=self.config.same_length,
        )
        return PaddedStreams.build(
            encodings,
            (words.shape[0], words.shape[1]),
            visible=visible,
            tokens=tokens,
            token_types=token_types,
            target_positions=permutation.target_positions,
            memory_length=memory_length,
        )

    def _encodings(self, length: int, memory_length: int) -> Tensor:
        """(groups, memory + 2 * length, hidden) encodings of all distances from the farthest before to behind.

        One dropout mask serves the whole batch; the reference draws one for each row and projects each by itself.
        """
        distances = torch.arange(memory_length + length, -length, -1, device=self.device)
        if self.config.clamp_len > 0:
            distances = distances.clamp(-self.config.clamp_len, self.config.clamp_len)
        groups = [distances, -distances] if self.config.bi_data else [distances]
        encodings = [distance_encodings(group, self.config.hidden_size, self.dtype) for group in groups]
        return self.dropout(torch.stack(encodings))

    def _embed(self, words: Tensor, permutation: Permutation) -> Tensor:
        """Rows of the first layer: (..., hidden) of the words, and behind them those of the query stream, if any."""
        content = words if words.is_floating_point() else self.word_embeddings(words)
        targets = permutation.target_positions
        if targets is not None:
            queries = self.mask_embedding.expand(*targets.shape, -1)
            return self.dropout(torch.cat([content, queries.to(content.dtype)], 1))
        if self.training:  # the mask embedding takes part with nothing, as DDP expects
            content = content + 0 * self.mask_embedding.view(-1)
        return self.dropout(content)

    def _run_layers(
        self,
        hidden_states: Tensor,
        streams: Streams,
        memory: tuple[Tensor, ...] | None,
        output_mask: Tensor | None,
        use_mems: bool,
        **kwargs: Any,
    ) -> CtxXLNetModelOutput:
        wants_states = kwargs.get("output_hidden_states")
        records = self.config.output_hidden_states if wants_states is None else wants_states
        last = streams.last(output_mask, content=bool(records))
        new_mems = []
        for number, layer in enumerate(self.layers):
            layer_memory = None if memory is None else memory[number]
            if use_mems:
                content = streams.padded_content(hidden_states)
                new_mems.append(updated_memory(content, layer_memory, self.config.mem_len, self.config.reuse_len))
            hidden_states = layer(hidden_states, last if number + 1 == len(self.layers) else streams, layer_memory)
        hidden_states = self.dropout(hidden_states)
        return CtxXLNetModelOutput(
            last_hidden_state=last.output(hidden_states),
            mems=tuple(new_mems) or None,
            layout=RecordedStreams(streams, hidden_states),
        )


def _tokens(attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor | None:
    """(batch, length) bool, False at padding; None when there is none.

    Raises:
        CtxError: A row without any token, or a mask of another kind.
    """
    masks = [mask != 0 for mask in (attention_mask, sequence_ids) if mask is not None]
    if not masks:
        return None
    if masks[0].dim() != 2:
        raise CtxError(
            f"attention_mask is {tuple(masks[0].shape)}; it must be (batch, length).",
            hint="say who sees whom by permutation_order or perm_mask (batch, length, length).",
        )
    tokens = torch.stack(masks).all(0)
    if is_traced(tokens):
        return tokens
    check_row_lengths(tokens.sum(1))
    return None if bool(tokens.all()) else tokens


def _memory_tokens(memory: tuple[Tensor, ...]) -> Tensor | None:
    """(batch, memory) bool, False where the memory holds nothing; None when it does everywhere."""
    tokens = (memory[-1] != 0).any(-1)
    return None if not is_traced(tokens) and bool(tokens.all()) else tokens
