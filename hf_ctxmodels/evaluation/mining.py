"""Mining of translations in unaligned text by the margin of sentence vectors (Artetxe & Schwenk 2019, arXiv
1811.01136), evaluated as in BUCC (Zweigenbaum et al. 2017)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag

Margin = Literal["ratio", "distance", "absolute"]
Candidates = Literal["max", "intersection", "forward", "backward"]

_MAX_COSINES = 2**24  # cosines in memory at the same time


class Search(Protocol):
    """A search of nearest neighbors."""

    def __call__(self, queries: Tensor, vectors: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
        """(queries, neighbors) largest inner products of each query with the vectors, in descending order, and the
        indices of the vectors, -1 for a missing neighbor; at most as many neighbors as there are vectors."""


@dataclass(frozen=True)
class ExactSearch:
    """Compare all vectors, in chunks."""

    def __call__(self, queries: Tensor, vectors: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
        """Exact inner products and indices, as in `Search`."""
        chunks = queries.split(max(1, _MAX_COSINES // len(vectors)))
        results = [(chunk @ vectors.T).topk(min(neighbors, len(vectors)), dim=1) for chunk in chunks]
        return torch.cat([result.values for result in results]), torch.cat([result.indices for result in results])


@dataclass(frozen=True)
class FaissSearch:
    """Search in an index of faiss.

    Raises:
        CtxError: The package faiss-cpu is missing, or the index or the parameters are invalid.
    """

    factory: str = flag("HNSW32", "Index for faiss.index_factory: Flat is exact, HNSW32 or IVF1024,Flat approximate.")
    parameters: str = flag("", "Parameters of the search, such as efSearch=64 or nprobe=32.")

    def __call__(self, queries: Tensor, vectors: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
        """Inner products and indices from the index, as in `Search`."""
        try:
            import faiss
        except ImportError as error:
            raise CtxError(
                "The package faiss-cpu is not installed.",
                location="--search faiss",
                hint="pip install 'hf_ctxmodels[mining]', or use --search exact.",
            ) from error
        database = np.ascontiguousarray(vectors.cpu().numpy())
        try:
            index = faiss.index_factory(database.shape[1], self.factory, faiss.METRIC_INNER_PRODUCT)
            if self.parameters:
                parameter_space: Any = faiss.ParameterSpace()  # annotated without the overload for a string
                parameter_space.set_index_parameters(index, self.parameters)
            index.train(database)
        except RuntimeError as error:
            raise CtxError(
                f"faiss does not accept the index: {str(error).splitlines()[-1]}",
                location=f"--search faiss:factory={self.factory},parameters={self.parameters}",
                hint="use, for example, faiss:factory=HNSW32,parameters=efSearch=64.",
            ) from error
        index.add(database)
        results = index.search(np.ascontiguousarray(queries.cpu().numpy()), min(neighbors, len(vectors)))
        products, indices = (torch.from_numpy(result).to(queries.device) for result in results)
        return products, indices


@dataclass(frozen=True)
class MinedPair:
    """Indices of a source sentence and of the target sentence that may be its translation, and their margin."""

    source: int
    target: int
    score: float


def margin_scores(cosines: Tensor, source_means: Tensor, target_means: Tensor, margin: Margin) -> Tensor:
    """The margin of cosines, given the mean cosines of the source and the target sentences with their nearest neighbors
    (Artetxe & Schwenk 2019, section 3.1); the tensors are broadcast.

    "ratio" divides the cosine by the mean of both means (at least 1e-6: a negative one would reverse the order),
    "distance" subtracts it, and "absolute" ignores it. Raises CtxError for another margin.
    """
    check_choice(get_args(Margin), margin=margin)
    if margin == "absolute":
        return cosines
    means = (source_means + target_means) / 2
    return cosines / means.clamp(min=1e-6) if margin == "ratio" else cosines - means


def mine_pairs(
    source: Tensor,
    target: Tensor,
    *,
    neighbors: int = 4,
    margin: Margin = "ratio",
    candidates: Candidates = "max",
    search: Search | None = None,
) -> list[MinedPair]:
    """The best pairs of sentences, each sentence in at most one pair, sorted by descending margin.

    The candidates are pairs of a sentence and the one with the highest margin among its nearest neighbors: of source
    sentences ("forward"), of target sentences ("backward"), of both directions at once ("intersection"), or of any
    ("max"). Of the candidates that share a sentence, the one with the highest margin remains (section 3.2).

    Args:
        source, target: (sentences, width) vectors of the sentences of two languages.
        neighbors: Number k of nearest neighbors.
        search: Search of nearest neighbors, by default `ExactSearch`.

    Raises:
        CtxError: There are no sentences, `neighbors` is below 1, or `margin` or `candidates` is unknown.
    """
    check_choice(get_args(Candidates), candidates=candidates)
    check_range({"neighbors": neighbors}, at_least=1)
    for name, vectors in (("source", source), ("target", target)):
        if not len(vectors):
            raise CtxError(f"There are no {name} sentences.", hint="use files with at least one sentence each.")
    search = search or ExactSearch()
    source, target = F.normalize(source.float(), dim=1), F.normalize(target.float(), dim=1)
    forward, backward = search(source, target, neighbors), search(target, source, neighbors)
    source_means, target_means = _mean_cosines(*forward), _mean_cosines(*backward)
    pairs: list[dict[tuple[int, int], float]] = []
    directions = ((*forward, source_means, target_means), (*backward, target_means, source_means))
    for cosines, indices, side_means, other_means in directions:
        scores = margin_scores(cosines, side_means[:, None], other_means[indices], margin)
        scores = scores.masked_fill(indices < 0, -torch.inf)  # an approximate search may return fewer neighbors
        best = scores.max(1, keepdim=True)
        neighbor = indices.gather(1, best.indices)[:, 0].tolist()
        pairs.append({(row, neighbor[row]): score for row, score in enumerate(best.values[:, 0].tolist())})
    forward_pairs, backward_pairs = pairs[0], {(first, second): score for (second, first), score in pairs[1].items()}
    selected = {
        "forward": forward_pairs,
        "backward": backward_pairs,
        "intersection": {pair: score for pair, score in forward_pairs.items() if pair in backward_pairs},
        "max": backward_pairs | forward_pairs,
    }[candidates]
    mined: list[MinedPair] = []
    seen_sources: set[int] = set()
    seen_targets: set[int] = set()
    for (first, second), score in sorted(selected.items(), key=lambda item: (-item[1], item[0])):
        if score > -torch.inf and first not in seen_sources and second not in seen_targets:
            mined.append(MinedPair(first, second, score))
            seen_sources.add(first)
            seen_targets.add(second)
    return mined


def _mean_cosines(cosines: Tensor, indices: Tensor) -> Tensor:
    """(queries,) mean cosines with the neighbors that a search returned; a missing neighbor has the index -1."""
    is_neighbor = indices >= 0
    return cosines.masked_fill(~is_neighbor, 0.0).sum(1) / is_neighbor.sum(1).clamp(min=1)


@dataclass(frozen=True)
class MiningScores:
    """Precision, recall and F1 of mined pairs, 0 to 1."""

    precision: float
    recall: float
    f1: float


def score_pairs(
    mined: Sequence[MinedPair], gold: Collection[tuple[int, int]], threshold: float = -np.inf
) -> MiningScores:
    """Compare the mined pairs of at least this margin with the gold pairs of indices."""
    pairs = {(pair.source, pair.target) for pair in mined if pair.score >= threshold}
    correct = len(pairs & set(gold))
    precision, recall = correct / max(len(pairs), 1), correct / max(len(gold), 1)
    return MiningScores(precision, recall, 2 * correct / max(len(pairs) + len(gold), 1))


def best_threshold(mined: Sequence[MinedPair], gold: Collection[tuple[int, int]]) -> float:
    """The threshold with the highest F1 for pairs sorted by descending margin: halfway between the margins of the last
    accepted pair and the next one; infinity if no mined pair is a gold pair."""
    gold = set(gold)
    correct, best, threshold = 0, 0.0, np.inf
    for count, pair in enumerate(mined, 1):
        correct += (pair.source, pair.target) in gold
        f1 = 2 * correct / (count + len(gold))
        is_last_of_score = count == len(mined) or mined[count].score < pair.score
        if is_last_of_score and f1 > best:
            best = f1
            threshold = pair.score if count == len(mined) else (pair.score + mined[count].score) / 2
    return threshold


def lexical_vectors(source: Sequence[str], target: Sequence[str]) -> tuple[Tensor, Tensor]:
    """(sentences, 2048) TF-IDF vectors of character n-grams within words: a baseline that knows only shared names,
    numbers and cognates."""
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

    vectorizer = HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4), n_features=2048, alternate_sign=False)
    counts = vectorizer.transform([*source, *target])
    vectors = torch.from_numpy(TfidfTransformer(sublinear_tf=True).fit_transform(counts).toarray()).float()
    return vectors[: len(source)], vectors[len(source) :]
