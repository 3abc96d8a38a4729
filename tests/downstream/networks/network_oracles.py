"""Reference recurrent layers of torch with the weights of this package's layers, and helpers for comparisons."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_ctxmodels.layers.recurrent.rnn import GRU


def run_recurrent(layer: nn.Module, states: Tensor) -> Tensor:
    """(length, width) -> (length, 2 * output), differentiable with respect to the weights of an `LSTM` or `GRU`."""
    is_gru = isinstance(layer, GRU)
    width = layer.hidden_size if is_gru else layer.cell_size
    module = (nn.GRU if is_gru else nn.LSTM)(states.shape[-1], width, bidirectional=True)
    weights = {}
    for number, suffix in enumerate(("_l0", "_l0_reverse")):
        weights[f"weight_ih{suffix}"] = layer.input_weight[number]
        weights[f"weight_hh{suffix}"] = layer.state_weight[number]
        weights[f"bias_ih{suffix}"] = layer.bias[number]
        bias = layer.state_bias
        weights[f"bias_hh{suffix}"] = torch.zeros_like(layer.bias[number]) if bias is None else bias[number]
    return functional_call(module, weights, (states,))[0]


def randomize(network: nn.Module, scale: float = 0.3) -> nn.Module:
    """Add noise to all parameters, so that none is 0; evaluation mode."""
    for parameter in network.parameters():
        parameter.data.add_(scale * torch.randn_like(parameter))
    return network.eval()


def assert_same_with_gradients(network: nn.Module, output: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Compare outputs, and gradients of their weighted sum with respect to inputs and all parameters."""
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-4)
    weights = torch.randn_like(expected)
    arguments = [*inputs, *network.parameters()]
    gradients, expected_gradients = (
        torch.autograd.grad((logits * weights).sum(), arguments, retain_graph=True) for logits in (output, expected)
    )
    names = [*(f"input {number}" for number in range(len(inputs))), *dict(network.named_parameters())]
    for name, gradient, expected_gradient in zip(names, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(
            gradient, expected_gradient, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert gradient.abs().sum() > 0, name
