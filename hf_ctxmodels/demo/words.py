"""word2vec on the demo text: neighbours, agreement with people, a map of words."""

from collections.abc import Sequence

import numpy as np
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from hf_ctxmodels.analysis import WordSpace, evaluate_analogies, evaluate_similarity, read_analogies
from hf_ctxmodels.data.demo import ANALOGIES, demo_documents, demo_file, rated_words
from hf_ctxmodels.demo.pictures import draw_word_map
from hf_ctxmodels.demo.screen import Result, Screen
from hf_ctxmodels.demo.workshop import Workshop
from hf_ctxmodels.io.word_vectors import WordVectors

PICTURE = "word_map.png"
RECIPE = "word2vec_demo"
LOOKED_UP = ("war", "chemistry", "president", "island")
NEIGHBOURS = 6
MAP = {
    "countries": ("france", "germany", "italy", "russia", "china", "japan"),
    "offices": ("king", "emperor", "president", "minister", "governor", "general"),
    "sciences": ("physics", "chemistry", "biology", "mathematics", "psychology", "medicine"),
    "nature": ("river", "mountain", "island", "forest", "lake", "coast"),
    "months": ("january", "march", "june", "august", "october", "december"),
}
_WINDOW = 5
_CONTEXTS = 2000


def show_words(screen: Screen, shop: Workshop, epochs: int) -> None:
    """Train word vectors, look words up, hold the vectors against people's ratings, draw the map."""
    tokenizer, model = shop.folder / "words-tokenizer", shop.folder / "word2vec"
    shop.run(
        screen,
        *("words-tokenizer", "train-tokenizer", "--family", "word2vec", "--dataset", "demo", "--vocab_size", 10000),
        *("--validation_fraction", 0),
        output=tokenizer,
    )
    shop.run(
        screen,
        *("word2vec", "pretrain", "--recipe", RECIPE, "--tokenizer", tokenizer, "--num_train_epochs", epochs),
        output=model,
    )
    vectors = WordVectors.of_model(AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model))
    space = WordSpace(vectors)
    screen.line(f"{len(vectors.words):,} words; the nearest of some, by the cosine of their vectors:")
    screen.rows(
        [
            (f"  {word}", ", ".join(near for near, _ in space.most_similar(word, NEIGHBOURS)))
            for word in LOOKED_UP
            if word in space
        ]
    )
    show_tests(screen, space, AutoTokenizer.from_pretrained(model))
    chosen = {word: group for group, words in MAP.items() for word in words if word in space}
    if len(chosen) > 2:
        places = [space.place(word) for word in chosen]
        title = "word2vec on 440,000 words: the two main directions of 30 words"
        draw_word_map(space.unit[places].numpy(), list(chosen), list(chosen.values()), title, shop.folder / PICTURE)


def show_tests(screen: Screen, space: WordSpace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Similarity and analogies, beside vectors of co-occurrence counts."""
    vectors = space.vectors
    matrix = cooccurrences(tokenizer, vectors.words)
    counted = WordSpace(WordVectors(vectors.words, matrix, lower_case=vectors.lower_case))
    rated, by_counts = (evaluate_similarity(each, rated_words()) for each in (space, counted))
    screen.result(
        Result(
            "agreement with people's ratings of words", rated.spearman, {"co-occurrence counts": by_counts.spearman}
        ),
        f"rank correlation over the {rated.covered} of {rated.pairs} pairs of WordSim-353 whose words are in the text; "
        f"counts: cosine of how often each word stands within {_WINDOW} words of the others, in the same text",
    )
    questions = read_analogies(demo_file(ANALOGIES))
    ours, counts = (evaluate_analogies(each, questions) for each in (space, counted))
    _, covered, every = ours.total
    baselines = {"co-occurrence counts": counts.accuracy, "guessing": 1 / len(vectors.words)}
    screen.result(
        Result("analogies answered", ours.accuracy, baselines, form=".1%"),
        f"share of the {covered:,} of {every:,} questions of Mikolov et al. 2013 whose words are in the text, such as "
        "man : king = woman : queen; the answer is one of all words",
    )


def cooccurrences(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> np.ndarray:
    """(words, contexts) float32: how often a word stands within five words of each of the most frequent ones."""
    ids = np.array(tokenizer.convert_tokens_to_ids(list(words)))
    column = np.full(len(tokenizer), -1)
    column[ids[:_CONTEXTS]] = np.arange(len(ids[:_CONTEXTS]))
    counts = np.zeros((len(tokenizer), min(_CONTEXTS, len(ids))), dtype=np.float32)
    for document in demo_documents():
        tokens = np.array(tokenizer(" ".join(document), add_special_tokens=False)["input_ids"])
        for distance in range(1, _WINDOW + 1):
            for one, other in ((tokens[:-distance], tokens[distance:]), (tokens[distance:], tokens[:-distance])):
                near = column[other] >= 0
                np.add.at(counts, (one[near], column[other[near]]), 1)
    return counts[ids]
