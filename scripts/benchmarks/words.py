"""The suites of word vectors against gensim: words per second, and what the vectors are worth."""

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForPreTraining, PreTrainedTokenizerBase

from hf_ctxmodels.conversion.word_vectors import WordVectors, gensim_models
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleSet, load_documents
from hf_ctxmodels.evaluation import (
    WordSpace,
    evaluate_analogies,
    evaluate_similarity,
    read_analogies,
    read_similarities,
)
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training.arguments import AdaGradOptions, ConstantOptions, LinearOptions, LoopArguments, SGDOptions
from hf_ctxmodels.training.loop import make_accelerator, train

WIDTH, WINDOW, NEGATIVE, SUBSAMPLING, MIN_COUNT, ROW, BATCH = 100, 5, 5, 1e-3, 5, 1000, 128
RATES = {"skip-gram": 0.025, "cbow": 0.05}  # the defaults of the released code
SEARCHED = 30_000
SIMILARITY_TESTS = ("EN-WS-353-ALL.txt", "EN-SIMLEX-999.txt", "EN-MEN-TR-3k.txt")
ANALOGY_TEST = "questions-words.txt.gz"
SPEED = (
    f"word vectors of {WIDTH} dimensions, window {WINDOW}, {NEGATIVE} negatives, one pass over text that is split into "
    "words already, through the training loop (`pretrain.py`); the peer is gensim with as many workers as threads; in "
    "turn. Words are those of the vocabulary, before frequent ones are dropped."
)
QUALITY = (
    f"word vectors of {WIDTH} dimensions of the same text, window {WINDOW}, {NEGATIVE} negatives; Spearman's rank "
    "correlation on pairs of words, and accuracy on analogies (3CosAdd); mean and standard deviation over the seeds."
)


@dataclass(frozen=True)
class Text:
    """Text for both sides.

    Attributes:
        tokenizer: of its words.
        documents: of the text; read anew by every iteration.
        rows: the known words of rows of text.
    """

    tokenizer: PreTrainedTokenizerBase
    documents: Any
    rows: list[list[str]]

    @classmethod
    def load(cls, dataset: str) -> "Text":
        """Read, count and split."""
        documents = load_documents(dataset)
        tokenizer: Any = get_family("word2vec").tokenizer
        tokenizer = tokenizer.train(documents.texts(), vocab_size=1_000_000, min_count=MIN_COUNT)
        objective: Any = get_family("word2vec").objectives["skip-gram"](tokenizer, max_length=ROW, seed=0)
        words = tokenizer.words
        rows = [[words[number] for number in row["input_ids"]] for row in objective.examples(documents)]
        return cls(tokenizer, documents, rows)

    @property
    def words(self) -> int:
        """Known words of the text."""
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Speed:
    """One line of the table: words per second of every run, and its ratio, ours by gensim's."""

    architecture: str
    words: int
    ours: list[float]
    gensim: list[float]


@dataclass(frozen=True)
class Quality:
    """One line of the table: name of a test -> value of every seed, and how much of the test is covered."""

    method: str
    values: dict[str, list[float]]
    covered: dict[str, str]
    seconds: float


def run_speed(
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    attention: str,
    only: str | None = None,
    *,
    dataset: str = "demo",
) -> Iterator[Speed]:
    """Time one pass of either side in turn.

    Args:
        repeats: Passes of each side.
        only: Part of an architecture's name.
        dataset: Text.
        device, dtype, attention: Not used.
    """
    text = Text.load(dataset)
    for architecture in RATES:
        if only is None or only in architecture:
            examples = _examples("word2vec", architecture, text, seed=0)
            ours, peer = [], []
            for seed in range(repeats):
                peer.append(text.words / _train_gensim(text, architecture, 1, seed)[1])
                ours.append(text.words / _train("word2vec", *examples, text, 1, seed)[1])
            yield Speed(architecture, text.words, ours, peer)


def run_quality(
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    attention: str,
    only: str | None = None,
    *,
    dataset: str = "demo",
    word_tests: str | None = None,
    epochs: int = 5,
) -> Iterator[Quality]:
    """Train on the same text with several seeds, and test.

    Args:
        repeats: Seeds.
        only: Part of a method's name.
        dataset: Text.
        word_tests: Directory with the tests `SIMILARITY_TESTS` and `ANALOGY_TEST`.
        epochs: Passes over the text; GloVe makes five times as many over its cells.
        device, dtype, attention: Not used.
    """
    if word_tests is None:
        raise CtxError(
            "Word vectors are to be tested, but on what?", location="--word_tests", hint="name the directory."
        )
    text = Text.load(dataset)
    for method in [f"{side}, {name}" for name in RATES for side in ("ours", "gensim")] + ["ours, GloVe"]:
        if only is not None and only not in method:
            continue
        side, _, architecture = method.partition(", ")
        values: dict[str, list[float]] = {}
        seconds, covered = [], {}
        for seed in range(repeats):
            if side == "gensim":
                vectors, spent = _train_gensim(text, architecture, epochs, seed)
            elif architecture in RATES:
                examples = _examples("word2vec", architecture, text, seed)
                vectors, spent = _train("word2vec", *examples, text, epochs, seed)
            else:
                vectors, spent = _train(
                    "glove", *_examples("glove", "cooccurrence", text, seed), text, 5 * epochs, seed
                )
            seconds.append(spent)
            for name, (value, share) in _test(vectors, Path(word_tests)).items():
                values.setdefault(name, []).append(value)
                covered[name] = share
        yield Quality(method, values, covered, median(seconds))


