"""ALBERT: scopes of parameter sharing when saving, training, compiling and exporting; configurations; shared layers."""

import copy
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forked import ForkedProcess
from safetensors import safe_open
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from zoo import Case, assert_close, assert_same_outputs, gradients, make_batch, make_targets

from hf_ctxmodels import CtxAlbertConfig, CtxError
from hf_ctxmodels.layers.attention.layouts import PaddedLayout
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.transformer import FeedForward, TransformerBlock
from hf_ctxmodels.models.albert.shared_layers import SharedLayers, cache_autocast_casts
from hf_ctxmodels.registry import FAMILIES

PRETRAINING = Case(FAMILIES["albert"], "AutoModelForPreTraining")
ENCODER = Case(FAMILIES["albert"], "AutoModel")
# four depths in one or two groups, with one or two layers per depth
SHARING = [
    {"num_hidden_layers": 4, "parameter_sharing": scope, "num_hidden_groups": groups, "inner_group_num": inner}
    for scope in ("all", "attention", "ffn", "none")
    for groups, inner in ((1, 1), (2, 2))
]
PARTIAL_SHARING = [sharing for sharing in SHARING if sharing["parameter_sharing"] in ("attention", "ffn")]
FULL_SHARING = [sharing for sharing in SHARING if sharing not in PARTIAL_SHARING]


def sharing_id(sharing: dict) -> str:
    return f"{sharing['parameter_sharing']}-{sharing['num_hidden_groups']}x{sharing['inner_group_num']}"


all_sharing = pytest.mark.parametrize("sharing", SHARING, ids=sharing_id)
partial_sharing = pytest.mark.parametrize("sharing", PARTIAL_SHARING, ids=sharing_id)
full_sharing = pytest.mark.parametrize("sharing", FULL_SHARING, ids=sharing_id)


class TestSharing:
    @pytest.mark.parametrize("tied", [True, False])
    @all_sharing
    def test_saving(self, sharing: dict, tied: bool, tmp_path: Path) -> None:
        """Each parameter is saved once, and no key is missing after loading."""
        model = PRETRAINING.model(tie_word_embeddings=tied, **sharing)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        reloaded, report = PRETRAINING.model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        assert sum(p.numel() for p in reloaded.parameters()) == sum(p.numel() for p in model.parameters())
        batch = make_batch(PRETRAINING)
        assert_same_outputs(reloaded.eval()(**batch), model(**batch), tolerance=0)

    @all_sharing
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_outputs_of_all_applications_are_recorded(self, sharing: dict, checkpointing: bool) -> None:
        model = ENCODER.model(attention="eager", **sharing)
        if checkpointing:
            model.train().activation_checkpointing_enable()
        outputs = model(**make_batch(ENCODER), output_hidden_states=True, output_attentions=True)
        num_applications = sharing["num_hidden_layers"] * sharing["inner_group_num"]
        assert len(outputs.attentions) == num_applications
        assert len(outputs.hidden_states) == num_applications + 1
        for states, next_states in pairwise(outputs.hidden_states):
            assert not torch.equal(states, next_states)
        assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)

    @all_sharing
    def test_gradient_checkpointing_keeps_the_gradients(self, sharing: dict) -> None:
        batch = make_batch(PRETRAINING)
        batch |= make_targets(PRETRAINING, batch)
        results = []
        for checkpointing in (False, True):
            model = PRETRAINING.model(hidden_dropout_prob=0.2, **sharing).train()
            if checkpointing:
                model.activation_checkpointing_enable()
            torch.manual_seed(7)
            results.append(gradients(model, model(**batch).loss))
        for name, gradient in results[0].items():
            assert gradient.any(), name
            assert torch.equal(gradient, results[1][name]), name

    @pytest.mark.parametrize("sharing", PARTIAL_SHARING[::2], ids=sharing_id)
    def test_compile(self, sharing: dict) -> None:
        torch._dynamo.reset()
        model, batch = ENCODER.model(**sharing), make_batch(ENCODER)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert_same_outputs(compiled(**batch), model(**batch), batch["attention_mask"])

    def test_parameter_counts_of_the_scopes(self) -> None:
        """As in table 4: sharing the feed-forward network saves more parameters than sharing attention."""

        def count(**sharing: object) -> int:
            return sum(
                parameter.numel()
                for parameter in ENCODER.model(num_hidden_layers=4, intermediate_size=128, **sharing).parameters()
            )

        counts = [count(parameter_sharing=scope) for scope in ("all", "ffn", "attention", "none")]
        assert counts == sorted(set(counts))
        assert counts[-1] == count(num_hidden_groups=4)


