"""The packed LSTM equals a naive reference, step by step and row by row, and `torch.nn.LSTM`."""

import pytest
import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import LSTM, LSTMState

TOKENS = torch.tensor(
    [[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool
)


def one_row(layer: LSTM, direction: int, inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(steps, input) -> (steps, output) and the state, by the equations of the class."""
    outputs = []
    for step in inputs:
        gates = (
            layer.input_weight[direction] @ step + layer.state_weight[direction] @ hidden + layer.bias[direction]
        ).chunk(4)
        cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh()
        if layer.cell_clip is not None:
            cell = cell.clamp(-layer.cell_clip, layer.cell_clip)
        hidden = gates[3].sigmoid() * cell.tanh()
        if layer.projection is not None:
            hidden = layer.projection[direction] @ hidden
        if layer.projection_clip is not None:
            hidden = hidden.clamp(-layer.projection_clip, layer.projection_clip)
        outputs.append(hidden)
    return torch.stack(outputs), hidden, cell


def naive_lstm(layer: LSTM, inputs: Tensor, tokens: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
    """(rows, length, input) -> (2, rows, length, output), with one row and direction after the other."""
    outputs = torch.zeros(2, *tokens.shape, layer.output_size, dtype=inputs.dtype)
    hidden, cell = torch.zeros_like(state.hidden), torch.zeros_like(state.cell)
    for direction in range(2):
        for row, is_token in enumerate(tokens):
            positions = is_token.nonzero()[:, 0]
            positions = positions.flip(0) if direction else positions
            start = state.hidden[direction, row], state.cell[direction, row]
            found = one_row(layer, direction, inputs[row, positions], *start)
            outputs[direction, row, positions], hidden[direction, row], cell[direction, row] = found
    return outputs, LSTMState(hidden, cell)


def packed_lstm(layer: LSTM, inputs: Tensor, rows: PackedSequences, state: LSTMState) -> tuple[Tensor, LSTMState]:
    before = rows.pack_state(tensor.transpose(0, 1) for tensor in state)
    outputs, after = layer(rows.pack(inputs), rows, before)
    return rows.unpack(outputs), LSTMState(*(tensor.transpose(0, 1) for tensor in rows.unpack_state(after)))


@pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
@pytest.mark.parametrize(("projection", "clip"), [(None, None), (6, None), (6, 0.3), (None, 0.3)])
def test_values_and_gradients_equal_the_reference(build: object, projection: int | None, clip: float | None) -> None:
    torch.manual_seed(0)
    layer = LSTM(5, 8, projection_size=projection, cell_clip=clip, projection_clip=clip).double()
    inputs = torch.randn(4, 7, 5, dtype=torch.double, requires_grad=True)
    state = LSTMState(torch.randn(2, 4, layer.output_size).double(), torch.randn(2, 4, 8).double())
    state = LSTMState(*(tensor.requires_grad_() for tensor in state))
    results = []
    for outputs, after in (naive_lstm(layer, inputs, TOKENS, state), packed_lstm(layer, inputs, build(TOKENS), state)):
        torch.manual_seed(1)
        total = sum((tensor * torch.randn_like(tensor)).sum() for tensor in (outputs, *after))
        results.append([outputs, *after, *torch.autograd.grad(total, [inputs, *state, *layer.parameters()])])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_without_gradients_and_in_two_segments() -> None:
    """Two segments with the state carried over equal one pass, in the forward direction."""
    torch.manual_seed(0)
    layer, inputs = LSTM(5, 8, projection_size=6, cell_clip=0.5), torch.randn(3, 8, 5)
    with torch.no_grad():
        whole, _ = packed_lstm(
            layer, inputs, PackedSequences.build(torch.ones(3, 8, dtype=torch.bool)), layer.zero_state(3)
        )
        half = PackedSequences.build(torch.ones(3, 4, dtype=torch.bool))
        first, state = packed_lstm(layer, inputs[:, :4], half, layer.zero_state(3))
        second, _ = packed_lstm(layer, inputs[:, 4:], half, state)
    torch.testing.assert_close(torch.cat([first[0], second[0]], 1), whole[0])
    assert not torch.allclose(first[1], whole[1, :, :4])


def test_equal_to_torch_lstm() -> None:
    """With a projection; `torch.nn.LSTM` has no clipping."""
    torch.manual_seed(0)
    layer, torch_lstm = LSTM(5, 8, projection_size=6), nn.LSTM(5, 8, proj_size=6, bidirectional=True, batch_first=True)
    with torch.no_grad():
        for direction, suffix in enumerate(("", "_reverse")):
            getattr(torch_lstm, f"weight_ih_l0{suffix}").copy_(layer.input_weight[direction])
            getattr(torch_lstm, f"weight_hh_l0{suffix}").copy_(layer.state_weight[direction])
            getattr(torch_lstm, f"weight_hr_l0{suffix}").copy_(layer.projection[direction])
            getattr(torch_lstm, f"bias_ih_l0{suffix}").copy_(layer.bias[direction])
            getattr(torch_lstm, f"bias_hh_l0{suffix}").zero_()
        inputs = torch.randn(3, 9, 5)
        outputs, _ = packed_lstm(
            layer, inputs, PackedSequences.build(torch.ones(3, 9, dtype=torch.bool)), layer.zero_state(3)
        )
        torch.testing.assert_close(torch.cat([*outputs], -1), torch_lstm(inputs)[0])


@pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
def test_several_sequences_in_a_row_are_independent(build: object) -> None:
    torch.manual_seed(0)
    layer, inputs = LSTM(5, 8, projection_size=6), torch.randn(1, 6, 5)
    tokens = torch.tensor([[True, True, True, False, True, True]])
    together, _ = layer((rows := build(tokens, torch.tensor([[1, 1, 2, 3, 2, 2]]))).pack(inputs), rows)
    together = rows.unpack(together)
    for positions in ([0, 1], [2, 4, 5]):
        alone = PackedSequences.build(torch.ones(1, len(positions), dtype=torch.bool))
        expected = alone.unpack(layer(alone.pack(inputs[:, positions]), alone)[0])
        torch.testing.assert_close(together[:, :, positions], expected)


def test_initial_biases() -> None:
    """The bias of the forget gate is one, all others are zero (Jozefowicz et al. 2015)."""
    layer = LSTM(3, 4, state_bias=True)
    gates = torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(4)
    assert torch.equal(layer.bias, gates.expand(2, -1))
    assert layer.state_bias is not None
    assert not layer.state_bias.any()
