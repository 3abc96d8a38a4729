r"""Export a model to a file that runs without this package, and compare the outputs.

    hf-ctxmodels export onnx --model runs/sst2 --output sst2.onnx
    hf-ctxmodels export onnx --model runs/summaries --part decoder --output decoder.onnx
    hf-ctxmodels export torch --model runs/sst2 --output sst2.pt2

The file takes batches of any size and length, and includes the adapters of the model. An encoder-decoder, which also
takes `decoder_input_ids`, is exported as one graph or as two: generation runs the encoder once and the decoder in each
step.
"""

from dataclasses import dataclass
from typing import Literal

from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import check_output_file
from hf_ctxmodels.downstream.loading_with_adapters import load_saved_model
from hf_ctxmodels.inference.exporting import check_exportable_as, example_batches, export_model
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ExportArguments:
    """Model and file."""

    model: str = flag(REQUIRED, "Directory or Hub id of the model, with its tokenizer.")
    output: str = flag(REQUIRED, "File to write; large weights of an ONNX file go to <file>.data.")
    part: Literal["model", "encoder", "decoder"] = flag("model", "Part of an encoder-decoder.")
    overwrite: bool = flag(False, "Replace --output if it exists.")


def main(file_format: Literal["onnx", "torch"]) -> None:
    """Export a model, and print the largest difference of the outputs."""
    (arguments,) = parse_arguments(ExportArguments, description=__doc__)
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
    model = load_saved_model(arguments.model)
    check_exportable_as(model, arguments.output, file_format, arguments.part)
    batches = example_batches(load_tokenizer(arguments.model), model, arguments.part)
    difference = export_model(model, batches, arguments.output, file_format, arguments.part)
    part = "" if arguments.part == "model" else f"The {arguments.part} of "
    print(f"{part}{type(model).__name__} exported to {arguments.output}, inputs {', '.join(batches[0])}")
    print(f"largest difference on batches of other shapes: {difference:.1e} of an output's largest value")
