"""What an AWD-LSTM adds to the packed recurrence: dropped weights, a second bias, gradients that go back so far."""

import pytest
import torch
from torch import nn

from hf_ctxmodels.layers.cpu.dropout import shared_dropout
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import LSTM, LSTMState

TOKENS = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)


def pair() -> tuple[LSTM, nn.LSTM]:
    """Ours with two biases, and torch's with the same weights."""
    torch.manual_seed(0)
    ours, theirs = LSTM(5, 8, directions=1, state_bias=True), nn.LSTM(5, 8, batch_first=True)
    nn.init.normal_(ours.state_bias)
    names = {"weight_ih_l0": "input_weight", "weight_hh_l0": "state_weight", "bias_ih_l0": "bias"}
    for name, own in {**names, "bias_hh_l0": "state_bias"}.items():
        getattr(theirs, name).data.copy_(getattr(ours, own)[0])
    return ours, theirs


@pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
def test_two_biases_are_those_of_torch(build) -> None:
    ours, theirs = pair()
    inputs = torch.randn(3, 7, 5)
    rows = build(TOKENS, directions=1)
    found = rows.unpack(ours(rows.pack(inputs), rows)[0])[0]
    for row, there in enumerate(TOKENS):
        torch.testing.assert_close(found[row][there], theirs(inputs[row][there][None])[0][0])
    found.sum().backward()
    assert torch.equal(ours.bias.grad, ours.state_bias.grad)


def test_one_mask_of_the_weights_for_a_whole_pass() -> None:
    """Equal to a layer whose weights are so dropped, and another mask at the next pass; none in evaluation."""
    layer = LSTM(5, 8, directions=1, weight_dropout=0.5)
    rows = PackedSequences.build(TOKENS, directions=1)
    packed = rows.pack(torch.randn(3, 7, 5))
    plain = layer.eval()(packed, rows)[0]
    weight = layer.state_weight.detach().clone()
    layer.train()
    torch.manual_seed(3)
    first, _ = layer(packed, rows)
    second, _ = layer(packed, rows)
    assert not torch.equal(first, second)
    first.sum().backward()
    kept = layer.state_weight.grad != 0
    assert 0.3 < kept.float().mean() < 0.7
    layer.eval()
    assert torch.equal(layer(packed, rows)[0], plain)
    layer.state_weight.data = weight * kept * 2
    torch.testing.assert_close(layer(packed, rows)[0], first)


@pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20])
def test_truncated_gradients_are_those_of_stretches_of_text(build, steps: int) -> None:
    """Every row, from its first token on: values as without, gradients as of stretches with the state handed over."""
    ours, _ = pair()
    inputs = torch.randn(3, 7, 5, requires_grad=True)
    rows = build(TOKENS, directions=1)
    weights = torch.randn(3, 7, 8) * TOKENS[..., None]
    whole, last = ours(rows.pack(inputs), rows)
    outputs, state = ours(rows.pack(inputs), rows, truncation=steps)
    torch.testing.assert_close(outputs, whole)
    for got, expected in zip(state, last, strict=True):
        torch.testing.assert_close(got, expected)
    parameters = [inputs, *ours.parameters()]
    got = torch.autograd.grad((rows.unpack(outputs)[0] * weights).sum(), parameters)
    total = torch.zeros(())
    for row, there in enumerate(TOKENS):
        before = None
        for part, weight in zip(inputs[row][there].split(steps), weights[row][there].split(steps), strict=True):
            alone = PackedSequences.build(torch.ones(1, len(part), dtype=torch.bool), directions=1)
            found, before = ours(part[None], alone, before)
            before = LSTMState(*(each.detach() for each in before))
            total = total + (found[0] * weight).sum()
    for one, other in zip(got, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(one, other)


class TestSharedDropout:
    NUMBERS = torch.tensor([[0, 1, 2, 0, 0, 1]])

    @pytest.mark.parametrize("whole", [True, False])
    def test_equal_numbers_lose_the_same(self, whole: bool) -> None:
        torch.manual_seed(0)
        tensor = torch.ones(1, 6, 400, requires_grad=True)
        out = shared_dropout(tensor, self.NUMBERS, 3, 0.5, True, drop_rows=whole)
        assert torch.equal(out[0, 0], out[0, 3])
        assert torch.equal(out[0, 1], out[0, 5])
        assert set(out.unique().tolist()) <= {0.0, 2.0}
        if whole:
            assert all(len(row.unique()) == 1 for row in out[0])
        else:
            assert not torch.equal(out[0, 0], out[0, 1])
            assert 0.4 < (out == 0).float().mean() < 0.6
        out.sum().backward()
        assert torch.equal(tensor.grad, out.detach())

    def test_rate_of_whole_rows(self) -> None:
        torch.manual_seed(0)
        out = shared_dropout(torch.ones(20_000, 2), torch.arange(20_000), 20_000, 0.1, True, drop_rows=True)
        assert (out == 0).float().mean().item() == pytest.approx(0.1, abs=0.011)
        assert out.mean().item() == pytest.approx(1, abs=0.012)

    def test_nothing_in_evaluation(self) -> None:
        tensor = torch.ones(1, 6, 4)
        assert shared_dropout(tensor, self.NUMBERS, 3, 0.5, False, drop_rows=True) is tensor


@pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
def test_numbers_of_packed_rows(build) -> None:
    """Every packed token's row, through `order` that of the batch."""
    rows = build(TOKENS, directions=2)
    found = rows.order[rows.sequence_indices]
    for positions in rows.positions:
        assert torch.equal(positions // TOKENS.shape[1], found)
