"""Coreference scores: MUC, B-cubed, CEAFe, and their mean, the CoNLL score.

Counts are summed over documents before they are divided, as in the reference implementation (Pradhan et al. 2014,
"Scoring Coreference Partitions of Predicted Mentions"). A mention that is missing in the other partition counts as
wrong, without alignment of similar spans.
"""

from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np

Clusters = Sequence[Collection[Hashable]]
"""A partition of the mentions of a document, which may be any hashable values, such as (first word, last word)."""
Counts = tuple[float, float]
"""Numerator and denominator of a recall."""


def coreference_scores(predictions: Sequence[Clusters], references: Sequence[Clusters]) -> dict[str, float]:
    """The CoNLL score `conll_f1`, the mean of the F1 of MUC, B-cubed and CEAFe, and F1, precision and recall of each
    and of the mentions; 0 to 1.

    Args:
        predictions, references: The clusters of each document. Singletons count as any cluster, except in MUC, which
            counts links; CoNLL-2012 has none.
    """
    scores: dict[str, float] = {}
    pairs = list(zip(predictions, references, strict=True))
    for name, recall_counts in _METRICS.items():
        recall = _ratio([recall_counts(reference, prediction) for prediction, reference in pairs])
        precision = _ratio([recall_counts(prediction, reference) for prediction, reference in pairs])
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        scores |= {f"{name}_f1": f1, f"{name}_precision": precision, f"{name}_recall": recall}
    conll = sum(scores[f"{name}_f1"] for name in ("muc", "b_cubed", "ceafe")) / 3
    return {"conll_f1": conll} | scores


def _ratio(counts: Sequence[Counts]) -> float:
    numerator, denominator = (float(sum(values)) for values in zip(*counts)) if counts else (0.0, 0.0)
    return numerator / denominator if denominator else 0.0


def _overlaps(key: Clusters, response: Clusters) -> np.ndarray:
    """(key clusters, response clusters) numbers of common mentions."""
    response_sets = [set(cluster) for cluster in response]
    overlaps = [[len(members & set(cluster)) for members in response_sets] for cluster in key]
    return np.array(overlaps, dtype=np.float64).reshape(len(key), len(response))


def muc_recall(key: Clusters, response: Clusters) -> Counts:
    """Links of the key that the response has (Vilain et al. 1995): sum of |K| - |p(K)| and of |K| - 1 over the key's
    clusters K, where p(K) are the parts of K in the response's clusters, and each missing mention is a part."""
    sizes = np.array([len(set(cluster)) for cluster in key], dtype=np.float64)
    overlaps = _overlaps(key, response)
    num_parts = (overlaps > 0).sum(1) + sizes - overlaps.sum(1)
    return float((sizes - num_parts).sum()), float((sizes - 1).sum())


def b_cubed_recall(key: Clusters, response: Clusters) -> Counts:
    """Share of the mentions of a mention's cluster that the response's cluster has, summed over mentions, and the
    number of mentions (Bagga & Baldwin 1998): sum of |K & R|^2 / |K| over all pairs of clusters, and of |K|."""
    sizes = np.array([len(set(cluster)) for cluster in key], dtype=np.float64)
    return float((_overlaps(key, response) ** 2 / sizes[:, None]).sum()), float(sizes.sum())


def ceafe_recall(key: Clusters, response: Clusters) -> Counts:
    """Similarity of the best one-to-one alignment of clusters, and the number of clusters (Luo 2005), with the
    similarity phi_4(K, R) = 2 |K & R| / (|K| + |R|)."""
    from scipy.optimize import linear_sum_assignment

    sizes, response_sizes = (np.array([len(set(cluster)) for cluster in side]) for side in (key, response))
    similarities = 2 * _overlaps(key, response) / np.maximum(np.add.outer(sizes, response_sizes), 1)
    return float(similarities[linear_sum_assignment(similarities, maximize=True)].sum()), float(len(key))


def mention_recall(key: Clusters, response: Clusters) -> Counts:
    """Number of the key's mentions that the response has, and of all its mentions."""
    mentions, response_mentions = ({mention for cluster in side for mention in cluster} for side in (key, response))
    return float(len(mentions & response_mentions)), float(len(mentions))


_METRICS: dict[str, Callable[[Clusters, Clusters], Counts]] = {
    "muc": muc_recall, "b_cubed": b_cubed_recall, "ceafe": ceafe_recall, "mention": mention_recall,
}  # fmt: skip
