"""Suites `static` and `static-quality`: speed and quality of word vectors compared with gensim."""

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

from benchmarks.settings import Settings
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
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import AdaGradOptions, ConstantOptions, LinearOptions, LoopArguments, SGDOptions
from hf_ctxmodels.training.loop import TrainingLoop

HIDDEN_SIZE, WINDOW, NEGATIVE, SUBSAMPLING, MIN_COUNT = 100, 5, 5, 1e-3, 5
MAX_LENGTH, BATCH_SIZE = 1000, 128
LEARNING_RATES = {"skip-gram": 0.025, "cbow": 0.05}  # the defaults of the released code
MAX_CANDIDATES = 30_000  # most frequent words that answer analogies
SIMILARITY_TESTS = ("EN-WS-353-ALL.txt", "EN-SIMLEX-999.txt", "EN-MEN-TR-3k.txt")
ANALOGY_TEST = "questions-words.txt.gz"
SPEED = (
    f"word vectors of {HIDDEN_SIZE} dimensions, window {WINDOW}, {NEGATIVE} negatives, one epoch over tokenized text "
    "with the training loop of `pretrain`; the reference is gensim with one worker per thread; interleaved. Words are "
    "counted before subsampling, without unknown words."
)
QUALITY = (
    f"word vectors of {HIDDEN_SIZE} dimensions trained on the same text, window {WINDOW}, {NEGATIVE} negatives; "
    "Spearman correlation on word similarity, and accuracy on analogies (3CosAdd); mean and standard deviation over "
    "seeds."
)


@dataclass(frozen=True)
class Text:
    """Training text.

    Attributes:
        tokenizer: Tokenizer with the vocabulary of the text.
        documents: Documents of the text; each iteration reads them again.
        sentences: Words of the training sequences, without unknown words, as gensim expects them.
    """

    tokenizer: PreTrainedTokenizerBase
    documents: Any
    sentences: list[list[str]]

    @classmethod
    def load(cls, dataset: str) -> "Text":
        """Read the text, build the vocabulary and tokenize."""
        documents = load_documents(dataset)
        tokenizer: Any = get_family("word2vec").tokenizer
        tokenizer = tokenizer.train(documents.texts(), vocab_size=1_000_000, min_count=MIN_COUNT)
        objective: Any = get_family("word2vec").objectives["skip-gram"](tokenizer, max_length=MAX_LENGTH, seed=0)
        words = tokenizer.words
        sentences = [[words[i] for i in example["input_ids"]] for example in objective.examples(documents)]
        return cls(tokenizer, documents, sentences)

    @property
    def words(self) -> int:
        """Number of words, without unknown words."""
        return sum(map(len, self.sentences))


@dataclass(frozen=True)
class Speed:
    """One row of the table: words per second of all runs."""

    architecture: str
    words: int
    hf_ctxmodels: list[float]
    gensim: list[float]


@dataclass(frozen=True)
class Quality:
    """One row of the table: results of all seeds and covered questions by test, and training time (s)."""

    method: str
    values: dict[str, list[float]]
    coverage: dict[str, str]
    seconds: float


def run_speed(settings: Settings) -> Iterator[Speed]:
    """Time `repeats` epochs of each architecture in both implementations in turn."""
    text = Text.load(settings.dataset)
    for architecture in LEARNING_RATES:
        if settings.select_row(architecture):
            examples = _examples("word2vec", architecture, text, seed=0)
            hf_ctxmodels, gensim = [], []
            for seed in range(settings.repeats):
                gensim.append(text.words / _train_gensim(text, architecture, 1, seed)[1])
                hf_ctxmodels.append(text.words / _train("word2vec", *examples, text, 1, seed)[1])
            yield Speed(architecture, text.words, hf_ctxmodels, gensim)


def run_quality(settings: Settings) -> Iterator[Quality]:
    """Train on the same text with `repeats` seeds, and evaluate on the files `SIMILARITY_TESTS` and `ANALOGY_TEST`.

    GloVe has five times as many epochs over its co-occurrence matrix as word2vec has over the text.
    """
    if settings.word_tests is None:
        raise CtxError(
            "The suite static-quality needs test files.", location="--word_tests", hint="give their directory."
        )
    text, epochs = Text.load(settings.dataset), settings.epochs
    for method in [
        f"{implementation}, {name}" for name in LEARNING_RATES for implementation in ("hf_ctxmodels", "gensim")
    ] + ["hf_ctxmodels, GloVe"]:
        if not settings.select_row(method):
            continue
        implementation, _, architecture = method.partition(", ")
        values: dict[str, list[float]] = {}
        seconds, coverage = [], {}
        for seed in range(settings.repeats):
            if implementation == "gensim":
                vectors, training_seconds = _train_gensim(text, architecture, epochs, seed)
            elif architecture in LEARNING_RATES:
                examples = _examples("word2vec", architecture, text, seed)
                vectors, training_seconds = _train("word2vec", *examples, text, epochs, seed)
            else:
                vectors, training_seconds = _train(
                    "glove", *_examples("glove", "cooccurrence", text, seed), text, 5 * epochs, seed
                )
            seconds.append(training_seconds)
            for name, (value, covered) in _evaluate(vectors, Path(settings.word_tests)).items():
                values.setdefault(name, []).append(value)
                coverage[name] = covered
        yield Quality(method, values, coverage, median(seconds))


