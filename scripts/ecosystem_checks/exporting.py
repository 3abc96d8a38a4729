"""Compilers and exporters."""

from typing import Any

import torch
from torch import Tensor

from .workplace import Workplace, assert_close, check


@check("torch.compile", "torch")
def compiled(place: Workplace) -> str:
    """One graph (`fullgraph=True`), with equal logits."""
    model = place.classifier()
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(**place.batch()).logits, model(**place.batch()).logits)
    return "a compiled graph computes padding too"


def _dynamic(batch: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    return {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in batch}


@check("torch.export", "torch")
def exported(place: Workplace) -> str:
    """Of a dynamic batch and length; equal logits on other shapes."""
    model, batch, other = place.classifier(), place.batch(), place.batch(["a boat", "the old dog saw the rain"])
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=batch, dynamic_shapes=_dynamic(batch))
        run: Any = program.module()
        assert_close(run(**other).logits, model(**other).logits)
    return ""


@check("ONNX", "onnx", "onnxscript", "onnxruntime")
def onnx(place: Workplace) -> str:
    """Of a dynamic batch and length; equal logits by onnxruntime on other shapes."""
    import onnxruntime

    model, batch, other = place.classifier(), place.batch(), place.batch(["a boat", "the old dog saw the rain"])
    file = place.folder / "model.onnx"
    shapes = {name: {0: "batch", 1: "length"} for name in batch}
    torch.onnx.export(
        model, kwargs=batch, f=file, dynamo=True, dynamic_shapes=shapes, output_names=["logits"], verbose=False
    )
    session = onnxruntime.InferenceSession(file)
    given = {each.name: other[each.name].numpy() for each in session.get_inputs()}
    with torch.no_grad():
        assert_close(torch.from_numpy(session.run(["logits"], given)[0]), model(**other).logits)
    return ""
