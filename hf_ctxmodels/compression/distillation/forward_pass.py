"""What a term reads of a forward pass: predictions, hidden states and attention scores, of real tokens only."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.compression.distillation.attention_scores import attention_scores
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import sequence_numbers
from hf_ctxmodels.heads import ForMaskedLM, ForSequenceClassification, ForTokenClassification, ItemCounts
from hf_ctxmodels.layers.lm_loss.cross_entropy import DeferredLogits
from hf_ctxmodels.layers.pooling import Pooling, pool_tokens, token_mask

Predictions = Literal["tokens", "labels", "rows"]
"""Where a head predicts: at every token, at tokens with a label, or once in a row."""


def predictions_of(model: PreTrainedModel) -> Predictions | None:
    """Where a model predicts; None for a model without such a head."""
    kinds: dict[type, Predictions] = {
        ForMaskedLM: "tokens",
        ForTokenClassification: "labels",
        ForSequenceClassification: "rows",
    }
    return next((where for kind, where in kinds.items() if isinstance(model, kind)), None)


def number_of_layers(model: PreTrainedModel) -> int:
    """How many layers' states the encoder records beside the embeddings."""
    sizes = getattr(model.config, "layer_sizes", None)
    return model.config.num_hidden_layers if sizes is None else len(sizes) - 1


@dataclass(eq=False)
class Run:
    """A forward pass.

    Attributes:
        model: Of which model.
        tokens: (batch, length) bool, False at padding.
        inputs: What it was given.
        labels: The student's targets, or None.
        output: The output of the encoder (masked LM) or of the head.
    """

    model: PreTrainedModel
    tokens: Tensor
    inputs: Mapping[str, Tensor]
    labels: Tensor | None
    output: Any
    _scores: dict[int, Tensor] = field(default_factory=dict)

    def state(self, number: int) -> Tensor:
        """(batch, length, hidden) hidden states number 0, the embeddings, to the last layer's."""
        return self.output.hidden_states[number]

    @cached_property
    def last_state(self) -> Tensor:
        """(batch, length, hidden) of the last layer."""
        found = getattr(self.output, "last_hidden_state", None)
        return self.output.hidden_states[-1] if found is None else found

    def first_tokens(self, number: int) -> Tensor:
        """(batch, hidden) states of each row's first token."""
        return pool_tokens(self.state(number), self.tokens, "first")

    def sentence_vectors(self, pooling: Pooling) -> Tensor:
        """(batch, width) pooled last states of each row's tokens."""
        return pool_tokens(self.last_state, self.tokens, pooling)

    @cached_property
    def pairs(self) -> Tensor:
        """(batch, length, length) bool: the pairs of a query and a key of one sequence, both real tokens."""
        pairs = self.tokens[:, :, None] & self.tokens[:, None, :]
        if (given := self.inputs.get("sequence_ids")) is not None:
            numbers = sequence_numbers(given)
            pairs = pairs & (numbers[:, :, None] == numbers[:, None, :])
        return pairs

    def scores(self, layer: int) -> Tensor:
        """(batch, heads, length, length) attention scores of a layer before the softmax, see `attention_scores`."""
        if layer not in self._scores:
            block = self.model.base_model.layers[layer - 1]
            self._scores[layer] = attention_scores(block, self.state(layer - 1), self.tokens)
        return self._scores[layer]

    def vocabulary(self, where: Tensor) -> DeferredLogits:
        """The predictions of a masked LM at the tokens of a (batch, length) mask; logits are not computed yet."""
        model: Any = self.model
        return model.mlm_head.scores(self.last_state[where])

    def logits(self, labels: Tensor | None) -> Tensor:
        """(targets, classes) of a task's head: of each row, or of each token with a label."""
        logits = self.output.logits
        return logits if logits.dim() == 2 or labels is None else logits[labels != IGNORE_INDEX]


def run(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    labels: Tensor | None = None,
    states: bool = False,
    counts: ItemCounts = None,
    hard: bool = False,
) -> Run:
    """Run a model on a batch, without padding where it can.

    Args:
        model: A masked LM or a task's head.
        inputs: Tensors by argument; those that its `forward` does not name are left out.
        labels: The student's targets.
        states: Record hidden states.
        counts: As in `mean_over_targets`.
        hard: Compute the head's own loss; of a masked LM `hard_loss` does so afterwards.

    Raises:
        CtxError: The model does not return the states.
    """
    given = {name: value for name, value in inputs.items() if name in arguments_of(model)}
    tokens = token_mask(given["input_ids"], inputs.get("attention_mask"), inputs.get("sequence_ids"))
    if isinstance(model, ForMaskedLM):
        output = model.encode(**given, output_hidden_states=states)
    else:
        targets = {"labels": labels, "num_items_in_batch": counts} if hard else {}
        output = model(**given, **targets, output_hidden_states=states)
    if states and not output.hidden_states:
        raise CtxError(f"{type(model).__name__} records no hidden states.", hint="use terms of predictions alone.")
    return Run(model, tokens, given, labels, output)


def arguments_of(model: PreTrainedModel) -> set[str]:
    """Names of the inputs that a model's `forward` names, and `sequence_ids`, which heads pass on to their encoder."""
    return set(inspect.signature(model.forward).parameters) | {"sequence_ids"}


def hard_loss(student: Run, labels: Tensor, counts: ItemCounts) -> Tensor:
    """The student's own loss, a mean over its targets."""
    if not isinstance(student.model, ForMaskedLM):
        return student.output.loss
    loss, _ = student.model.masked_lm(student.last_state[labels != IGNORE_INDEX], labels, counts, everywhere=False)
    assert loss is not None
    return loss


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """(batch, length) bool of a batch, False at padding."""
    return token_mask(batch["input_ids"], batch.get("attention_mask"), batch.get("sequence_ids"))
