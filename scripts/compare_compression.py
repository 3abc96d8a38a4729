r"""Compare compressed forms of a sentence encoder: parameters, file size, time and correlation with human ratings.

    python scripts/compare_compression.py --model all-MiniLM-L6-v2 --pooling mean --ranks 192 128 96 --int8_rank 192 \
        --texts sentences.txt --similarity stsb-en-test.csv=1,2,3 --output_file compression.md

The rows are float32, bfloat16, int8, and low-rank factors with and without weighting by the activations on --texts.
Time is CPU time with interleaved runs, so that the load of the machine affects all rows equally.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from benchmarks.measure import measure
from benchmarks.settings import Settings
from transformers import PreTrainedModel

from hf_ctxmodels.architectures.sentence_encoder import Pooling, encode_sentences
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.compression.low_rank.compression import (
    factorize_model,
    find_factorizable_modules,
    record_second_moments,
)
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.data.files import split_columns
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_saved_model
from hf_ctxmodels.evaluation.sentence_tests import read_test_pairs, similarity
from hf_ctxmodels.training.model_loading import load_tokenizer


@dataclass
class ComparisonArguments:
    """Model and data."""

    model: str = flag(REQUIRED, "Directory or Hub id of a sentence encoder.")
    texts: str = flag(REQUIRED, "Texts for the activations, one per line, which are not test sentences.")
    similarity: list[str] = flag(REQUIRED, "FILE=FIRST,SECOND,SCORE: a table and its columns of two texts and a score.")
    output_file: str = flag(REQUIRED, "Markdown file for the table.")
    ranks: list[int] = flag((), "Ranks of the low-rank rows.")
    energies: list[float] = flag((), "Shares of the squared singular values of further low-rank rows.")
    int8_rank: int | None = flag(None, "Rank of a row with low-rank factors, weighted by activations, in int8.")
    pooling: str | None = flag(None, "Pooling of the hidden states; by default of the model.", get_args(Pooling))
    timed_sentences: int = flag(256, "Sentences of --texts to measure the time on.")
    repeats: int = flag(5, "Timed runs of each row.")


def variants(
    model: PreTrainedModel, arguments: ComparisonArguments, encode: Callable, texts: list[str]
) -> Iterator[tuple[str, Callable]]:
    """Name -> function that compresses a copy of the model in place."""
    with record_second_moments(model, find_factorizable_modules(model, (), ())) as moments:
        encode(model, texts)
    yield "float32", lambda copied: None
    yield "bfloat16", lambda copied: copied.bfloat16()
    yield "int8", lambda copied: quantize_model(copied, CtxInt8Config())
    sizes: list[tuple[str, Any]] = [("rank", rank) for rank in arguments.ranks]
    sizes += [("energy", energy) for energy in arguments.energies]
    for option, value in sizes:
        for weighting, statistics in (("plain", None), ("activations", moments)):
            yield f"{option} {value}, {weighting}", partial(factorize_model, moments=statistics, **{option: value})
    if (rank := arguments.int8_rank) is not None:

        def factorize_and_quantize(copied: PreTrainedModel) -> None:
            factorize_model(copied, rank=rank, moments=moments)
            quantize_model(copied, CtxInt8Config())

        yield f"rank {rank}, activations, int8", factorize_and_quantize


def file_size(model: PreTrainedModel) -> int:
    """Size of the saved weights in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def main() -> None:
    """Compress, measure and print the table."""
    (arguments,) = parse_arguments(ComparisonArguments, description=__doc__)
    model, tokenizer = load_saved_model(arguments.model).base_model, load_tokenizer(arguments.model)

    def encode(compressed: PreTrainedModel, texts: list[str]) -> torch.Tensor:
        return encode_sentences(compressed, tokenizer, texts, pooling=arguments.pooling).float()

    texts = [line.strip() for line in read_lines(arguments.texts) if line.strip()]
    models = {}
    for name, compress in variants(model, arguments, encode, texts):
        models[name] = copy.deepcopy(model)
        compress(models[name])
    timed = texts[: arguments.timed_sentences]
    steps = {name: partial(encode, compressed, timed) for name, compressed in models.items()}
    times = measure(steps, Settings(repeats=arguments.repeats))
    tables = [split_columns(text) for text in arguments.similarity]
    rated_pairs = [read_test_pairs(file, columns) for file, columns in tables]
    header = ["model", "parameters", "file", "CPU s / 1,000 sentences", *(Path(file).stem for file, _ in tables)]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    print("\n".join(lines))
    for name, compressed in models.items():
        scores = [similarity(partial(encode, compressed), pairs) for pairs in rated_pairs]
        cells = [
            name,
            f"{compressed.num_parameters():,}",
            f"{file_size(compressed) / 1e6:.1f} MB",
            f"{1000 * times[name].cpu_seconds / len(timed):.2f}",
            *(f"{score.spearman:.4f}" for score in scores),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    with wrap_write_errors(arguments.output_file):
        Path(arguments.output_file).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
