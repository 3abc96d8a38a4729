r"""Show what works, in a few minutes, on text and weights that come with installed packages; no network is needed.

    hf-ctxmodels demo --output_dir demo

A real BERT is opened unchanged, word2vec and a tiny BERT are trained on the demo text, a classifier is fine-tuned from
few labels, published to a directory and opened by clean processes. Every number is of this run, beside its baseline.
What is finished is used again by the next demo in the same directory, and an interrupted pretraining is continued;
--overwrite starts anew. The seeds and settings were fixed before (model_cards/experiments/demo.md).
"""

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils import logging

from hf_ctxmodels.core.console import format_next_commands
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.demo import masked_words, words
from hf_ctxmodels.demo.masked_words import show_masked_words, start_pretraining
from hf_ctxmodels.demo.real_bert import checkpoint, show_real_bert
from hf_ctxmodels.demo.screen import Screen
from hf_ctxmodels.demo.topics import show_publishing, show_topics
from hf_ctxmodels.demo.words import show_words
from hf_ctxmodels.demo.workshop import Workshop, foreground_threads
from hf_ctxmodels.training.recipe import parse_arguments

RESULTS = "results.json"
MADE = (
    *("tokenizer", "bert", "words-tokenizer", "word2vec", "real-bert", "topics", "published", "logs"),
    *(masked_words.PICTURE, words.PICTURE, RESULTS),
)


@dataclass
class DemoArguments:
    """Where, and how long."""

    output_dir: str = field(default="demo", metadata={"help": "Directory for everything that the demo makes."})
    overwrite: bool = field(default=False, metadata={"help": "Delete what an earlier demo has made there."})
    max_steps: int = field(default=1600, metadata={"help": "Pretraining steps of the tiny BERT, of 64 rows."})
    word_epochs: int = field(default=10, metadata={"help": "Passes of word2vec over the text."})
    label_epochs: int = field(default=10, metadata={"help": "Passes of the classifier over its labelled sentences."})


def main() -> None:
    """Run every section, and sum up."""
    (arguments,) = parse_arguments(DemoArguments, description=__doc__)
    checkpoint()  # first: without the extra there is no demo
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output_dir", "overwrite")}
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(foreground_threads())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as an interruption at the keyboard: the stages are stopped
    screen = Screen(sections=6)
    folder = Path(arguments.output_dir)
    try:
        with Workshop(folder, settings, MADE, overwrite=arguments.overwrite) as shop:
            run(screen, shop, arguments)
    except KeyboardInterrupt:
        screen.line(f"\nStopped. What is finished is kept in {folder}; the same command goes on from there.", indent="")
        raise
    sum_up(screen, folder)


def run(screen: Screen, shop: Workshop, arguments: DemoArguments) -> None:
    """Every section in turn."""
    if shop.resumed:
        screen.line(f"An earlier demo in {shop.folder} is continued; --overwrite starts anew.", indent="")
    screen.section("A tiny BERT begins to learn")
    pretraining = start_pretraining(screen, shop, arguments.max_steps)
    screen.section("A real BERT, opened unchanged")
    show_real_bert(screen)
    screen.section("word2vec, trained on the demo text")
    show_words(screen, shop, arguments.word_epochs)
    screen.section("A classifier from 60 labelled sentences")
    show_topics(screen, shop, arguments.label_epochs)
    screen.section("Published to a directory, opened by clean processes")
    show_publishing(screen, shop)
    screen.section("What the tiny BERT has learned")
    show_masked_words(screen, shop, pretraining, arguments.max_steps)


def sum_up(screen: Screen, folder: Path) -> None:
    """All numbers once more, what is where, and what to do next."""
    screen.line(f"\n{'All of it':<92}{screen.elapsed:>8}", indent="")
    for result in screen.results:
        screen.line(str(result))
    rows = [{"name": each.name, "value": each.value, "baselines": dict(each.baselines)} for each in screen.results]
    with wrap_write_errors(folder):
        (folder / RESULTS).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    screen.line("\nwhat is where", indent="")
    screen.rows(
        [
            (str(folder / "bert"), "the tiny BERT, its tokenizer, log and summary"),
            (str(folder / "word2vec"), "the word vectors"),
            (str(folder / "topics"), "labelled sentences, the classifier and its predictions"),
            (str(folder / "published"), "the classifier as a Hub repository, with its card"),
            (str(folder / masked_words.PICTURE), "the losses by step"),
            (str(folder / words.PICTURE), "words on the plane"),
            (str(folder / RESULTS), "the numbers above"),
        ]
    )
    screen.line()
    text = ("--dataset", "YOUR.txt", "--output_dir", "runs/tokenizer")
    print(
        format_next_commands(
            ("evaluate-words", "--model", folder / "word2vec", "--near", "king"),
            ("train-tokenizer", "--family", "bert", "--vocab_size", 8000, *text),
            ("pretrain", "--help"),
        )
    )
