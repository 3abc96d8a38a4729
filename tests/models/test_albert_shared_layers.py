"""ALBERT's shared layers: identity of modules, order of application, parameter names, gradients, autocast."""

import copy
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from zoo import assert_close

from hf_ctxmodels.layers.attention.layouts import PaddedLayout
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.transformer import FeedForward, TransformerBlock
from hf_ctxmodels.models.albert.shared_layers import SharedLayers, cache_autocast_casts

WIDTH, DEPTHS = 8, 6
LAYOUT = PaddedLayout(2, 5)
SCOPES = ("all", "attention", "ffn", "none")
# (groups, layers per depth)
SHAPES = [(1, 1), (2, 1), (3, 2), (6, 1)]
# a parameter of each of the two sublayers
ATTENTION, FEED_FORWARD = "attention.out_proj.weight", "feed_forward.up_proj.weight"


def make_layer() -> TransformerBlock:
    attention, feed_forward = SelfAttention(WIDTH, 2), FeedForward(WIDTH, 12, "gelu")
    layer = TransformerBlock(WIDTH, attention, feed_forward, norm="post", norm_cls=nn.LayerNorm, dropout=0.0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def make_layers(scope: str, groups: int = 1, inner: int = 1, depths: int = DEPTHS) -> SharedLayers:
    torch.manual_seed(0)
    return SharedLayers(make_layer, depths, scope=scope, num_groups=groups, inner=inner)


def run(layers: Any, states: Tensor) -> Tensor:
    for layer in layers:
        states = layer(states, LAYOUT).hidden_states
    return states


def states(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("groups", "inner"), SHAPES)
@pytest.mark.parametrize("scope", SCOPES)
class TestStructure:
    def test_shared_modules(self, scope: str, groups: int, inner: int) -> None:
        """The depths of a group share the modules of the scope, and no other modules."""
        layers = list(make_layers(scope, groups, inner))
        assert len(layers) == DEPTHS * inner == len(make_layers(scope, groups, inner))
        slots = [(number // inner * groups // DEPTHS, number % inner) for number in range(len(layers))]
        for (i, first), (j, second) in product(enumerate(layers), repeat=2):
            in_group = slots[i] == slots[j]
            is_same = in_group if scope == "all" else i == j
            assert (first is second) == is_same
            assert (first.attention is second.attention) == (is_same or (in_group and scope == "attention"))
            assert (first.attention_norm is second.attention_norm) == (is_same or (in_group and scope == "attention"))
            assert (first.feed_forward is second.feed_forward) == (is_same or (in_group and scope == "ffn"))
            assert (first.feed_forward_norm is second.feed_forward_norm) == (is_same or (in_group and scope == "ffn"))

    def test_parameters_have_one_name(self, scope: str, groups: int, inner: int) -> None:
        layers = make_layers(scope, groups, inner)
        names = [name for name, _ in layers.named_parameters(remove_duplicate=False)]
        assert set(layers.state_dict()) == set(names)
        parameters = [id(parameter) for parameter in layers.parameters()]
        assert len(names) == len(parameters) == len(set(parameters))
        used = {id(parameter) for layer in layers for _, parameter in used_parameters(layer)}
        assert used == set(parameters)
        shared, separate = groups * inner, DEPTHS * inner
        assert sum(ATTENTION in name for name in names) == (shared if scope in ("all", "attention") else separate)
        assert sum(FEED_FORWARD in name for name in names) == (shared if scope in ("all", "ffn") else separate)

    def test_equal_to_separate_layers_with_copied_weights(self, scope: str, groups: int, inner: int) -> None:
        """The gradient of a shared parameter is the sum of the gradients of its copies."""
        layers = make_layers(scope, groups, inner)
        separate = [copy_layer(layer) for layer in layers]
        outputs, expected = run(layers, states()), run(separate, states())
        assert_close(outputs, expected)
        weights = states(1)
        (outputs * weights).sum().backward()
        (expected * weights).sum().backward()
        sums: dict[int, Tensor] = {}
        for layer, layer_copy in zip(layers, separate, strict=True):
            pairs = zip(used_parameters(layer), used_parameters(layer_copy), strict=True)
            for (_, parameter), (_, parameter_copy) in pairs:
                sums[id(parameter)] = sums.get(id(parameter), 0) + parameter_copy.grad
        for name, parameter in layers.named_parameters():
            assert_close(parameter.grad, sums[id(parameter)], f"gradient of {name}", tolerance=1e-4)

    def test_deepcopy_and_load_state_dict(self, scope: str, groups: int, inner: int) -> None:
        """A copy shares no parameters with the original; loading the state dict restores all parameters."""
        layers = make_layers(scope, groups, inner)
        layers_copy = copy.deepcopy(layers)
        assert not {id(parameter) for parameter in layers_copy.parameters()} & {id(p) for p in layers.parameters()}
        with torch.no_grad():
            for parameter in layers_copy.parameters():
                parameter.add_(1)
        assert (run(layers_copy, states()) - run(layers, states())).abs().max() > 0.01
        layers_copy.load_state_dict(layers.state_dict())
        assert torch.equal(run(layers_copy, states()), run(layers, states()))
        assert_close(run(layers_copy.double(), states().double()).float(), run(layers, states()))


def used_parameters(layer: TransformerBlock) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a layer uses, registered and shared."""
    modules = (layer.attention, layer.attention_norm, layer.feed_forward, layer.feed_forward_norm)
    return [(name, parameter) for module in modules for name, parameter in module.named_parameters()]


def copy_layer(layer: TransformerBlock) -> TransformerBlock:
    """A copy that shares no parameters."""
    layer_copy = make_layer()
    with torch.no_grad():
        for (_, target), (_, source) in zip(used_parameters(layer_copy), used_parameters(layer), strict=True):
            target.copy_(source)
    return layer_copy


def test_one_shared_layer_is_compiled_once() -> None:
    """For any depth, without a graph break."""
    torch._dynamo.reset()
    layers = make_layers("all")
    expected = run(layers, states())
    counter = CompileCounterWithBackend("aot_eager")
    for layer in set(layers):
        layer.compile(fullgraph=True, backend=counter)
    with torch.no_grad():
        assert_close(run(layers, states()), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_autocast_casts_a_shared_parameter_once(mode: Any) -> None:
    """The number of casts does not depend on the depth."""

    def weight_casts(depths: int) -> Counter:
        layers = make_layers("all", depths=depths)
        shapes = {tuple(parameter.shape) for parameter in layers.parameters() if parameter.dim() == 2}
        profiled = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        with profiled, mode(), torch.autocast("cpu", torch.bfloat16), cache_autocast_casts(torch.device("cpu")):
            run(layers, states())
        events = [tuple(event.input_shapes[0]) for event in profiled.events() if event.name == "aten::_to_copy"]
        return Counter(shape for shape in events if shape in shapes)

    casts = weight_casts(1)
    assert sum(casts.values()) == 4
    assert weight_casts(DEPTHS) == casts


def test_inference_outside_autocast_stays_in_inference_mode() -> None:
    with torch.inference_mode(), cache_autocast_casts(torch.device("cpu")):
        assert run(make_layers("all"), states()).is_inference()
