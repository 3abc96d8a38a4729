"""LSTM and GRU layers over packed sequences equal naive references and torch's layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.recurrent import rnn
from hf_ctxmodels.layers.recurrent.custom_ops import RECURRENCE_OPERATORS
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.recurrence import scan_gru, scan_lstm
from hf_ctxmodels.layers.recurrent.rnn import GRU, LSTM
from hf_ctxmodels.registry import get_family

Layer = LSTM | GRU
TOKENS = torch.tensor(
    [[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool
)
TORCH_NAMES = {
    "input_weight": "weight_ih_l0",
    "state_weight": "weight_hh_l0",
    "projection": "weight_hr_l0",
    "bias": "bias_ih_l0",
    "state_bias": "bias_hh_l0",
}
both_packings = pytest.mark.parametrize("build", [PackedSequences.build, PackedSequences.with_padding])
both_layers = pytest.mark.parametrize("layer_class", [LSTM, GRU])


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def naive_lstm(layer: LSTM, direction: int, inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    """(steps, input) -> (steps, output) and the last state, by the equations of the class."""
    outputs = []
    for step in inputs:
        gates = layer.input_weight[direction] @ step + layer.state_weight[direction] @ hidden + layer.bias[direction]
        if layer.state_bias is not None:
            gates = gates + layer.state_bias[direction]
        in_gate, forget, candidate, out_gate = gates.chunk(4)
        cell = forget.sigmoid() * cell + in_gate.sigmoid() * candidate.tanh()
        if layer.cell_clip is not None:
            cell = cell.clamp(-layer.cell_clip, layer.cell_clip)
        hidden = out_gate.sigmoid() * cell.tanh()
        if layer.projection is not None:
            hidden = layer.projection[direction] @ hidden
        if layer.projection_clip is not None:
            hidden = hidden.clamp(-layer.projection_clip, layer.projection_clip)
        outputs.append(hidden)
    return torch.stack(outputs), hidden, cell


def naive_gru(layer: GRU, direction: int, inputs: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for step in inputs:
        reset_x, update_x, candidate_x = (layer.input_weight[direction] @ step + layer.bias[direction]).chunk(3)
        state_terms = layer.state_weight[direction] @ hidden + layer.state_bias[direction]
        reset_h, update_h, candidate_h = state_terms.chunk(3)
        candidate = (candidate_x + (reset_x + reset_h).sigmoid() * candidate_h).tanh()
        hidden = torch.lerp(candidate, hidden, (update_x + update_h).sigmoid())
        outputs.append(hidden)
    return torch.stack(outputs), hidden


def run_rows_separately(layer: Layer, inputs: Tensor, state: tuple[Tensor, ...]) -> list[Tensor]:
    """(2, rows, length, output), and tensors (2, rows, width) of the last state."""
    run = naive_lstm if isinstance(layer, LSTM) else naive_gru
    results = [torch.zeros(2, *TOKENS.shape, state[0].shape[-1], dtype=inputs.dtype), *map(torch.zeros_like, state)]
    for direction in range(2):
        for row, is_token in enumerate(TOKENS):
            positions = is_token.nonzero()[:, 0]
            positions = positions.flip(0) if direction else positions
            initial = [tensor[direction, row] for tensor in state]
            results[0][direction, row, positions], *last = run(layer, direction, inputs[row, positions], *initial)
            for result, tensor in zip(results[1:], last, strict=True):
                result[direction, row] = tensor
    return results


def run_packed(layer: Layer, inputs: Tensor, packing: PackedSequences, state: tuple[Tensor, ...]) -> list[Tensor]:
    initial = packing.pack_state(tensor.transpose(0, 1) for tensor in state)
    outputs, last = layer(packing.pack(inputs), packing, initial)
    return [packing.unpack(outputs), *(tensor.transpose(0, 1) for tensor in packing.unpack_state(last))]


def make_torch_layer(layer: Layer) -> nn.LSTM | nn.GRU:
    """torch's bidirectional layer with the same weights."""
    input_size, options = layer.input_weight.shape[2], {"bidirectional": True, "batch_first": True}
    if isinstance(layer, GRU):
        torch_layer: nn.LSTM | nn.GRU = nn.GRU(input_size, layer.hidden_size, **options)
    else:
        projection_size = 0 if layer.projection is None else layer.output_size
        torch_layer = nn.LSTM(input_size, layer.cell_size, proj_size=projection_size, **options)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            for direction, suffix in enumerate(("", "_reverse")):
                getattr(torch_layer, TORCH_NAMES[name] + suffix).copy_(weight[direction])
    return torch_layer


