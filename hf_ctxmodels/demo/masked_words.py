"""Pretraining of a tiny BERT in the background, compared with unigram and bigram baselines."""

import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data import ExampleSet, load_documents
from hf_ctxmodels.demo.bigram_model import BigramModel
from hf_ctxmodels.demo.demo_runner import DemoRunner, Stage
from hf_ctxmodels.demo.plots import plot_learning_curve
from hf_ctxmodels.demo.report import DemoReport, Result
from hf_ctxmodels.objectives import MaskedLM
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import read_log

PLOT_FILE = "learning_curve.png"
HELD_OUT_FRACTION = 0.05  # of the documents
MAX_LENGTH = 32  # as in the recipe
VOCAB_SIZE = 2000
RECIPE = "bert_tiny_demo"
_BATCH_SIZE = 64
SENTENCES = (
    "He was born in [MASK] and died in 1955.",
    "The United [MASK] of America",
    "The war began in the [MASK] century.",
)


def start_bert_pretraining(report: DemoReport, runner: DemoRunner, steps: int) -> Stage | None:
    """Train a tokenizer and start the pretraining; None if both are finished."""
    report.text("A tiny BERT is pretrained in the background, on one core, during the next sections.")
    tokenizer = runner.folder / "tokenizer"
    runner.run(
        report,
        *("tokenizer", "train-tokenizer", "--family", "bert", "--dataset", "demo", "--vocab_size", VOCAB_SIZE),
        *("--validation_fraction", HELD_OUT_FRACTION),
        output=tokenizer,
    )
    command = ("pretrain", "--recipe", RECIPE, "--tokenizer", tokenizer, "--max_steps", steps)
    report.command(*command, "--output_dir", runner.folder / "bert")
    return runner.start("bert", *command, output=runner.folder / "bert", threads=1)


def show_masked_words(report: DemoReport, runner: DemoRunner, stage: Stage | None, steps: int) -> None:
    """Wait for the pretraining, compare its loss with the baselines, plot the loss curve and fill masks."""
    folder = runner.folder / "bert"
    if stage is None:
        report.line(f"using the model of an earlier run ({runner.seconds('bert'):.0f} s)")
    else:
        wait(report, stage, folder, steps)
    summary = TrainingSummary.load(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    report.text(
        f"{summary.model_class}, {summary.parameters:,} parameters, vocabulary of {len(tokenizer):,} WordPiece tokens, "
        f"{summary.steps:,} steps on one core in {runner.seconds('bert') or 0:.0f} s, {summary.tokens:,} tokens."
    )
    loss, baselines = heldout_losses(model, tokenizer)
    report.result(
        Result("masked-LM loss, held-out text", loss, baselines, lower_is_better=True),
        "cross-entropy in nats per masked token, lower is better; 15% of the tokens are masked (40% in training); "
        "unigrams: token frequencies in the training text; bigrams: Kneser-Ney, from the previous or the next token, "
        "whichever is better",
    )
    title = f"Masked language modeling: BERT, {summary.parameters / 1e6:.1f} million parameters, 440,000 words of text"
    plot_learning_curve(summary.curve, loss, baselines, title, runner.folder / PLOT_FILE)
    report.rows([(f"  {text}", ", ".join(fill_mask(model, tokenizer, text))) for text in SENTENCES])


def wait(report: DemoReport, stage: Stage, folder: Path, steps: int) -> None:
    """Wait for a pretraining run and show its progress."""
    last_update = 0.0

    def show_progress() -> None:
        nonlocal last_update
        record = next((record for record in reversed(read_log(folder)) if "loss" in record), None)
        if record is None or time.perf_counter() - last_update < 1:
            return
        last_update = time.perf_counter()
        rate = record.get("tokens_per_second", 0)
        report.status(f"... step {record['step']:,} of {steps:,}, loss {record['loss']:.2f}, {rate:,.0f} tokens/s")

    stage.wait(show_progress)


@torch.no_grad()
def heldout_losses(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, dict[str, float]]:
    """Masked-LM loss of the model on the held-out text, and losses of the baselines on the same targets."""
    objective = MaskedLM(tokenizer, max_length=MAX_LENGTH, seed=0, packing=True)
    train_documents, heldout_documents = load_documents("demo").split(HELD_OUT_FRACTION)
    train_set = ExampleSet.build(objective.examples(train_documents))
    heldout_set = ExampleSet.build(objective.examples(heldout_documents))
    sequences = [train_set[0, index]["input_ids"] for index in range(len(train_set))]
    vocab_size, special_ids = len(tokenizer), tokenizer.all_special_ids
    left_bigrams = BigramModel(sequences, vocab_size, special_ids, left=True)
    right_bigrams = BigramModel(sequences, vocab_size, special_ids, left=False)
    frequencies = np.bincount(np.concatenate(sequences), minlength=vocab_size) + 0.5
    frequencies[special_ids] = 0
    unigram_losses: list[np.ndarray] = []
    left_losses: list[np.ndarray] = []
    right_losses: list[np.ndarray] = []
    total_loss, num_targets = 0.0, 0
    for start in range(0, len(heldout_set), _BATCH_SIZE):
        stop = min(start + _BATCH_SIZE, len(heldout_set))
        batch = objective.collate([heldout_set[0, index] for index in range(start, stop)])
        labels = batch["labels"].numpy()
        tokens = np.where(labels == IGNORE_INDEX, batch["input_ids"].numpy(), labels)
        row, column = np.nonzero(labels != IGNORE_INDEX)
        targets = labels[row, column]
        unigram_losses.append(-np.log(frequencies[targets] / frequencies.sum()))
        left_losses.append(-np.log(left_bigrams.probabilities(tokens[row, column - 1], targets)))
        right_losses.append(-np.log(right_bigrams.probabilities(tokens[row, column + 1], targets)))
        total_loss += float(model(**batch).loss) * len(targets)
        num_targets += len(targets)
    bigram_loss = min(float(np.concatenate(losses).mean()) for losses in (left_losses, right_losses))
    baselines = {"unigrams": float(np.concatenate(unigram_losses).mean()), "bigrams": bigram_loss}
    return total_loss / num_targets, baselines


@torch.no_grad()
def fill_mask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, number: int = 4) -> list[str]:
    """The most probable tokens for the mask in a text."""
    inputs = tokenizer(text, return_tensors="pt")
    position = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    token_ids = model(**inputs).logits[0, position].topk(number).indices.tolist()
    return [tokenizer.decode([token_id]) for token_id in token_ids]
