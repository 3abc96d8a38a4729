"""Subcommands of `hf-ctxmodels export`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from hf_ctxmodels.compression.int8.quantizer import (
    CtxInt8Config,
    InputRanges,
    find_replaceable_modules,
    quantize_model,
    record_ranges,
)
from hf_ctxmodels.compression.low_rank.compression import (
    LayerResult,
    check_factorizable,
    factorize_model,
    find_factorizable_modules,
    record_second_moments,
)
from hf_ctxmodels.core.adapter_support import ADAPTERS_FOLDER, has_saved_adapters
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_next_commands, print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, ParsedChoices, check_range, flag
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.output_files import (
    MODEL_FILES,
    TOKENIZER_FILES,
    WEIGHT_SHARDS,
    check_output_directory,
    check_output_file,
    replacing_files,
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
from hf_ctxmodels.inference.prediction import finetuning_summary
from hf_ctxmodels.tokenizers.base import CtxTokenizer, limit_tokenizer_length
from hf_ctxmodels.training.checkpoint_files import MANIFEST_FILE
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.summary import SUMMARY_FILE

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
    prefix = "" if arguments.part == "model" else f"The {arguments.part} of "
    print(f"{prefix}{type(model).__name__} exported to {arguments.output}, inputs {', '.join(batches[0])}")
    print(f"largest difference on batches of other shapes: {difference:.1e} of an output's largest value")


@dataclass
class ReferenceExportArguments:
    """Model and output."""

    model: str = flag(REQUIRED, "Directory or Hub id of the model.")
    output_dir: str = flag(REQUIRED, "Directory for the exported model and its tokenizer.")
    overwrite: bool = flag(False, "Replace files of the same names in --output_dir.")


def reference() -> None:
    """Save a model in the layout of its reference class, such as BertModel, for transformers without this package.

        hf-ctxmodels export transformers --model runs/sst2 --output_dir runs/sst2-reference

    The weights are bit-identical.
    """
    (arguments,) = parse_arguments(ReferenceExportArguments, description=getdoc(reference))
    _check_directories(arguments.model, arguments.output_dir, arguments.overwrite)
    if has_saved_adapters(arguments.model):
        raise CtxError(
            "The model has adapters, which transformers does not load.",
            location=arguments.model,
            hint="fine-tune without --adapter, or use the model with this package.",
        )
    model: Any = load_saved_model(arguments.model)
    _save_with_tokenizer(model, model.export_reference, arguments.model, arguments.output_dir, for_transformers=True)
    (name,) = read_json(Path(arguments.output_dir) / "config.json")["architectures"]
    print(f"{type(model).__name__} exported to {arguments.output_dir} as {name}")
    if (Path(arguments.model) / "modules.json").is_file():
        print_status("The files of sentence-transformers are not exported: only the model and its tokenizer are")


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
    _check_directories(arguments.model, arguments.output_dir, arguments.overwrite)
    model = load_saved_model(arguments.model)
    before = model.get_memory_footprint()
    activations: Any = next(name for name, scales in SCALES.items() if isinstance(arguments.activations, scales))
    config = CtxInt8Config(activations=activations, embeddings=arguments.embeddings, skip=arguments.skip)
    quantize_model(model, config, _calibrate(model, arguments))
    save_model = partial(_save_compressed, model, arguments.model)
    _save_with_tokenizer(model, save_model, arguments.model, arguments.output_dir)
    after = model.get_memory_footprint()
    print(f"{len(config.modules or ())} modules have weights of 8 bits")
    print(f"weights: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now ({before / after:.2f} times smaller)")
    print(f"saved in {arguments.output_dir}")
    print(format_next_commands(("push", "--model", arguments.output_dir, "--repo_id", "ORGANIZATION/NAME")))


def _calibrate(model: PreTrainedModel, arguments: QuantizationArguments) -> InputRanges | None:
    """The ranges of the activations on the calibration texts; None without static scales."""
    scales = arguments.activations
    if not isinstance(scales, StaticScales):
        return None
    names = find_replaceable_modules(model, embeddings=False, skipped=arguments.skip)
    with record_ranges(model, names) as ranges:
        _run_texts(model, arguments.model, scales.file, scales.max_length, f"--activations static:file={scales.file}")
    return ranges


@torch.inference_mode()
def _run_texts(model: PreTrainedModel, source: str, file: str, max_length: int, location: str) -> None:
    """Run a model on the lines of a file, with the tokenizer of `source`; raises CtxError for too few lines."""
    texts = [line.strip() for line in read_lines(file) if line.strip()]
    if len(texts) < MIN_TEXTS:
        raise CtxError(
            f"Expected at least {MIN_TEXTS} calibration texts, got {len(texts)}.",
            location=location,
            hint="use a few hundred texts from the domain of the model.",
        )
    tokenizer = load_tokenizer(source)
    for start in progress_bar(range(0, len(texts), 8), "calibration", unit="batches"):
        options = {"padding": True, "truncation": True, "max_length": max_length}
        batch = tokenizer(texts[start : start + 8], return_tensors="pt", **options)
        model(**inputs_for_texts(model, dict(batch)))


@dataclass(frozen=True)
class PlainWeighting:
    """The error of the weights."""


@dataclass(frozen=True)
class ActivationWeighting:
    """The error of the outputs on texts."""

    file: str = flag(REQUIRED, "Texts from the domain of the model, one per line; a few thousand or more.")
    max_length: int = flag(128, "Tokens of a text to read.")


WEIGHTINGS: dict[str, type] = {"none": PlainWeighting, "activations": ActivationWeighting}


@dataclass
class LowRankArguments(ParsedChoices):
    """Model and factorization."""

    model: str = flag(REQUIRED, "Directory or Hub id of a float32 or half-precision model.")
    output_dir: str = flag(REQUIRED, "Directory for the compressed model and its tokenizer.")
    rank: int | None = flag(None, "Rank of the factors of each layer.", conflicts=("energy",))
    energy: float | None = flag(
        None, "Share of the squared singular values of a layer that its factors keep, such as 0.9.", conflicts=("rank",)
    )
    layers: list[str] = flag(
        (),
        "Modules to factorize, with the linear layers and embeddings in them: paths or last components of paths, such "
        "as feed_forward; by default all linear layers and the word embeddings.",
    )
    skip: list[str] = flag((), "Modules to leave as they are: paths or last components of paths, such as layers.0.")
    weighting: PlainWeighting | ActivationWeighting = flag(
        "none", "Whether the factors minimize the error of the weights or of the outputs on texts.", WEIGHTINGS
    )
    overwrite: bool = flag(False, "Replace files of the same names in --output_dir.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rank is None) == (self.energy is None):
            raise CtxError(
                "Expected a rank or an energy.", location="--rank, --energy", hint="give exactly one of the flags."
            )
        check_range(self, "rank", at_least=1)
        check_range(self, "energy", above=0, at_most=1)


def low_rank() -> None:
    r"""Replace the weights of linear layers and of word embeddings by products of two smaller matrices.

        hf-ctxmodels export low-rank --model runs/sst2 --output_dir runs/sst2-low-rank --energy 0.9
        hf-ctxmodels export low-rank --model runs/sst2 --output_dir runs/sst2-low-rank --rank 96 \
            --weighting activations:file=texts.txt

    The Auto classes load the result, which can be trained, for example by `distill` from the original model, and
    quantized by `export int8`. A layer whose factors would not be smaller is left as it is.
    """
    (arguments,) = parse_arguments(LowRankArguments, description=getdoc(low_rank))
    _check_directories(arguments.model, arguments.output_dir, arguments.overwrite)
    model = load_saved_model(arguments.model)
    check_factorizable(model)
    before, moments = model.num_parameters(), None
    if isinstance(weighting := arguments.weighting, ActivationWeighting):
        layers = find_factorizable_modules(model, arguments.layers, arguments.skip)
        with record_second_moments(model, layers) as moments:
            location = f"--weighting activations:file={weighting.file}"
            _run_texts(model.eval(), arguments.model, weighting.file, weighting.max_length, location)
    results = factorize_model(
        model,
        rank=arguments.rank,
        energy=arguments.energy,
        layers=arguments.layers,
        skip=arguments.skip,
        moments=moments,
    )
    save_model = partial(_save_compressed, model, arguments.model)
    _save_with_tokenizer(model, save_model, arguments.model, arguments.output_dir)
    print("\n".join(_result_lines(results)))
    after = model.num_parameters()
    print(f"parameters: {before:,} before, {after:,} now ({before / after:.2f} times fewer)")
    print(f"saved in {arguments.output_dir}")
    print(format_next_commands(("export", "int8", "--model", arguments.output_dir, "--output_dir", "DIRECTORY")))


def _result_lines(results: list[LayerResult]) -> Iterator[str]:
    """One line for all layers with the same last component of the name and the same shape."""
    groups: dict[tuple[str, tuple[int, ...], str | None], list[LayerResult]] = {}
    for result in results:
        groups.setdefault((result.name.rpartition(".")[2], result.shape, result.reason), []).append(result)
    for (name, shape, reason), group in groups.items():
        layer = f"{name} {shape[0]} x {shape[1]}" + (f" ({len(group)} layers)" if len(group) > 1 else "")
        if reason is not None:
            yield f"{layer:<40} unchanged: {reason}"
            continue
        ranks = sorted({result.rank for result in group if result.rank is not None})
        rank = f"rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "")
        yield f"{layer:<40} {rank:<18} {min(result.energy for result in group):.1%} of the energy or more"


def _check_directories(source: str, output_dir: str, overwrite: bool) -> None:
    """Raise CtxError if the output directory is the model's, or has a model that may not be overwritten."""
    names = (*MODEL_FILES, *TOKENIZER_FILES, ADAPTERS_FOLDER)
    check_output_directory(output_dir, names, flag="--output_dir", overwrite=overwrite, model=source)