@both_packings
@pytest.mark.parametrize(
    "make_layer",
    [
        lambda: LSTM(5, 8, state_bias=True),
        lambda: LSTM(5, 8, projection_size=6),
        lambda: LSTM(5, 8, projection_size=6, cell_clip=0.3, projection_clip=0.3),
        lambda: LSTM(5, 8, cell_clip=0.3, projection_clip=0.3),
        lambda: GRU(5, 8),
    ],
    ids=["lstm", "projection", "projection and clips", "clips", "gru"],
)
def test_layers_equal_naive_reference(build: Callable, make_layer: Callable[[], Layer]) -> None:
    torch.manual_seed(0)
    layer = make_layer().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    inputs = randn(4, 7, 5)
    state = tuple(randn(*tensor.shape) for tensor in layer.zero_state(4))
    values_and_gradients = []
    for results in (run_rows_separately(layer, inputs, state), run_packed(layer, inputs, build(TOKENS), state)):
        torch.manual_seed(1)
        total = sum((tensor * torch.randn_like(tensor)).sum() for tensor in results)
        gradients = torch.autograd.grad(total, [inputs, *state, *layer.parameters()])
        values_and_gradients.append([*results, *gradients])
    torch.testing.assert_close(*values_and_gradients)


@pytest.mark.parametrize(("layer_class", "options"), [(LSTM, {"state_bias": True, "projection_size": 48}), (GRU, {})])
def test_layers_equal_torch(layer_class: type[Layer], options: dict) -> None:
    """In float32 without gradients, with enough steps for prepacked weights; one direction is the first of two."""
    torch.manual_seed(1)
    layer, inputs, lengths = layer_class(40, 64, **options), torch.randn(5, 30, 40), torch.tensor([30, 4, 17, 30, 1])
    token_mask = torch.arange(30) < lengths[:, None]
    packing = PackedSequences.build(token_mask)
    with torch.no_grad():
        outputs = packing.unpack(layer(packing.pack(inputs), packing)[0])
        expected, _ = make_torch_layer(layer)(nn.utils.rnn.pack_padded_sequence(inputs, lengths, True, False))
        expected, _ = nn.utils.rnn.pad_packed_sequence(expected, True)
        torch.testing.assert_close(torch.cat([*outputs], -1), expected, atol=1e-5, rtol=1e-5)
        forward_layer = layer_class(40, 64, directions=1, **options)
        for weight, weights in zip(forward_layer.parameters(), layer.parameters(), strict=True):
            weight.copy_(weights[:1])
        packing = PackedSequences.build(token_mask, directions=1)
        torch.testing.assert_close(packing.unpack(forward_layer(packing.pack(inputs), packing)[0])[0], outputs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make_layer", "options"),
    [
        (lambda: LSTM(5, 6), {}),
        (lambda: LSTM(5, 6), {"truncation": 2}),
        (lambda: LSTM(5, 6, directions=1, state_bias=True, projection_size=4), {}),
        (lambda: GRU(5, 6), {}),
    ],
    ids=["LSTM", "truncated LSTM", "projected LSTM", "GRU"],
)
def test_cudnn_layer_equals_recurrence(
    make_layer: Callable[[], Layer], options: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's layer, which a GPU computes by cuDNN, equals the recurrence; both run on the CPU here."""
    torch.manual_seed(0)
    layer = make_layer()
    directions = len(layer.bias)
    packing = PackedSequences.build(TOKENS, directions=directions)
    state = tuple(torch.randn_like(tensor) for tensor in layer.zero_state(len(TOKENS)))
    inputs = torch.randn(directions, int(TOKENS.sum()), 5, requires_grad=True)
    leaves, results = [inputs, *layer.parameters()], []
    for has_cudnn in (False, True):
        monkeypatch.setattr(rnn, "uses_cudnn", lambda *_, has_cudnn=has_cudnn: has_cudnn)
        outputs, last_state = layer(inputs.to(dtype), packing, state, **options)
        assert outputs.dtype == dtype
        weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
        total = (outputs * weights).sum() + sum(tensor.sum() for tensor in last_state)
        results.append([outputs, *last_state, *torch.autograd.grad(total, leaves)])
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)


