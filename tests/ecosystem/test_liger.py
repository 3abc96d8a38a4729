"""The cross-entropy over the vocabulary equals liger-kernel's, whose kernels Triton interprets on the CPU."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy

torch.manual_seed(0)
inputs = [torch.randn(*size, requires_grad=True) for size in ((37, 16), (61, 16), (61,))]
states, weight, bias = inputs
targets = torch.randint(61, (37,))
losses = [
    chunked_cross_entropy(states, weight, bias, targets),
    liger_fused_linear_cross_entropy(states, weight, targets, bias=bias, reduction="sum"),
]
torch.testing.assert_close(*losses)
for actual, expected in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
"""


def test_loss_and_gradients_equal_liger_kernel() -> None:
    pytest.importorskip("triton", reason="pip install liger-kernel triton")
    pytest.importorskip("liger_kernel", reason="pip install liger-kernel triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True)
