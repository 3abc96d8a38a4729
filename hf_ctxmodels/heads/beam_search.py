"""The question-answering head of XLNet (Yang et al. 2019, released code for SQuAD 2.0), which XLM uses as well: beam
search over spans, where the end of an answer is predicted given its start."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host
from hf_ctxmodels.core.inputs import check_tensors
from hf_ctxmodels.heads.base import HeadModel, ItemCounts, mean_over_targets, validate_sequence_targets
from hf_ctxmodels.heads.downstream import padding_of_inputs, position_loss
from hf_ctxmodels.layers.pooling import last_token_columns, states_at


class StartLogits(nn.Module):
    """Logits of each token for being the start of the answer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, 1)

    def forward(self, states: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length)."""
        return self.dense(states).squeeze(-1)


class EndLogits(nn.Module):
    """Logits of each token for being the end of the answer, given its start."""

    def __init__(self, hidden_size: int, layer_norm_eps: float) -> None:
        super().__init__()
        self.dense_0 = nn.Linear(2 * hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dense_1 = nn.Linear(hidden_size, 1)

    def forward(self, states: Tensor, starts: Tensor) -> Tensor:
        """States (batch, length, hidden) and start states (batch, starts, hidden) -> (batch, starts, length)."""
        width = states.shape[-1]
        # f(s, t) = f(s, 0) + f(0, t) - f(0, 0) for an affine f avoids a (batch, starts, length, 2 * hidden) tensor
        end_terms = self.dense_0(F.pad(states, (0, width)))
        start_terms = self.dense_0(F.pad(starts, (width, 0))) - self.dense_0(starts.new_zeros(2 * width))
        hidden = end_terms[:, None] + start_terms[:, :, None]
        return self.dense_1(self.norm(torch.tanh(hidden))).squeeze(-1)


class AnswerClass(nn.Module):
    """Logit of each example for being unanswerable."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense_0 = nn.Linear(2 * hidden_size, hidden_size)
        self.dense_1 = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, starts: Tensor, classes: Tensor) -> Tensor:
        """Start states and <cls> states, (batch, hidden) each -> (batch,)."""
        return self.dense_1(torch.tanh(self.dense_0(torch.cat([starts, classes], -1)))).squeeze(-1)


@dataclass
class BeamSearchSpanOutput(ModelOutput):
    """Output of `ForBeamSearchQuestionAnswering`.

    Attributes:
        loss: Mean cross-entropy of start and end, plus half the cross-entropy of answerability; in nats.
        start_top_log_probs, start_top_index: (batch, starts) probabilities of the top starts (not logarithms, in spite
            of the name in transformers), and their columns.
        end_top_log_probs, end_top_index: (batch, ends * starts) of the top ends of each start, which varies fastest.
        cls_logits: (batch,) logits of being unanswerable.
        hidden_states, attentions: As in the output of the encoder.
        mems: The memory, of models with one.
    """

    loss: Tensor | None = None
    start_top_log_probs: Tensor | None = None
    start_top_index: Tensor | None = None
    end_top_log_probs: Tensor | None = None
    end_top_index: Tensor | None = None
    cls_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    mems: tuple[Tensor, ...] | None = None


