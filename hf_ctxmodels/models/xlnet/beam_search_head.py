"""The span head of XLNet (Yang et al. 2019, the released code for SQuAD 2.0): ends depend on starts."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_tensors, is_traced
from hf_ctxmodels.heads.base import HeadModel, ItemCounts, mean_over_targets, validate_sequence_targets
from hf_ctxmodels.heads.downstream import position_loss
from hf_ctxmodels.layers.pooling import last_token_columns, states_at

_UNANSWERABLE_WEIGHT = 0.5  # brings the third term to the size of the two others


class StartLogits(nn.Module):
    """A score for every token to be the start of the answer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, 1)

    def forward(self, states: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length)."""
        return self.dense(states).squeeze(-1)


class EndLogits(nn.Module):
    """A score for every token to be the end of the answer that has a given start."""

    def __init__(self, hidden_size: int, layer_norm_eps: float) -> None:
        super().__init__()
        self.dense_0 = nn.Linear(2 * hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dense_1 = nn.Linear(hidden_size, 1)

    def forward(self, states: Tensor, starts: Tensor) -> Tensor:
        """(batch, length, hidden), and the states of (batch, starts, hidden) -> (batch, starts, length)."""
        width = states.shape[-1]
        # For an affine map f(s, t) = f(s, 0) + f(0, t) - f(0, 0): no (batch, starts, length, 2 * hidden) tensor.
        ends = self.dense_0(F.pad(states, (0, width)))
        shifts = self.dense_0(F.pad(starts, (width, 0))) - self.dense_0(starts.new_zeros(2 * width))
        pairs = ends[:, None] + shifts[:, :, None]
        return self.dense_1(self.norm(torch.tanh(pairs))).squeeze(-1)


class AnswerClass(nn.Module):
    """A score for a row to have no answer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense_0 = nn.Linear(2 * hidden_size, hidden_size)
        self.dense_1 = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, starts: Tensor, classes: Tensor) -> Tensor:
        """States of the starts and of the <cls> tokens, (batch, hidden) each -> (batch,)."""
        return self.dense_1(torch.tanh(self.dense_0(torch.cat([starts, classes], -1)))).squeeze(-1)


