r"""Show results in a few minutes, on text and weights from installed packages, without a network.

    hf-ctxmodels demo --output_dir demo

The demo opens a pretrained BERT, trains word2vec and a tiny BERT on the demo text, fine-tunes a classifier from few
labels, publishes it to a directory and opens it in new processes. Every result is measured in this run and printed with
a baseline. A second demo in the same directory reuses finished stages and resumes an interrupted pretraining;
--overwrite starts again. Seeds and settings are listed in model_cards/experiments/demo.md.
"""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_next_commands, stop_signals
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.demo import masked_words, word_vectors
from hf_ctxmodels.demo.demo_runner import DemoReport, DemoRunner, num_foreground_threads
from hf_ctxmodels.demo.masked_words import show_masked_words, start_bert_pretraining
from hf_ctxmodels.demo.real_bert import checkpoint, show_real_bert
from hf_ctxmodels.demo.topic_classifier import show_publishing, show_topic_classifier
from hf_ctxmodels.demo.word_vectors import show_word_vectors

RESULTS = "results.json"
OUTPUT_NAMES = (
    *("tokenizer", "bert", "words-tokenizer", "word2vec", "real-bert", "topics", "published", "logs"),
    *(masked_words.PLOT_FILE, word_vectors.PLOT_FILE, RESULTS),
)


@dataclass
class DemoArguments:
    """Output directory and training lengths."""

    output_dir: str = flag("demo", "Output directory.")
    overwrite: bool = flag(False, "Delete the output of an earlier demo.")
    max_steps: int = flag(1600, "Pretraining steps of the tiny BERT, of 64 sequences.")
    word_epochs: int = flag(10, "Epochs of word2vec.")
    label_epochs: int = flag(10, "Epochs of the classifier.")


def main() -> None:
    """Run the sections and print a summary."""
    (arguments,) = parse_arguments(DemoArguments, description=__doc__)
    checkpoint()  # fails early if the extra is not installed
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output_dir", "overwrite")}
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(num_foreground_threads())
    for signal_number in stop_signals():
        signal.signal(signal_number, signal.default_int_handler)  # stop the stages, as after Ctrl-C
    report = DemoReport(sections=6)
    folder = Path(arguments.output_dir)
    try:
        with DemoRunner(folder, settings, OUTPUT_NAMES, overwrite=arguments.overwrite) as runner:
            if runner.resumed:
                report.line(f"Continuing the demo in {folder}; --overwrite starts again.", indent="")
            report.section("Pretraining of a tiny BERT starts")
            pretraining = start_bert_pretraining(report, runner, arguments.max_steps)
            report.section("A pretrained BERT, opened unchanged")
            show_real_bert(report)
            report.section("word2vec, trained on the demo text")
            show_word_vectors(report, runner, arguments.word_epochs)
            report.section("A classifier from 60 labeled sentences")
            show_topic_classifier(report, runner, arguments.label_epochs)
            report.section("Publishing, and opening in new processes")
            show_publishing(report, runner)
            report.section("Results of the tiny BERT")
            show_masked_words(report, runner, pretraining, arguments.max_steps)
    except KeyboardInterrupt:
        report.line(
            f"\nStopped. Finished stages are kept in {folder}; the same command continues from there.", indent=""
        )
        raise
    print_summary(report, folder)


def print_summary(report: DemoReport, folder: Path) -> None:
    """Print all results, the output files and the next commands."""
    report.line(f"\n{'Summary':<92}{report.elapsed:>8}", indent="")
    for result in report.results:
        report.line(str(result))
    rows = [
        {"name": result.name, "value": result.value, "baselines": dict(result.baselines)} for result in report.results
    ]
    write_text_file(folder / RESULTS, json.dumps(rows, indent=2) + "\n")
    report.line("\noutput files", indent="")
    report.rows(
        [
            (str(folder / "bert"), "the tiny BERT, its tokenizer, log and summary"),
            (str(folder / "word2vec"), "the word vectors"),
            (str(folder / "topics"), "labeled sentences, the classifier and its predictions"),
            (str(folder / "published"), "the classifier as a Hub repository, with its card"),
            (str(folder / masked_words.PLOT_FILE), "the loss curve"),
            (str(folder / word_vectors.PLOT_FILE), "the plot of words"),
            (str(folder / RESULTS), "the results above"),
        ]
    )
    report.line()
    text = ("--dataset", "YOUR.txt", "--output_dir", "runs/tokenizer")
    print(
        format_next_commands(
            ("evaluate", "words", "--model", folder / "word2vec", "--near", "king"),
            ("data", "tokenizer", "--family", "bert", "--vocab_size", 8000, *text),
            ("pretrain", "--help"),
        )
    )
