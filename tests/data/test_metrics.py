"""Metrics against numbers worked out by hand, against scikit-learn, SciPy and seqeval, and by their properties."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import seqeval.metrics
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ctxmodels.downstream.tasks import metrics

LABELLINGS = st.integers(1, 30).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 2))
NUMBERS = st.integers(2, 20).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(-9, 9).map(lambda v: v / 2), min_size=n, max_size=n)] * 2)
)
TAGS = st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
SENTENCES = st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=8), min_size=1, max_size=5)


def test_classification_by_hand():
    # 3 of 5 right. Label 1: 2 true positives, 3 predicted, 3 there: F1 2/3. Label 0: 1, 2, 2: F1 1/2.
    sides = {"predictions": [1, 1, 1, 0, 0], "references": [1, 1, 0, 0, 1]}
    assert metrics.accuracy(**sides) == {"accuracy": 0.6}
    assert metrics.f1(**sides) == {"f1": pytest.approx(2 / 3)}
    assert metrics.f1(**sides, pos_label=0) == {"f1": 0.5}
    assert metrics.f1(**sides, average="macro") == {"f1": pytest.approx(7 / 12)}
    # (TP TN - FP FN) / sqrt(3 * 3 * 2 * 2) = (2 - 1) / 6
    assert metrics.matthews_correlation(**sides) == {"matthews_correlation": pytest.approx(1 / 6)}


def test_correlation_by_hand():
    # Deviations -1 0 1 and -1 1 0: 1 / (sqrt 2 * sqrt 2).
    assert metrics.pearsonr(predictions=[1, 2, 3], references=[0, 2, 1])["pearsonr"] == pytest.approx(0.5)
    # Any rising curve has rank correlation 1; ties share rank 1.5.
    assert metrics.spearmanr(predictions=[1, 2, 3, 4], references=[1, 8, 27, 64])["spearmanr"] == pytest.approx(1.0)
    tied = metrics.spearmanr(predictions=[1, 1, 2], references=[1, 2, 3])["spearmanr"]
    assert tied == pytest.approx(math.sqrt(3) / 2)
    assert metrics.mse(predictions=[1.0, 3.0], references=[0.0, 1.0]) == {"mse": 2.5}


@given(LABELLINGS)
def test_classification_equals_scikit_learn(sides):
    predictions, references = sides
    ours = {"predictions": predictions, "references": references}
    assert metrics.accuracy(**ours)["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(*sides))
    for average in ("macro", "binary"):
        clipped = [[min(v, 1) for v in side] for side in (references, predictions)] if average == "binary" else None
        theirs = clipped or [references, predictions]
        expected = sklearn.metrics.f1_score(*theirs, average=average, zero_division=0)
        score = metrics.f1(predictions=theirs[1], references=theirs[0], average=average)["f1"]
        assert score == pytest.approx(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of labellings with a single label
        expected = sklearn.metrics.matthews_corrcoef(references, predictions)
    assert metrics.matthews_correlation(**ours)["matthews_correlation"] == pytest.approx(expected)


@given(NUMBERS)
def test_correlation_equals_scipy(sides):
    predictions, references = sides
    constant = len(set(predictions)) == 1 or len(set(references)) == 1
    for name, function in (("pearsonr", scipy.stats.pearsonr), ("spearmanr", scipy.stats.spearmanr)):
        ours = metrics.METRICS[name](predictions=predictions, references=references)[name]
        if constant:
            assert math.isnan(ours)
        else:
            assert ours == pytest.approx(function(predictions, references)[0], abs=1e-12)


def test_entities_by_hand():
    assert metrics.entities(["B-PER", "I-PER", "B-PER", "O", "I-LOC", "I-PER"]) == {
        (0, 2, "PER"),
        (2, 3, "PER"),
        (4, 5, "LOC"),
        (5, 6, "PER"),
    }


def test_seqeval_by_hand():
    # There: PER 0-2, LOC 3-4. Found: PER 0-2 (right), LOC 2-4 (wrong begin). 4 of 5 tags are right.
    scores = metrics.seqeval(
        predictions=[["B-PER", "I-PER", "B-LOC", "I-LOC", "O"]], references=[["B-PER", "I-PER", "O", "I-LOC", "O"]]
    )
    assert scores == {
        "LOC": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 1},
        "PER": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 1},
        "overall_precision": 0.5,
        "overall_recall": 0.5,
        "overall_f1": 0.5,
        "overall_accuracy": 0.8,
    }


@settings(max_examples=200)
@given(SENTENCES)
def test_seqeval_equals_seqeval(sentences):
    predictions = [[predicted for predicted, _ in sentence] for sentence in sentences]
    references = [[expected for _, expected in sentence] for sentence in sentences]
    ours = metrics.seqeval(predictions=predictions, references=references)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of empty sides
        for name in ("precision", "recall", "f1", "accuracy"):
            expected = getattr(seqeval.metrics, f"{name}_score")(references, predictions)
            assert ours[f"overall_{name}"] == pytest.approx(float(expected))
        if any(tag != "O" for tags in predictions + references for tag in tags):
            report = seqeval.metrics.classification_report(references, predictions, output_dict=True)
            for kind in {"PER", "LOC"} & report.keys():
                assert ours[kind]["f1"] == pytest.approx(float(report[kind]["f1-score"]))
                assert ours[kind]["number"] == report[kind]["support"]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("an apple a day", "apple day"),
        ("theatre of Athens", "theatre of athens"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("“Quoted” – dash", "“quoted” – dash"),  # only ASCII punctuation goes
        ("a.b", "ab"),  # punctuation goes first, so this `a` is no article
        ("The", ""),
    ],
)
def test_answers_are_normalised_as_squad_does(text, normal):
    assert metrics.normalize_answer(text) == normal


def _question(number, *texts):
    return {"id": str(number), "answers": {"text": list(texts), "answer_start": [0] * len(texts)}}


def _answer(number, text, null=0.0):
    return {"id": str(number), "prediction_text": text, "no_answer_probability": null}


def test_squad_by_hand():
    references = [_question(1, "the red house", "house"), _question(2, "in 1999"), _question(3, "Paris")]
    predictions = [_answer(3, "London"), _answer(1, "The House."), _answer(2, "1999")]
    # Exact: question 1 only. F1: 1; {1999} against {in, 1999} 2/3; 0.
    assert metrics.squad(predictions=predictions, references=references) == {
        "exact_match": pytest.approx(100 / 3),
        "f1": pytest.approx(100 * (1 + 2 / 3) / 3),
    }
    # A word counts as often as it occurs on both sides: 2 of 3 and 2 of 2.
    assert metrics.answer_f1("go go go", "go go") == pytest.approx(0.8)


def test_squad_v2_by_hand():
    references = [_question(1, "red house"), _question(2), _question(3), _question(4, "Rome")]
    predictions = [_answer(1, "house", 0.1), _answer(2, "", 0.9), _answer(3, "Athens", 0.2), _answer(4, "", 0.8)]
    scores = metrics.squad_v2(predictions=predictions, references=references)
    assert scores == {
        "exact": 25.0,
        "f1": pytest.approx(100 * (2 / 3 + 1) / 4),
        "total": 4,
        "HasAns_exact": 0.0,
        "HasAns_f1": pytest.approx(100 / 3),
        "HasAns_total": 2,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2,
        # Answering nothing gets 2 of 4 exactly; answering question 1 alone, at 0.1, adds F1 2/3.
        "best_exact": 50.0,
        "best_exact_thresh": 0.0,
        "best_f1": pytest.approx(100 * (2 + 2 / 3) / 4),
        "best_f1_thresh": 0.1,
    }
    # With the threshold between 0.1 and 0.2, question 3 is answered with nothing too.
    assert metrics.squad_v2(predictions=predictions, references=references, no_answer_threshold=0.15)["exact"] == 50.0


@given(st.lists(st.tuples(st.sampled_from(["red house", "house", ""]), st.floats(0, 1)), min_size=1, max_size=8))
def test_squad_v2_best_threshold_is_the_best_of_all(answers):
    references = [_question(i, *(["house"] if i % 2 else [])) for i in range(len(answers))]
    predictions = [_answer(i, text, null) for i, (text, null) in enumerate(answers)]
    scores = metrics.squad_v2(predictions=predictions, references=references)
    tried = [
        metrics.squad_v2(predictions=predictions, references=references, no_answer_threshold=threshold)["exact"]
        for threshold in [-1.0, *(null for _, null in answers)]
    ]
    assert scores["best_exact"] >= max(tried) - 1e-9
    if len({null for _, null in answers}) == len(answers):  # else a threshold cannot part equals, and the order can
        assert scores["best_exact"] == pytest.approx(max(tried))


@pytest.mark.parametrize("name", sorted(metrics.METRICS))
def test_no_examples_and_unequal_numbers_are_errors(name):
    metric = metrics.METRICS[name]
    with pytest.raises(ValueError, match="at least one"):
        metric(predictions=[], references=[])
    of_questions = {"predictions": [_answer(1, ""), _answer(2, "")], "references": [_question(1, "x")]}
    of_sentences = {"predictions": [["O"], ["O"]], "references": [["O"]]}
    with pytest.raises(ValueError, match=r"2 predictions for 1|different questions"):
        metric(**of_questions if name.startswith("squad") else of_sentences)


def test_what_is_not_bio_is_an_error():
    with pytest.raises(ValueError, match="'NNP' is not BIO"):
        metrics.seqeval(predictions=[["O"]], references=[["NNP"]])
    with pytest.raises(ValueError, match="Sentence 0: 2 predicted tags for 1"):
        metrics.seqeval(predictions=[["O", "O"]], references=[["O"]])
    with pytest.raises(ValueError, match="squad_v2 scores"):
        metrics.squad(predictions=[_answer(1, "x")], references=[_question(1)])


def test_numbers_are_plain_floats():
    sides = {"predictions": np.array([1, 0, 1]), "references": np.array([1, 1, 0])}
    for name in ("accuracy", "f1", "matthews_correlation", "pearsonr", "spearmanr", "mse"):
        assert type(metrics.METRICS[name](**sides)[name]) is float
