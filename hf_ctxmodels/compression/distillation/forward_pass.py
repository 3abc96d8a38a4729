"""Forward passes of student and teacher: predictions, hidden states and attention scores of real tokens."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import sequence_numbers
from hf_ctxmodels.heads import ForMaskedLM, ForSequenceClassification, ForTokenClassification, ItemCounts
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.lm_loss.cross_entropy import DeferredLogits
from hf_ctxmodels.layers.pooling import Pooling, build_token_mask, pool_tokens
from hf_ctxmodels.layers.transformer import TransformerBlock

PredictionLevel = Literal["tokens", "labeled_tokens", "sequences"]
"""Where a head predicts: at every token, at tokens with a label, or once for a sequence."""


def get_prediction_level(model: PreTrainedModel) -> PredictionLevel | None:
    """Where a model predicts; None for a model without such a head."""
    levels: dict[type, PredictionLevel] = {
        ForMaskedLM: "tokens",
        ForTokenClassification: "labeled_tokens",
        ForSequenceClassification: "sequences",
    }
    return next((level for head_class, level in levels.items() if isinstance(model, head_class)), None)


def list_layers(model: PreTrainedModel, loss_name: str) -> list[nn.Module]:
    """The layers in the order of application; raises CtxError for a model without layers."""
    layers: Any = getattr(model.base_model, "layers", None)
    if layers is None:
        raise CtxError(f"{type(model).__name__} has no Transformer layers.", hint=f"remove the loss {loss_name}.")
    return [*layers]


def require_attention(model: PreTrainedModel, layer: int, loss_name: str) -> SelfAttention:
    """The self-attention of a layer, from 1; raises CtxError for a layer without attention scores."""
    block = list_layers(model, loss_name)[layer - 1]
    if not (isinstance(block, TransformerBlock) and isinstance(block.attention, SelfAttention)):
        raise CtxError(
            f"{type(block).__name__} has no attention scores to learn.",
            hint=f"remove the loss {loss_name}, or use models with BERT's layers.",
        )
    return block.attention


def require_bidirectional_attention(model: PreTrainedModel, loss_name: str) -> None:
    """Raise CtxError if the queries of a model do not attend to all tokens of their sequence."""
    base_model: Any = model.base_model
    if hasattr(base_model, "mask_specs") and base_model.mask_specs() is not BIDIRECTIONAL:
        raise CtxError(
            f"The attention of {type(model).__name__} is causal.",
            hint=f"remove the loss {loss_name}, or use bidirectional encoders.",
        )


@dataclass(eq=False)
class ForwardPass:
    """A model, and the inputs and outputs of its forward pass.

    Attributes:
        token_mask: (batch, length) bool, False at padding.
        labels: The student's targets, or None.
        output: The output of the encoder (masked LM) or of the head.
    """

    model: PreTrainedModel
    token_mask: Tensor
    inputs: Mapping[str, Tensor]
    labels: Tensor | None
    output: Any
    _attention_scores: dict[int, Tensor] = field(default_factory=dict)

    def hidden_states(self, index: int) -> Tensor:
        """(batch, length, hidden) hidden states: 0 for the embeddings, i for layer i."""
        return self.output.hidden_states[index]

    @cached_property
    def last_hidden_state(self) -> Tensor:
        """(batch, length, hidden) of the last layer."""
        last_hidden_state = getattr(self.output, "last_hidden_state", None)
        return self.output.hidden_states[-1] if last_hidden_state is None else last_hidden_state

    def first_token_states(self, index: int) -> Tensor:
        """(batch, hidden) states of the first token of each sequence."""
        return pool_tokens(self.hidden_states(index), self.token_mask, "first")

    def sentence_vectors(self, pooling: Pooling) -> Tensor:
        """(batch, width) pooled last states of the tokens of each sequence."""
        return pool_tokens(self.last_hidden_state, self.token_mask, pooling)

    @cached_property
    def pair_mask(self) -> Tensor:
        """(batch, length, length) bool: pairs of a query and a key that are real tokens of one sequence."""
        pairs = self.token_mask[:, :, None] & self.token_mask[:, None, :]
        if (sequence_ids := self.inputs.get("sequence_ids")) is not None:
            numbers = sequence_numbers(sequence_ids)
            pairs = pairs & (numbers[:, :, None] == numbers[:, None, :])
        return pairs

    def attention_scores(self, layer: int) -> Tensor:
        """(batch, heads, length, length) scores QK^T times the layer's scale of a layer, from 1, before the softmax and
        without position bias; 0 at padding (Vaswani et al. 2017, equation 1)."""
        if layer not in self._attention_scores:
            attention = self._block(layer).attention
            query, key = (
                states.unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
                for states in self.attention_projections(layer, 2)
            )
            self._attention_scores[layer] = query @ key.transpose(-1, -2) * attention.scale
        return self._attention_scores[layer]

    def attention_projections(self, layer: int, number: int = 3) -> tuple[Tensor, ...]:
        """(batch, length, width of all heads) queries, keys and values of a layer, from 1, or the first `number` of
        them; 0 at padding."""
        block = self._block(layer)
        states = self.hidden_states(layer - 1)[self.token_mask]
        if block.norm == "pre":
            states = block.attention_norm(states)
        projected = linear(block.attention.qkv_proj, states, 0, number * block.attention.inner_size)
        padded = projected.new_zeros(*self.token_mask.shape, projected.shape[-1])
        return padded.index_put((self.token_mask,), projected).chunk(number, -1)

    def _block(self, layer: int) -> TransformerBlock:
        return [*self.model.base_model.layers][layer - 1]

    def deferred_logits(self, mask: Tensor) -> DeferredLogits:
        """The logits of a masked LM at the tokens of a (batch, length) mask, not computed yet."""
        model: Any = self.model
        return model.mlm_head.deferred_logits(self.last_hidden_state[mask])

    def logits(self, labels: Tensor | None) -> Tensor:
        """(targets, classes) logits of a task head: for each sequence, or for each token with a label."""
        logits = self.output.logits
        return logits if logits.dim() == 2 or labels is None else logits[labels != IGNORE_INDEX]


def run_forward(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    labels: Tensor | None = None,
    output_hidden_states: bool = False,
    counts: ItemCounts = None,
    compute_loss: bool = False,
) -> ForwardPass:
    """Run a masked LM or a model with a task head on a batch, without padding if possible.

    Args:
        inputs: Tensors by argument; those that the model's `forward` does not name are dropped.
        labels: The student's targets.
        output_hidden_states: Record hidden states.
        counts: As in `number_of_targets`.
        compute_loss: Compute the loss of a task head.

    Raises:
        CtxError: The model does not return hidden states.
    """
    # heads have all arguments of encoders, and pass sequence_ids
    unsupported = {"langs", "task_type_ids"} - set(getattr(model.base_model, "extra_input_ids", ()))
    accepted = set(inspect.signature(model.forward).parameters) - unsupported | {"sequence_ids"}
    inputs = {name: value for name, value in inputs.items() if name in accepted}
    mask = build_token_mask(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("sequence_ids"))
    if isinstance(model, ForMaskedLM):
        output = model.encode(**inputs, output_hidden_states=output_hidden_states)
    else:
        targets = {"labels": labels, "num_items_in_batch": counts} if compute_loss else {}
        output = model(**inputs, **targets, output_hidden_states=output_hidden_states)
    if output_hidden_states and not output.hidden_states:
        raise CtxError(f"{type(model).__name__} records no hidden states.", hint="use losses of predictions only.")
    return ForwardPass(model, mask, inputs, labels, output)
