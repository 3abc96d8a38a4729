"""ALBERT: parameter sharing in saving, training, compilation and export; configurations; shared layers."""

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import AlbertConfig, AlbertForPreTraining
from zoo import (
    Case,
    assert_close,
    assert_same_outputs,
    gradients,
    labeled_batch,
    load_strict,
    make_batch,
)

from hf_ctxmodels import CtxAlbertConfig, CtxError
from hf_ctxmodels.layers.attention.layouts import PaddedLayout
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.transformer import FeedForward, TransformerBlock
from hf_ctxmodels.models.albert.shared_layers import SharedLayers, cache_autocast_casts
from hf_ctxmodels.registry import FAMILIES

PRETRAINING = Case(FAMILIES["albert"], "AutoModelForPreTraining")
ENCODER = Case(FAMILIES["albert"], "AutoModel")
SCOPES = ("all", "attention", "ffn", "none")
# four depths in one or two groups, with one or two layers per depth
SHARING = [
    {"num_hidden_layers": 4, "parameter_sharing": scope, "num_hidden_groups": groups, "inner_group_num": inner}
    for scope in SCOPES
    for groups, inner in ((1, 1), (2, 2))
]
PARTIAL_SHARING = [sharing for sharing in SHARING if sharing["parameter_sharing"] in ("attention", "ffn")]
FULL_SHARING = [sharing for sharing in SHARING if sharing not in PARTIAL_SHARING]


def sharing_id(sharing: dict) -> str:
    return f"{sharing['parameter_sharing']}-{sharing['num_hidden_groups']}x{sharing['inner_group_num']}"


all_sharing = pytest.mark.parametrize("sharing", SHARING, ids=sharing_id)


class TestSharing:
    @pytest.mark.parametrize("tied", [True, False])
    @all_sharing
    def test_parameters_are_saved_once(self, sharing: dict, tied: bool, tmp_path: Path) -> None:
        """Each parameter is saved once, and no key is missing after loading."""
        model = PRETRAINING.model(tie_word_embeddings=tied, **sharing)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        reloaded, batch = load_strict(PRETRAINING.model_class, tmp_path), make_batch(PRETRAINING)
        assert_same_outputs(reloaded(**batch), model(**batch), tolerance=0)

    @all_sharing
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_outputs_of_all_layer_calls_are_recorded(self, sharing: dict, checkpointing: bool) -> None:
        model = ENCODER.model(attention="eager", **sharing)
        if checkpointing:
            model.train().activation_checkpointing_enable()
        outputs = model(**make_batch(ENCODER), output_hidden_states=True, output_attentions=True)
        num_calls = sharing["num_hidden_layers"] * sharing["inner_group_num"]
        assert len(outputs.attentions) == num_calls
        assert len(outputs.hidden_states) == num_calls + 1
        for states, next_states in pairwise(outputs.hidden_states):
            assert not torch.equal(states, next_states)
        assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)

    @all_sharing
    def test_gradient_checkpointing_preserves_gradients(self, sharing: dict) -> None:
        batch = labeled_batch(PRETRAINING)
        results = []
        for checkpointing in (False, True):
            model = PRETRAINING.model(hidden_dropout_prob=0.2, **sharing).train()
            if checkpointing:
                model.activation_checkpointing_enable()
            torch.manual_seed(7)
            results.append(gradients(model, model(**batch).loss))
        assert all(gradient.any() for gradient in results[0].values())
        assert_close(*results, tolerance=0)

    @pytest.mark.slow
    @pytest.mark.parametrize("sharing", PARTIAL_SHARING[::2], ids=sharing_id)
    def test_compiled_encoder_matches_eager(self, sharing: dict) -> None:
        torch._dynamo.reset()
        model, batch = ENCODER.model(**sharing), make_batch(ENCODER)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert_same_outputs(compiled(**batch), model(**batch), batch["attention_mask"])

    def test_parameter_counts_by_scope(self) -> None:
        """As in table 4 of the paper: sharing the feed-forward network saves more parameters than sharing attention."""

        def count(**sharing: object) -> int:
            return ENCODER.model(num_hidden_layers=4, intermediate_size=128, **sharing).num_parameters()

        counts = [count(parameter_sharing=scope) for scope in ("all", "ffn", "attention", "none")]
        assert counts == sorted(set(counts))
        assert counts[-1] == count(num_hidden_groups=4)


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sharing", [SHARING[0], SHARING[3], SHARING[4]], ids=sharing_id)
def test_distributed_data_parallel(sharing: dict, checkpointing: bool) -> None:
    """The gradient of a shared parameter is reduced once per step, with all its terms."""
    batch = labeled_batch(PRETRAINING)
    model = PRETRAINING.model(classifier_dropout_prob=0.0, **sharing).train()
    expected = gradients(model, model(**batch).loss)
    if checkpointing:
        model.activation_checkpointing_enable()
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        assert_close(gradients(model, wrapped(**batch).loss), expected)


