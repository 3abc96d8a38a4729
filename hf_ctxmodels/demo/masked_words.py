"""A tiny BERT, pretrained in the background on the demo text, beside models that know words and pairs of words."""

import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data import ExampleSet, load_documents
from hf_ctxmodels.demo.bigrams import BigramModel
from hf_ctxmodels.demo.pictures import draw_learning_curve
from hf_ctxmodels.demo.screen import Result, Screen
from hf_ctxmodels.demo.workshop import Stage, Workshop
from hf_ctxmodels.objectives import MaskedLM
from hf_ctxmodels.training.metrics.summary import TrainingSummary
from hf_ctxmodels.training.metrics.training_log import read_log

PICTURE = "learning_curve.png"
HELD_OUT = 0.05  # of the documents
LENGTH = 32  # of a row, as in the recipe
VOCABULARY = 2000
RECIPE = "bert_tiny_demo"
_ROWS = 64
SENTENCES = (
    "He was born in [MASK] and died in 1955.",
    "The United [MASK] of America",
    "The war began in the [MASK] century.",
)


def start_pretraining(screen: Screen, shop: Workshop, steps: int) -> Stage | None:
    """Train a tokenizer, and start to pretrain; None if both are finished."""
    screen.text("A tiny BERT is pretrained in the background, on one core, while the rest is shown.")
    tokenizer = shop.folder / "tokenizer"
    shop.run(
        screen,
        *("tokenizer", "train-tokenizer", "--family", "bert", "--dataset", "demo", "--vocab_size", VOCABULARY),
        *("--validation_fraction", HELD_OUT),
        output=tokenizer,
    )
    command = ("pretrain", "--recipe", RECIPE, "--tokenizer", tokenizer, "--max_steps", steps)
    screen.command(*command, "--output_dir", shop.folder / "bert")
    return shop.start("bert", *command, output=shop.folder / "bert", threads=1)


def show_masked_words(screen: Screen, shop: Workshop, stage: Stage | None, steps: int) -> None:
    """Wait for the pretraining, hold its loss against the baselines, draw the curve, fill gaps."""
    folder = shop.folder / "bert"
    if stage is None:
        screen.line(f"pretrained in an earlier run, in {shop.seconds('bert'):.0f} s: its files are used")
    else:
        wait(screen, stage, folder, steps)
    summary = TrainingSummary.load(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    screen.text(
        f"{summary.model_class}, {summary.parameters:,} parameters, vocabulary of {len(tokenizer):,} word pieces, "
        f"{summary.steps:,} steps on one core in {shop.seconds('bert') or 0:.0f} s, {summary.tokens:,} tokens."
    )
    loss, baselines = losses(model, tokenizer)
    screen.result(
        Result("loss of masked words, held-out text", loss, baselines, lower=True),
        "nats per masked word piece, less is better; 15% of the pieces are masked (in training 40%); by frequency: how "
        "often each piece is in the training text; by bigrams: from the piece beside it (Kneser-Ney; the better of "
        "before and after), where BERT may find a gap",
    )
    title = f"Masked words: a BERT of {summary.parameters / 1e6:.1f} million parameters on 440,000 words of text"
    draw_learning_curve(summary.curve, loss, baselines, title, shop.folder / PICTURE)
    screen.rows([(f"  {text}", ", ".join(fill(model, tokenizer, text))) for text in SENTENCES])


def wait(screen: Screen, stage: Stage, folder: Path, steps: int) -> None:
    """Wait for a pretraining run; its last record is shown."""
    shown = 0.0

    def watch() -> None:
        nonlocal shown
        record = next((record for record in reversed(read_log(folder)) if "loss" in record), None)
        if record is None or time.perf_counter() - shown < 1:
            return
        shown = time.perf_counter()
        rate = record.get("tokens_per_second", 0)
        screen.state(f"... step {record['step']:,} of {steps:,}, loss {record['loss']:.2f}, {rate:,.0f} tokens/s")

    stage.wait(watch)


@torch.no_grad()
def losses(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, dict[str, float]]:
    """The loss of the model on the masked tokens of the held-out text, and that of the baselines on the same tokens."""
    objective = MaskedLM(tokenizer, max_length=LENGTH, seed=0, packing=True)
    documents, others = load_documents("demo").split(HELD_OUT)
    training, held_out = (ExampleSet.build(objective.examples(each)) for each in (documents, others))
    rows = [training[0, place]["input_ids"] for place in range(len(training))]
    size, special = len(tokenizer), tokenizer.all_special_ids
    before, after = (BigramModel(rows, size, special, left=left) for left in (True, False))
    frequencies = np.bincount(np.concatenate(rows), minlength=size) + 0.5
    frequencies[special] = 0
    nats: tuple[list[np.ndarray], ...] = ([], [], [])
    total = 0.0
    for start in range(0, len(held_out), _ROWS):
        batch = objective.collate([held_out[0, place] for place in range(start, min(start + _ROWS, len(held_out)))])
        labels = batch["labels"].numpy()
        tokens = np.where(labels == IGNORE_INDEX, batch["input_ids"].numpy(), labels)
        row, place = np.nonzero(labels != IGNORE_INDEX)
        targets = labels[row, place]
        for found, each in zip(
            (
                frequencies[targets] / frequencies.sum(),
                before.probabilities(tokens[row, place - 1], targets),
                after.probabilities(tokens[row, place + 1], targets),
            ),
            nats,
            strict=True,
        ):
            each.append(-np.log(found))
        total += float(model(**batch).loss) * len(targets)
    frequency, *bigrams = (float(np.concatenate(each).mean()) for each in nats)
    return total / sum(map(len, nats[0])), {"by frequency": frequency, "by bigrams": min(bigrams)}


@torch.no_grad()
def fill(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, number: int = 4) -> list[str]:
    """The most likely words for the gap in a text."""
    inputs = tokenizer(text, return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    return [tokenizer.decode([token]) for token in model(**inputs).logits[0, place].topk(number).indices.tolist()]
