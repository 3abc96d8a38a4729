"""word2vec on the demo text: neighbours, agreement with people, a map of words."""

from collections.abc import Sequence

import numpy as np
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.data.demo_corpus import demo_documents, rated_words
from hf_ctxmodels.demo.pictures import draw_word_map
from hf_ctxmodels.demo.screen import Result, Screen
from hf_ctxmodels.demo.workshop import Workshop
from hf_ctxmodels.evaluation import WordSpace, evaluate_similarity

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
    vectors = WordVectors.from_model(AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model))
    space = WordSpace(vectors)
    screen.line(f"{len(vectors.words):,} words; the nearest of some, by the cosine of their vectors:")
    screen.rows(
        [
            (f"  {word}", ", ".join(near for near, _ in space.most_similar(word, NEIGHBOURS)))
            for word in LOOKED_UP
            if word in space
        ]
    )
    show_ratings(screen, space, AutoTokenizer.from_pretrained(model))
    chosen = {word: group for group, words in MAP.items() for word in words if word in space}
    if len(chosen) > 2:
        places = [space.index(word) for word in chosen]
        title = "word2vec on 440,000 words: the two main directions of 30 words"
        draw_word_map(space.unit[places].numpy(), list(chosen), list(chosen.values()), title, shop.folder / PICTURE)


def show_ratings(screen: Screen, space: WordSpace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Hold the cosines of words against people's ratings, beside those of counts without any learning."""
    words = space.vectors.words
    counted = WordSpace(WordVectors(words, ppmi(cooccurrences(tokenizer, words)), lower_case=space.vectors.lower_case))
    rated, by_counts = (evaluate_similarity(each, rated_words()) for each in (space, counted))
    screen.result(
        Result("agreement with people's ratings of words", rated.spearman, {"co-occurrence": by_counts.spearman}),
        f"rank correlation over the {rated.covered} of {rated.pairs} pairs of WordSim-353 whose words are in the text; "
        f"co-occurrence: positive pointwise mutual information with the words at most {_WINDOW} words away, same text",
    )


def ppmi(counts: np.ndarray) -> np.ndarray:
    """Positive pointwise mutual information of (words, contexts) counts (Levy & Goldberg 2014, section 3.2)."""
    shares = counts / counts.sum()
    expected = shares.sum(1, keepdims=True) * shares.sum(0, keepdims=True)
    ratios = np.divide(shares, expected, out=np.ones_like(shares), where=expected > 0)
    return np.log(np.maximum(ratios, 1))


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