def speed_table(results: Sequence[Speed]) -> str:
    """Render results."""
    lines = ["| architecture | words | ours, words/s | gensim, words/s | ratio |", "|---|---|---|---|---|"]
    for each in results:
        ratios = [ours / peer for ours, peer in zip(each.ours, each.gensim)]
        cells = [
            each.architecture,
            f"{each.words:,}",
            f"{median(each.ours):,.0f}",
            f"{median(each.gensim):,.0f}",
            f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quality_table(results: Sequence[Quality]) -> str:
    """Render results."""
    names = list(results[0].values) if results else []
    covered = [f"{name} ({results[0].covered[name]})" for name in names]
    lines = [f"| method | {' | '.join(covered)} | training |", "|---" * (len(names) + 2) + "|"]
    for each in results:
        cells = [
            f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}" for values in each.values.values()
        ]
        lines.append(f"| {each.method} | {' | '.join(cells)} | {each.seconds:,.0f} s |")
    return "\n".join(lines)


def _examples(family: str, name: str, text: Text, seed: int) -> tuple[Objective, ExampleSet]:
    objective = get_family(family).objectives[name](text.tokenizer, max_length=ROW, seed=seed)
    return objective, ExampleSet.build(objective.examples(text.documents))


def _train(
    family: str, objective: Objective, examples: ExampleSet, text: Text, epochs: int, seed: int
) -> tuple[WordVectors, float]:
    """Our vectors, and the seconds of training alone."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    word2vec = family == "word2vec"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        loop = LoopArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_batch_size=BATCH if word2vec else 16,
            optimizer=SGDOptions() if word2vec else AdaGradOptions(),
            dataloader_workers=0,
            learning_rate=RATES[objective.config_fields["architecture"]] if word2vec else 0.05,
            lr_scheduler=LinearOptions() if word2vec else ConstantOptions(),
            max_grad_norm=0.0,
            logging_steps=20,
            save_steps=0,
            seed=seed,
        )
        accelerator = make_accelerator(loop)
        # The text is a thousandth of the paper's, so counts that deserve the full weight are smaller.
        own: dict[str, Any] = {"update_threads": torch.get_num_threads()} if word2vec else {"x_max": 10.0}
        sizes = {"vocab_size": len(text.tokenizer), "hidden_size": WIDTH}
        model = AutoModelForPreTraining.from_config(
            get_family(family).config(**sizes, **own, **objective.config_fields)
        )
        result = train(model, examples, objective.collate, loop, accelerator)
    return WordVectors.from_model(model, text.tokenizer), result.tokens / (result.tokens_per_second or float("nan"))


def _train_gensim(text: Text, architecture: str, epochs: int, seed: int) -> tuple[WordVectors, float]:
    """gensim's vectors, and the seconds of training alone."""
    model = gensim_models().Word2Vec(
        vector_size=WIDTH,
        window=WINDOW,
        negative=NEGATIVE,
        sample=SUBSAMPLING,
        sg=int(architecture == "skip-gram"),
        alpha=RATES[architecture],
        min_alpha=0.0,
        min_count=1,
        workers=torch.get_num_threads(),
        seed=seed,
    )
    model.build_vocab(text.rows)
    begin = time.perf_counter()
    model.train(text.rows, total_examples=len(text.rows), epochs=epochs)
    seconds = time.perf_counter() - begin
    vectors = WordVectors.from_gensim(model.wv)
    vectors.lower_case = True
    return vectors, seconds


def _test(vectors: WordVectors, folder: Path) -> dict[str, tuple[float, str]]:
    """Name of a test -> value, and covered of all."""
    space = WordSpace(vectors, SEARCHED)
    found = {}
    for file in SIMILARITY_TESTS:
        result = evaluate_similarity(space, read_similarities(folder / file))
        found[file.removesuffix(".txt")] = (result.spearman, f"{result.covered} of {result.pairs}")
    answers = evaluate_analogies(space, read_analogies(folder / ANALOGY_TEST))
    _, covered, every = answers.total
    found["analogies"] = (answers.accuracy, f"{covered:,} of {every:,}")
    return found
