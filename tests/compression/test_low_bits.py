"""Low-bit quantization: codes against a loop, gradients, eigenvalues, training, and damaged checkpoints."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_runs import unbatch
from transformers import AutoModel, AutoModelForSequenceClassification
from zoo import Case, make_batch, make_targets

from hf_ctxmodels import CtxError
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.compression.low_bits.modules import (
    FakeQuantizedLinear,
    PackedLinear,
    fake_quantize,
    pack_bits,
    quantize_groups,
    unpack_bits,
)
from hf_ctxmodels.compression.low_bits.quantizer import (
    find_quantizable_modules,
    pack_model,
    replace_with_fake_quantized,
)
from hf_ctxmodels.compression.low_bits.training import (
    LowBitsArguments,
    QBertOptions,
    assign_bits,
    group_by_layer,
    layer_sensitivities,
    top_eigenvalue,
)
from hf_ctxmodels.downstream.adapters import load_saved_adapters
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningMethodArguments, FinetuningMethods
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.freezing import freeze_encoder
from hf_ctxmodels.training.model_loading import prepare_for_training

BERT = Case(FAMILIES["bert"], "AutoModelForSequenceClassification")
OPTIONS = LowBitsArguments(QBertOptions(bits=(3, 5), groups=4, sensitivity_batches=2))


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = [name for name, value in rows[0].items() if torch.is_tensor(value)]
    return {name: torch.stack([row[name] for row in rows]) for name in names}


def nearest_levels(weight: Tensor, bits: int, groups: int) -> Tensor:
    """The nearest of 2^bits levels between the smallest and largest weight of a group of rows."""
    size = -(-len(weight) // groups)
    values = weight.clone()
    for first in range(0, len(weight), size):
        group = weight[first : first + size].double()
        levels = torch.linspace(float(group.min()), float(group.max()), 2**bits, dtype=torch.float64)
        for row in range(len(group)):
            for column in range(group.shape[1]):
                values[first + row, column] = levels[(levels - group[row, column]).abs().argmin()]
    return values


def test_fake_quantization_rounds_to_nearest_level(subtests: pytest.Subtests) -> None:
    """Gradients pass through unchanged; packing preserves codes."""
    torch.manual_seed(0)
    weight = torch.randn(10, 7) * torch.logspace(-2, 1, 10)[:, None]
    weight.requires_grad_()
    for bits in range(2, 9):
        for groups in (1, 3, 10, 128):
            with subtests.test(bits=bits, groups=groups):
                values = fake_quantize(weight, bits, groups)
                torch.testing.assert_close(values, nearest_levels(weight.detach(), bits, groups), rtol=1e-5, atol=1e-6)
                grad_output = torch.randn_like(values)
                (gradient,) = torch.autograd.grad(values, weight, grad_output)
                assert torch.equal(gradient, grad_output)
                codes = quantize_groups(weight, bits, groups).codes
                assert int(codes.max()) < 2**bits
                packed = pack_bits(codes, bits)
                assert packed.dtype is torch.uint8
                assert len(packed) == -(-70 * bits // 8)
                assert torch.equal(unpack_bits(packed, bits, (10, 7)), codes)
    constant = torch.full((4, 5), 0.3)
    assert torch.equal(fake_quantize(constant, 2, 2), constant)


def test_gradients_per_example_equal_gradients_of_examples() -> None:
    layer = FakeQuantizedLinear.from_module(nn.Linear(6, 4), bits=4, groups=2)
    inputs = torch.randn(3, 6)

    def loss(parameters: dict[str, Tensor], states: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (states[None],)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(layer.named_parameters()), inputs)
    for number, states in enumerate(inputs):
        expected = torch.autograd.grad(layer(states[None]).square().sum(), (layer.weight, layer.bias))
        torch.testing.assert_close((gradients["weight"][number], gradients["bias"][number]), expected)


def test_power_iteration_finds_largest_eigenvalue() -> None:
    """For the Hessian of two weights of a small network, also if the eigenvalue is negative."""
    torch.manual_seed(0)
    states, first, second = torch.randn(20, 4), torch.randn(5, 4), torch.randn(3, 5)
    labels = torch.arange(20) % 3

    def loss(flat: Tensor) -> Tensor:
        first_weight, second_weight = flat[:20].view(5, 4), flat[20:].view(3, 5)
        return nn.functional.cross_entropy((states @ first_weight.T).tanh() @ second_weight.T, labels)

    flat = torch.cat([first.flatten(), second.flatten()])
    eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
    largest = float(max(eigenvalues, key=abs))
    for sign in (1, -1):
        weights = [weight.clone().requires_grad_() for weight in (first, second)]
        value = sign * loss(torch.cat([weight.flatten() for weight in weights]))
        eigenvalue = top_eigenvalue(value, weights, iterations=500, tolerance=1e-7)
        assert eigenvalue == pytest.approx(sign * largest, rel=1e-3)


def test_sensitive_layers_get_more_bits() -> None:
    """Sensitivity is the absolute mean plus the standard deviation of eigenvalues over batches."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))

        def forward(self, curvatures: Tensor) -> Any:
            weights: list[Any] = [layer.weight for layer in self.layers]
            terms = [curvature * weight.square().sum() / 2 for curvature, weight in zip(curvatures, weights)]
            return type("Output", (), {"loss": torch.stack(terms).sum()})

    layers = [f"layers.{number}" for number in range(4)]
    groups = group_by_layer(["pooler.dense", *(f"{layer}.map" for layer in layers)])
    assert groups == {layer: [f"{layer}.map"] for layer in layers}
    batches = [{"curvatures": torch.tensor(values)} for values in ([1.0, 5.0, -3.0, 2.0], [1.0, 1.0, -3.0, 2.0])]
    sensitivities = layer_sensitivities(Model(), {layer: [layer] for layer in layers}, batches)
    assert [*sensitivities.values()] == pytest.approx([1.0, 3.0 + 2.0, 3.0, 2.0])
    assert assign_bits(sensitivities, [2, 4]) == {"layers.1": 4, "layers.2": 4, "layers.3": 2, "layers.0": 2}


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "bart", "t5", "xlnet", "ulmfit"])
def test_output_layer_stays_in_float32(family: str) -> None:
    """The last layer of a classifier, which has the labels, and no other layer of it."""
    model = Case(FAMILIES[family], "AutoModelForSequenceClassification").model(num_labels=7)
    names, _ = find_quantizable_modules(model)
    skipped = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}.keys() - names
    assert [model.get_submodule(name).out_features for name in skipped] == [7]


