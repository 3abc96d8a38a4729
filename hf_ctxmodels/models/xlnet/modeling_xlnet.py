"""XLNet (Yang et al. 2019, arXiv 1906.08237): a Transformer-XL pretrained by permutation language modeling.

The encoder has two-stream relative attention with segment recurrence (sections 2.3 to 2.5). The content stream holds
the tokens, the query stream one state per token to predict, which has the token's position but not its content. Both
share all weights and attend to the keys and values of the content stream. Without targets there is a single stream, as
in fine-tuning.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.attention_heads import prune_projections, select_slices
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import select_true
from hf_ctxmodels.core.inputs import reject_unused_tensors
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import pack_tokens
from hf_ctxmodels.layers.common import HookPoint
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear, prepack_linear_layers, prepacked_weights
from hf_ctxmodels.layers.cpu.relative_attention import RelativeBiases
from hf_ctxmodels.layers.pooling import build_token_mask, pool_tokens
from hf_ctxmodels.layers.transformer import FeedForward, ResidualSum
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.conversion_xlnet import XLNET_CONVERSION, XLNET_EXPORT
from hf_ctxmodels.models.xlnet.segment_recurrence import (
    GenerationWithMemory,
    SegmentRecurrence,
    SegmentRecurrenceOutput,
    token_mask_or_none,
)
from hf_ctxmodels.models.xlnet.streams import (
    EncoderInputs,
    Probabilities,
    StreamLayout,
    check_memory,
    check_permutation,
    check_target_labels,
)

_RECOMPUTED_TOKENS = 2  # recomputed at each generation step, as in transformers


class RelativeAttention(nn.Module):
    """Multi-head attention by content, distance and, with `has_segments`, segment, for one or two streams.

    Attributes:
        heads: Numbers of the heads, without pruned ones.
        bias_gates: (heads,) factors of `biases`; None for 1.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, dropout: float, has_segments: bool = True) -> None:
        super().__init__()
        self.num_heads = self.initial_num_heads = num_heads
        self.heads = tuple(range(num_heads))
        self.bias_gates: Tensor | None = None
        self.head_dim = hidden_size // num_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = dropout
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.position_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.segment_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim)) if has_segments else None
        self.segment_embeddings = nn.Parameter(torch.zeros(2, num_heads, self.head_dim)) if has_segments else None

    @property
    def biases(self) -> RelativeBiases:
        """The parameters of the score other than the projections, zeros for segments that it does not have."""
        if self.segment_bias is None or self.segment_embeddings is None:
            zeros = torch.zeros_like(self.content_bias)
            return RelativeBiases(self.content_bias, self.position_bias, zeros, zeros.expand(2, -1, -1))
        return RelativeBiases(self.content_bias, self.position_bias, self.segment_bias, self.segment_embeddings)

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Remove heads, see `core.attention_heads.prune_heads`."""
        indices = torch.tensor(prune_projections(self, heads, {self.qkv_proj: 3, self.position_proj: 1}), device="cpu")
        for name, axis in (("content_bias", 0), ("position_bias", 0), ("segment_bias", 0), ("segment_embeddings", 1)):
            if (parameter := getattr(self, name)) is not None:
                setattr(self, name, select_slices(parameter, indices, axis))

    def forward(
        self, hidden_states: Tensor, streams: StreamLayout, memory: Tensor | None = None
    ) -> tuple[Tensor, Probabilities]:
        """Attend to the content stream, (..., hidden) in the layout of `streams`, and (batch, memory, hidden) memory;
        returns (..., hidden) of the computed states and, if the implementation returns them, the probabilities."""
        width = self.num_heads * self.head_dim
        query_states, key_states = streams.select_queries(hidden_states), streams.select_keys(hidden_states)
        if memory is not None:
            key_states = torch.cat([memory, key_states], 1)
        if query_states is key_states:
            query, key, value = self._split_heads(linear(self.qkv_proj, key_states), 3)
        else:
            (query,) = self._split_heads(linear(self.qkv_proj, query_states, 0, width), 1)
            key, value = self._split_heads(linear(self.qkv_proj, key_states, width, 3 * width), 2)
        (relative,) = self._split_heads(linear(self.position_proj, streams.encodings), 1)
        dropout = self.attention_dropout if self.training else 0.0
        biases = self.biases
        if (gates := self.bias_gates) is not None:
            biases = RelativeBiases(*(bias * gates.to(bias)[:, None] for bias in biases))
        context, probabilities = streams.attend(
            query, key, value, relative, biases, scaling=self.scaling, dropout=dropout
        )
        return linear(self.out_proj, context.flatten(-2)), probabilities

    def _split_heads(self, projected: Tensor, num_projections: int) -> tuple[Tensor, ...]:
        """(..., num_projections * hidden) -> `num_projections` tensors (..., heads, head_dim)."""
        return projected.unflatten(-1, (num_projections, self.num_heads, -1)).unbind(-3)


class CtxXLNetLayer(GradientCheckpointingLayer):
    """Relative attention and feed-forward network, each followed by dropout, residual and LayerNorm (post-norm)."""

    def __init__(self, config: Any, has_segments: bool = True) -> None:
        super().__init__()
        width, dropout = config.hidden_size, config.attention_dropout
        self.attention = RelativeAttention(
            width, config.num_attention_heads, dropout=dropout, has_segments=has_segments
        )
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(
            width, config.intermediate_size, config.hidden_act, dropout=config.hidden_dropout_prob
        )
        self.feed_forward_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.attention_residual, self.feed_forward_residual = ResidualSum(), ResidualSum()

    def prepack(self) -> None:
        """Prepack the linear layers for inference, see `CtxPreTrainedModel.prepare_for_inference`."""
        prepack_linear_layers(self)

    def forward(
        self, hidden_states: Tensor, streams: StreamLayout, memory: Tensor | None = None
    ) -> tuple[Tensor, Probabilities]:
        """(..., hidden) in the layout of `streams` -> the computed states, and the attention probabilities."""
        attention_output, probabilities = self.attention(hidden_states, streams, memory)
        residual, attention_output = streams.select_queries(hidden_states), self.dropout(attention_output)
        hidden_states = self.attention_residual(residual, attention_output, self.attention_norm, 0)
        output = self.dropout(self.feed_forward(hidden_states))
        output = self.feed_forward_residual(hidden_states, output, self.feed_forward_norm, 0)
        return output, probabilities


class CtxXLNetPreTrainedModel(CtxPreTrainedModel):
    """Base class of the XLNet models."""

    config: CtxXLNetConfig
    base_model_prefix = "xlnet"
    reference_model_type = "xlnet"
    export_conversion = XLNET_EXPORT
    mask_hint = "to hide keys from some positions only, pass permutation_order or perm_mask (batch, length, length)."
    _supports_flash_attn = False
    _no_split_modules = ["CtxXLNetLayer"]
    _keys_to_ignore_on_load_unexpected = [  # other heads of the family
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


class CtxXLNetModel(SegmentRecurrence, CtxXLNetPreTrainedModel):
    """The XLNet encoder: a single stream, or two streams with targets."""

    _input_embed_layer = "word_embeddings"

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mask_embedding = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.layers = nn.ModuleList(CtxXLNetLayer(config) for _ in range(config.num_hidden_layers))
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.embedding_output = HookPoint()
        self.post_init()

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
    ) -> SegmentRecurrenceOutput:
        """Encode a batch. `EncoderInputs` explains `permutation_order` and `perm_mask`.

        Args:
            input_ids: (batch, length) token ids, including the targets; or `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length), 1 at tokens and 0 at padding, on either side.
            token_type_ids: (batch, length) segment ids of any numbering; None omits the segment term.
            mems: (batch, memory, hidden) of earlier segments per layer, as returned; zeros are masked.
            permutation_order: (batch, length) ranks in the factorization order; -1 is visible to all positions.
            target_positions: (batch, targets) columns to predict, -1 for none; enables the query stream.
            perm_mask: (batch, length, length), 1 where key j is hidden from position i; an alternative to
                `permutation_order`.
            target_mapping: (batch, targets, length), one-hot; an alternative to `target_positions`.
            sequence_ids: (batch, length), 0 at padding; a run of equal numbers is one sequence.
            output_mask: (batch, length) bool, for a single stream: the positions in `last_hidden_state`, row-major.
            position_ids, input_mask: Not supported: positions are relative, and `attention_mask` marks padding.
            use_mems: Whether to return `mems`; defaults to `use_mems_train` or `use_mems_eval` of the configuration.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention instead of sdpa).

        Raises:
            CtxError: The inputs do not match each other or the model.
        """
        if position_ids is not None:
            raise CtxError("XLNet has relative positions and takes no position_ids.", hint="remove position_ids.")
        if input_mask is not None:
            raise CtxError("input_mask is not supported.", hint="pass attention_mask = 1 - input_mask.")
        reject_unused_tensors(**kwargs)
        tokens = self.check_encoder_input(
            input_ids,
            inputs_embeds,
            attention_mask,
            None,
            width=self.config.hidden_size,
            token_type_ids=token_type_ids,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
        )
        if token_type_ids is None and self.training:  # DDP expects gradients of the segment parameters
            token_type_ids = torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        token_mask = token_mask_or_none(tokens, attention_mask, sequence_ids)
        inputs = EncoderInputs(
            self.config,
            tokens,
            token_mask,
            token_type_ids,
            sequence_ids,
            check_memory(mems, self.config, tokens.shape[0]),
            output_mask=output_mask,
            **check_permutation(tokens, token_mask, permutation_order, target_positions, perm_mask, target_mapping),
        )
        return self.run_layers(inputs, use_mems, **kwargs)

    def embed(self, inputs: EncoderInputs, streams: StreamLayout) -> Tensor:
        """(..., hidden) word embeddings, followed by the mask embeddings of the query stream, if any."""
        tokens = pack_tokens(streams.layout, inputs.tokens, self.word_embeddings)
        content = tokens if tokens.is_floating_point() else self.word_embeddings(tokens)
        if inputs.target_positions is not None:
            queries = self.mask_embedding.expand(*inputs.target_positions.shape, -1)
            return self.dropout(torch.cat([content, queries.to(content.dtype)], 1))
        if self.training:  # DDP expects a gradient of the mask embedding
            content = content + 0 * self.mask_embedding.view(-1)
        return self.dropout(content)


class CtxXLNetSummary(nn.Module):
    """Pooling of the sequence and choice heads: a state of the sequence, by default the last (<cls>), projected."""

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__()
        self.pooling: Any = "last" if config.summary_type == "cls_index" else config.summary_type
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.summary_use_proj else nn.Identity()
        self.activation = ACT2FN[config.summary_activation] if config.summary_activation else nn.Identity()

    def forward(self, states: Tensor, token_mask: Tensor) -> Tensor:
        """(batch, length, hidden) states and (batch, length) bool -> (batch, hidden)."""
        return self.activation(self.dense(pool_tokens(states, token_mask, self.pooling)))


@dataclass
class CtxXLNetForPreTrainingOutput(ModelOutput):
    """Output of `CtxXLNetForPreTraining`.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, targets, vocabulary), or (batch, length, vocabulary) without targets; with `labels`, only if
            `needs_all_logits`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


class CtxXLNetHeadModel(heads.HeadModel, CtxXLNetPreTrainedModel):
    """Base class of the XLNet models with a head; sequence heads have a summary."""

    encoder_class = CtxXLNetModel

    def build_encoder(self, config: CtxXLNetConfig) -> CtxXLNetModel:
        """Create the encoder, and the summary for sequence heads."""
        if self.uses_pooler:
            self.summary = CtxXLNetSummary(config)
        return CtxXLNetModel(config)

    def encode(self, *, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the encoder; returns a model output, without memory unless `use_mems`."""
        outputs = super().encode(attention_mask=attention_mask, **{"use_mems": False, **inputs})
        if self.uses_pooler:
            states = outputs.last_hidden_state
            token_mask = build_token_mask(states, attention_mask, inputs.get("sequence_ids"))
            outputs.pooler_output = self.summary(states, token_mask)
        return outputs

    def encoder_fields(self, outputs: Any) -> dict[str, Any]:
        """The fields of the encoder output that a task head returns, including the memory."""
        return super().encoder_fields(outputs) | {"mems": outputs.mems}


@dataclass
class CtxXLNetForSequenceClassificationOutput(SequenceClassifierOutput):
    """`SequenceClassifierOutput` with `mems`, see `SegmentRecurrenceOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForTokenClassificationOutput(TokenClassifierOutput):
    """`TokenClassifierOutput` with `mems`, see `SegmentRecurrenceOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForQuestionAnsweringSimpleOutput(QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with `mems`, see `SegmentRecurrenceOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForMultipleChoiceOutput(MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with `mems`, see `SegmentRecurrenceOutput`."""

    mems: tuple[Tensor, ...] | None = None


