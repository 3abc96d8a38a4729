r"""Perplexity of a causal language model on a text, per token and per word, and bits per character and byte.

    hf-ctxmodels evaluate perplexity --model runs/gpt2 --dataset 'corpus/test*.txt' --stride 256
    hf-ctxmodels evaluate perplexity --model runs/transformer_xl --dataset test.txt --memory_length 640 \
        --clamp_len 400 --same_length true
    hf-ctxmodels evaluate perplexity --model runs/transformer_xl --dataset test.txt --memory_length 0 64 128 256 \
        --output_dir runs/memory

The text is read in overlapping windows, or with --memory_length in segments with a memory. The last line measures
several lengths of the memory, and saves a table and a figure.
"""

from dataclasses import asdict, dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.figures import LineChart
from hf_ctxmodels.analysis.results import AnalysisResult, Table
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import check_output_directory
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.hub_datasets import with_default_split
from hf_ctxmodels.data.text_files import Separator
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.tasks.metrics import range_note
from hf_ctxmodels.evaluation.perplexity import (
    Perplexity,
    RunningText,
    measure_perplexity,
    measure_perplexity_with_memory,
)

_NAME = "perplexity"


@dataclass
class PerplexityArguments:
    """Model and text."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id of a causal language model, or XLNet.")
    dataset: list[str] = flag(
        REQUIRED,
        "demo, a .txt, .jsonl or .parquet file or a pattern of files, or a Hub id or directory, optionally with "
        ":config=NAME,split=NAME (default: split=test); or several of these.",
    )
    text_column: str = flag("text", "Column with the text of a document, except in .txt.")
    validation_fraction: float | None = flag(
        None, "Use only the validation documents of pretrain with this fraction and the same files."
    )
    document_separator: Separator | None = flag(
        None, "As of pretrain; by default `blank`, or with --validation_fraction guessed as by pretrain."
    )
    max_length: int | None = flag(None, "Window length in tokens; by default the maximum length of the model.")
    stride: int | None = flag(None, "Stride of the windows in tokens; by default half a window.")
    memory_length: list[int] = flag(
        (),
        "Read the text in segments of --max_length tokens (by default 64) with a memory of N states (Transformer-XL); "
        "several lengths are compared in a table.",
        conflicts=("stride",),
    )
    clamp_len: int | None = flag(
        None, "With --memory_length: clamp distances to N, -1 for no limit; by default as in training."
    )
    same_length: bool | None = flag(
        None, "With --memory_length: whether a token attends to at most N tokens; by default as in training."
    )
    batch_size: int = flag(8, "Windows per batch.")
    output_dir: str | None = flag(
        None, "With several lengths of --memory_length: directory for the table and a figure."
    )
    overwrite: bool = flag(False, "Replace the results in --output_dir.")

    def __post_init__(self) -> None:
        check_range(self, "memory_length", at_least=0, location="--memory_length")
        check_range(self, "clamp_len", at_least=-1)
        check_range(self, "batch_size", at_least=1)
        if not self.memory_length and (self.clamp_len is not None or self.same_length is not None):
            raise CtxError(
                "Without --memory_length the text is read in windows without a memory.",
                location="--clamp_len, --same_length",
                hint="add --memory_length N, or remove them.",
            )
        if self.output_dir is not None and len(self.memory_length) < 2:
            raise CtxError(
                "--output_dir needs at least two lengths of the memory.",
                location="--output_dir",
                hint="pass, for example, --memory_length 0 64 128, or omit --output_dir.",
            )


def main() -> None:
    """Measure and print the perplexity, or a table for several lengths of the memory."""
    arguments, placement = parse_arguments(PerplexityArguments, DeviceArguments, description=__doc__)
    if arguments.output_dir is not None:
        check_output_directory(
            arguments.output_dir, [f"{_NAME}.json"], flag="--output_dir", overwrite=arguments.overwrite
        )
    model, tokenizer = load_model_and_tokenizer(arguments.model, "AutoModelForCausalLM")
    placement.place(model)
    separator: Separator | None = arguments.document_separator
    if separator is None and arguments.validation_fraction is None:
        separator = "blank"
    datasets = [with_default_split(dataset, "test") for dataset in arguments.dataset]
    documents = load_documents(
        *datasets, text_column=arguments.text_column, skip_empty_documents=True, document_separator=separator
    )
    if arguments.validation_fraction is not None:
        documents = documents.split(arguments.validation_fraction)[1]
    results = measure(model, tokenizer, documents, arguments)
    if len(results) > 1:
        result = memory_result(results, arguments)
        print(result.tables[0].markdown())
        if arguments.output_dir is not None:
            result.save(arguments.output_dir)
            print(f"\nresults and figure in {arguments.output_dir}")
    else:
        print_perplexity(*results.values())
    print(range_note("perplexity"))


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    arguments: PerplexityArguments,
) -> dict[int | None, Perplexity]:
    """Perplexity of documents by length of the memory, or in windows, for the key None."""
    texts = map(" ".join, documents)  # as in causal language modeling
    if not arguments.memory_length:
        windows = {name: getattr(arguments, name) for name in ("max_length", "stride", "batch_size")}
        return {None: measure_perplexity(model, tokenizer, texts, **windows)}
    text = RunningText.tokenize(tokenizer, texts)
    return {
        length: measure_perplexity_with_memory(
            model,
            text,
            memory_length=length,
            segment_length=arguments.max_length or 64,
            batch_size=arguments.batch_size,
            clamp_len=arguments.clamp_len,
            same_length=arguments.same_length,
        )
        for length in arguments.memory_length
    }


def print_perplexity(result: Perplexity) -> None:
    """Print a single measurement with its counts."""
    per_token, per_word = (
        f"{value:.3f}" if value < 1e9 else f"{value:.3e}" for value in (result.per_token, result.per_word)
    )
    print(
        f"perplexity {per_token} per token, {per_word} per word; {result.tokens:,} tokens, "
        f"{result.words:,} words, {result.unknown:,} unknown tokens, {result.nats / result.tokens:.4f} nats per token"
    )
    print(
        f"bits {result.bits_per_character:.4f} per character, {result.bits_per_byte:.4f} per byte; "
        f"{result.characters:,} characters, {result.bytes:,} bytes"
    )


def memory_result(results: dict[int | None, Perplexity], arguments: PerplexityArguments) -> AnalysisResult:
    """A table of the lengths of the memory, and a chart of the perplexities."""
    lengths = sorted(arguments.memory_length)
    measures = {
        "perplexity per token": [results[length].per_token for length in lengths],
        "perplexity per word": [results[length].per_word for length in lengths],
        "bits per character": [results[length].bits_per_character for length in lengths],
        "bits per byte": [results[length].bits_per_byte for length in lengths],
    }
    text = results[lengths[0]]
    note = f"{text.tokens:,} tokens, {text.words:,} words, {text.unknown:,} unknown tokens."
    rows = [f"memory of {length:,} states" for length in lengths]
    title = "Perplexity by length of the memory"
    table = Table(title, list(measures), rows, list(zip(*measures.values())), best="min", digits=4, note=note)
    chart = LineChart(
        "memory", title, lengths, {"perplexity per token": measures["perplexity per token"]},
        x_label="states of the memory", y_label="perplexity per token", log_x=lengths[0] > 0, caption=note,
    )  # fmt: skip
    settings = {name: value for name, value in asdict(arguments).items() if name not in ("output_dir", "overwrite")}
    values = {"memory_length": lengths, **measures}
    return AnalysisResult(_NAME, [arguments.model], settings, [table], [chart], values)
