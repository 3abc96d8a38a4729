r"""Export a model to a file that runs without this package, and compare it with the model.

    hf-ctxmodels export --model runs/sst2 --format onnx --output sst2.onnx
    hf-ctxmodels export --model runs/summaries --part decoder --output decoder.onnx

The file takes batches of any number of rows and columns; adapters beside the model are part of it. An encoder-decoder
takes `decoder_input_ids` too, and is exported whole, or in the two parts of which generation runs the first once and
repeats the second.
"""

from dataclasses import dataclass, field
from typing import Literal

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_file
from hf_ctxmodels.downstream.loading_with_adapters import load_saved_model
from hf_ctxmodels.inference.exporting import check_exportable_as, example_batches, export_model
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ExportArguments:
    """What to export, and where."""

    model: str = field(metadata={"help": "Directory or Hub id of the model, with its tokenizer."})
    output: str = field(metadata={"help": "File to write; the weights of an ONNX file are beside it, in <file>.data."})
    format: Literal["onnx", "torch"] = flag("onnx", "onnx, or torch for a program of torch.export (.pt2).")
    part: Literal["model", "encoder", "decoder"] = flag(
        "model",
        "Of an encoder-decoder: model, encoder, or decoder, which maps encoder_hidden_states, attention_mask and "
        "decoder_input_ids to logits.",
    )
    overwrite: bool = flag(False, "Replace --output if it exists.")


def main() -> None:
    """Open, export, compare, and print the difference."""
    (arguments,) = parse_arguments(ExportArguments, description=__doc__)
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
    model = load_saved_model(arguments.model)
    check_exportable_as(model, arguments.output, arguments.format, arguments.part)
    batches = example_batches(load_tokenizer(arguments.model), model, arguments.part)
    found = export_model(model, batches, arguments.output, arguments.format, arguments.part)
    from_model = "" if arguments.part == "model" else f"The {arguments.part} of "
    print(f"{from_model}{type(model).__name__} exported to {arguments.output}, inputs {', '.join(batches[0])}")
    print(f"largest difference on batches of other shapes: {found:.1e} of an output's largest value")