class CtxXLNetForPreTraining(GenerationWithMemory, CtxXLNetHeadModel, GenerationMixin):
    """XLNet with a language modeling head: predicts tokens in a random factorization order (section 2.2).

    The output layer is tied to the word embeddings. In generation an unknown token is appended to the text, whose query
    state predicts the next token; the memory holds earlier tokens.

    Logits without targets are not left-to-right predictions, although the Auto class is `AutoModelForCausalLM`: the
    content stream attends to the whole text. `hf_ctxmodels.inference.score` scores a text with targets.
    """

    reference_architecture = "XLNetLMHeadModel"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    output_layer_name = "lm_head"
    _tied_weights_keys = {"lm_head.weight": "xlnet.word_embeddings.weight"}

    def build_head(self, config: CtxXLNetConfig) -> None:
        """Create the output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

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
        labels: Tensor | None = None,
        use_mems: bool | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxXLNetForPreTrainingOutput:
        """Compute the logits of the targets, or the loss. Other arguments as in `CtxXLNetModel.forward`.

        Args:
            labels: (batch, targets) token ids; -100 is ignored. Without targets (batch, length), predicted by the
                content stream at the same position. `shift_labels` in `kwargs` replace them: labels are not shifted.
            logits_to_keep: As in transformers: number of last targets (or positions), 0 for all; or their indices.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        labels = labels if shift_labels is None else shift_labels
        has_query_stream = target_positions is not None or target_mapping is not None
        if labels is None or not has_query_stream:
            labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        else:
            labels = heads.validate_targets(labels, "labels")
            check_target_labels(labels, target_positions, target_mapping)
        target_mask = None if labels is None else heads.mask_of_targets(labels)
        computes_logits = labels is None or self.needs_all_logits(return_logits)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            mems=mems,
            permutation_order=permutation_order,
            target_positions=target_positions,
            perm_mask=perm_mask,
            target_mapping=target_mapping,
            inputs_embeds=inputs_embeds,
            output_mask=None if has_query_stream or computes_logits else target_mask,
            use_mems=use_mems,
            **kwargs,
        )
        states = self.output_layer_input(outputs.last_hidden_state)
        loss = logits = None
        if computes_logits:
            logits = linear(self.lm_head, slice_logits_to_keep(states, logits_to_keep))
        if labels is not None:
            if target_mask is not None and (has_query_stream or computes_logits):
                states = select_true(states, target_mask)
            loss = heads.language_modeling_loss(self.lm_head, states, labels, num_items_in_batch)
        return CtxXLNetForPreTrainingOutput(
            loss=loss,
            logits=logits,
            mems=outputs.mems,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as in transformers, with weights prepacked for oneDNN on a CPU."""
        with prepacked_weights(self.prepacked_bytes):
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        use_mems: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Append an unknown token to the text; after the first step only the last two tokens, with the memory.

        transformers also recomputes two tokens at each step. Unlike there, padding of the prompt is masked.
        """
        tail = slice(-_RECOMPUTED_TOKENS if past_key_values else None, None)
        input_ids = F.pad(input_ids[:, tail], (0, 1))
        order = torch.full_like(input_ids, -1)
        order[:, -1] = 0
        passed_arguments = ("output_hidden_states", "output_attentions", "return_dict", "logits_to_keep")
        inputs: dict[str, Any] = {
            **{name: kwargs[name] for name in passed_arguments if name in kwargs},
            "input_ids": input_ids,
            "permutation_order": order,
            "target_positions": torch.full_like(input_ids[:, :1], input_ids.shape[1] - 1),
            "use_mems": use_mems,
        }
        if attention_mask is not None:
            inputs["attention_mask"] = F.pad(attention_mask[:, tail], (0, 1), value=1)
        if token_type_ids is not None:
            inputs["token_type_ids"] = F.pad(token_type_ids[:, tail].float(), (0, 1), "replicate").long()
        if past_key_values:
            inputs["mems"] = tuple(memory[:, :-_RECOMPUTED_TOKENS] for memory in past_key_values)
        return inputs


class CtxXLNetForSequenceClassification(heads.ForSequenceClassification, CtxXLNetHeadModel):
    """XLNet with a classifier or regressor on the summary of the sequence."""

    export_conversion = XLNET_CONVERSION
    output_class = CtxXLNetForSequenceClassificationOutput


class CtxXLNetForTokenClassification(heads.ForTokenClassification, CtxXLNetHeadModel):
    """XLNet with a token classifier, without dropout before it."""

    output_class = CtxXLNetForTokenClassificationOutput

    def build_head(self, config: CtxXLNetConfig) -> None:
        """Create a linear classifier."""
        self.dropout = nn.Identity()
        self.classifier = nn.Linear(config.head_input_size, config.num_labels)


class CtxXLNetForQuestionAnsweringSimple(heads.ForQuestionAnswering, CtxXLNetHeadModel):
    """XLNet with a span classifier for extractive question answering."""

    output_class = CtxXLNetForQuestionAnsweringSimpleOutput


class CtxXLNetForQuestionAnswering(heads.ForBeamSearchQuestionAnswering, CtxXLNetHeadModel):
    """XLNet with beam search over spans and answerability for extractive question answering."""


class CtxXLNetForMultipleChoice(heads.ForMultipleChoice, CtxXLNetHeadModel):
    """XLNet with a multiple-choice classifier on the summary of each choice."""

    export_conversion = XLNET_CONVERSION
    output_class = CtxXLNetForMultipleChoiceOutput