@both_layers
def test_compiled_gradients_equal_eager(layer_class: type[Layer]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, inputs = layer_class(5, 8), torch.randn(4, 7, 5, requires_grad=True)

    def compute_loss(inputs: Tensor) -> Tensor:
        packing = PackedSequences.with_padding(TOKENS, (TOKENS.cumsum(1) > 2).long())
        outputs, last_state = layer(packing.pack(inputs), packing)
        return packing.unpack(outputs).square().sum() + sum(tensor.sin().sum() for tensor in last_state)

    losses_and_gradients = []
    for compute in (compute_loss, torch.compile(compute_loss, fullgraph=True, backend="aot_eager")):
        loss = compute(inputs)
        losses_and_gradients.append([loss, *torch.autograd.grad(loss, [inputs, *layer.parameters()])])
    torch.testing.assert_close(*losses_and_gradients)


def test_exported_scan_equals_custom_operator() -> None:
    """With an initial state, padding, packed sequences, a projection and clipping."""
    torch.manual_seed(0)
    packing = PackedSequences.with_padding(TOKENS, (TOKENS.cumsum(1) > 2).long())
    assert packing.step_mask is not None
    assert packing.restarts is not None
    options = packing.step_options()._replace(cell_clip=0.7, projection_clip=0.3)
    tokens, size, projected = TOKENS.numel(), 5, 4
    lstm = [randn(2, tokens, 4 * size), randn(2, 4, projected), randn(2, 4, size)]
    lstm += [randn(2, 4 * size, projected), randn(2, projected, size)]
    gru = [randn(2, tokens, 3 * size), randn(2, 4, size), randn(2, 3 * size, size), randn(2, size)]
    for name, scan, inputs in (("lstm", scan_lstm, lstm), ("gru", scan_gru, gru)):
        values_and_gradients = []
        for outputs in (scan(options, *inputs), RECURRENCE_OPERATORS[name](*inputs, *options[1:])):
            torch.manual_seed(1)
            total = sum((output * torch.randn_like(output)).sum() for output in outputs)
            values_and_gradients.append([*outputs, *torch.autograd.grad(total, inputs)])
        torch.testing.assert_close(*values_and_gradients)


def test_initial_biases() -> None:
    """The bias of the forget gate is one, all others are zero (Jozefowicz et al. 2015)."""
    layer = LSTM(3, 4, state_bias=True)
    gates = torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(4)
    assert torch.equal(layer.bias, gates.expand(2, -1))
    assert layer.state_bias is not None
    assert not layer.state_bias.any()


@pytest.mark.parametrize("family", ["elmo", "cvt"])
def test_tensorflow_initialization(family) -> None:
    """One matrix maps input and output of the previous step to all gates: the `kernel` of TensorFlow's LSTMCell, with
    its default initializer `glorot_uniform`, as in bilm-tf and in the released code of CVT."""
    spec = get_family(family)
    layer = spec.models["AutoModel"](spec.config(**spec.sizes["tiny"] | {"cell_size": 256})).layers[0]
    inputs, outputs = layer.input_weight.shape[2], layer.output_size
    kernel = torch.cat([layer.input_weight, layer.state_weight], 2)
    std = (2 / (inputs + outputs + 4 * layer.cell_size)) ** 0.5
    assert kernel.std().item() == pytest.approx(std, rel=0.03)
    assert layer.projection.std().item() == pytest.approx((2 / (layer.cell_size + outputs)) ** 0.5, rel=0.03)


def test_weight_dropout_has_one_mask_per_pass() -> None:
    """The output equals that of a layer with these weights dropped; the next pass has a new mask, evaluation none."""
    layer, packing = LSTM(5, 8, directions=1, weight_dropout=0.5), PackedSequences.build(TOKENS, directions=1)
    packed, weight = packing.pack(torch.randn(4, 7, 5)), layer.state_weight.detach().clone()
    without_dropout = layer.eval()(packed, packing)[0]
    layer.train()
    torch.manual_seed(3)
    first, second = layer(packed, packing)[0], layer(packed, packing)[0]
    assert not torch.equal(first, second)
    first.sum().backward()
    is_kept = layer.state_weight.grad != 0
    assert 0.3 < is_kept.float().mean() < 0.7
    assert torch.equal(layer.eval()(packed, packing)[0], without_dropout)
    layer.state_weight.data = weight * is_kept * 2
    torch.testing.assert_close(layer(packed, packing)[0], first)


@both_packings
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20])
def test_truncated_gradients_equal_detached_segments(build: Callable, steps: int) -> None:
    """For each row, from its first token on; the values equal those without truncation."""
    torch.manual_seed(0)
    layer, inputs = LSTM(5, 8, directions=1, state_bias=True), torch.randn(4, 7, 5, requires_grad=True)
    nn.init.normal_(layer.state_bias)
    packing, weights = build(TOKENS, directions=1), torch.randn(4, 7, 8) * TOKENS[..., None]
    untruncated, last_state = layer(packing.pack(inputs), packing)
    outputs, state = layer(packing.pack(inputs), packing, truncation=steps)
    torch.testing.assert_close((outputs, *state), (untruncated, *last_state))
    leaves, total = [inputs, *layer.parameters()], torch.zeros(())
    for row, is_token in enumerate(TOKENS):
        state = None
        segments = zip(inputs[row][is_token].split(steps), weights[row][is_token].split(steps), strict=True)
        for segment, segment_weights in segments:
            single = PackedSequences.build(torch.ones(1, len(segment), dtype=torch.bool), directions=1)
            segment_outputs, state = layer(segment[None], single, state)
            state = tuple(tensor.detach() for tensor in state)
            total = total + (segment_outputs[0] * segment_weights).sum()
    gradients = torch.autograd.grad((packing.unpack(outputs)[0] * weights).sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(total, leaves))


@both_packings
def test_sequence_indices(build: Callable) -> None:
    """`order` maps the index of a packed token's sequence to its row in the batch."""
    packing = build(TOKENS)
    for positions in packing.positions:
        assert torch.equal(positions // TOKENS.shape[1], packing.order[packing.sequence_indices])
