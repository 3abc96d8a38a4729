"""Export of models and parts of encoder-decoders to `torch.export`, ONNX and OpenVINO files, with a check of the
outputs."""

import io
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.architectures.encoder_decoder_heads import TransformerForConditionalGeneration
from hf_ctxmodels.compression.int8.modules import Int8Linear
from hf_ctxmodels.compression.low_bits.modules import PackedLinear
from hf_ctxmodels.core.errors import CtxError, require_packages
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.core.output_files import replacing_files
from hf_ctxmodels.heads import ForMultipleChoice, Seq2SeqHead

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Largest difference of an output from the model's, relative to its largest value."""

MAX_RELATIVE_DIFFERENCE_8BIT = 0.1
"""The same for ONNX and OpenVINO files of models with 8-bit inputs: the runtime may round an input halfway between two
codes differently, which changes outputs as much as the rounding itself."""

_SEQUENCE_LENGTHS = ((9, 6, 4), (3, 12, 7, 2, 8), (5,))  # words per text: of the example batch, and of the test batches
_DECODER_INPUTS = ("attention_mask", "encoder_hidden_states", "decoder_input_ids")
_WORDS = ["the", "film", "was", "a", "joy", "from", "start", "to", "end", "and", "nobody", "left"]

Batch = dict[str, Tensor]
Run = Callable[[Batch], Iterable[Tensor]]
"""Function from a batch to the outputs, in order."""
Format = Literal["onnx", "openvino", "torch"]
Part = Literal["model", "encoder", "decoder"]
"""The whole model, or the part of an encoder-decoder that generation runs once or in every step."""


def has_generating_decoder(model: PreTrainedModel) -> bool:
    """Whether the model generates a target sequence and its forward takes `decoder_input_ids`."""
    return bool(model.config.is_encoder_decoder) and isinstance(model, Seq2SeqHead)


def _example_decoder_input_ids(model: Any, input_ids: Tensor) -> Tensor:
    """(batch, length) token ids, or (batch, length, characters) ids -> (batch, length + 2) `decoder_input_ids` of an
    example target; the first character stands for a word."""
    input_ids = input_ids[..., 1] if input_ids.dim() == 3 else input_ids
    return model.prepare_decoder_input_ids_from_labels(torch.cat([input_ids, input_ids[:, :2]], 1))


def inputs_for_texts(model: PreTrainedModel, batch: Batch) -> Batch:
    """Inputs for one forward pass of a head over (batch, length) texts, with a target for an encoder-decoder and one
    choice for multiple choice."""
    if has_generating_decoder(model):
        return batch | {"decoder_input_ids": _example_decoder_input_ids(model, batch["input_ids"])}
    if isinstance(model, ForMultipleChoice):
        return {name: tensor[:, None] for name, tensor in batch.items()}
    return batch


