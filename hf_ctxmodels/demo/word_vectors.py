"""word2vec on the demo text: nearest neighbors, correlation with human ratings, and a plot."""

from collections.abc import Sequence

import numpy as np
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.data.demo_corpus import demo_documents, rated_words
from hf_ctxmodels.demo.demo_runner import DemoReport, DemoRunner, Result
from hf_ctxmodels.demo.plots import plot_word_map
from hf_ctxmodels.evaluation import WordSpace, evaluate_similarity

PLOT_FILE = "word_map.png"
RECIPE = "word2vec_demo"
QUERY_WORDS = ("war", "chemistry", "president", "island")
NUM_NEIGHBORS = 6
WORD_GROUPS = {
    "countries": ("france", "germany", "italy", "russia", "china", "japan"),
    "offices": ("king", "emperor", "president", "minister", "governor", "general"),
    "sciences": ("physics", "chemistry", "biology", "mathematics", "psychology", "medicine"),
    "nature": ("river", "mountain", "island", "forest", "lake", "coast"),
    "months": ("january", "march", "june", "august", "october", "december"),
}
_WINDOW = 5
_MAX_CONTEXTS = 2000


def show_word_vectors(report: DemoReport, runner: DemoRunner, epochs: int) -> None:
    """Train word vectors, show nearest neighbors, compare them with human ratings, and plot them."""
    tokenizer, model = runner.folder / "words-tokenizer", runner.folder / "word2vec"
    runner.run(
        report,
        *("words-tokenizer", "data", "tokenizer", "--family", "word2vec", "--dataset", "demo", "--vocab_size", 10000),
        *("--validation_fraction", 0),
        output=tokenizer,
    )
    runner.run(
        report,
        *("word2vec", "pretrain", "--recipe", RECIPE, "--tokenizer", tokenizer, "--num_train_epochs", epochs),
        output=model,
    )
    vectors = WordVectors.from_model(AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model))
    space = WordSpace(vectors)
    report.line(f"{len(vectors.words):,} words; nearest neighbors by cosine:")
    report.rows(
        [
            (f"  {word}", ", ".join(neighbor for neighbor, _ in space.most_similar(word, NUM_NEIGHBORS)))
            for word in QUERY_WORDS
            if word in space
        ]
    )
    show_ratings(report, space, AutoTokenizer.from_pretrained(model))
    plotted = {word: group for group, words in WORD_GROUPS.items() for word in words if word in space}
    if len(plotted) > 2:
        indices = [space.index(word) for word in plotted]
        title = "word2vec on 440,000 words: principal components of 30 words"
        plot_word_map(
            space.unit_vectors[indices].numpy(), list(plotted), list(plotted.values()), title, runner.folder / PLOT_FILE
        )


def show_ratings(report: DemoReport, space: WordSpace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare cosines with human ratings; the baseline is a co-occurrence matrix without training."""
    words = space.vectors.words
    baseline_space = WordSpace(
        WordVectors(words, ppmi(cooccurrences(tokenizer, words)), lower_case=space.vectors.lower_case)
    )
    result = evaluate_similarity(space, rated_words())
    baseline = evaluate_similarity(baseline_space, rated_words())
    report.result(
        Result("correlation with human ratings of words", result.spearman, {"co-occurrence": baseline.spearman}),
        f"Spearman correlation over the {result.covered} of {result.pairs} pairs of WordSim-353 whose words are in the "
        f"text; co-occurrence: positive pointwise mutual information in windows of {_WINDOW} words, same text",
    )


def ppmi(counts: np.ndarray) -> np.ndarray:
    """Positive pointwise mutual information of (words, contexts) counts (Levy & Goldberg 2014, section 3.2)."""
    joint = counts / counts.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    ratios = np.divide(joint, independent, out=np.ones_like(joint), where=independent > 0)
    return np.log(np.maximum(ratios, 1))


def cooccurrences(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> np.ndarray:
    """(words, contexts) float32 counts of the most frequent words in a window of five words around every word."""
    ids = np.array(tokenizer.convert_tokens_to_ids(list(words)))
    num_contexts = min(_MAX_CONTEXTS, len(ids))
    column = np.full(len(tokenizer), -1)
    column[ids[:num_contexts]] = np.arange(num_contexts)
    counts = np.zeros((len(tokenizer), num_contexts), dtype=np.float32)
    for document in demo_documents():
        tokens = np.array(tokenizer(" ".join(document), add_special_tokens=False)["input_ids"])
        for distance in range(1, _WINDOW + 1):
            left, right = tokens[:-distance], tokens[distance:]
            for centers, contexts in ((left, right), (right, left)):
                is_context = column[contexts] >= 0
                np.add.at(counts, (centers[is_context], column[contexts[is_context]]), 1)
    return counts[ids]
