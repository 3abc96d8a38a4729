r"""Write a model with weights of 8 bits, for inference on a CPU: a quarter of the file, and about twice the speed.

    hf-ctxmodels quantize --model runs/sst2 --output_dir runs/sst2-int8

The Auto classes open the result as they open the model; adapters beside the model are applied, and written beside the
result. Inputs of the maps get 8 bits too: with a scale for each token, for each call's tensor, or static ones of the
texts of --calibration_file.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoTokenizer, PreTrainedModel

from hf_ctxmodels.compression.int8.module_replacement import InputRanges, RangeRecorder, find_replaceable_modules
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.core.adapter_files import ADAPTERS_FOLDER
from hf_ctxmodels.core.console import format_next_commands, print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag, non_default_fields, reject_flag_conflicts
from hf_ctxmodels.core.output_files import MODEL_FILES, TOKENIZER_FILES, check_output_directory, wrap_write_errors
from hf_ctxmodels.downstream.loading_with_adapters import load_saved_model
from hf_ctxmodels.inference.model_inputs import inputs_for_texts
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments

LEAST_TEXTS = 16


@dataclass
class QuantizeArguments:
    """What to quantize, and how."""

    model: str = field(metadata={"help": "Directory or Hub id of a model in single or half precision."})
    output_dir: str = field(metadata={"help": "Directory to write the quantized model and its tokenizer to."})
    activations: Literal["token", "tensor", "static"] = flag(
        "token",
        "What has a scale of the inputs of a map: each token (a row depends on no other), the tensor, or all inputs "
        "(`static`, from --calibration_file).",
    )
    embeddings: Literal["int8", "float32"] = flag("int8", "Type of the tables of embeddings.")
    skip: list[str] = flag((), "Modules that stay as they are: paths, or last parts of paths, such as classifier.")
    calibration_file: str | None = flag(None, "Texts, one a line, whose inputs give the static scales.")
    max_length: int = flag(128, "Tokens of a text of --calibration_file that are read.")
    overwrite: bool = flag(False, "Replace files of the same names in --output_dir.")


def open_model(source: str) -> PreTrainedModel:
    """The model as it was saved, with its head and adapters.

    Raises:
        CtxError: It cannot be opened, is damaged, has several tasks, or is quantized already.
    """
    config = load_config(source)
    if getattr(config, "quantization_config", None) is not None:
        raise CtxError(
            "The model is quantized already.",
            location=source,
            hint="give the model in single precision that it was made of.",
        )
    return load_saved_model(source, config)


def calibrate(model: PreTrainedModel, arguments: QuantizeArguments) -> InputRanges | None:
    """The ranges of the inputs of all maps on the texts of --calibration_file; None without static scales.

    Raises:
        CtxError: The file is missing, too short, or given without need.
    """
    static, calibrated = arguments.activations == "static", arguments.calibration_file is not None
    rules = (
        (
            static != calibrated,
            "--activations, --calibration_file",
            "Static scales come from a calibration, and no other scale does.",
        ),
        (
            "max_length" in non_default_fields(arguments) and not calibrated,
            "--max_length",
            "It cuts the texts of --calibration_file.",
        ),
    )
    reject_flag_conflicts(rules, "give --activations static and --calibration_file, or none of these.")
    if arguments.calibration_file is None:
        return None
    texts = read_texts(arguments.calibration_file)
    tokenizer = load_tokenizer(arguments.model)
    names = find_replaceable_modules(model, embeddings=False, skipped=arguments.skip)
    with torch.inference_mode(), RangeRecorder(model, names) as recorder:
        for first in progress_bar(range(0, len(texts), 8), "calibration", unit="batches"):
            options = {"padding": True, "truncation": True, "max_length": arguments.max_length}
            batch = tokenizer(texts[first : first + 8], return_tensors="pt", **options)
            model(**inputs_for_texts(model, dict(batch)))
    return recorder.ranges


def read_texts(file: str) -> list[str]:
    """The lines with text.

    Raises:
        CtxError: The file cannot be read, or has fewer than `LEAST_TEXTS`.
    """
    try:
        texts = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise CtxError(f"The texts cannot be read: {error}", location=f"--calibration_file {file}") from error
    if len(texts) < LEAST_TEXTS:
        raise CtxError(
            f"The file has {len(texts)} texts, too few for ranges that hold for others.",
            location=f"--calibration_file {file}",
            hint=f"give at least {LEAST_TEXTS}, better some hundred, of those that the model will read.",
        )
    return texts


def stored_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights in a file; tied ones are stored once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in {*model.parameters(), *model.buffers()})


def main() -> None:
    """Open, calibrate, quantize, save, and print the sizes."""
    (arguments,) = parse_arguments(QuantizeArguments, description=__doc__)
    names = (*MODEL_FILES, *TOKENIZER_FILES, ADAPTERS_FOLDER)
    check_output_directory(arguments.output_dir, names, flag="--output_dir", overwrite=arguments.overwrite)
    model = open_model(arguments.model)
    before = stored_bytes(model)
    config = CtxInt8Config(activations=arguments.activations, embeddings=arguments.embeddings, skip=arguments.skip)
    quantize_model(model, config, calibrate(model, arguments))
    with wrap_write_errors(arguments.output_dir):
        shutil.rmtree(Path(arguments.output_dir) / ADAPTERS_FOLDER, ignore_errors=True)  # those of another model
        model.save_pretrained(arguments.output_dir)
        try:
            AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.output_dir)
        except (OSError, ValueError) as error:
            print_status(f"{arguments.model} has no tokenizer: {error}")
    after = stored_bytes(model)
    print(f"{len(config.modules or ())} modules have weights of 8 bits")
    print(f"weights: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now ({before / after:.2f} times smaller)")
    print(f"saved in {arguments.output_dir}")
    print(format_next_commands(("push", "--model", arguments.output_dir, "--repo_id", "ORGANISATION/NAME")))
