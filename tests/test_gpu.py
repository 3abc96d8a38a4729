"""Tests on a GPU (`pytest -m gpu`), and `scripts/gpu_first.py` on the CPU."""

import json
from pathlib import Path

import gpu_first
import pytest
import torch
from commands import run_file
from zoo import HEADS, Case

from hf_ctxmodels.core.devices import place_model

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_first.py"
QUICK_PARTS = ("environment", "heads", "training", "attention")


def gpu(test):
    """Mark a test that needs a GPU."""
    reason = "needs a CUDA device, and `pytest -m gpu`"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


@gpu
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", gpu_first.TOLERANCES)
@pytest.mark.parametrize("case", [case for case in HEADS if not case.has_consistency_loss], ids=str)
def test_head_gradients_equal_cpu(case: Case, dtype: str, packed: bool) -> None:
    torch.set_float32_matmul_precision("highest")  # a training run in the same process sets "high"
    assert gpu_first.head_error(case, "cuda", dtype, packed) < gpu_first.TOLERANCES[dtype]


@gpu
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("family", gpu_first.PRETRAINED_FAMILIES)
def test_training_step_does_not_synchronize(family: str, tmp_path: Path) -> None:
    run = gpu_first.prepare_training(family, "tiny", torch.device("cuda"), tmp_path)
    run.loop.callbacks = [gpu_first.StepMeasurement(torch.device("cuda"), sync_mode="error")]
    try:
        run.loop.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.loop.accelerator.mixed_precision == "bf16"


@gpu
@pytest.mark.usefixtures("fresh_accelerate")
def test_deterministic_runs() -> None:
    arguments = gpu_first.GpuArguments(size="tiny")
    default, deterministic = gpu_first.determinism(torch.device("cuda"), arguments)
    assert default.as_expected is None  # default runs are equal up to rounding, which has no fixed tolerance
    assert deterministic.as_expected, deterministic


@gpu
def test_model_is_placed_on_gpu() -> None:
    assert place_model(torch.nn.Linear(2, 2)).weight.is_cuda


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("parts", [QUICK_PARTS, pytest.param(gpu_first.PARTS, marks=pytest.mark.slow)], ids=len)
def test_gpu_script_runs_on_cpu(parts, tmp_path, capsys) -> None:
    output = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--size", "tiny", "--families", "gpt2", "word2vec", "--parts", *parts]
    assert run_file(SCRIPT, *arguments, "--output", output) == 0, capsys.readouterr()
    results = {result["name"]: result for result in json.loads(output.read_text())}
    for name in ("heads of gpt2, bfloat16", "heads of width 26, torch.float16"):
        assert results[name]["as_expected"], results[name]
    assert "tokens/s" in results["word2vec tiny, cpu, float32"]["measured"]
    assert "not as expected" in capsys.readouterr().out
