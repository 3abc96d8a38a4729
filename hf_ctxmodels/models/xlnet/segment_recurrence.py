"""Segment recurrence (Dai et al. 2019, arXiv 1901.02860, section 3.2): the layers of XLNet and Transformer-XL attend to
the states of earlier segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced
from hf_ctxmodels.core.inputs import check_no_empty_rows
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.stateful_generation import StatefulGeneration
from hf_ctxmodels.layers.common import HookPoint
from hf_ctxmodels.layers.pooling import build_token_mask
from hf_ctxmodels.layers.transformer import recorded_layer_numbers
from hf_ctxmodels.models.xlnet.relative_attention import distance_encodings
from hf_ctxmodels.models.xlnet.streams import EncoderInputs, StreamLayout


@dataclass
class SegmentRecurrenceOutput(BaseModelOutputWithPooling):
    """Output of a model with segment recurrence.

    Attributes:
        last_hidden_state: (batch, length, hidden), or (outputs, hidden) with an output mask. With targets, the query
            stream (batch, targets, hidden).
        pooler_output: (batch, hidden), set by the heads with a summary.
        mems: The memory for the next segment: (batch, memory, hidden) per layer, detached, zeros at padding.
        hidden_states: The input of each layer and the output of the last layer, None for layers that are not recorded.
            With targets, both streams alternate: content 0, query 0, content 1, ...
        attentions: (batch, heads, queries, keys) per layer. With targets, a pair (content stream, query stream); the
            last layer computes only the query stream unless hidden states are recorded.
    """

    mems: tuple[Tensor, ...] | None = None


def token_mask_or_none(tokens: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor | None:
    """(batch, length) bool, False at padding; None without padding. Raises CtxError for a row without tokens."""
    if attention_mask is None and sequence_ids is None:
        return None
    token_mask = build_token_mask(tokens, attention_mask, sequence_ids)
    if is_traced(token_mask):
        return token_mask
    check_no_empty_rows(token_mask)
    return None if bool(host_copy(token_mask).all()) else token_mask


class GenerationWithMemory(StatefulGeneration):
    """The state of `generate` is the memory of earlier segments."""

    state_outputs: ClassVar[tuple[str, ...]] = ("mems",)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        for name in ("past_key_values", "mems"):
            if model_kwargs.get(name) is not None:
                raise CtxError(
                    f"generate of {type(self).__name__} does not accept {name}: it computes the memory itself.",
                    hint=f"remove {name}, and pass the whole text.",
                )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)

    @staticmethod
    def _reorder_cache(past_key_values: Sequence[Tensor], beam_idx: Tensor) -> tuple[Tensor, ...]:
        """The memory of the selected beams."""
        return tuple(memory.index_select(0, beam_idx.to(memory.device)) for memory in past_key_values)


class SegmentRecurrence(CtxPreTrainedModel):
    """The layers of a model with a memory of earlier segments; the family defines the embeddings and the layers."""

    config: Any
    layers: nn.ModuleList
    dropout: nn.Module
    embedding_output: HookPoint

    def embed(self, inputs: EncoderInputs, streams: StreamLayout) -> Tensor:
        """The input of the first layer, in the layout of `streams`."""
        raise NotImplementedError

    def run_layers(self, inputs: EncoderInputs, use_mems: bool | None, **kwargs: Any) -> SegmentRecurrenceOutput:
        """Run the layers; `use_mems` and `kwargs` as in `forward`."""
        config, num_layers = self.config, len(self.layers)
        if use_mems is None:
            use_mems = config.use_mems_train if self.training else config.use_mems_eval
        output_hidden_states, output_attentions = config.resolve_output_flags(kwargs).values()
        recorded_layers = recorded_layer_numbers(output_hidden_states, num_layers + 1)
        streams = StreamLayout.build(inputs, self.encode_distances(inputs), output_attentions=output_attentions)
        last_streams = streams.for_last_layer(returns_content=bool(recorded_layers))
        hidden_states = self.embedding_output(self.embed(inputs, streams))
        mems, attentions = [], []
        recorded: list[Tensor | None] = []
        not_recorded = (None,) * (1 if inputs.target_positions is None else 2)
        for number, layer in enumerate(self.layers):
            memory = None if inputs.memory is None else inputs.memory[number]
            if number in recorded_layers:
                unpacked = streams.unpack(hidden_states)
                recorded.extend(unpacked)
                # gradients with respect to the recorded states flow through them
                hidden_states = streams.repack([state for state in unpacked if state is not None])
            else:
                recorded.extend(not_recorded)
            if use_mems:
                new_memory = streams.content_states(hidden_states)[:, : config.reuse_len or None]
                if memory is not None:
                    new_memory = torch.cat([memory, new_memory], 1)
                mems.append(new_memory[:, -(config.mem_len or 0) :].detach())
            is_last = number + 1 == num_layers
            hidden_states, probabilities = layer(hidden_states, last_streams if is_last else streams, memory)
            if output_attentions:
                attentions.append(probabilities)
        outputs = last_streams.unpack(self.dropout(hidden_states))
        recorded.extend(outputs if num_layers in recorded_layers else not_recorded)
        return SegmentRecurrenceOutput(
            last_hidden_state=outputs[-1],
            mems=tuple(mems) or None,
            hidden_states=None if output_hidden_states is None or output_hidden_states is False else tuple(recorded),
            attentions=tuple(attentions) if output_attentions else None,
        )

    def encode_distances(self, inputs: EncoderInputs) -> Tensor:
        """(groups, memory + 2 * length, hidden) encodings of the distances memory + length, ..., 1 - length, with one
        dropout mask for the batch, unlike in transformers."""
        device = inputs.tokens.device  # `self.device` is meta if accelerate offloads the weights
        distances = torch.arange(inputs.memory_length + inputs.length, -inputs.length, -1, device=device)
        if self.config.clamp_len > 0:
            distances = distances.clamp(-self.config.clamp_len, self.config.clamp_len)
        groups = [distances, -distances] if self.config.bi_data else [distances]
        encodings = [distance_encodings(group, self.config.hidden_size, self.dtype) for group in groups]
        return self.dropout(torch.stack(encodings))
