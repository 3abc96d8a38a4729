"""Checks of compilers and exporters."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel

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


@check("CTranslate2", "ctranslate2")
def ctranslate2(context: CheckContext) -> str:
    """An encoder exported by `export_reference`, converted: equal hidden states."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    model = AutoModel.from_pretrained(context.save(AutoModel)).eval()
    reference, converted = str(context.folder / "reference"), str(context.folder / "converted")
    model.export_reference(reference)
    context.tokenizer.export_reference(reference)
    TransformersConverter(reference).convert(converted)
    batch = context.batch()
    mask = batch["attention_mask"].bool()
    token_ids = [row[is_token].tolist() for row, is_token in zip(batch["input_ids"], mask)]
    states = ctranslate2.Encoder(converted).forward_batch(token_ids).last_hidden_state
    with torch.no_grad():
        assert_close(torch.tensor(np.array(states))[mask], model(**batch).last_hidden_state[mask])
    return ""