class TestReference:
    @pytest.mark.parametrize("sharing", FULL_SHARING, ids=sharing_id)
    def test_full_sharing_is_exported(self, sharing: dict, tmp_path: Path) -> None:
        """Without sharing, transformers has one group per depth."""
        model, batch = PRETRAINING.model(**sharing), make_batch(PRETRAINING)
        model.export_reference(tmp_path)
        reference = load_strict(AlbertForPreTraining, tmp_path)
        groups = 4 if sharing["parameter_sharing"] == "none" else sharing["num_hidden_groups"]
        assert reference.config.num_hidden_groups == groups
        assert not hasattr(reference.config, "parameter_sharing")
        assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])
        reloaded = load_strict(PRETRAINING.model_class, tmp_path)
        assert_same_outputs(reloaded(**batch), model(**batch), tolerance=0)

    @pytest.mark.parametrize("sharing", PARTIAL_SHARING, ids=sharing_id)
    def test_partial_sharing_cannot_be_exported(self, sharing: dict, tmp_path: Path) -> None:
        with pytest.raises(CtxError, match=rf"(?s)parameter_sharing='{sharing['parameter_sharing']}'.*save_pretrained"):
            PRETRAINING.model(**sharing).export_reference(tmp_path / "export")
        assert not (tmp_path / "export").exists()

    def test_partial_sharing_with_one_depth_per_group_is_exported(self, tmp_path: Path) -> None:
        """The sentence-order classifier has 2 labels; transformers sizes it by `num_labels`, as fine-tuning sets it."""
        model, batch = (
            PRETRAINING.model(num_hidden_groups=3, parameter_sharing="attention", num_labels=5),
            make_batch(PRETRAINING),
        )
        model.export_reference(tmp_path)
        reference = load_strict(AlbertForPreTraining, tmp_path)
        assert reference.config.num_labels == 2
        assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])


class TestConfiguration:
    @pytest.mark.parametrize("field", ["gap_size", "net_structure_type", "num_memory_blocks"])
    def test_legacy_fields_accept_only_published_value(self, field: str, tmp_path: Path) -> None:
        """Other values are not supported."""
        reference = AlbertConfig(**{field: 0})
        reference.save_pretrained(tmp_path)
        CtxAlbertConfig.from_pretrained(tmp_path)
        setattr(reference, field, 1)
        reference.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"{field}=1"):
            CtxAlbertConfig.from_pretrained(tmp_path)


WIDTH, DEPTHS = 8, 6
LAYOUT = PaddedLayout(2, 5)
# (groups, layers per depth)
SHAPES = [(1, 1), (2, 1), (3, 2), (6, 1)]


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


