"""Coreference scores, compared with published examples and with naive implementations."""

from itertools import permutations

import numpy as np
import pytest

from hf_ctxmodels.downstream.tasks.coreference_metrics import coreference_scores

PRADHAN = ["abc", "defg"], ["ab", "cd", "fghi"]  # Pradhan et al. 2014, figure 1; both have no singletons
BAGGA = ["12345", "67", "89ABC"]  # Bagga & Baldwin 1998, figures 2 to 4


@pytest.mark.parametrize(
    ("key", "response", "expected"),
    [
        (*PRADHAN, {"muc_recall": 2 / 5, "muc_precision": 2 / 5, "b_cubed_recall": 35 / 84, "b_cubed_precision": 0.5}),
        (*PRADHAN, {"ceafe_recall": 0.65, "ceafe_precision": 1.3 / 3, "mention_recall": 6 / 7}),
        (BAGGA, ["12345", "6789ABC"], {"muc_precision": 0.9, "b_cubed_precision": 16 / 21, "b_cubed_recall": 1}),
        (BAGGA, ["1234589ABC", "67"], {"muc_precision": 0.9, "b_cubed_precision": 7 / 12, "muc_recall": 1}),
        (["ABCD"], ["AB", "CD"], {"muc_recall": 2 / 3, "muc_precision": 1}),  # Vilain et al. 1995
        (["ab"], [], {"conll_f1": 0, "mention_f1": 0, "ceafe_precision": 0}),
        (["ab", "cde"], ["edc", "ba"], {"conll_f1": 1, "muc_f1": 1, "b_cubed_f1": 1, "ceafe_f1": 1}),
    ],
)
def test_published_examples(key: list[str], response: list[str], expected: dict[str, float]) -> None:
    scores = coreference_scores([response], [key])
    assert {name: scores[name] for name in expected} == pytest.approx(expected)


def test_scores_match_definitions() -> None:
    """Summed over several documents; CEAF takes the best of all alignments."""
    rng = np.random.default_rng(0)

    def partition(num_mentions: int) -> list[set[int]]:
        numbers = rng.integers(0, 5, num_mentions)
        is_mention = rng.random(num_mentions) < 0.8
        clusters = [set(np.flatnonzero((numbers == number) & is_mention).tolist()) for number in range(4)]
        return [cluster for cluster in clusters if cluster]

    keys, responses = ([partition(12) for _ in range(6)] for _ in range(2))
    scores = coreference_scores(responses, keys)
    for suffix, first, second in (("recall", keys, responses), ("precision", responses, keys)):
        links = total_links = shares = mentions = similarity = clusters = 0.0
        for side, opposite in zip(first, second, strict=True):
            cluster_of = {mention: cluster for cluster in map(frozenset, opposite) for mention in cluster}
            for cluster in side:
                links += len(cluster) - len({cluster_of.get(mention, mention) for mention in cluster})
                total_links += len(cluster) - 1
                shares += sum(len(cluster & cluster_of.get(m, frozenset())) / len(cluster) for m in cluster)
                mentions += len(cluster)
            short, long = sorted((side, opposite), key=len)
            similarity += max(
                sum(2 * len(a & b) / (len(a) + len(b)) for a, b in zip(short, alignment, strict=False))
                for alignment in permutations(long)
            )
            clusters += len(side)
        assert scores[f"muc_{suffix}"] == pytest.approx(links / total_links)
        assert scores[f"b_cubed_{suffix}"] == pytest.approx(shares / mentions)
        assert scores[f"ceafe_{suffix}"] == pytest.approx(similarity / clusters)
    f1 = [scores[f"{name}_f1"] for name in ("muc", "b_cubed", "ceafe")]
    assert scores["conll_f1"] == pytest.approx(np.mean(f1))
    harmonic = 2 / (1 / scores["muc_precision"] + 1 / scores["muc_recall"])
    assert scores["muc_f1"] == pytest.approx(harmonic)
