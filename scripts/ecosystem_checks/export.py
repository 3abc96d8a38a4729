"""Checks of compilers and exporters."""

from typing import Any

import torch
from torch import Tensor

from .context import CheckContext, assert_close, check


@check("torch.compile", "torch")
def compiled(context: CheckContext) -> str:
    """One graph (`fullgraph=True`) with equal logits."""
    model = context.classifier()
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(**context.batch()).logits, model(**context.batch()).logits)
    return ""


def _dynamic_shapes(batch: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    return {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in batch}


@check("torch.export", "torch")
def exported(context: CheckContext) -> str:
    """Dynamic batch size and length; equal logits for other shapes."""
    model, batch, test_batch = (
        context.classifier(),
        context.batch(),
        context.batch(["a boat", "the old dog saw the rain"]),
    )
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=batch, dynamic_shapes=_dynamic_shapes(batch))
        run: Any = program.module()
        assert_close(run(**test_batch).logits, model(**test_batch).logits)
    return ""


@check("ONNX", "onnx", "onnxscript", "onnxruntime")
def onnx(context: CheckContext) -> str:
    """Dynamic batch size and length; equal logits of onnxruntime for other shapes."""
    import onnxruntime

    model, batch, test_batch = (
        context.classifier(),
        context.batch(),
        context.batch(["a boat", "the old dog saw the rain"]),
    )
    file = context.folder / "model.onnx"
    shapes = {name: {0: "batch", 1: "length"} for name in batch}
    torch.onnx.export(
        model, kwargs=batch, f=file, dynamo=True, dynamic_shapes=shapes, output_names=["logits"], verbose=False
    )
    session = onnxruntime.InferenceSession(file)
    inputs = {node.name: test_batch[node.name].numpy() for node in session.get_inputs()}
    with torch.no_grad():
        assert_close(torch.from_numpy(session.run(["logits"], inputs)[0]), model(**test_batch).logits)
    return ""
