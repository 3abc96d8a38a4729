"""The packed GRU equals `torch.nn.GRU` run on each row separately; also with padding and in a compiled graph."""

import pytest
import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import GRU, GRUState

TOKENS = torch.tensor(
    [[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool
)
NAMES = {
    "input_weight": "weight_ih_l0",
    "state_weight": "weight_hh_l0",
    "bias": "bias_ih_l0",
    "state_bias": "bias_hh_l0",
}


def make_torch_gru(layer: GRU) -> nn.GRU:
    """`torch.nn.GRU` with the same weights."""
    torch_gru = nn.GRU(layer.input_weight.shape[2], layer.hidden_size, bidirectional=True, batch_first=True)
    with torch.no_grad():
        for ours, theirs in NAMES.items():
            for direction, suffix in enumerate(("", "_reverse")):
                getattr(torch_gru, theirs + suffix).copy_(getattr(layer, ours)[direction])
    return torch_gru.to(layer.bias.dtype)


def run_rows_separately(torch_gru: nn.GRU, inputs: Tensor, state: GRUState) -> tuple[Tensor, Tensor]:
    """(2, rows, length, hidden) and the last states, for each row separately without padding."""
    outputs, last = torch.zeros(2, *TOKENS.shape, torch_gru.hidden_size, dtype=inputs.dtype), []
    for row, is_token in enumerate(TOKENS):
        found, hidden = torch_gru(inputs[row, is_token][None], state.hidden[:, row : row + 1].contiguous())
        outputs[:, row, is_token] = torch.stack(found[0].chunk(2, -1))
        last.append(hidden)
    return outputs, torch.cat(last, 1)


@pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
def test_values_and_gradients_equal_torch(build: object) -> None:
    torch.manual_seed(0)
    layer = GRU(5, 8).double()
    torch_gru = make_torch_gru(layer)
    inputs = torch.randn(4, 7, 5, dtype=torch.double, requires_grad=True)
    state = GRUState(torch.randn(2, 4, 8, dtype=torch.double, requires_grad=True))
    rows = build(TOKENS)
    packed, after = layer(rows.pack(inputs), rows, rows.pack_state([state.hidden.transpose(0, 1)]))
    got = (rows.unpack(packed), rows.unpack_state(after)[0].transpose(0, 1))
    expected = run_rows_separately(torch_gru, inputs, state)
    weights = [torch.randn_like(each) for each in expected]
    found = []
    for results, module in ((got, layer), (expected, torch_gru)):
        total = sum((each * weight).sum() for each, weight in zip(results, weights, strict=True))
        found.append(torch.autograd.grad(total, [inputs, *state, *module.parameters()]))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    theirs = dict(zip([name for name, _ in torch_gru.named_parameters()], found[1][2:], strict=True))
    for (name, _), gradient in zip(layer.named_parameters(), found[0][2:], strict=True):
        both = torch.stack([theirs[NAMES[name]], theirs[f"{NAMES[name]}_reverse"]])
        torch.testing.assert_close(gradient, both, atol=1e-10, rtol=1e-10)


def test_float32_without_gradients() -> None:
    """Sequences long enough for prepacked weights; one direction equals the first of two."""
    torch.manual_seed(1)
    layer, inputs = GRU(40, 64), torch.randn(5, 30, 40)
    lengths = torch.tensor([30, 4, 17, 30, 1])
    tokens = torch.arange(30) < lengths[:, None]
    rows = PackedSequences.build(tokens)
    with torch.no_grad():
        outputs = rows.unpack(layer(rows.pack(inputs), rows)[0])
        expected, _ = make_torch_gru(layer)(nn.utils.rnn.pack_padded_sequence(inputs, lengths, True, False))
        expected, _ = nn.utils.rnn.pad_packed_sequence(expected, True)
        torch.testing.assert_close(torch.cat([*outputs], -1), expected, atol=1e-5, rtol=1e-5)
        first = GRU(40, 64, directions=1)
        for ours, theirs in zip(first.parameters(), layer.parameters(), strict=True):
            ours.copy_(theirs[:1])
        rows = PackedSequences.build(tokens, directions=1)
        torch.testing.assert_close(rows.unpack(first(rows.pack(inputs), rows)[0])[0], outputs[0])


@pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
def test_several_sequences_in_a_row_are_independent(build: object) -> None:
    torch.manual_seed(0)
    layer, inputs = GRU(5, 8), torch.randn(1, 6, 5)
    tokens = torch.tensor([[True, True, True, False, True, True]])
    together, _ = layer((rows := build(tokens, torch.tensor([[1, 1, 2, 3, 2, 2]]))).pack(inputs), rows)
    together = rows.unpack(together)
    for positions in ([0, 1], [2, 4, 5]):
        alone = PackedSequences.build(torch.ones(1, len(positions), dtype=torch.bool))
        expected = alone.unpack(layer(alone.pack(inputs[:, positions]), alone)[0])
        torch.testing.assert_close(together[:, :, positions], expected)


def test_gradients_of_a_compiled_graph() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, inputs = GRU(5, 8), torch.randn(4, 7, 5, requires_grad=True)

    def total(given: Tensor) -> Tensor:
        rows = PackedSequences.with_padding(TOKENS, (TOKENS.cumsum(1) > 2).long())
        outputs, after = layer(rows.pack(given), rows)
        return rows.unpack(outputs).square().sum() + after.hidden.sin().sum()

    results = []
    for run in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        value = run(inputs)
        results.append([value, *torch.autograd.grad(value, [inputs, *layer.parameters()])])
    for got, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_is_close(autocast: bool) -> None:
    torch.manual_seed(0)
    layer, inputs = GRU(16, 32), torch.randn(4, 7, 16)
    rows = PackedSequences.build(TOKENS)
    expected, _ = layer(rows.pack(inputs), rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        dtype = torch.float32 if autocast else torch.bfloat16
        got, _ = layer.to(dtype)(rows.pack(inputs.to(dtype)), rows)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=0.03, rtol=0.03)
