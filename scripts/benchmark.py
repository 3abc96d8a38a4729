"""Benchmark speed and memory: against transformers (same weights, same outputs), or of variants of a model."""

import hf_ctxmodels  # noqa: F401  sets the wait policy of threads, before torch is imported

# isort: split
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks import (
    adapters,
    bands,
    compiled,
    compression,
    decoders,
    encoders,
    features,
    pretraining,
    prompts,
    recurrent,
    report,
    sentences,
    seq2seq,
    serving,
    sharing,
    vocabulary_loss,
    word_vectors,
)
from benchmarks.cpu_load import busy_core
from transformers.utils import logging

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.errors import wrap_errors
from hf_ctxmodels.core.output_files import check_output_file


@dataclass(frozen=True)
class Suite:
    """One benchmark suite, with one table.

    Attributes:
        runs: Functions that yield results.
        table: Formats results as a Markdown table.
        describe: Describes the suite, given the attention implementation of the reference.
        options: Names of the command line arguments that are passed to `runs`.
    """

    runs: Sequence[Callable[..., Iterator[Any]]]
    table: Callable[[Sequence[Any]], str]
    describe: Callable[[str], str]
    options: tuple[str, ...] = ()


SUITES = {
    "encoders": Suite([encoders.run, pretraining.run], report.table, report.describe_reference, ("busy",)),
    "decoders": Suite([decoders.run], report.table, report.describe_reference, ("busy",)),
    "seq2seq": Suite([seq2seq.run], report.table, seq2seq.describe_reference, ("busy",)),
    "bands": Suite([bands.run], bands.table, lambda attention: bands.SETTING),
    "compile": Suite([compiled.run], compiled.table, lambda attention: compiled.SETTING),
    "compression": Suite([compression.run], compression.table, lambda attention: compression.SETTING),
    "sharing": Suite([sharing.run], sharing.table, lambda attention: sharing.SETTING),
    "serving": Suite([serving.run], serving.table, lambda attention: serving.SETTING),
    "adapters": Suite([adapters.run], adapters.table, lambda attention: adapters.SETTING),
    "features": Suite([features.run], features.table, lambda attention: features.SETTING),
    "sentences": Suite([sentences.run], sentences.table, lambda attention: sentences.SETTING),
    "prompts": Suite([prompts.run], prompts.table, lambda attention: prompts.SETTING),
    "vocabulary-loss": Suite([vocabulary_loss.run], vocabulary_loss.table, lambda attention: vocabulary_loss.SETTING),
    "recurrent": Suite([recurrent.run], recurrent.table, lambda attention: recurrent.SETTING),
    "static": Suite(
        [word_vectors.run_speed], word_vectors.speed_table, lambda attention: word_vectors.SPEED, ("dataset",)
    ),
    "static-quality": Suite(
        [word_vectors.run_quality],
        word_vectors.quality_table,
        lambda attention: word_vectors.QUALITY,
        ("dataset", "word_tests", "epochs"),
    ),
}


@dataclass
class BenchmarkArguments:
    """Arguments of the benchmark."""

    suite: str = field(default="encoders", metadata={"help": "Suite to run.", "choices": list(SUITES)})
    output: str | None = field(default=None, metadata={"help": "Markdown file to write the table to."})
    overwrite: bool = field(default=False, metadata={"help": "Replace --output if it exists."})
    only: str | None = field(default=None, metadata={"help": "Run only cases with a word that starts with this text."})
    repeats: int = field(default=7, metadata={"help": "Timed runs per implementation; the median is reported."})
    threads: int = field(default=2, metadata={"help": "CPU threads."})
    busy: bool = field(default=False, metadata={"help": "Keep one core busy with a second process."})
    device: str = field(default="cpu", metadata={"help": "Device: cpu or cuda."})
    dtype: str = field(
        default="float32", metadata={"help": "Precision (training uses autocast).", "choices": ["float32", "bfloat16"]}
    )
    reference_attention: str = field(
        default="sdpa",
        metadata={"help": "Attention implementation of the reference: sdpa, flash_attention_2 or eager."},
    )
    dataset: str = field(default="demo", metadata={"help": "Training text of the suites static and static-quality."})
    word_tests: str | None = field(
        default=None,
        metadata={"help": "Directory with the word similarity and analogy tests of the suite static-quality."},
    )
    epochs: int = field(default=5, metadata={"help": "Epochs of the suite static-quality."})
    targets: bool = field(default=False, metadata={"help": "Also show the target ratios and mark missed ones."})


def main() -> None:
    """Run the suite and print each row of the table as soon as it is measured."""
    (arguments,) = parse_arguments(BenchmarkArguments, description=__doc__)
    if arguments.output is not None:
        check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
    with wrap_errors("The device cannot be used", location=f"--device {arguments.device}", hint="use --device cpu."):
        device = torch.empty(0, device=arguments.device).device
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, arguments.dtype)
    suite = SUITES[arguments.suite]

    def table(results: Sequence[Any]) -> str:
        text = suite.table(results)
        return text if arguments.targets else report.without_targets(text)

    description = suite.describe(arguments.reference_attention)
    setting = report.describe_setting(device, dtype, arguments.repeats, arguments.busy, description)
    results: list[Any] = []
    print(setting)
    options = {name: getattr(arguments, name) for name in suite.options}
    with busy_core() if arguments.busy else nullcontext():
        for run in suite.runs:
            for result in run(
                device, dtype, arguments.repeats, arguments.reference_attention, arguments.only, **options
            ):
                results.append(result)
                print(table([result]).splitlines()[-1], flush=True)
    text = f"{setting}\n\n{table(results)}\n"
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    run_script(main)