# two processes with half of the batch each: the averaged gradients equal those of the batch
DISTRIBUTED = [{"classifier_dropout_prob": 0.0, **sharing} for sharing in (SHARING[0], SHARING[3], SHARING[4])]
PROCESS = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, "tests")
from models.test_albert import PRETRAINING, DISTRIBUTED, distributed_batch

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
batch = {name: tensor[rank::2] for name, tensor in distributed_batch().items()}
for number, sharing in enumerate(DISTRIBUTED):
    model = PRETRAINING.model(**sharing).train()
    if number % 2:
        model.activation_checkpointing_enable()
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        wrapped(**batch).loss.backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/{number}.pt")
"""


def distributed_batch() -> dict:
    """Examples with the same number of targets, so that the mean over examples is the mean over targets."""
    batch = make_batch(PRETRAINING, (9, 9, 6, 6))
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    batch["labels"][:, 2:4] = batch["input_ids"][:, 2:4]
    batch["sentence_order_label"] = torch.tensor([0, 1, 1, 0])
    return batch


def test_distributed_data_parallel(tmp_path: Path) -> None:
    processes = [ForkedProcess("-c", PROCESS, rank, tmp_path) for rank in (0, 1)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    for number, sharing in enumerate(DISTRIBUTED):
        model = PRETRAINING.model(**sharing).train()
        expected = gradients(model, model(**distributed_batch()).loss)
        averaged = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert averaged.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(averaged[name], gradient, f"{sharing_id(sharing)} {name}")


class TestReference:
    @full_sharing
    def test_full_sharing_is_exported(self, sharing: dict, tmp_path: Path) -> None:
        """Without sharing, transformers has one group per depth."""
        model = PRETRAINING.model(**sharing)
        model.export_reference(tmp_path)
        reference = _load_reference(tmp_path)
        groups = 4 if sharing["parameter_sharing"] == "none" else sharing["num_hidden_groups"]
        assert reference.config.num_hidden_groups == groups
        assert not hasattr(reference.config, "parameter_sharing")
        batch = make_batch(PRETRAINING)
        assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])
        reloaded, report = PRETRAINING.model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        assert_same_outputs(reloaded.eval()(**batch), model(**batch), tolerance=0)

    @partial_sharing
    def test_partial_sharing_cannot_be_exported(self, sharing: dict, tmp_path: Path) -> None:
        with pytest.raises(CtxError, match=rf"(?s)parameter_sharing='{sharing['parameter_sharing']}'.*save_pretrained"):
            PRETRAINING.model(**sharing).export_reference(tmp_path / "export")
        assert not (tmp_path / "export").exists()

    def test_partial_sharing_with_one_depth_per_group_is_exported(self, tmp_path: Path) -> None:
        model = PRETRAINING.model(num_hidden_groups=3, parameter_sharing="attention")
        model.export_reference(tmp_path)
        batch = make_batch(PRETRAINING)
        assert_same_outputs(model(**batch), _load_reference(tmp_path)(**batch), batch["attention_mask"])

    def test_num_labels_does_not_change_the_sentence_order_classifier(self, tmp_path: Path) -> None:
        """transformers sizes it by `num_labels`, which a fine-tuned configuration sets."""
        model = PRETRAINING.model(num_labels=5)
        model.export_reference(tmp_path)
        assert _load_reference(tmp_path).config.num_labels == 2


def _load_reference(folder: Path) -> PreTrainedModel:
    model, report = transformers.AlbertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


class TestConfiguration:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("num_hidden_groups", 5, r"num_hidden_groups=5.*num_hidden_layers=12.*1, 2, 3, 4, 6, 12"),
            ("num_hidden_groups", 0, r"num_hidden_groups=0.*num_hidden_layers=12.*1, 2"),
            ("num_hidden_groups", 24, r"num_hidden_groups=24.*num_hidden_layers=12.*12"),
            ("parameter_sharing", "heads", r"(?s)parameter_sharing.*attention"),
            ("inner_group_num", 0, "inner_group_num=0"),
            ("num_attention_heads", 7, "num_attention_heads=7"),
        ],
    )
    def test_invalid_values(self, field: str, value: object, message: str) -> None:
        with pytest.raises(Exception, match=message):
            CtxAlbertConfig(**{field: value})

    @pytest.mark.parametrize("field", ["gap_size", "net_structure_type", "num_memory_blocks"])
    def test_fields_of_the_first_release(self, field: str, tmp_path: Path) -> None:
        """Only their published value is supported."""
        reference = transformers.AlbertConfig(**{field: 0})
        reference.save_pretrained(tmp_path)
        CtxAlbertConfig.from_pretrained(tmp_path)
        setattr(reference, field, 1)
        reference.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"{field}=1"):
            CtxAlbertConfig.from_pretrained(tmp_path)


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
