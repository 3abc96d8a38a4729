r"""Encode the sentences of a file as vectors.

    hf-ctxmodels embed sentences --model runs/infersent --input sentences.txt --output vectors.npy
    hf-ctxmodels embed sentences --model runs/bert --pooling mean --input news.parquet --text_column title \
        --output titles.npy

A .txt file has one sentence per line, blank lines are skipped; each record of a .jsonl or .parquet file has one in a
column. The output is a (sentences, width) array in the order of the input, which `numpy.load(file, mmap_mode="r")`
opens without reading it. Memory does not depend on the number of sentences.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hf_ctxmodels.analysis.sentences import check_sentence_file
from hf_ctxmodels.architectures.sentence_encoder import encode_in_windows, saved_pooling
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, print_status, progress_bar
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import check_output_file, replacing
from hf_ctxmodels.data.text_files import FileRange, TextColumns, read_file
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.layers.pooling import Pooling


@dataclass
class EncodingArguments:
    """Model, input and output."""

    model: str = flag(REQUIRED, "Directory or Hub id of a model, with its tokenizer.")
    input: str = flag(REQUIRED, "File of sentences: .txt, .jsonl or .parquet.")
    output: str = flag(REQUIRED, "File for the vectors, .npy.")
    overwrite: bool = flag(False, "Replace --output if it exists.")
    text_column: str = flag("text", "Column of the sentences in a .jsonl or .parquet file.")
    pooling: Pooling | None = flag(
        None, "Pooling of the hidden states; by default as saved by sentence-transformers, or the pooling of the model."
    )
    normalize: bool | None = flag(
        None, "Scale vectors to length 1; by default as saved by sentence-transformers, or false."
    )
    batch_size: int = flag(64, "Sentences per batch.")

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)
        if not self.output.endswith(".npy"):
            raise CtxError("The output is a NumPy file.", location=f"--output {self.output}", hint="end it in .npy.")
        check_sentence_file(self.input, f"--input {self.input}")


def iterate_sentences(path: str, text_column: str) -> Iterator[str]:
    """The lines of a text file that are not blank, or the texts in a column; raises CtxError as `read_file`."""
    for paragraphs in read_file(FileRange(path), TextColumns(text_column), "line"):
        yield " ".join(paragraphs)


def main() -> None:
    """Encode the sentences window by window into a memory-mapped file."""
    arguments, placement = parse_arguments(
        EncodingArguments, DeviceArguments, description=__doc__, essential=("model", "input", "output")
    )
    output = Path(arguments.output)
    check_output_file(output, flag="--output", overwrite=arguments.overwrite, inputs=(arguments.input,))
    count = sum(1 for _ in iterate_sentences(arguments.input, arguments.text_column))
    if not count:
        raise CtxError("No sentences.", location=arguments.input, hint="use a file with at least one sentence.")
    try:
        pooling, normalize = saved_pooling(arguments.model)
    except CtxError:  # a saved pooling that is not supported
        if arguments.pooling is None:
            raise
        pooling, normalize = None, False
    pooling = arguments.pooling or pooling
    normalize = normalize if arguments.normalize is None else arguments.normalize
    model, tokenizer = load_model_and_tokenizer(arguments.model, "AutoModel")
    placement.place_for_inference(model)
    print_status(f"{type(model).__name__} encodes {format_count(count, 'sentence')}")
    texts = iterate_sentences(arguments.input, arguments.text_column)
    sentences = progress_bar(texts, "encoding", unit="sentences", total=count)
    windows = encode_in_windows(
        model, tokenizer, sentences, pooling=pooling, batch_size=arguments.batch_size, normalize=normalize
    )
    array: np.memmap | None = None
    start = 0
    with replacing(output) as temporary:
        for vectors in windows:
            rows = (vectors.float() if vectors.dtype == torch.bfloat16 else vectors).cpu().numpy()
            if array is None:
                array = np.lib.format.open_memmap(temporary, "w+", rows.dtype, (count, rows.shape[1]))
            array[start : start + len(rows)] = rows
            start += len(rows)
        assert array is not None
        array.flush()
    print(f"{format_count(count, 'vector')} of width {array.shape[1]} in {output}")
