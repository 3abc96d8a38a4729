"""Devices and data types: mixed precision, model placement, and deterministic algorithms."""

import copy
import os

import pytest
import torch
from commands import run_command
from training_runs import arguments
from zoo import NETWORKS, Case, make_batch

from hf_ctxmodels import CtxBertConfig, CtxBertModel, CtxError
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.devices import DeviceArguments, place_model, select_device
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.accelerator import (
    choose_mixed_precision,
    describe_device,
    make_accelerator,
    restore_determinism,
    use_deterministic_algorithms,
)

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "launch_precision", "expected"),
    [
        ("cuda", (9, 0), None, None, "bf16"),
        ("cuda", (8, 0), None, None, "bf16"),
        ("cuda", (7, 5), None, None, "no"),
        ("cuda", (7, 5), "float16", None, "fp16"),
        ("cuda", (7, 5), "bfloat16", None, "bf16"),
        ("cuda", (9, 0), "float32", "bf16", "no"),
        ("cuda", (9, 0), None, "no", "no"),
        ("cuda", (9, 0), None, "fp16", "fp16"),
        ("cpu", None, None, None, "no"),
        ("cpu", None, "bfloat16", None, "bf16"),
        ("mps", None, None, None, "no"),
        ("cpu", None, "float16", None, "--dtype float16"),
        ("cpu", None, None, "fp16", "accelerate launch --mixed_precision fp16"),
    ],
)
def test_choose_mixed_precision(device, capability, dtype, launch_precision, expected):
    if " " not in expected:
        assert choose_mixed_precision(device, capability, dtype, launch_precision) == expected
        return
    with pytest.raises(CtxError, match="Training in float16 needs a GPU") as error:
        choose_mixed_precision(device, capability, dtype, launch_precision)
    assert error.value.location == expected


def test_models_of_this_package_are_prepared_for_inference(monkeypatch):
    prepared = []
    monkeypatch.setattr(CtxBertModel, "prepare_for_inference", lambda self: prepared.append(self))
    model, other = (
        CtxBertModel(CtxBertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1)),
        torch.nn.Linear(2, 2),
    )
    for network in (model, other):
        DeviceArguments(device="cpu", dtype="bfloat16").place_for_inference(network)
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    assert prepared == [model]


def test_select_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert select_device() == select_device("cpu") == torch.device("cpu")
    with pytest.raises(CtxError, match=r"There is no device cuda\.\n.*\n.*use one of: cpu\."):
        select_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device() == torch.device("cuda")
    assert select_device("cuda:1") == torch.device("cuda", 1)
    for name in ("cuda:2", "gpu", "mps"):
        with pytest.raises(CtxError, match="use one of: cpu, cuda, cuda:0, cuda:1"):
            select_device(name)


def test_place_model(monkeypatch):
    model = CtxBertModel(CtxBertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    assert place_model(copy.deepcopy(model), "cpu", "bfloat16").dtype == torch.bfloat16
    quantize_model(model, CtxInt8Config())
    assert place_model(model, "cpu").device.type == "cpu"
    with pytest.raises(CtxError, match="keeps its data types"):
        place_model(model, "cpu", "bfloat16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert place_model(model).device.type == "cpu"
    with pytest.raises(CtxError, match="runs on the CPU only"):
        place_model(model, "cuda")


@pytest.mark.usefixtures("fresh_accelerate")
@restore_determinism()
def test_deterministic_algorithms(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, ":4096:2")
    with pytest.raises(CtxError, match=f"{VARIABLE}=:4096:2"):
        use_deterministic_algorithms()
    monkeypatch.delenv(VARIABLE)
    with monkeypatch.context() as context:
        for name in ("is_available", "is_initialized"):
            context.setattr(torch.cuda, name, lambda: True)
        with pytest.raises(CtxError, match="no effect after the first use of the GPU"):
            use_deterministic_algorithms()
    assert not torch.are_deterministic_algorithms_enabled()
    accelerator = make_accelerator(arguments(tmp_path, deterministic=True, device="cpu", dtype="bfloat16"))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert describe_device(accelerator) == "cpu, bfloat16 autocast"
    assert describe_device(make_accelerator(arguments(tmp_path, device="cpu"))) == "cpu, float32"
    with pytest.raises(SystemExit):
        run_script(lambda: torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2)))
    assert (
        "put_ does not have a deterministic implementation.\n  Fix: remove --deterministic." in capsys.readouterr().err
    )


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
@restore_determinism()
def test_determinism_is_restored(mode, monkeypatch):
    monkeypatch.setenv(VARIABLE, ":4096:8")
    torch.set_deterministic_debug_mode(mode)
    cudnn = torch.backends.cudnn
    previous = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark

    @restore_determinism()
    def interrupted_run():
        use_deterministic_algorithms()
        assert (torch.get_deterministic_debug_mode(), cudnn.deterministic) == (2, True)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        interrupted_run()
    assert (torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark) == previous


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    "command",
    [
        "pretrain --family bert --tokenizer nowhere --dataset demo",
        "finetune sequence-classification --model nowhere --train_file nothing.csv --validation_file nothing.csv",
        "finetune multitask --model nowhere --tasks nothing.yaml",
        "finetune text2text --model nowhere --tasks nothing.yaml",
    ],
)
@restore_determinism()
def test_commands_restore_determinism(command, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that its value is restored
    monkeypatch.delenv(VARIABLE)
    flags = {"output_dir": tmp_path / "run", "deterministic": True, "device": "cpu"}
    assert run_command(*command.split(), **flags) == 2
    assert VARIABLE in os.environ
    assert not torch.are_deterministic_algorithms_enabled()


def test_float16_of_accelerate_launch_requires_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(CtxError, match="Training in float16 needs a GPU"):
        make_accelerator(arguments(tmp_path, device="cpu"))


def test_processes_on_same_device_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CtxError, match="Several processes would train on the same device"):
        make_accelerator(arguments(tmp_path, device="cuda:1"))


@pytest.mark.parametrize("case", NETWORKS, ids=str)
def test_offloaded_weights(case: Case, tmp_path) -> None:
    """Outputs are equal if accelerate reads the weights from files in each forward."""
    model, batch = case.model(), make_batch(case)
    model.save_pretrained(tmp_path / "model")
    has_adaptive_embeddings = case.family.name == "transformer_xl"
    device_map = {"": "disk"}
    if has_adaptive_embeddings:
        device_map = {name: "disk" if name == "layers" else "cpu" for name, _ in model.named_children()}

    def load(device_map: dict[str, str]) -> torch.nn.Module:
        return case.model_class.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offloaded"
        )

    offloaded = load(device_map)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    with torch.no_grad():
        torch.testing.assert_close(offloaded(**batch)[0], model(**batch)[0], rtol=0, atol=1e-5)
        if has_adaptive_embeddings:
            with pytest.raises(CtxError, match="cannot be offloaded"):
                load({"": "disk"})(**batch)


@pytest.mark.parametrize("family", ["word2vec", "glove"])
def test_offloaded_output_vectors_raise(family: str, tmp_path) -> None:
    """The product with weights that are on the meta device would be undefined."""
    case = Case(FAMILIES[family], "AutoModelForPreTraining")
    model, batch = case.model(), make_batch(case)
    model.save_pretrained(tmp_path)
    offloaded = case.model_class.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "files")
    with torch.no_grad(), pytest.raises(CtxError, match=r"`(outputs|context_embeddings)` cannot be offloaded"):
        offloaded(**batch)