@dataclass
class BeamSearchSpanOutput(ModelOutput):
    """Output of `ForBeamSearchQuestionAnswering`.

    Attributes:
        loss: Mean of the start's and the end's cross-entropy, and half the cross-entropy of having no answer; in nats.
        start_top_log_probs: (batch, starts) probabilities of the likeliest starts (the reference's name, which
            promises logarithms, is kept).
        start_top_index: (batch, starts) their columns.
        end_top_log_probs: (batch, ends * starts) probabilities of the likeliest ends of each start; start varies
            fastest.
        end_top_index: (batch, ends * starts) their columns.
        cls_logits: (batch,) score of having no answer.
        hidden_states, attentions: As asked for.
    """

    loss: Tensor | None = None
    start_top_log_probs: Tensor | None = None
    start_top_index: Tensor | None = None
    end_top_log_probs: Tensor | None = None
    end_top_index: Tensor | None = None
    cls_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ForBeamSearchQuestionAnswering(HeadModel):
    """Start of an answer, its end given the start, and whether there is one.

    Reads `start_n_top` and `end_n_top` of the configuration: how many candidates a search keeps, fewer where the input
    has fewer tokens.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions", "is_impossible")
    accepts_loss_kwargs = False

    def build_head(self, config: Any) -> None:
        """Three scores; the names are those of the reference's weights."""
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
        **kwargs: Any,
    ) -> BeamSearchSpanOutput:
        """The likeliest spans, or the loss where both positions are given.

        Args:
            start_positions, end_positions: (batch,) columns; those outside the sequence are ignored.
            is_impossible: (batch,) 1 where there is no answer; adds the third term of the loss, at `cls_index`.
            cls_index: (batch,) column of <cls>; by default each row's last token.
            p_mask: (batch, length), 1 where no answer can start or end. Padding is no candidate anyway.
        """
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        states = outputs.last_hidden_state
        excluded = _excluded(states, attention_mask, p_mask)
        if cls_index is None:
            cls_index = last_token_columns(states, None if attention_mask is None else attention_mask != 0)
        else:
            cls_index = validate_sequence_targets(cls_index, "cls_index", len(states))
            _check_below(states.shape[1], cls_index, "cls_index")
        classes = states_at(states, cls_index)
        if start_positions is None or end_positions is None:
            return self.build_output(BeamSearchSpanOutput, outputs, **self._search(states, classes, excluded))
        start_positions = validate_sequence_targets(start_positions, "start_positions", len(states))
        start_states = states_at(states, start_positions.clamp(0, states.shape[1] - 1))
        position_term = partial(
            position_loss, excluded=excluded, counts=num_items_in_batch, why="padding, or p_mask is 1"
        )
        start = position_term(self.start_logits(states), start_positions, name="start_positions")
        end_logits = self.end_logits(states, start_states[:, None])[:, 0]
        end = position_term(end_logits, end_positions, name="end_positions")
        loss = (start + end) / 2
        if is_impossible is not None:
            check_tensors(is_impossible=is_impossible)
            if is_impossible.is_floating_point():  # as transformers has it
                _check_below(2, is_impossible, "is_impossible")
                is_impossible = is_impossible.long()
            targets = validate_sequence_targets(is_impossible, "is_impossible", len(states))
            _check_below(2, targets, "is_impossible")
            scores = self.answer_class(start_states, classes).float()
            error = F.binary_cross_entropy_with_logits(scores, targets.float(), reduction="sum")
            loss = loss + _UNANSWERABLE_WEIGHT * mean_over_targets(error, targets, "is_impossible", num_items_in_batch)
        return self.build_output(BeamSearchSpanOutput, outputs, loss=loss)

    def _search(self, states: Tensor, classes: Tensor, excluded: Tensor | None) -> dict[str, Tensor]:
        """The likeliest starts, and the likeliest ends of each."""
        length = states.shape[1]
        starts = _probabilities(self.start_logits(states), excluded)
        top, index = starts.topk(min(self.config.start_n_top, length), -1)
        start_states = states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
        ends = self.end_logits(states, start_states)
        ends = _probabilities(ends, None if excluded is None else excluded[:, None])
        top_ends, end_index = ends.transpose(1, 2).topk(min(self.config.end_n_top, length), 1)
        average = (starts[:, None] @ states)[:, 0]
        return {
            "start_top_log_probs": top,
            "start_top_index": index,
            "end_top_log_probs": top_ends.flatten(1),
            "end_top_index": end_index.flatten(1),
            "cls_logits": self.answer_class(average, classes),
        }


def _check_below(limit: int, values: Tensor, name: str) -> None:
    """Raise CtxError if a value is outside [0, limit). Skipped while a graph is being traced."""
    if is_traced(values):
        return
    bad = values[(values < 0) | (values >= limit)]
    if bad.numel():
        raise CtxError(f"{name} holds {int(bad[0])}, outside [0, {limit}).")


def _excluded(states: Tensor, attention_mask: Tensor | None, p_mask: Tensor | None) -> Tensor | None:
    """(batch, length) bool, true where no answer can start or end; None if it can everywhere."""
    masks = []
    if attention_mask is not None:
        masks.append(attention_mask == 0)
    if p_mask is not None:
        check_tensors(p_mask=p_mask)
        if p_mask.shape != states.shape[:2]:
            raise CtxError(f"p_mask is {tuple(p_mask.shape)}, but the input is {tuple(states.shape[:2])}.")
        masks.append(p_mask != 0)
    return torch.stack(masks).any(0) if masks else None


def _probabilities(scores: Tensor, excluded: Tensor | None) -> Tensor:
    if excluded is not None:
        scores = scores.masked_fill(excluded, torch.finfo(scores.dtype).min)
    return scores.softmax(-1)