class DecoderStep(nn.Module):
    """The part of an encoder-decoder that generation repeats: encoder states and a target prefix to logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, encoder_hidden_states: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor
    ) -> dict[str, Tensor]:
        """(batch, length, hidden), (batch, length) and (batch, steps) -> "logits" (batch, steps, vocabulary)."""
        encoder_outputs = BaseModelOutput(encoder_hidden_states)  # type: ignore[arg-type]
        outputs = self.model(
            encoder_outputs=encoder_outputs, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids
        )
        return {"logits": outputs.logits}


PARTS: dict[Part, Callable[[PreTrainedModel], nn.Module]] = {
    "model": lambda model: model,
    "encoder": lambda model: model.get_encoder(),
    "decoder": DecoderStep,
}
"""Name of a part -> function from the model to its module."""


def check_export_file(file: str | Path, format: Format) -> None:
    """Raise CtxError if the packages of a format are not installed, or the file has another suffix."""
    suffix = {"torch": ".pt2", "openvino": ".xml"}.get(format, Path(file).suffix)
    if Path(file).suffix != suffix:
        name = "torch.export" if format == "torch" else "OpenVINO"
        raise CtxError(
            f"A file of {name} ends in {suffix}.", location=f"--output {file}", hint=f"use the suffix {suffix}."
        )
    if format != "torch":
        packages = ("onnx", "onnxscript", "onnxruntime" if format == "onnx" else "openvino")
        require_packages(*packages, extra=format, location=f"export {format}")


def check_exportable_as(model: PreTrainedModel, file: str | Path, format: Format, part: Part = "model") -> None:
    """Raise CtxError as `check_export_file`, or if a model has no graph or no such part."""
    check_export_file(file, format)
    has_part = has_generating_decoder(model) or (part == "encoder" and isinstance(model, EncoderDecoder))
    if part != "model" and not has_part:
        raise CtxError(
            f"{type(model).__name__} has no generating decoder.",
            location=f"--part {part}",
            hint="remove --part to export the whole model.",
        )
    if part == "decoder" and not isinstance(model, TransformerForConditionalGeneration):
        raise CtxError(
            f"The decoder of {type(model).__name__} needs more inputs than the encoder's states.",
            location=f"--part {part}",
            hint="remove --part to export the whole model.",
        )
    scales = {module.activations for module in model.modules() if isinstance(module, Int8Linear)}
    if scales - {"token"}:
        raise CtxError(
            f"8-bit inputs with a scale per {', '.join(sorted(scales))} have no graph.",
            location="--model",
            hint="quantize with --activations token; the exported graph multiplies in float32.",
        )


def example_batches(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None, part: Part = "model"
) -> list[Batch]:
    """Batches of different shapes, for a part of an encoder-decoder with `decoder_input_ids`: the first for the export,
    the others to compare the outputs."""
    texts = [[" ".join(_WORDS[:num_words]) for num_words in lengths] for lengths in _SEQUENCE_LENGTHS]
    limit = None if model is None else max_input_length(model.config)
    truncation = {} if limit is None else {"truncation": True, "max_length": limit}
    batches = [dict(tokenizer(batch, padding=True, return_tensors="pt", **truncation)) for batch in texts]
    if model is None or not has_generating_decoder(model) or part == "encoder":
        return batches
    inputs = [batch | {"decoder_input_ids": _example_decoder_input_ids(model, batch["input_ids"])} for batch in batches]
    if part == "decoder":
        encoder: Any = model.eval().get_encoder()
        for batch, arguments in zip(batches, inputs, strict=True):
            with torch.no_grad():
                arguments["encoder_hidden_states"] = encoder(**batch).last_hidden_state
        inputs = [{name: arguments[name] for name in _DECODER_INPUTS} for arguments in inputs]
    return inputs


def export_model(
    model: PreTrainedModel, batches: list[Batch], file: str | Path, format: Format, part: Part = "model"
) -> float:
    """Export a model, and compare the outputs of the exported file with the model's on batches of other shapes.

    Args:
        model: The model; it is set to evaluation mode.
        batches: The example batch, with at least two rows and columns, and the batches to compare on.
        file: Output file; the weights of an ONNX file are written to `<file>.data`, the weights of an OpenVINO file
            (`.xml`) to a file with the suffix `.bin`.
        format, part: "torch" for `torch.export`, "onnx" or "openvino", and the part of an encoder-decoder to export.

    Returns:
        The largest difference of an output, relative to its largest value.

    Raises:
        CtxError: The model cannot be exported, the file cannot be written, or the outputs differ.
    """
    check_exportable_as(model, file, format, part)
    module = PARTS[part](model.eval()).eval()
    file = Path(file)
    with replacing_files(file.parent, main_file=file.name) as folder, torch.no_grad():
        try:
            run = WRITERS[format](module, batches[0], folder / file.name)
        except OSError:  # of the file, not of the model
            raise
        except Exception as error:  # the exporters raise errors of many types
            raise CtxError(
                f"{type(model).__name__} cannot be exported: {(str(error).strip().splitlines() or [''])[0]}",
                location=f"export {format}",
                hint="see docs/how-to/export.md for the models that can be exported.",
            ) from error
        difference = max_relative_difference(module, run, batches[1:])
        is_rounded = format != "torch" and rounds_inputs(model)
        if not difference <= (MAX_RELATIVE_DIFFERENCE_8BIT if is_rounded else MAX_RELATIVE_DIFFERENCE):
            raise CtxError(
                f"An output of the exported model differs by {difference:.1e} of its largest value; no file was saved.",
                location=f"export {format}",
                hint="try another format.",
            )
    return difference


def write_program(model: nn.Module, batch: Batch, file: Path) -> Run:
    """Export with `torch.export`, with dynamic batch size and length; returns a function that runs the file."""
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in batch}
    content = io.BytesIO()  # on a full disk, torch's writer would abort the process
    exported = torch.export.export(model, (), kwargs=batch, dynamic_shapes=shapes)
    for node in exported.graph.nodes:  # the file separates modules by commas, which names of adapter fusions contain
        stack = node.meta.get("nn_module_stack", {})
        node.meta["nn_module_stack"] = {
            key.replace(",", "+"): (path.replace(",", "+"), module_type) for key, (path, module_type) in stack.items()
        }
    torch.export.save(exported, content)
    file.write_bytes(content.getbuffer())
    program = torch.export.load(file).module()
    return lambda inputs: _tensors(program(**inputs)).values()


def write_onnx(model: nn.Module, batch: Batch, file: Path) -> Run:
    """Export to ONNX, with dynamic batch size, length and decoder steps; returns a function that runs the file."""
    import onnxruntime

    output_names = _export_onnx(model, batch, file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    input_names = {node.name for node in session.get_inputs()}

    def run(inputs: Batch) -> list[Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in inputs.items() if name in input_names}
        return [torch.from_numpy(output) for output in session.run(output_names, arrays)]

    return run


def write_openvino(model: nn.Module, batch: Batch, file: Path) -> Run:
    """Convert the ONNX graph to OpenVINO's format, in float32; returns a function that runs the file on a CPU."""
    import openvino

    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        output_names = _export_onnx(model, batch, Path(folder) / "model.onnx")
        openvino.save_model(openvino.convert_model(Path(folder) / "model.onnx"), file, compress_to_fp16=False)
    program = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    input_names = {name for port in program.inputs for name in port.get_names()}

    def run(inputs: Batch) -> list[Tensor]:
        outputs = program({name: tensor.numpy() for name, tensor in inputs.items() if name in input_names})
        return [torch.from_numpy(outputs[name]) for name in output_names]

    return run


