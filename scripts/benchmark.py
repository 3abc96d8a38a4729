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
from benchmarks.settings import Settings
from transformers.utils import logging

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.output_files import check_output_file


@dataclass(frozen=True)
class Suite:
    """One benchmark suite, with one table.

    Attributes:
        runs: Functions that yield the results of the rows selected by `Settings.select_row`.
        table: Formats results as a Markdown table.
        describe: Describes the suite, given the attention implementation of the reference.
    """

    runs: Sequence[Callable[[Settings], Iterator[Any]]]
    table: Callable[[Sequence[Any]], str]
    describe: Callable[[str], str]


SUITES = {
    "encoders": Suite([encoders.run, pretraining.run], report.table, report.describe_reference),
    "decoders": Suite([decoders.run], report.table, report.describe_reference),
    "seq2seq": Suite([seq2seq.run], report.table, seq2seq.describe_reference),
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
    "static": Suite([word_vectors.run_speed], word_vectors.speed_table, lambda attention: word_vectors.SPEED),
    "static-quality": Suite(
        [word_vectors.run_quality], word_vectors.quality_table, lambda attention: word_vectors.QUALITY
    ),
}


@dataclass
class BenchmarkArguments:
    """Suite and output of the benchmark."""

    suite: str = field(default="encoders", metadata={"help": "Suite to run.", "choices": list(SUITES)})
    output: str | None = field(default=None, metadata={"help": "Markdown file to write the table to."})
    overwrite: bool = field(default=False, metadata={"help": "Replace --output if it exists."})
    targets: bool = field(default=False, metadata={"help": "Also show the target ratios and mark missed ones."})


def main() -> None:
    """Run the suite and print each row of the table as soon as it is measured."""
    arguments, settings = parse_arguments(BenchmarkArguments, Settings, description=__doc__)
    if arguments.output is not None:
        check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
    with wrap_errors("The device cannot be used", location=f"--device {settings.device}", hint="use --device cpu."):
        torch.empty(0, device=settings.device)
    torch.set_num_threads(settings.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    suite = SUITES[arguments.suite]

    def table(results: Sequence[Any]) -> str:
        text = suite.table(results)
        return text if arguments.targets else report.without_targets(text)

    setting = report.describe_settings(settings, suite.describe(settings.reference_attention))
    results: list[Any] = []
    print(setting)
    with busy_core() if settings.busy else nullcontext():
        for run in suite.runs:
            for result in run(settings):
                results.append(result)
                print(table([result]).splitlines()[-1], flush=True)
    if not results:
        raise CtxError(
            f"No row of the suite {arguments.suite} matches.",
            location=f"--only {settings.only}",
            hint=f"pass the start of a word of a row; rows: {'; '.join(dict.fromkeys(settings.row_names))}.",
        )
    text = f"{setting}\n\n{table(results)}\n"
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    run_script(main)
