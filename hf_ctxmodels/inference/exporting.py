"""Export of models and of parts of encoder-decoders as a program of torch or an ONNX file, and the check of what was
written."""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from hf_ctxmodels.architectures.encoder_decoder_heads import TransformerForConditionalGeneration
from hf_ctxmodels.compression.int8.modules import Int8Linear
from hf_ctxmodels.compression.low_bits.modules import PackedLinear
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.inference.model_inputs import Batch, decoder_input_of, writes_target

LARGEST_DIFFERENCE = 1e-4
"""Of an output, as a share of its largest value."""

LARGEST_OF_CODES = 0.1
"""The same for ONNX of models that round their inputs to 8 bits: an input between two codes, of which onnxruntime has
another last digit, gets the other one, and that moves outputs as far as the 8 bits themselves do."""

_LENGTHS = ((9, 6, 4), (3, 12, 7, 2, 8), (5,))  # words of the texts: of the example, and of what is then run
_WORDS = ["the", "film", "was", "a", "joy", "from", "start", "to", "end", "and", "nobody", "left"]

Run = Callable[[Batch], Iterable[Tensor]]
"""A batch -> outputs in their order."""
Format = Literal["onnx", "torch"]
Part = Literal["model", "encoder", "decoder"]
"""What is exported: the whole model, or what generation runs once, or what it repeats."""


class DecoderStep(nn.Module):
    """Logits of a target for what the encoder gave: the part of an encoder-decoder that generation repeats."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, encoder_hidden_states: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor
    ) -> dict[str, Tensor]:
        """(batch, length, hidden), (batch, length) and (batch, steps) -> "logits" (batch, steps, vocabulary)."""
        encoded = BaseModelOutput(encoder_hidden_states)  # type: ignore[arg-type]
        outputs = self.model(
            encoder_outputs=encoded, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids
        )
        return {"logits": outputs.logits}


PARTS: dict[Part, Callable[[PreTrainedModel], nn.Module]] = {
    "model": lambda model: model,
    "encoder": lambda model: model.get_encoder(),
    "decoder": DecoderStep,
}
"""The module of a part."""


def check_exports(model: PreTrainedModel, file: str | Path, form: Format, part: Part = "model") -> None:
    """Raise CtxError for a model that has no graph or no such part, a format whose packages are missing, or a wrong
    name."""
    if part != "model" and not writes_target(model):
        raise CtxError(
            f"{type(model).__name__} has no decoder that writes.",
            location=f"--part {part}",
            hint="leave --part out: the model is exported whole.",
        )
    if part == "decoder" and not isinstance(model, TransformerForConditionalGeneration):
        raise CtxError(
            f"The decoder of {type(model).__name__} reads more of the source than the encoder's states.",
            location=f"--part {part}",
            hint="leave --part out: the model is exported whole.",
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


def example_batches(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None, part: Part = "model"
) -> list[Batch]:
    """What a model is exported with, and two batches of other shapes to compare on.

    Args:
        tokenizer: Its own.
        model: For an encoder-decoder that writes, whose batches have `decoder_input_ids` of lengths of their own.
        part: What is exported.
    """
    texts = [[" ".join(_WORDS[index % len(_WORDS)] for index in range(each)) for each in row] for row in _LENGTHS]
    longest = None if model is None else max_input_length(model.config)
    cut = {} if longest is None else {"truncation": True, "max_length": longest}
    batches = [dict(tokenizer(each, padding=True, return_tensors="pt", **cut)) for each in texts]
    if model is None or not writes_target(model) or part == "encoder":
        return batches
    return [batch | _decoder_input(model, batch, part) for batch in batches]


@torch.no_grad()
def _decoder_input(model: Any, batch: Batch, part: Part) -> Batch:
    """Targets of `decoder_input_of`; for the decoder alone also the encoder's states, without ids."""
    written = decoder_input_of(model, batch["input_ids"])
    if part == "model":
        return {"decoder_input_ids": written}
    states = model.eval().get_encoder()(**batch).last_hidden_state
    batch.pop("input_ids")
    return {"encoder_hidden_states": states, "decoder_input_ids": written}


def export_model(
    model: PreTrainedModel, batches: list[Batch], file: str | Path, form: Format, part: Part = "model"
) -> float:
    """Write a model, and compare what was written with the model on batches of other shapes.

    Args:
        model: Evaluated.
        batches: That of the example, with at least two rows and columns, and those to compare on.
        file: To be written, with the weights of an ONNX file in `<file>.data` beside it.
        form: `torch` for `torch.export`, or `onnx`.
        part: What of an encoder-decoder is exported.

    Returns:
        The largest difference of an output, as a share of its largest value.

    Raises:
        CtxError: The model cannot be exported, the file cannot be written, or what it computes differs.
    """
    check_exports(model, file, form, part)
    exported = PARTS[part](model.eval()).eval()
    file = Path(file)
    with wrap_write_errors(file), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        written = Path(folder) / file.name
        try:
            run = (write_onnx if form == "onnx" else write_program)(exported, batches[0], written)
        except Exception as error:  # whatever the exporters meet in a model
            raise CtxError(
                f"{type(model).__name__} cannot be exported: {(str(error).strip().splitlines() or [''])[0]}",
                location=f"--format {form}",
                hint="docs/how-to/export.md lists what can.",
            ) from error
        found = difference_on(exported, run, batches[1:])
        if not found <= (LARGEST_OF_CODES if form == "onnx" and rounds_inputs(model) else LARGEST_DIFFERENCE):
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
    """The largest difference from the model of what was exported, as a share of an output's largest value.

    A model that rounds its inputs multiplies them as its graph does, in single precision.
    """
    found, rounds = 0.0, rounds_inputs(model)
    for each in batches:
        with _AsInGraphs() if rounds else nullcontext():
            expected = _tensors(model(**each)).values()
        found = max(found, _difference(expected, run(each), each["attention_mask"]))
    return found


def rounds_inputs(model: nn.Module) -> bool:
    """Whether maps of a model round their inputs to codes of 8 bits."""
    return any(isinstance(module, Int8Linear | PackedLinear) for module in model.modules())


class _AsInGraphs(TorchDispatchMode):
    """Within, operators are those of a graph, see `layers.cpu.onednn.operators_are_intercepted`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _tensors(output: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, Tensor)}


def _difference(expected: Iterable[Tensor], found: Iterable[Tensor], mask: Tensor) -> float:
    """Of all outputs; of what there is for each token, only tokens count. Infinite where either gives no number."""
    shares = [0.0]
    for ours, theirs in zip(expected, found, strict=True):
        if ours.shape[:2] == mask.shape:
            ours, theirs = ours[mask != 0], theirs[mask != 0]
        share = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-30))
        shares.append(share if math.isfinite(share) else math.inf)  # `max` passes over what is no number
    return max(shares)
