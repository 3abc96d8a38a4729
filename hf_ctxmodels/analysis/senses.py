"""Occurrences of words over a corpus: their vectors by layer, maps of them, and nearest words in context."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.architectures.word_alignment import Sentence, split_words
from hf_ctxmodels.architectures.word_encoder import EncodedCorpus, WordEncoder
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError, require_packages
from hf_ctxmodels.core.flags import check_choice

Projection = Literal["pca", "umap"]

_CONTEXT_WORDS = 12  # words before and after an occurrence
_MAX_SCORES = 2**24  # cosines in memory at the same time


class Occurrence(NamedTuple):
    """A word, or several consecutive ones, of a sentence, and optionally its sense or tag."""

    sentence: int
    start: int
    stop: int
    label: str = ""


def find_occurrences(
    sentences: Sequence[Sentence],
    word: str,
    max_occurrences: int | None = None,
    seed: int = 0,
    *,
    tags: Sequence[Sequence[str]] | None = None,
) -> list[Occurrence]:
    """The occurrences of a word, in any case, in order; a random sample if there are more than `max_occurrences`. The
    `tags` of all words, if any, are their labels.

    Raises:
        CtxError: The word does not occur.
    """
    occurrences = [
        Occurrence(number, index, index + 1, tags[number][index] if tags else "")
        for number, sentence in enumerate(sentences)
        for index, text in enumerate(split_words(sentence))
        if text.casefold() == word.casefold()
    ]
    if not occurrences:
        raise CtxError(f"The word {word!r} does not occur.", hint="use another word, or more text.")
    return sample_occurrences(occurrences, max_occurrences, seed)


def sample_occurrences(occurrences: list[Occurrence], size: int | None, seed: int = 0) -> list[Occurrence]:
    """A random sample in order, or all if there are no more than `size`."""
    if size is None or len(occurrences) <= size:
        return occurrences
    return sorted(random.Random(seed).sample(occurrences, size))


def encode_occurrences(
    encoder: WordEncoder,
    sentences: Sequence[Sentence],
    occurrences: Sequence[Occurrence],
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Encode the sentences with occurrences.

    Returns:
        (occurrences, layers, hidden) mean vectors of their words, and (occurrences,) whether they have tokens.
    """
    rows_by_sentence: dict[int, list[int]] = defaultdict(list)
    for row, occurrence in enumerate(occurrences):
        rows_by_sentence[occurrence.sentence].append(row)
    vectors = torch.zeros(len(occurrences), len(encoder.layers), encoder.hidden_size, dtype=dtype)
    has_tokens = torch.zeros(len(occurrences), dtype=torch.bool)
    encoded = encoder.encode(sentences[number] for number in rows_by_sentence)
    bar = progress_bar(encoded, "encoding", unit="sentences", total=len(rows_by_sentence))
    for sentence, rows in zip(bar, rows_by_sentence.values()):
        for row in rows:
            words = slice(occurrences[row].start, occurrences[row].stop)
            is_encoded = sentence.has_tokens[words]
            has_tokens[row] = bool(is_encoded.any())
            if has_tokens[row]:
                vectors[row] = sentence.vectors[words][is_encoded].mean(0)
    return vectors, has_tokens