class ForBeamSearchQuestionAnswering(HeadModel):
    """Predicts the start of an answer, its end given the start, and answerability.

    The beam search keeps `config.start_n_top` starts and `config.end_n_top` ends per start, fewer for shorter inputs.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions", "is_impossible")
    accepts_loss_kwargs = False

    def build_head(self, config: Any) -> None:
        """Create the three classifiers; the weights have the names of transformers."""
        self.start_logits = StartLogits(config.hidden_size)
        self.end_logits = EndLogits(config.hidden_size, config.layer_norm_eps)
        self.answer_class = AnswerClass(config.hidden_size)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        is_impossible: Tensor | None = None,
        cls_index: Tensor | None = None,
        p_mask: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_spans: bool = False,
        **kwargs: Any,
    ) -> BeamSearchSpanOutput:
        """Compute the top spans, or the loss with both positions.

        Args:
            start_positions, end_positions: (batch,) columns; positions outside the sequence are ignored.
            is_impossible: (batch,) 1 for unanswerable questions; adds the third term of the loss, at `cls_index`.
            cls_index: (batch,) column of <cls>; by default the last token.
            p_mask: (batch, length), 1 where no answer can start or end. Padding is always excluded.
            return_spans: Compute the top spans with both positions, too.

        Raises:
            CtxError: A tensor has another shape, `cls_index` or `is_impossible` is out of range, or no answer can start
                or end at a labeled position.
        """
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        states = outputs.last_hidden_state
        excluded = padding = padding_of_inputs(attention_mask, kwargs.get("sequence_ids"))
        if p_mask is not None:
            check_tensors(p_mask=p_mask)
            if p_mask.shape != states.shape[:2]:
                raise CtxError(f"p_mask is {tuple(p_mask.shape)}, but the input is {tuple(states.shape[:2])}.")
            is_masked = on_host(lambda mask: mask != 0, p_mask)
            excluded = is_masked if excluded is None else on_host(torch.logical_or, excluded, is_masked)
        if cls_index is None:
            cls_index = last_token_columns(states, None if padding is None else ~padding)
        else:
            cls_index = validate_sequence_targets(cls_index, "cls_index", len(states))
            _check_below(states.shape[1], cls_index, "cls_index")
        cls_states = states_at(states, cls_index)
        if start_positions is None or end_positions is None:
            return BeamSearchSpanOutput(**self._search(states, cls_states, excluded), **self.encoder_fields(outputs))
        start_positions = validate_sequence_targets(start_positions, "start_positions", len(states))
        start_states = states_at(states, start_positions.clamp(0, states.shape[1] - 1))
        position_term = partial(
            position_loss, excluded=excluded, num_items=num_items_in_batch, reason="padding, or p_mask is 1"
        )
        start = position_term(self.start_logits(states), start_positions, name="start_positions")
        end_logits = self.end_logits(states, start_states[:, None])[:, 0]
        end = position_term(end_logits, end_positions, name="end_positions")
        loss = (start + end) / 2
        if is_impossible is not None:
            check_tensors(is_impossible=is_impossible)
            if is_impossible.is_floating_point():  # the dtype in transformers
                is_impossible = is_impossible.long()
            targets = validate_sequence_targets(is_impossible, "is_impossible", len(states))
            _check_below(2, targets, "is_impossible")
            logits = self.answer_class(start_states, cls_states).float()
            total = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="sum")
            # half the weight, as in the released code
            loss = loss + mean_over_targets(total, targets, "is_impossible", num_items_in_batch) / 2
        loss = self.add_regularization(loss, outputs, start_positions, "start_positions", num_items_in_batch)
        spans = self._search(states, cls_states, excluded) if return_spans else {}
        return BeamSearchSpanOutput(loss=loss, **spans, **self.encoder_fields(outputs))

    def _search(self, states: Tensor, cls_states: Tensor, excluded: Tensor | None) -> dict[str, Any]:
        """The top starts, and the top ends of each start."""
        length = states.shape[1]
        start_probabilities = _probabilities(self.start_logits(states), excluded)
        top_starts, start_index = start_probabilities.topk(min(self.config.start_n_top, length), -1)
        start_states = states.gather(1, start_index[..., None].expand(-1, -1, states.shape[-1]))
        end_logits = self.end_logits(states, start_states)
        end_probabilities = _probabilities(end_logits, None if excluded is None else excluded[:, None])
        top_ends, end_index = end_probabilities.transpose(1, 2).topk(min(self.config.end_n_top, length), 1)
        expected_start_state = (start_probabilities[:, None] @ states)[:, 0]
        return {
            "start_top_log_probs": top_starts,
            "start_top_index": start_index,
            "end_top_log_probs": top_ends.flatten(1),
            "end_top_index": end_index.flatten(1),
            "cls_logits": self.answer_class(expected_start_state, cls_states),
        }


def _check_below(limit: int, values: Tensor, name: str) -> None:
    """Raise CtxError if a value is outside [0, limit). Skipped while a graph is being traced."""
    values = host_copy(values)
    is_invalid = (values < 0) | (values >= limit)
    if not is_traced(values) and bool(is_invalid.any()):
        raise CtxError(f"{name} contains {int(values[is_invalid][0])}, outside [0, {limit}).")


def _probabilities(logits: Tensor, excluded: Tensor | None) -> Tensor:
    if excluded is not None:
        logits = logits.masked_fill(excluded, torch.finfo(logits.dtype).min)
    return logits.softmax(-1)
