"""Pretraining of a tiny BERT in the background, compared with unigram and bigram baselines."""

import time
from collections.abc import Iterable

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data import ExampleSet, load_documents
from hf_ctxmodels.demo.demo_runner import DemoReport, DemoRunner, Result, Stage
from hf_ctxmodels.demo.plots import plot_learning_curve
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
        *("tokenizer", "data", "tokenizer", "--family", "bert", "--dataset", "demo", "--vocab_size", VOCAB_SIZE),
        *("--validation_fraction", HELD_OUT_FRACTION),
        output=tokenizer,
    )
    command = ("pretrain", "--recipe", RECIPE, "--tokenizer", tokenizer, "--max_steps", steps)
    report.command(*command, "--output_dir", runner.folder / "bert")
    return runner.start("bert", *command, output=runner.folder / "bert", threads=1)


def show_masked_words(report: DemoReport, runner: DemoRunner, stage: Stage | None, steps: int) -> None:
    """Wait for the pretraining, compare its loss with the baselines, plot the loss curve and fill masks."""
    folder = runner.folder / "bert"
    last_update = 0.0

    def show_progress() -> None:
        nonlocal last_update
        record = next((record for record in reversed(read_log(folder)) if "loss" in record), None)
        if record is None or time.perf_counter() - last_update < 1:
            return
        last_update = time.perf_counter()
        rate = record.get("tokens_per_second", 0)
        report.status(f"... step {record['step']:,} of {steps:,}, loss {record['loss']:.2f}, {rate:,.0f} tokens/s")

    if stage is None:
        report.line(f"using the model of an earlier run ({runner.seconds('bert'):.0f} s)")
    else:
        stage.wait(show_progress)
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


class BigramModel:
    """P(token | neighbor) with interpolated Kneser-Ney smoothing (Kneser & Ney 1995; Chen & Goodman 1999, sec. 2.7).

    The discount is n1 / (n1 + 2 n2) for n1 and n2 pairs that occur once and twice; every possible target has a non-zero
    probability.

    Args:
        sequences: (tokens,) ids of the training sequences.
        excluded_ids: Tokens that are never targets.
        left: Whether the neighbor is the previous token; else the next token.
    """

    def __init__(
        self, sequences: Iterable[np.ndarray], vocab_size: int, excluded_ids: Iterable[int], *, left: bool = True
    ) -> None:
        self._size = vocab_size
        sides = (slice(None, -1), slice(1, None)) if left else (slice(1, None), slice(None, -1))  # neighbor, target
        keys = np.concatenate(
            [ids.astype(np.int64)[sides[0]] * vocab_size + ids.astype(np.int64)[sides[1]] for ids in sequences]
        )
        allowed = np.ones(vocab_size, dtype=bool)
        allowed[list(excluded_ids)] = False
        self._keys, self._counts = np.unique(keys[allowed[keys % vocab_size]], return_counts=True)
        once, twice = (self._counts == 1).sum(), (self._counts == 2).sum()
        self._discount = once / max(1, once + 2 * twice)
        contexts, targets = np.divmod(self._keys, vocab_size)
        self._totals = np.bincount(contexts, weights=self._counts, minlength=vocab_size)
        self._num_successors = np.bincount(contexts, minlength=vocab_size)
        continuations = np.bincount(targets, minlength=vocab_size) + 0.1 * allowed
        self._continuation = continuations / continuations.sum()

    def probabilities(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """(targets,) probabilities of the targets given their neighbors, both (targets,) ids."""
        keys = contexts.astype(np.int64) * self._size + targets
        indices = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        counts = np.where(self._keys[indices] == keys, self._counts[indices], 0)
        totals, backoff = self._totals[contexts], self._continuation[targets]
        mass = np.maximum(counts - self._discount, 0) + self._discount * self._num_successors[contexts] * backoff
        return np.where(totals > 0, mass / np.maximum(totals, 1), backoff)


@torch.no_grad()
def heldout_losses(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, dict[str, float]]:
    """Masked-LM loss of the model on the held-out text, and losses of the baselines on the same targets."""
    objective = MaskedLM(tokenizer, max_length=MAX_LENGTH, seed=0, packing=True)
    train_documents, heldout_documents = load_documents("demo").split(HELD_OUT_FRACTION)
    train_set = ExampleSet.build(objective.examples(train_documents))
    heldout_set = ExampleSet.build(objective.examples(heldout_documents))
    sequences = [train_set[0, index]["input_ids"] for index in range(len(train_set))]
    vocab_size, special_ids = len(tokenizer), tokenizer.all_special_ids
    left_bigrams, right_bigrams = (
        BigramModel(sequences, vocab_size, special_ids, left=is_left) for is_left in (True, False)
    )
    frequencies = np.bincount(np.concatenate(sequences), minlength=vocab_size) + 0.5
    frequencies[special_ids] = 0
    total_loss, num_targets = 0.0, 0
    baseline_losses = np.zeros(3)  # of unigrams, left bigrams and right bigrams
    for start in range(0, len(heldout_set), _BATCH_SIZE):
        stop = min(start + _BATCH_SIZE, len(heldout_set))
        batch = objective.collate([heldout_set[0, index] for index in range(start, stop)])
        labels = batch["labels"].numpy()
        tokens = np.where(labels == IGNORE_INDEX, batch["input_ids"].numpy(), labels)
        row, column = np.nonzero(labels != IGNORE_INDEX)
        targets = labels[row, column]
        probabilities = (
            frequencies[targets] / frequencies.sum(),
            left_bigrams.probabilities(tokens[row, column - 1], targets),
            right_bigrams.probabilities(tokens[row, column + 1], targets),
        )
        baseline_losses -= np.log(probabilities).sum(1)
        total_loss += float(model(**batch).loss) * len(targets)
        num_targets += len(targets)
    unigram_loss, *bigram_losses = (baseline_losses / num_targets).tolist()
    return total_loss / num_targets, {"unigrams": unigram_loss, "bigrams": min(bigram_losses)}


@torch.no_grad()
def fill_mask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, number: int = 4) -> list[str]:
    """The most probable tokens for the mask in a text."""
    inputs = tokenizer(text, return_tensors="pt")
    position = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    token_ids = model(**inputs).logits[0, position].topk(number).indices.tolist()
    return [tokenizer.decode([token_id]) for token_id in token_ids]