def encode_sentences(
    encoder: WordEncoder, sentences: Sequence[Sentence], *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(sentences, layers, hidden) mean vectors of the words of sentences, and (sentences,) whether they have tokens."""
    occurrences = [Occurrence(row, 0, len(split_words(sentence))) for row, sentence in enumerate(sentences)]
    return encode_occurrences(encoder, sentences, occurrences, dtype=dtype)


def project(vectors: Tensor, method: Projection = "pca", seed: int = 0) -> Tensor:
    """Map (n, layers, hidden) vectors to (n, layers, 2), each layer separately.

    Args:
        vectors: Vectors of n > 2 occurrences.
        method: "pca", the first two principal components; or "umap" (McInnes et al. 2018), which preserves
            neighborhoods and needs the extra `umap`.
        seed: Seed of UMAP.

    Raises:
        CtxError: There are fewer than 3 occurrences, the method is unknown, or its package is missing.
    """
    check_choice(get_args(Projection), method=method)
    if len(vectors) < 3:
        raise CtxError(f"{len(vectors)} occurrences cannot be mapped.", hint="use more text, or a frequent word.")
    maps = []
    for layer in vectors.float().unbind(1):
        if method == "umap":
            maps.append(_umap(layer, seed))
            continue
        centered = layer - layer.mean(0)
        components, _, _ = torch.linalg.svd(centered.T, full_matrices=False)
        components = F.pad(components[:, :2], (0, max(0, 2 - components.shape[1])))
        largest = components.abs().argmax(0, keepdim=True)
        maps.append(centered @ (components * components.gather(0, largest).sign()))  # the sign of an axis is arbitrary
    return torch.stack(maps, 1)


def _umap(vectors: Tensor, seed: int) -> Tensor:
    require_packages("umap", extra="umap", location='method="umap"')
    from umap import UMAP

    reducer = UMAP(n_components=2, n_neighbors=min(15, len(vectors) - 1), metric="cosine", random_state=seed, n_jobs=1)
    return torch.from_numpy(reducer.fit_transform(vectors.numpy())).float()


def neighbor_agreement(vectors: Tensor, labels: Sequence[str]) -> Tensor:
    """(layers,) fraction of occurrences whose nearest other occurrence, by cosine, has the same label; for (n, layers,
    hidden) vectors and n labels. Raises CtxError for a single occurrence."""
    if len(labels) < 2:
        raise CtxError("A single occurrence has no neighbor.", hint="use more text, or a frequent word.")
    names = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    ids = torch.tensor([names[label] for label in labels])
    agreement = []
    for layer in F.normalize(vectors.float(), dim=-1).unbind(1):
        cosines = layer @ layer.T
        cosines.fill_diagonal_(-torch.inf)
        agreement.append((ids[cosines.argmax(1)] == ids).double().mean())
    return torch.stack(agreement)


def context_text(words: Sequence[str], occurrence: Occurrence, size: int = _CONTEXT_WORDS) -> str:
    """The words around an occurrence, which is in square brackets."""
    start, stop = max(0, occurrence.start - size), occurrence.stop + size
    text = [*words[start : occurrence.start], f"[{' '.join(words[occurrence.start : occurrence.stop])}]"]
    text += words[occurrence.stop : stop]
    return " ".join(["..."] * (start > 0) + text + ["..."] * (stop < len(words)))


def nearest_occurrences(
    corpus: EncodedCorpus, queries: Sequence[Occurrence], layer: int = -1, number: int = 10
) -> list[list[tuple[Occurrence, float]]]:
    """The words in context that are nearest to occurrences of one word each, without the words of the same sentence;
    see `nearest_to_vectors`."""
    rows = torch.tensor([int(corpus.starts[query.sentence]) + query.start for query in queries])
    return nearest_to_vectors(corpus, corpus.vectors[rows, layer], layer, number, [query.sentence for query in queries])


def nearest_to_vectors(
    corpus: EncodedCorpus, vectors: Tensor, layer: int, number: int, excluded_sentences: Sequence[int] = ()
) -> list[list[tuple[Occurrence, float]]]:
    """The words in context that are nearest to vectors, by cosine.

    Args:
        corpus: Encoded sentences.
        vectors: (queries, hidden).
        layer: Index of the layer in `corpus.vectors`.
        number: Neighbors of each query.
        excluded_sentences: For each query, the index of a sentence whose words are skipped; empty to skip none.

    Returns:
        For each query its neighbors with their cosines, the nearest first.
    """
    targets = F.normalize(vectors.float(), dim=-1)
    scores, indices = [], []
    chunk_size = max(1, _MAX_SCORES // max(len(vectors), corpus.vectors.shape[-1]))
    for start in range(0, len(corpus.vectors), chunk_size):
        chunk = slice(start, start + chunk_size)
        cosines = targets @ F.normalize(corpus.vectors[chunk, layer].float(), dim=-1).T
        cosines[:, ~corpus.has_tokens[chunk]] = -torch.inf
        for row, sentence in enumerate(excluded_sentences):
            first, last = corpus.starts[sentence : sentence + 2].tolist()
            cosines[row, max(0, first - start) : max(0, last - start)] = -torch.inf
        best = cosines.topk(min(number, cosines.shape[1]))
        scores.append(best.values)
        indices.append(best.indices + start)
    best = torch.cat(scores, 1).topk(min(number, sum(score.shape[1] for score in scores)))
    chosen = torch.cat(indices, 1).gather(1, best.indices)
    sentence_numbers = torch.searchsorted(corpus.starts, chosen, right=True) - 1
    words = chosen - corpus.starts[sentence_numbers]
    return [
        [
            (Occurrence(sentence, word, word + 1), score)
            for sentence, word, score in zip(*row, strict=True)
            if score > -torch.inf
        ]
        for row in zip(sentence_numbers.tolist(), words.tolist(), best.values.tolist())
    ]
