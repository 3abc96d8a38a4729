"""Export of encoders and heads as a program of torch or an ONNX file, and the check of what was written."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.outputs import writing
from hf_ctxmodels.layers.int8.modules import Int8Linear

LARGEST_DIFFERENCE = 1e-4
"""Of an output, as a share of its largest value."""

_LENGTHS = ((9, 6, 4), (3, 12, 7, 2, 8), (5,))  # words of the texts: of the example, and of what is then run
_WORDS = ["the", "film", "was", "a", "joy", "from", "start", "to", "end", "and", "nobody", "left"]

Batch = dict[str, Tensor]
Run = Callable[[Batch], Iterable[Tensor]]
"""A batch -> outputs in their order."""
Format = Literal["onnx", "torch"]


def check_exports(model: PreTrainedModel, file: str | Path, form: Format) -> None:
    """Raise CtxError for a model that has no graph, a format whose packages are missing, or a wrong name."""
    if model.config.is_encoder_decoder:
        raise CtxError(
            f"{type(model).__name__} is an encoder-decoder, which is exported in parts.",
            location="--model",
            hint="export an encoder, or a head on one.",
        )
    scales = {module.activations for module in model.modules() if isinstance(module, Int8Linear)}
    if scales - {"token"}:
        raise CtxError(
            f"Inputs of 8 bits with a scale by {', '.join(sorted(scales))} are not in a graph.",
            location="--model",
            hint="quantize with --activations token, which exports; the graph multiplies in single precision.",
        )
    if form == "torch" and Path(file).suffix != ".pt2":
        raise CtxError("A program of torch.export is a file ending in .pt2.", location=f"--output {file}")
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if form == "onnx" and missing:
        raise CtxError(
            f"ONNX needs {', '.join(missing)}.", location="--format onnx", hint='pip install "hf_ctxmodels[onnx]"'
        )


def example_batches(tokenizer: PreTrainedTokenizerBase) -> list[Batch]:
    """What a model is exported with, and two batches of other shapes to compare on."""
    texts = [[" ".join(_WORDS[index % len(_WORDS)] for index in range(each)) for each in row] for row in _LENGTHS]
    return [dict(tokenizer(each, padding=True, return_tensors="pt")) for each in texts]


def export_model(model: PreTrainedModel, batches: list[Batch], file: str | Path, form: Format) -> float:
    """Write a model, and compare what was written with the model on batches of other shapes.

    Args:
        model: An encoder or a head on one; evaluated.
        batches: That of the example, with at least two rows and columns, and those to compare on.
        file: To be written, with the weights of an ONNX file in `<file>.data` beside it.
        form: `torch` for `torch.export`, or `onnx`.

    Returns:
        The largest difference of an output, as a share of its largest value.

    Raises:
        CtxError: The model cannot be exported, the file cannot be written, or what it computes differs.
    """
    check_exports(model, file, form)
    model.eval()
    file = Path(file)
    with writing(file), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        written = Path(folder) / file.name
        try:
            run = (write_onnx if form == "onnx" else write_program)(model, batches[0], written)
        except Exception as error:  # whatever the exporters meet in a model
            raise CtxError(
                f"{type(model).__name__} cannot be exported: {(str(error).strip().splitlines() or [''])[0]}",
                location=f"--format {form}",
                hint="docs/how-to/export.md lists what can.",
            ) from error
        found = difference_on(model, run, batches[1:])
        if not found <= LARGEST_DIFFERENCE:
            raise CtxError(
                f"What was exported differs from the model by {found:.1e} of an output's largest value.",
                location=f"--format {form}",
                hint="nothing was written; try the other format.",
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        for each in Path(folder).iterdir():
            shutil.move(each, file.parent / each.name)
    return found


def write_program(model: nn.Module, batch: Batch, file: Path) -> Run:
    """Export by `torch.export`, with a dynamic batch and length; gives what runs the written file."""
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in batch}
    torch.export.save(torch.export.export(model, (), kwargs=batch, dynamic_shapes=shapes), file)
    opened = torch.export.load(file).module()
    return lambda other: _tensors(opened(**other)).values()


def write_onnx(model: nn.Module, batch: Batch, file: Path) -> Run:
    """Export to ONNX, with a dynamic batch, length and number of a decoder's steps; gives what runs the file."""
    import onnxruntime

    names = [*_tensors(model(**batch))]
    shapes = {name: {0: "batch", 1: "steps" if name.startswith("decoder_") else "length"} for name in batch}
    torch.onnx.export(
        model, kwargs=batch, f=file, dynamo=True, dynamic_shapes=shapes, output_names=names, verbose=False
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    taken = {each.name for each in session.get_inputs()}

    def run(other: Batch) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in other.items() if name in taken}
        return [torch.from_numpy(each) for each in session.run(names, given)]

    return run


def difference_on(model: nn.Module, run: Run, batches: Iterable[Batch]) -> float:
    """The largest difference from the model of what was exported, as a share of an output's largest value."""
    return max(_difference(_tensors(model(**each)).values(), run(each), each["attention_mask"]) for each in batches)


def _tensors(output: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, Tensor)}


def _difference(expected: Iterable[Tensor], found: Iterable[Tensor], mask: Tensor) -> float:
    """Of all outputs; of what there is for each token, only tokens count."""
    shares = [0.0]
    for ours, theirs in zip(expected, found, strict=True):
        if ours.shape[:2] == mask.shape:
            ours, theirs = ours[mask != 0], theirs[mask != 0]
        shares.append(float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-30)))
    return max(shares)