def make_states(seed: int = 0) -> Tensor:
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

    def test_parameters_have_unique_names(self, scope: str, groups: int, inner: int) -> None:
        layers = make_layers(scope, groups, inner)
        names = [name for name, _ in layers.named_parameters(remove_duplicate=False)]
        assert set(layers.state_dict()) == set(names)
        parameters = set(layers.parameters())
        assert len(names) == len(parameters)
        assert parameters == {parameter for layer in layers for parameter in used_parameters(layer)}

    def test_matches_separate_layers_with_copied_weights(self, scope: str, groups: int, inner: int) -> None:
        """The gradient of a shared parameter is the sum of the gradients of its copies."""
        layers = make_layers(scope, groups, inner)
        separate = [copy_layer(layer) for layer in layers]
        outputs, expected = run(layers, make_states()), run(separate, make_states())
        assert_close(outputs, expected)
        output_weights = make_states(1)
        (outputs * output_weights).sum().backward()
        (expected * output_weights).sum().backward()
        sums: dict[nn.Parameter, Tensor] = {}
        for layer, layer_copy in zip(layers, separate, strict=True):
            for parameter, parameter_copy in zip(used_parameters(layer), used_parameters(layer_copy), strict=True):
                sums[parameter] = sums.get(parameter, 0) + parameter_copy.grad
        assert_close([parameter.grad for parameter in sums], list(sums.values()), "gradients", tolerance=1e-4)

    def test_deepcopy_and_load_state_dict(self, scope: str, groups: int, inner: int) -> None:
        """A copy shares no parameters with the original; loading the state dict restores all parameters."""
        layers = make_layers(scope, groups, inner)
        layers_copy = copy.deepcopy(layers)
        assert not set(layers_copy.parameters()) & set(layers.parameters())
        with torch.no_grad():
            for parameter in layers_copy.parameters():
                parameter.add_(1)
        assert (run(layers_copy, make_states()) - run(layers, make_states())).abs().max() > 0.01
        layers_copy.load_state_dict(layers.state_dict())
        assert torch.equal(run(layers_copy, make_states()), run(layers, make_states()))
        assert_close(run(layers_copy.double(), make_states().double()).float(), run(layers, make_states()))


def used_parameters(layer: TransformerBlock) -> list[nn.Parameter]:
    """The parameters that a layer uses, registered and shared."""
    modules = (layer.attention, layer.attention_norm, layer.feed_forward, layer.feed_forward_norm)
    return [parameter for module in modules for parameter in module.parameters()]


def copy_layer(layer: TransformerBlock) -> TransformerBlock:
    """A copy that shares no parameters."""
    layer_copy = make_layer()
    with torch.no_grad():
        for target, source in zip(used_parameters(layer_copy), used_parameters(layer), strict=True):
            target.copy_(source)
    return layer_copy


def test_shared_layer_is_compiled_once() -> None:
    """One graph for all depths, without graph breaks."""
    torch._dynamo.reset()
    layers = make_layers("all")
    expected = run(layers, make_states())
    counter = CompileCounterWithBackend("aot_eager")
    for layer in set(layers):
        layer.compile(fullgraph=True, backend=counter)
    with torch.no_grad():
        assert_close(run(layers, make_states()), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_autocast_casts_shared_parameter_once(mode: Any) -> None:
    """The number of casts does not depend on the depth."""

    def weight_casts(depths: int) -> Counter:
        layers = make_layers("all", depths=depths)
        shapes = {tuple(parameter.shape) for parameter in layers.parameters() if parameter.dim() == 2}
        profiled = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        with profiled, mode(), torch.autocast("cpu", torch.bfloat16), cache_autocast_casts(torch.device("cpu")):
            run(layers, make_states())
        cast_shapes = [tuple(event.input_shapes[0]) for event in profiled.events() if event.name == "aten::_to_copy"]
        return Counter(shape for shape in cast_shapes if shape in shapes)

    casts = weight_casts(1)
    assert sum(casts.values()) == 4
    assert weight_casts(DEPTHS) == casts


def test_inference_mode_without_autocast() -> None:
    with torch.inference_mode(), cache_autocast_casts(torch.device("cpu")):
        assert run(make_layers("all"), make_states()).is_inference()
