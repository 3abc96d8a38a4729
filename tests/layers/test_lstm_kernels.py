"""The Triton kernels of LSTM steps without a GPU: interpreted on the CPU, and compiled for GPUs."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_ctxmodels.layers.recurrent import lstm_steps, recurrence

SCRIPT = Path(__file__).parent / "lstm_kernel_checks.py"


@pytest.mark.slow
@pytest.mark.parametrize("check", ["interpret", "compile"])
def test_kernels(check: str, tmp_path: Path) -> None:
    """`interpret`: equal to the torch functions that are used on other devices. `compile`: for three generations of
    GPUs, which finds errors that the interpreter does not find."""
    pytest.importorskip("triton", reason="pip install triton")
    environment = os.environ | {"TRITON_INTERPRET": str(int(check == "interpret")), "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, SCRIPT, check], env=environment, check=True)


@pytest.mark.parametrize(("is_installed", "num_warnings"), [(False, 0), (True, 1)], ids=["missing", "failing"])
def test_torch_functions_are_used_without_triton(
    is_installed: bool, num_warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silently if Triton is not installed; with one warning if it is, but does not run."""
    warnings: list[str] = []
    monkeypatch.setattr(recurrence.logger, "warning", warnings.append)
    monkeypatch.setattr(recurrence, "find_spec", lambda name: is_installed or None)
    monkeypatch.setattr(recurrence, "_LSTM_KERNELS", "hf_ctxmodels.missing_kernels")
    recurrence.has_lstm_kernels.cache_clear()
    gates: Any = SimpleNamespace(
        is_cuda=True, dtype=torch.float32, device=torch.device("cpu"), is_contiguous=lambda: True
    )
    assert [recurrence._select_lstm_steps(gates) for _ in range(2)] == [lstm_steps] * 2
    assert len(warnings) == num_warnings
    recurrence.has_lstm_kernels.cache_clear()


def test_kernels_are_selected_for_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA devices only, in float32, bfloat16 and float16, for contiguous gates."""
    kernels = SimpleNamespace()
    monkeypatch.setattr(recurrence, "has_lstm_kernels", lambda device, dtype: True)
    monkeypatch.setattr(recurrence, "import_module", lambda name: kernels)
    assert recurrence._select_lstm_steps(torch.zeros(1, 1, 4)) is lstm_steps
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for is_contiguous in (True, False):
            options = {"is_contiguous": partial(bool, is_contiguous), "dtype": dtype}
            gates: Any = SimpleNamespace(is_cuda=True, device=None, **options)
            has_kernels = is_contiguous and dtype is not torch.float64
            assert recurrence._select_lstm_steps(gates) is (kernels if has_kernels else lstm_steps)
