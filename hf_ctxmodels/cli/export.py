"""Subcommands of `hf-ctxmodels export`."""

import shutil
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, PreTrainedModel

from hf_ctxmodels.compression.int8.quantizer import (
    CtxInt8Config,
    InputRanges,
    find_replaceable_modules,
    quantize_model,
    record_ranges,
)
from hf_ctxmodels.core.adapter_support import ADAPTERS_FOLDER
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_next_commands, print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, ParsedChoices, flag
from hf_ctxmodels.core.output_files import (
    MODEL_FILES,
    TOKENIZER_FILES,
    check_output_directory,
    check_output_file,
    wrap_write_errors,
)
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_saved_model
from hf_ctxmodels.inference.exporting import (
    Format,
    check_export_file,
    check_exportable_as,
    example_batches,
    export_model,
    inputs_for_texts,
)
from hf_ctxmodels.training.model_loading import load_tokenizer

MIN_TEXTS = 16


@dataclass
class ExportArguments:
    """Model and file."""

    model: str = flag(REQUIRED, "Directory or Hub id of the model, with its tokenizer.")
    output: str = flag(REQUIRED, "File to write; weights go to <file>.data (ONNX, if large) or FILE.bin (OpenVINO).")
    part: Literal["model", "encoder", "decoder"] = flag("model", "Part of an encoder-decoder.")
    overwrite: bool = flag(False, "Replace --output if it exists.")


def graph(file_format: Format) -> None:
    """Export a model to a file that runs without this package, and compare the outputs.

        hf-ctxmodels export onnx --model runs/sst2 --output sst2.onnx
        hf-ctxmodels export onnx --model runs/summaries --part decoder --output decoder.onnx
        hf-ctxmodels export openvino --model runs/sst2 --output sst2.xml
        hf-ctxmodels export torch --model runs/sst2 --output sst2.pt2

    The file takes batches of any size and length, and includes the adapters of the model. An encoder-decoder, which
    also takes `decoder_input_ids`, is exported as one graph or as two: generation runs the encoder once and the decoder
    in each step.
    """
    (arguments,) = parse_arguments(ExportArguments, description=getdoc(graph))
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
    check_export_file(arguments.output, file_format)
    model = load_saved_model(arguments.model)
    check_exportable_as(model, arguments.output, file_format, arguments.part)
    batches = example_batches(load_tokenizer(arguments.model), model, arguments.part)
    difference = export_model(model, batches, arguments.output, file_format, arguments.part)
    part = "" if arguments.part == "model" else f"The {arguments.part} of "
    print(f"{part}{type(model).__name__} exported to {arguments.output}, inputs {', '.join(batches[0])}")
    print(f"largest difference on batches of other shapes: {difference:.1e} of an output's largest value")


@dataclass(frozen=True)
class TokenScales:
    """A scale per token; an example does not depend on the others in the batch."""


@dataclass(frozen=True)
class TensorScales:
    """A scale per tensor."""


@dataclass(frozen=True)
class StaticScales:
    """Scales from calibration texts."""

    file: str = flag(REQUIRED, "Calibration texts, one per line.")
    max_length: int = flag(128, "Tokens of a text to read.")


SCALES: dict[str, type] = {"token": TokenScales, "tensor": TensorScales, "static": StaticScales}


@dataclass
class QuantizationArguments(ParsedChoices):
    """Model and quantization."""

    model: str = flag(REQUIRED, "Directory or Hub id of a float32 or half-precision model.")
    output_dir: str = flag(REQUIRED, "Directory for the quantized model and its tokenizer.")
    activations: TokenScales | TensorScales | StaticScales = flag("token", "Scales of the activations.", SCALES)
    embeddings: Literal["int8", "float32"] = flag("int8", "Type of the embedding matrices.")
    skip: list[str] = flag((), "Modules to keep in float32: paths or last components of paths, such as classifier.")
    overwrite: bool = flag(False, "Replace files of the same names in --output_dir.")


def int8() -> None:
    """Quantize the weights of a model to 8 bits, for inference on a CPU.

        hf-ctxmodels export int8 --model runs/sst2 --output_dir runs/sst2-int8

    The file is about a quarter of the size and inference about twice as fast. The Auto classes load the result, with
    its adapters. Activations are also quantized to 8 bits, with a scale per token or per tensor, or with static scales
    from calibration texts.
    """
    (arguments,) = parse_arguments(QuantizationArguments, description=getdoc(int8))
    names = (*MODEL_FILES, *TOKENIZER_FILES, ADAPTERS_FOLDER)
    check_output_directory(arguments.output_dir, names, flag="--output_dir", overwrite=arguments.overwrite)
    model = load_saved_model(arguments.model)
    before = stored_bytes(model)
    activations: Any = next(name for name, scales in SCALES.items() if isinstance(arguments.activations, scales))
    config = CtxInt8Config(activations=activations, embeddings=arguments.embeddings, skip=arguments.skip)
    quantize_model(model, config, _calibrate(model, arguments))
    with wrap_write_errors(arguments.output_dir):
        shutil.rmtree(Path(arguments.output_dir) / ADAPTERS_FOLDER, ignore_errors=True)  # of a previous model
        model.save_pretrained(arguments.output_dir)
        try:
            AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.output_dir)
        except (OSError, ValueError) as error:
            print_status(f"{arguments.model} has no tokenizer: {error}")
    after = stored_bytes(model)
    print(f"{len(config.modules or ())} modules have weights of 8 bits")
    print(f"weights: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now ({before / after:.2f} times smaller)")
    print(f"saved in {arguments.output_dir}")
    print(format_next_commands(("push", "--model", arguments.output_dir, "--repo_id", "ORGANIZATION/NAME")))


def _calibrate(model: PreTrainedModel, arguments: QuantizationArguments) -> InputRanges | None:
    """The ranges of the activations on the calibration texts; None without static scales."""
    scales = arguments.activations
    if not isinstance(scales, StaticScales):
        return None
    location = f"--activations static:file={scales.file}"
    texts = [line.strip() for line in read_lines(scales.file) if line.strip()]
    if len(texts) < MIN_TEXTS:
        raise CtxError(
            f"Expected at least {MIN_TEXTS} calibration texts, got {len(texts)}.",
            location=location,
            hint="use a few hundred texts from the domain of the model.",
        )
    tokenizer = load_tokenizer(arguments.model)
    names = find_replaceable_modules(model, embeddings=False, skipped=arguments.skip)
    with torch.inference_mode(), record_ranges(model, names) as ranges:
        for start in progress_bar(range(0, len(texts), 8), "calibration", unit="batches"):
            options = {"padding": True, "truncation": True, "max_length": scales.max_length}
            batch = tokenizer(texts[start : start + 8], return_tensors="pt", **options)
            model(**inputs_for_texts(model, dict(batch)))
    return ranges


def stored_bytes(model: PreTrainedModel) -> int:
    """Size of the saved weights in bytes; tied weights are stored once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in {*model.parameters(), *model.buffers()})
