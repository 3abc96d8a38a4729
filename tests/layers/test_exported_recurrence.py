"""The recurrences of exported graphs against those of compiled graphs, with gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_ctxmodels.layers.recurrent.custom_ops import gru_custom_op, lstm_custom_op
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.recurrence import scan_gru, scan_lstm

TOKENS = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0]], dtype=torch.bool)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def assert_same(first: Callable, second: Callable, given: list[Tensor], rest: list[object]) -> None:
    found = []
    for function in (first, second):
        results = function(*given, *rest)
        torch.manual_seed(1)
        total = sum((each * torch.randn_like(each)).sum() for each in results)
        found.append([*results, *torch.autograd.grad(total, given)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_scan_gives_what_the_recurrence_gives() -> None:
    """With a state to begin with, padding, several sequences in a row, a projection and clipping."""
    torch.manual_seed(0)
    rows = PackedSequences.with_padding(TOKENS, (TOKENS.cumsum(1) > 2).long())
    assert rows.token_mask is not None
    assert rows.restarts is not None
    tokens, size, projected = TOKENS.numel(), 5, 4
    lstm = [random(2, tokens, 4 * size), random(2, 3, projected), random(2, 3, size)]
    lstm += [random(2, 4 * size, projected), random(2, projected, size)]
    of_lstm = [rows.token_mask, rows.restarts, 0.7, 0.3]
    assert_same(scan_lstm, lstm_custom_op, lstm, of_lstm)
    gru = [random(2, tokens, 3 * size), random(2, 3, size), random(2, 3 * size, size), random(2, size)]
    assert_same(scan_gru, gru_custom_op, gru, [rows.token_mask, rows.restarts])