def test_quantized_training_and_checkpoint(tmp_path: Path) -> None:
    """A step changes float32 weights; the packed and the reloaded model have the outputs of the evaluated model."""
    model, batch = BERT.model(), make_batch(BERT)
    targets = batch | make_targets(BERT, batch)
    features = unbatch(targets)
    names = [name for name, _ in model.named_parameters()]
    OPTIONS.start(model, features, collate, 2, Accelerator(cpu=True))
    assert names == [name for name, _ in model.named_parameters()]
    bits = {module.bits for module in model.bert.layers.modules() if isinstance(module, FakeQuantizedLinear)}
    assert bits == {3, 5}
    assert type(model.classifier) is nn.Linear
    weight = model.bert.layers[0].attention.qkv_proj.weight
    initial_weight = weight.detach().clone()
    model.train()(**targets).loss.backward()
    assert all(parameter.grad is not None for parameter in model.bert.layers.parameters())
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(weight, initial_weight)
    assert len(weight.unique()) > 2**5 * 4
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        packed = pack_model(model)
        packed.save_pretrained(tmp_path)
        reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        for quantized in (packed, reloaded):
            torch.testing.assert_close(quantized(**batch).logits, expected, rtol=1e-5, atol=1e-5)
    encoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(encoder.layers[0].attention.qkv_proj, PackedLinear)
    encoder.save_pretrained(tmp_path / "encoder")
    weights = encoder.state_dict()
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "encoder")
    for name, weight in classifier.base_model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    for train in (
        lambda: reloaded.train()(**batch),
        lambda: prepare_for_training(reloaded),
        lambda: LowBitsArguments(None).start(reloaded, features, collate, 2, Accelerator(cpu=True)),
    ):
        with pytest.raises(CtxError, match="cannot be trained"):
            train()


@pytest.mark.slow
def test_frozen_encoders_and_adapters(tmp_path: Path, subtests: pytest.Subtests, capsys: pytest.CaptureFixture) -> None:
    """Sensitivities do not depend on frozen weights, which stay frozen. Adapters stay in float32 and can be loaded into
    models with packed or 8-bit codes."""
    batch = make_batch(BERT)
    targets = batch | make_targets(BERT, batch)
    features = unbatch(targets)

    def adapt(model: Any) -> None:
        AdapterArguments(adapter="madx-task:name=x,reduction_factor=4").apply(model)

    freezes: tuple[Callable[[Any], None], ...] = (freeze_encoder, adapt)
    for freeze in freezes:
        with subtests.test(freeze.__name__):
            model = BERT.model()
            freeze(model)
            unfrozen, messages = copy.deepcopy(model).requires_grad_(True), []
            for trained_model in (unfrozen, model):
                requires_grad = {name: p.requires_grad for name, p in trained_model.named_parameters()}
                OPTIONS.start(trained_model, features, collate, 2, Accelerator(cpu=True))
                assert requires_grad == {name: p.requires_grad for name, p in trained_model.named_parameters()}
                messages.append(capsys.readouterr().err)
            assert messages[0].count("sensitivity") == 3
            assert messages[0] == messages[1]
    model.train()(**targets).loss.backward()
    torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 1.0).step()
    int8_model = BERT.model()
    adapt(int8_model)
    int8_model.load_state_dict(model.state_dict())
    quantize_model(int8_model, CtxInt8Config())
    with torch.no_grad():
        for number, quantized in enumerate((pack_model(model), int8_model)):
            with subtests.test(type(quantized.hf_quantizer).__name__):
                expected, folder = quantized.eval()(**batch).logits, tmp_path / str(number)
                quantized.save_pretrained(folder)
                reloaded = AutoModelForSequenceClassification.from_pretrained(folder)
                assert not torch.allclose(reloaded(**batch).logits, expected, rtol=1e-3)
                assert load_saved_adapters(reloaded, folder) == ["x"]
                torch.testing.assert_close(reloaded(**batch).logits, expected, rtol=1e-5, atol=1e-5)
                assert number or torch.allclose(expected, model.eval()(**batch).logits, rtol=1e-5, atol=1e-5)


