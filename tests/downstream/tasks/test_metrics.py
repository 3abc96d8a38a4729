"""Metrics, compared with values computed by hand."""

import math

import pytest
from forked import run_forked
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.downstream.tasks import metrics

NUMBERS = st.integers(2, 20).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(-9, 9).map(lambda v: v / 2), min_size=n, max_size=n)] * 2)
)


def test_classification_scores():
    # 3 of 5 correct. Label 1: 2 true positives, 3 predictions, 3 references: F1 2/3. Label 0: 1, 2, 2: F1 1/2.
    predictions, references = [1, 1, 1, 0, 0], [1, 1, 0, 0, 1]
    assert metrics.classification_scores(predictions, references, 2) == {
        "accuracy": 0.6,
        "f1": pytest.approx(2 / 3),
        "f1_macro": pytest.approx(7 / 12),
        "matthews_correlation": pytest.approx(1 / 6),  # (TP TN - FP FN) / sqrt(3 * 3 * 2 * 2) = (2 - 1) / 6
    }
    assert "f1" not in metrics.classification_scores(predictions, references, 3)
    constant = metrics.classification_scores([0, 0], [0, 1], 2)
    assert (constant["f1"], constant["matthews_correlation"]) == (0.0, 0.0)
    assert all(type(value) is float for value in constant.values())


def test_correlations():
    # Deviations -1 0 1 and -1 1 0: 1 / (sqrt 2 * sqrt 2).
    assert metrics.pearson_correlation([1, 2, 3], [0, 2, 1]) == pytest.approx(0.5)
    # A monotonic function has rank correlation 1; equal values share rank 1.5.
    assert metrics.spearman_correlation([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1.0)
    assert metrics.spearman_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert metrics.regression_scores([1.0, 3.0], [0.0, 1.0])["mse"] == 2.5


@pytest.mark.filterwarnings("error")
@given(NUMBERS)
def test_correlation_of_constant_values_is_nan(numbers):
    predictions, references = numbers
    is_constant = len(set(predictions)) == 1 or len(set(references)) == 1
    for correlation in (metrics.pearson_correlation, metrics.spearman_correlation):
        assert math.isnan(correlation(predictions, references)) == is_constant
    scores = metrics.regression_scores(predictions, references)
    assert not any(math.isnan(value) for value in scores.values())
    assert (scores["pearsonr"] == 0.0) or not is_constant


def test_entity_scores():
    # References: PER 0-2, LOC 3-4. Predictions: PER 0-2 (correct), LOC 2-4 (wrong start). 4 of 5 tags are correct.
    predictions, references = [["B-PER", "I-PER", "B-LOC", "I-LOC", "O"]], [["B-PER", "I-PER", "O", "I-LOC", "O"]]
    assert metrics.entity_scores(predictions, references) == {
        "f1": 0.5,
        "precision": 0.5,
        "recall": 0.5,
        "accuracy": 0.8,
    }
    # an `I-X` that continues no entity of type X starts one, as in the scorer of the CoNLL-2003 shared task
    assert metrics.entity_scores([["O", "I-LOC", "I-PER"]], [["O", "B-LOC", "B-PER"]])["f1"] == 1.0
    assert metrics.entity_scores([["O"]], [["O"]]) == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("an apple a day", "apple day"),
        ("theatre of Athens", "theatre of athens"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("“Quoted” – dash", "“quoted” – dash"),  # only ASCII punctuation is removed
        ("a.b", "ab"),  # punctuation is removed first, so this `a` is not an article
        ("The", ""),
    ],
)
def test_squad_answer_normalization(text, expected):
    assert metrics.normalize_answer(text) == expected


def test_squad_scores():
    answers = [["the red house", "house"], ["in 1999"], ["Paris"]]
    # Exact: the first question only. F1: 1; {1999} against {in, 1999} 2/3; 0.
    assert metrics.squad_scores(["The House.", "1999", "London"], answers) == {
        "f1": pytest.approx(100 * (1 + 2 / 3) / 3),
        "exact_match": pytest.approx(100 / 3),
    }
    # A word counts as often as it occurs in both texts: 2 of 3 and 2 of 2.
    assert metrics.answer_f1("go go go", "go go") == pytest.approx(0.8)


def test_squad_v2_scores():
    assert metrics.squad_v2_scores(["house", "", "Athens", ""], [["red house"], [], [], ["Rome"]]) == {
        "exact": 25.0,
        "f1": pytest.approx(100 * (2 / 3 + 1) / 4),
        "total": 4,
        "HasAns_exact": 0.0,
        "HasAns_f1": pytest.approx(100 / 3),
        "HasAns_total": 2,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2,
    }


def test_metric_libraries_are_imported_lazily():
    code = "import sys, hf_ctxmodels.downstream.tasks; print([m for m in ('sklearn', 'seqeval') if m in sys.modules])"
    assert run_forked("-c", code).stdout.strip() == "[]"


def test_ranks_of_equal_and_undefined_scores() -> None:
    """A model whose scores are all equal or nan has the lowest ranks."""
    for scores in ([0.5, 0.5, 0.5], [math.nan, math.nan, math.nan], [math.nan, 0.5, 0.1], [0.5, math.nan, 0.5]):
        assert metrics.ranking_scores([scores], [[True, False, False]]) == {"mrr": 1 / 3, "accuracy_at_1": 0}
    expected = {"mrr": pytest.approx((1 + 1 / 2) / 2), "accuracy_at_1": 0.5}
    assert metrics.ranking_scores([[0.1, 0.9], [0.2, 0.3, 0.1]], [[False, True], [True, False, True]]) == expected


def test_regression_scores_of_undefined_predictions() -> None:
    scores = metrics.regression_scores([math.nan, 1.0, 2.0], [0.0, 1.0, 2.0])
    assert math.isnan(scores.pop("mse"))
    assert scores == {"pearsonr": 0, "spearmanr": 0}
    assert metrics.regression_scores([1.0, 3.0], [2, 1])["mse"] == 2.5