def _save_with_tokenizer(
    model: PreTrainedModel,
    save_model: Callable[[str], None],
    source: str,
    output_dir: str,
    *,
    for_transformers: bool = False,
) -> None:
    """Save a model by `save_model`, and the tokenizer of `source`, if it has one, with at most the model's input
    length; files of a previous model are replaced. With `for_transformers` the tokenizer opens without this package."""
    previous = (*MODEL_FILES, WEIGHT_SHARDS, *TOKENIZER_FILES, ADAPTERS_FOLDER, MANIFEST_FILE, SUMMARY_FILE)
    with replacing_files(output_dir, previous) as folder:
        save_model(str(folder))
        try:
            tokenizer = load_tokenizer(source)
            limit_tokenizer_length(tokenizer, model.config)
            has_reference = for_transformers and isinstance(tokenizer, CtxTokenizer)
            (tokenizer.export_reference if has_reference else tokenizer.save_pretrained)(folder)
        except CtxError as error:
            print_status(f"The tokenizer is not saved: {error.message}")


def _save_compressed(model: PreTrainedModel, source: str, output_dir: str) -> None:
    """Save a model, and the summary of the fine-tuning of `source`, with the task and the length that `predict` reads,
    but without the results, which are those of the original weights."""
    model.save_pretrained(output_dir)
    summary = finetuning_summary(source)
    if summary is not None:
        replace(summary, parameters=model.num_parameters(), metrics={}, warnings=[]).save(output_dir)