def test_invalid_options_raise() -> None:
    with pytest.raises(CtxError, match="Cached features"):  # before anything is computed
        FinetuningMethods(
            FinetuningMethodArguments(freeze="encoder:cache_features=features"),
            low_bits=LowBitsArguments("q-bert:bits=4"),
        )
    accelerator, tied = Accelerator(cpu=True), Case(FAMILIES["bert"], "AutoModelForMaskedLM").model()
    with pytest.raises(CtxError, match="tied to its embeddings"):
        LowBitsArguments("q-bert:bits=4").start(tied, [], None, 2, accelerator)
    with pytest.raises(CtxError, match="2 to 8 bits"):
        LowBitsArguments("q-bert:bits=1").start(BERT.model(), [], None, 2, accelerator)
    with pytest.raises(CtxError, match="0 training examples"):
        LowBitsArguments("q-bert:bits=2,4").start(BERT.model(), [], None, 2, accelerator)
    with pytest.raises(CtxError, match="one group"):
        replace_with_fake_quantized(BERT.model(), {"bert.pooler.dense": 4}, 0)


CODES, SCALE = "layers.0.feed_forward.up_proj.codes", "layers.0.feed_forward.up_proj.code_scale"
RECURRENT_SCALE = "layers.0.parametrizations.state_weight.original1"
PACKED, STEP = "layers.0.feed_forward.up_proj.packed", "layers.0.feed_forward.up_proj.step"


def test_sizes_of_saved_models_are_printed(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture) -> None:
    """The trained weights in float32 are in the output directory, the packed ones in its folder `quantized`."""
    model, options = BERT.model(), LowBitsArguments("q-bert:bits=4")
    accelerator = Accelerator(cpu=True)
    model.save_pretrained(tmp_path)
    options.start(model, [], None, 2, accelerator)
    options.save(model, tokenizer, str(tmp_path), accelerator)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "quantized", tmp_path)]
    assert sizes[0] < sizes[1]
    packed, full = (f"{size / 1e6:.1f} MB" for size in sizes)
    assert f"quantized: {packed}, in float32 {full}" in "".join(capsys.readouterr())


def save_quantized(folder: Path, family: str, method: str = "int8") -> dict[str, Tensor]:
    """Save a quantized encoder and return the tensors of its file."""
    model = Case(FAMILIES[family], "AutoModel").model()
    if method == "int8":
        quantize_model(model, CtxInt8Config())
    else:
        replace_with_fake_quantized(model, dict.fromkeys(find_quantizable_modules(model)[0], 4), 8)
        model = pack_model(model)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def change_first(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scale: torch.cat([scale.new_tensor([value]), scale[1:]])


@pytest.mark.parametrize(
    ("method", "name", "change", "message"),
    [
        ("int8", CODES, None, "codes is missing"),
        ("int8", SCALE, None, "code_scale is missing"),
        ("int8", SCALE, change_first(float("nan")), "not finite and positive"),
        ("int8", SCALE, change_first(-1.0), "not finite and positive"),
        ("int8", SCALE, change_first(0.0), "not finite and positive"),
        ("int8", CODES, lambda codes: codes + 0.5, "float32, expected integers"),
        ("low bits", PACKED, None, "packed is missing"),
        ("low bits", STEP, change_first(0.0), "not finite and positive"),
        ("low bits", PACKED, lambda packed: packed + 0.5, "float32, expected integers"),
        ("int8", RECURRENT_SCALE, lambda scale: -scale, "not finite and positive"),
    ],
)
def test_damaged_codes_or_scales_raise(
    method: str, name: str, change: Callable[[Tensor], Tensor] | None, message: str, tmp_path: Path
) -> None:
    tensors = save_quantized(tmp_path, "ulmfit" if name == RECURRENT_SCALE else "bert", method)
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    module = "up_proj.*" if "up_proj" in name else ""
    with pytest.raises(CtxError, match=module + message):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("int8", {"activations": "static"}, "input_scale is missing"),
        ("int8", {"block_size": 64}, "no field 'block_size'"),
        ("low bits", {"block_size": 64}, "no field 'block_size'"),
        ("low bits", {"groups": 0}, "at least one group"),
    ],
)
def test_damaged_configuration_raises(method: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, "bert", method)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CtxError, match=message):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForMaskedLM"])
def test_resizing_int8_embeddings_raises(auto_class: str) -> None:
    model = Case(FAMILIES["bert"], auto_class).model()
    quantize_model(model, CtxInt8Config())
    with pytest.raises(CtxError, match="Quantized embeddings cannot be resized"):
        model.resize_token_embeddings(model.config.vocab_size + 1)