def speed_table(results: Sequence[Speed]) -> str:
    """Format results as Markdown."""
    lines = ["| architecture | words | hf_ctxmodels, words/s | gensim, words/s | ratio |", "|---|---|---|---|---|"]
    for result in results:
        ratios = [rate / gensim_rate for rate, gensim_rate in zip(result.hf_ctxmodels, result.gensim, strict=True)]
        cells = [
            result.architecture,
            f"{result.words:,}",
            f"{median(result.hf_ctxmodels):,.0f}",
            f"{median(result.gensim):,.0f}",
            f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quality_table(results: Sequence[Quality]) -> str:
    """Format results as Markdown."""
    names = list(results[0].values) if results else []
    columns = [f"{name} ({results[0].coverage[name]})" for name in names]
    lines = [f"| method | {' | '.join(columns)} | training |", "|---" * (len(names) + 2) + "|"]
    for result in results:
        cells = [
            f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}" for values in result.values.values()
        ]
        lines.append(f"| {result.method} | {' | '.join(cells)} | {result.seconds:,.0f} s |")
    return "\n".join(lines)


def _examples(family: str, name: str, text: Text, seed: int) -> tuple[Objective, ExampleSet]:
    objective = get_family(family).objectives[name](text.tokenizer, max_length=MAX_LENGTH, seed=seed)
    return objective, ExampleSet.build(objective.examples(text.documents))


def _train(
    family: str, objective: Objective, examples: ExampleSet, text: Text, epochs: int, seed: int
) -> tuple[WordVectors, float]:
    """Train with this package; returns the vectors and the training time (s)."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    is_word2vec = family == "word2vec"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        loop = LoopArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_batch_size=BATCH_SIZE if is_word2vec else 16,
            optimizer=SGDOptions() if is_word2vec else AdaGradOptions(),
            dataloader_workers=0,
            learning_rate=LEARNING_RATES[objective.config_fields["architecture"]] if is_word2vec else 0.05,
            lr_scheduler=LinearOptions() if is_word2vec else ConstantOptions(),
            max_grad_norm=0.0,
            logging_steps=20,
            save_steps=0,
            seed=seed,
        )
        accelerator = make_accelerator(loop)
        # The text is a thousandth of the size of the paper's, so that counts reach the full weight earlier.
        options: dict[str, Any] = {"update_threads": torch.get_num_threads()} if is_word2vec else {"x_max": 10.0}
        sizes = {"vocab_size": len(text.tokenizer), "hidden_size": HIDDEN_SIZE}
        model = AutoModelForPreTraining.from_config(
            get_family(family).config(**sizes, **options, **objective.config_fields)
        )
        result = TrainingLoop(model, examples, objective.collate, loop, accelerator).run()
    return WordVectors.from_model(model, text.tokenizer), result.tokens / (result.tokens_per_second or float("nan"))


def _train_gensim(text: Text, architecture: str, epochs: int, seed: int) -> tuple[WordVectors, float]:
    """Train with gensim; returns the vectors and the training time (s)."""
    model = gensim_models().Word2Vec(
        vector_size=HIDDEN_SIZE,
        window=WINDOW,
        negative=NEGATIVE,
        sample=SUBSAMPLING,
        sg=int(architecture == "skip-gram"),
        alpha=LEARNING_RATES[architecture],
        min_alpha=0.0,
        min_count=1,
        workers=torch.get_num_threads(),
        seed=seed,
    )
    model.build_vocab(text.sentences)
    start = time.perf_counter()
    model.train(text.sentences, total_examples=len(text.sentences), epochs=epochs)
    seconds = time.perf_counter() - start
    vectors = WordVectors.from_gensim(model.wv)
    vectors.lower_case = True
    return vectors, seconds


def _evaluate(vectors: WordVectors, folder: Path) -> dict[str, tuple[float, str]]:
    """Value and coverage of all tests."""
    space = WordSpace(vectors, MAX_CANDIDATES)
    results = {}
    for file in SIMILARITY_TESTS:
        result = evaluate_similarity(space, read_similarities(folder / file))
        results[file.removesuffix(".txt")] = (result.spearman, f"{result.covered} of {result.pairs}")
    answers = evaluate_analogies(space, read_analogies(folder / ANALOGY_TEST))
    _, covered, total = answers.total
    results["analogies"] = (answers.accuracy, f"{covered:,} of {total:,}")
    return results
