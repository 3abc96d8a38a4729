"""Table of scripts/learning.py: metrics, baselines and targets; F1 of replaced token detection."""

import numpy as np
import pytest
from benchmarks.detection import TokenDetector, best_threshold, f1_of_flags
from benchmarks.learning_report import (
    Criterion,
    Detection,
    TransferResult,
    pretraining_criteria,
    report,
    transfer_criteria,
)

from hf_ctxmodels.training.summary import TrainingSummary

PAIR_LOSS = {"eval_pair_loss": 0.7, "baseline_pair_loss": 0.69}


def summary(**metrics: float) -> TrainingSummary:
    names = {"task": "pretraining", "model_class": "CtxNewtForPreTraining", "model_type": "ctx-newt", "dataset": "demo"}
    return TrainingSummary(**names, seed=0, parameters=12345, steps=10, global_batch_size=8, metrics=metrics)


@pytest.mark.parametrize(
    ("metrics", "is_met"),
    [
        ({"eval_loss": 4.9, "baseline_loss": 6.0}, [True]),
        ({"eval_loss": 5.1, "baseline_loss": 6.0}, [False]),
        # A classifier has a target for its accuracy, not for its loss.
        ({**PAIR_LOSS, "eval_pair_accuracy": 0.61, "baseline_pair_accuracy": 0.5}, [True, True]),
        ({"eval_pair_accuracy": 0.6, "baseline_pair_accuracy": 0.5}, [False]),
        ({"eval_pair_accuracy": 0.7, "baseline_pair_accuracy": 0.75}, [False]),
        ({"eval_pair_accuracy": 0.7500001, "baseline_pair_accuracy": 0.75}, [False]),
        ({"eval_replaced_f1": 0.2, "baseline_replaced_f1": 0.1, "eval_replaced_precision": 0.5}, [True]),
        ({"eval_replaced_f1": 0.1, "baseline_replaced_f1": 0.1}, [False]),
    ],
)
def test_targets_depend_on_metric(metrics, is_met):
    criteria = pretraining_criteria(summary(**metrics))
    assert [criterion.is_met for criterion in criteria] == is_met
    assert len([criterion for criterion in criteria if criterion.target]) == 1


def test_detection_must_exceed_token_detector():
    metrics = {"eval_replaced_f1": 0.0, "baseline_replaced_f1": 0.2}
    (criterion,) = pretraining_criteria(summary(**metrics), Detection(by_model=0.25, by_token=0.24))
    assert (criterion.value, criterion.baseline, criterion.is_met) == ("0.250", "0.240", True)
    (missed,) = pretraining_criteria(summary(**metrics), Detection(by_model=0.25, by_token=0.26))
    assert (missed.baseline, missed.is_met) == ("0.260", False)
    assert not pretraining_criteria(summary(**metrics), Detection(by_model=0.2, by_token=0.1))[0].is_met


def transfer(*test_accuracies: float) -> TransferResult:
    return TransferResult(1e-3, {3e-4: 0.7, 1e-3: 0.75}, test_accuracies)


def test_transfer_target_requires_improvement_of_all_seeds():
    assert transfer_criteria("SST-2", transfer(0.8, 0.79), transfer(0.7, 0.78))[1].is_met
    dev, overlapping = transfer_criteria("SST-2", transfer(0.8, 0.77), transfer(0.7, 0.78))
    assert (dev.name, dev.value) == ("SST-2 dev accuracy at learning rates 0.0003, 0.001", "0.700 0.750")
    assert not dev.target
    assert not overlapping.is_met
    assert (overlapping.value, overlapping.baseline) == (
        "0.785 (0.800 0.770) at 0.001",
        "0.740 (0.700 0.780) at 0.001 from random weights",
    )


def test_report_marks_missed_targets():
    criteria = [Criterion("mlm loss", "5", "6", "lower", False), Criterion("order loss", "1", "2")]
    text = report(criteria, summary(), ["hf-ctxmodels pretrain"], "newt_learning.png")
    assert "| mlm loss | 5 | 6 | lower | **no** |\n| order loss | 1 | 2 | - | - |" in text
    assert "```bash\nhf-ctxmodels pretrain\n```" in text
    assert "![Losses by step](newt_learning.png)" in text


def test_token_detector_flags_frequent_replacements():
    detector = TokenDetector(5)
    input_ids = np.array([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    replaced = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=bool)
    detector.count(input_ids[:6], replaced[:6])
    detector.count(input_ids[6:], replaced[6:])
    # Flagging only 1 has F1 2 * 3 / (4 + 4), flagging 2 as well 2 * 4 / (8 + 4), everything 2 * 4 / (12 + 4).
    assert detector.f1(np.array([1, 1, 2, 3, 4]), np.array([True, False, True, False, False])) == pytest.approx(0.5)
    uninformative, input_ids = TokenDetector(4), np.array([1, 2, 3] * 5)  # everything is flagged
    uninformative.count(input_ids, np.arange(15) < 3)
    assert uninformative.f1(input_ids, np.arange(15) < 3) == pytest.approx(2 * 3 / (15 + 3))


def test_best_threshold_maximizes_f1():
    generator = np.random.default_rng(0)
    replaced = generator.random(300) < 0.2
    scores = np.round(generator.normal(size=300) + replaced, 1)  # many ties, which are flagged together
    best = max(f1_of_flags(scores >= threshold, replaced) for threshold in np.unique(scores))
    assert f1_of_flags(scores >= best_threshold(scores, replaced), replaced) == best
    assert best > f1_of_flags(np.ones(300, bool), replaced)
    assert f1_of_flags(np.zeros(3, bool), np.zeros(3, bool)) == 0