WRITERS: dict[Format, Callable[[nn.Module, Batch, Path], Run]] = {
    "onnx": write_onnx,
    "openvino": write_openvino,
    "torch": write_program,
}


def _export_onnx(model: nn.Module, batch: Batch, file: Path) -> list[str]:
    """Write an ONNX file; returns the names of the outputs."""
    output_names = [*_tensors(model(**batch))]
    shapes = {name: {0: "batch", 1: "steps" if name.startswith("decoder_") else "length"} for name in batch}
    torch.onnx.export(
        model, kwargs=batch, f=file, dynamo=True, dynamic_shapes=shapes, output_names=output_names, verbose=False
    )
    return output_names


def max_relative_difference(model: nn.Module, run: Run, batches: Iterable[Batch]) -> float:
    """Largest difference between the outputs of an exported file and the model, relative to an output's largest value;
    infinite if one is not finite. A model that rounds its inputs is run with float32 products, as in its graph."""
    differences, uses_float_products = [0.0], rounds_inputs(model)
    for batch in batches:
        with _FloatProducts() if uses_float_products else nullcontext():
            expected = _tensors(model(**batch)).values()
        for expected_output, output in zip(expected, run(batch), strict=True):
            if expected_output.shape[:2] == batch["attention_mask"].shape:  # compare the tokens
                is_token = batch["attention_mask"] != 0
                expected_output, output = expected_output[is_token], output[is_token]
            scale = expected_output.abs().max().clamp_min(1e-30)
            difference = float((expected_output - output).abs().max() / scale)
            differences.append(difference if math.isfinite(difference) else math.inf)  # `max` would ignore NaN
    return max(differences)


def rounds_inputs(model: nn.Module) -> bool:
    """Whether linear layers of the model round their inputs to 8 bits."""
    return any(isinstance(module, Int8Linear | PackedLinear) for module in model.modules())


class _FloatProducts(TorchDispatchMode):
    """Context in which quantized layers multiply in float32, see `layers.cpu.linear.operators_are_intercepted`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _tensors(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
