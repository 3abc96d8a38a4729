"""Layers that share parameters: which are one, in which order they run, and that each parameter is there once."""

import copy
from collections import Counter
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
# One group, several, one per depth; one layer per depth, or two.
SHAPES = [(1, 1), (2, 1), (3, 2), (6, 1)]
# A bit of what a shared and a free part of a layer are made of.
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
    def test_what_is_one(self, scope: str, groups: int, inner: int) -> None:
        """Depths of a group share what the scope says; nothing else is shared."""
        layers = list(make_layers(scope, groups, inner))
        assert len(layers) == DEPTHS * inner == len(make_layers(scope, groups, inner))
        places = [(number // inner, number % inner) for number in range(len(layers))]
        for one, (depth, position) in zip(layers, places, strict=True):
            for other, (other_depth, other_position) in zip(layers, places, strict=True):
                slot = position == other_position and depth * groups // DEPTHS == other_depth * groups // DEPTHS
                same = slot if scope == "all" else (depth, position) == (other_depth, other_position)
                assert (one is other) == same
                assert (one.attention is other.attention) == (same or (slot and scope == "attention"))
                assert (one.attention_norm is other.attention_norm) == (same or (slot and scope == "attention"))
                assert (one.feed_forward is other.feed_forward) == (same or (slot and scope == "ffn"))
                assert (one.feed_forward_norm is other.feed_forward_norm) == (same or (slot and scope == "ffn"))

    def test_every_parameter_has_one_name(self, scope: str, groups: int, inner: int) -> None:
        layers = make_layers(scope, groups, inner)
        names = [name for name, _ in layers.named_parameters(remove_duplicate=False)]
        assert set(layers.state_dict()) == set(names)
        parameters = [id(parameter) for parameter in layers.parameters()]
        assert len(names) == len(parameters) == len(set(parameters))
        reached = {id(parameter) for layer in layers for _, parameter in parts_of(layer)}
        assert reached == set(parameters)
        shared, free = groups * inner, DEPTHS * inner
        assert sum(ATTENTION in name for name in names) == (shared if scope in ("all", "attention") else free)
        assert sum(FEED_FORWARD in name for name in names) == (shared if scope in ("all", "ffn") else free)

    def test_equal_to_separate_layers_with_copied_weights(self, scope: str, groups: int, inner: int) -> None:
        """The gradient of a shared parameter is the sum of those of its copies."""
        layers = make_layers(scope, groups, inner)
        separate = [copied(layer) for layer in layers]
        got, expected = run(layers, states()), run(separate, states())
        assert_close(got, expected)
        weighting = states(1)
        (got * weighting).sum().backward()
        (expected * weighting).sum().backward()
        sums: dict[int, Tensor] = {}
        for layer, twin in zip(layers, separate, strict=True):
            for (_, parameter), (_, copy_of_it) in zip(parts_of(layer), parts_of(twin), strict=True):
                sums[id(parameter)] = sums.get(id(parameter), 0) + copy_of_it.grad
        for name, parameter in layers.named_parameters():
            assert_close(parameter.grad, sums[id(parameter)], f"gradient of {name}", tolerance=1e-4)

    def test_copied_and_reloaded(self, scope: str, groups: int, inner: int) -> None:
        """A copy shares within itself, and nothing with the original; a state dict fills it completely."""
        layers = make_layers(scope, groups, inner)
        twin = copy.deepcopy(layers)
        assert not {id(parameter) for parameter in twin.parameters()} & {id(p) for p in layers.parameters()}
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1)
        assert (run(twin, states()) - run(layers, states())).abs().max() > 0.01
        twin.load_state_dict(layers.state_dict())
        assert torch.equal(run(twin, states()), run(layers, states()))
        assert_close(run(twin.double(), states().double()).float(), run(layers, states()))


def parts_of(layer: TransformerBlock) -> list[tuple[str, nn.Parameter]]:
    """The parameters a layer computes with, its own and borrowed."""
    parts = ("attention", "attention_norm", "feed_forward", "feed_forward_norm")
    return [(name, parameter) for part in parts for name, parameter in getattr(layer, part).named_parameters()]


def copied(layer: TransformerBlock) -> TransformerBlock:
    """A layer that shares nothing."""
    twin = make_layer()
    with torch.no_grad():
        for (_, target), (_, source) in zip(parts_of(twin), parts_of(layer), strict=True):
            target.copy_(source)
    return twin


def test_one_shared_layer_is_compiled_once() -> None:
    """Whatever the depth, and without a graph break."""
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
    """As often for six depths as for one."""

    def weight_casts(depths: int) -> Counter:
        layers = make_layers("all", depths=depths)
        shapes = {tuple(parameter.shape) for parameter in layers.parameters() if parameter.dim() == 2}
        profiled = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        with profiled, mode(), torch.autocast("cpu", torch.bfloat16), cache_autocast_casts(torch.device("cpu")):
            run(layers, states())
        events = [tuple(event.input_shapes[0]) for event in profiled.events() if event.name == "aten::_to_copy"]
        return Counter(shape for shape in events if shape in shapes)

    once = weight_casts(1)
    assert sum(once.values()) == 4
    assert weight_casts(DEPTHS) == once


def test_inference_outside_autocast_stays_in_inference_mode() -> None:
    with torch.inference_mode(), cache_autocast_casts(torch.device("cpu")):
        assert run(make_layers("all"), states()).is_inference()
