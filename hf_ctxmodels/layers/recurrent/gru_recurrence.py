"""The recurrence of a GRU after the input's products, see `hf_ctxmodels.layers.recurrent.lstm_recurrence`."""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.layers.recurrent.lstm_recurrence import (
    Rules,
    StepProduct,
    previous_states,
    summed_products,
)

GATES = 3

# Saved for the backward pass: the gates after their non-linearities, the state's term of the candidate, and the states
# after every step, each (directions, tokens, ...); the initial states, the recurrent weights.
_Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def recur(
    gates: Tensor,
    hidden: Tensor,
    state_weight: Tensor,
    candidate_bias: Tensor,
    steps: tuple[int, ...],
    present: Tensor | None = None,
    restarts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All steps: states (directions, tokens, hidden), and the last ones (directions, rows, hidden).

    Args:
        gates: (directions, tokens, 3 * hidden) the input's terms of reset gate, update gate and candidate, with all
            biases but the candidate's recurrent one.
        hidden: (directions, rows, hidden) the states before the first step.
        state_weight: (directions, 3 * hidden, hidden).
        candidate_bias: (directions, hidden) the candidate's recurrent bias, added before the reset gate is applied.
        steps, present, restarts: See `recurrence.Rules`.
    """
    rules = Rules(steps, None, None, present, restarts)
    trains = torch.is_grad_enabled()  # within the function gradients are always off
    return _Recurrence.apply(gates, hidden, state_weight, candidate_bias, rules, trains)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hidden: Tensor,
        state_weight: Tensor,
        candidate_bias: Tensor,
        rules: Rules,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        trains = trains and any(ctx.needs_input_grad)
        values, shown, outputs, last = run_gru(
            gates.clone() if trains else gates, hidden, state_weight, candidate_bias, rules
        )
        if trains:
            ctx.save_for_backward(values, shown, outputs, hidden, state_weight)
            ctx.rules = rules
        return outputs, last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        return (*gru_gradients(ctx.saved_tensors, ctx.rules, d_outputs, d_last), None, None)


def run_gru(
    values: Tensor, hidden: Tensor, state_weight: Tensor, candidate_bias: Tensor, rules: Rules
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward pass: the gates of `recur`, whose non-linearities are applied in place; the state's term of every
    candidate; the states, and the last states."""
    size = hidden.shape[2]
    recurs = StepProduct(state_weight, len(rules.steps))
    shown, outputs = (values.new_empty(*values.shape[:2], size) for _ in range(2))
    ended: list[Tensor] = []
    start = 0
    for rows in rules.steps:
        if rows < hidden.shape[1]:
            ended.append(hidden[:, rows:])
            hidden = hidden[:, :rows]
        part = slice(start, start := start + rows)
        if rules.restarts is not None:
            hidden = hidden * ~rules.restarts[:, part]
        step, from_state, new = values[:, part], shown[:, part], outputs[:, part]
        product = recurs(hidden)
        step[..., : 2 * size].add_(product[..., : 2 * size]).sigmoid_()
        reset, update, candidate = step.split(size, -1)
        torch.add(product[..., 2 * size :], candidate_bias[:, None], out=from_state)
        candidate.addcmul_(reset, from_state).tanh_()
        torch.lerp(candidate, hidden, update, out=new)
        if rules.present is not None:
            new.copy_(torch.where(rules.present[:, part], new, hidden))
        hidden = new
    ended.append(hidden)
    return values, shown, outputs, torch.cat(ended[::-1], 1)


def gru_gradients(kept: _Kept, rules: Rules, d_outputs: Tensor, d_last: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the first four arguments of `recur`."""
    values, shown, outputs, first, state_weight = kept
    size = first.shape[2]
    before = previous_states(first, outputs, rules)
    to_hidden = StepProduct(state_weight.transpose(1, 2), len(rules.steps))
    d_state = torch.empty_like(values)  # of the state's terms of the gates
    d_candidates = torch.empty_like(outputs)  # of the candidates before their non-linearity
    d_hidden = d_last[:, :0]
    stop = values.shape[1]
    for rows in reversed(rules.steps):
        known, part = d_hidden.shape[1], slice(stop - rows, stop)
        if rows > known:  # rows that end at this step
            d_hidden = torch.cat([d_hidden, d_last[:, known:rows]], 1)
        reset, update, candidate = values[:, part].split(size, -1)
        d_new = d_outputs[:, part] + d_hidden
        d_kept = None
        if rules.present is not None:
            stays = ~rules.present[:, part]
            d_kept = d_new * stays
            d_new = d_new.masked_fill(stays, 0)
        d_reset, d_update, d_shown = d_state[:, part].split(size, -1)
        d_candidate = d_candidates[:, part]
        torch.mul(d_new * (1 - update), 1 - candidate.square(), out=d_candidate)
        torch.mul(d_candidate * shown[:, part], reset - reset.square(), out=d_reset)
        torch.mul(d_new * (before[:, part] - candidate), update - update.square(), out=d_update)
        torch.mul(d_candidate, reset, out=d_shown)
        d_hidden = torch.addcmul(to_hidden(d_state[:, part]), d_new, update)
        if d_kept is not None:
            d_hidden = d_hidden + d_kept
        if rules.restarts is not None:
            d_hidden = d_hidden * ~rules.restarts[:, part]
        stop -= rows
    d_gates = torch.cat([d_state[..., : 2 * size], d_candidates], -1)
    return d_gates, d_hidden, summed_products(d_state, before), d_state[..., 2 * size :].sum(1)
