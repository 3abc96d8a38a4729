"""Frequency baselines."""

import math

import pytest
import torch

from hf_ctxmodels.objectives.base import BaselineOptions
from hf_ctxmodels.training.evaluation import BaselineScore, FrequencyBaseline, named_baselines

PAD, MASK = 0, 1
TARGETS = ["labels", "order_label"]


def test_token_frequency_baseline():
    baseline = FrequencyBaseline(BaselineOptions(5, [PAD, MASK]))
    baseline.count_tokens([{"input_ids": torch.tensor(ids).numpy()} for ids in ([2, 2, 3, PAD], [2, MASK, PAD])])
    batches = [{"labels": torch.tensor([[2, -100], [4, -100]])}, {"labels": torch.tensor([[3, 2]])}]
    frequency = {2: 4 / 7, 3: 2 / 7, 4: 1 / 7}  # counts 3, 1, 0 with add-one smoothing
    score = baseline.scores(batches, ["labels"])["labels"]
    assert score.loss == pytest.approx(-sum(math.log(frequency[token]) for token in (2, 4, 3, 2)) / 4)
    assert score.accuracy == 0.5


@pytest.mark.parametrize(
    ("training", "held_out", "loss", "accuracy"),
    [
        ([[1, 1, 0, -100], [1, 1]], [0, 0, 1], -(2 * math.log(2 / 7) + math.log(5 / 7)) / 3, 1 / 3),
        ([[0, 0]], [1], math.log(4), 0.0),  # a class without training examples
    ],
)
def test_class_frequency_baseline(training, held_out, loss, accuracy):
    baseline = FrequencyBaseline(BaselineOptions(5, []))
    for labels in training:
        baseline.count_classes({"order_label": torch.tensor(labels), "seed": torch.tensor([2**62])}, TARGETS)
    score = baseline.scores([{"order_label": torch.tensor(held_out)}], ["order_label"])["order_label"]
    assert (score.loss, score.accuracy) == pytest.approx((loss, accuracy))


def test_absent_targets_have_no_score():
    batches = [{"labels": torch.full((2, 2), -100), "scores": torch.zeros(2)}]
    assert FrequencyBaseline(BaselineOptions(5, [])).scores(batches, ["labels", "absent"]) == {}


def test_baseline_names():
    baseline = FrequencyBaseline(BaselineOptions(4, []))
    batch = {"labels": torch.tensor([[1, -100]]), "order_label": torch.tensor([1])}
    baseline.count_classes(batch, TARGETS)
    scores = baseline.scores([batch], ["labels", "order_label"])
    metrics = {"eval_loss": 3.0, "eval_mlm_loss": 2.0, "eval_order_loss": 1.0, "eval_order_accuracy": 0.5}
    named = named_baselines(scores, ("labels", "order_label"), metrics)
    assert named.keys() == {"baseline_mlm_loss", "baseline_order_loss", "baseline_order_accuracy"}
    assert named["baseline_mlm_loss"] == pytest.approx(math.log(4))
    assert named_baselines(scores, ("labels",), {"eval_loss": 3.0}) == {"baseline_loss": named["baseline_mlm_loss"]}


def test_detection_baseline_flags_all_tokens():
    metrics = {"eval_loss": 3.0, "eval_mlm_loss": 2.0, "eval_rtd_loss": 0.3, "eval_rtd_f1": 0.5, "eval_rtd_share": 0.1}
    named = named_baselines(
        {"labels": BaselineScore(4.0, 0.1), "all": BaselineScore(9.0, 0.1)}, ("labels", "all"), metrics
    )
    assert named.keys() == {"baseline_mlm_loss", "baseline_rtd_loss", "baseline_rtd_f1"}
    assert named["baseline_mlm_loss"] == 4.0
    assert named["baseline_rtd_loss"] == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9))
    precision, recall = 0.1, 1.0
    assert named["baseline_rtd_f1"] == pytest.approx(2 * precision * recall / (precision + recall))


def test_token_classes_are_counted_in_batches():
    baseline = FrequencyBaseline(BaselineOptions(5, [], token_classes=("capital_labels",)))
    baseline.count_tokens([{"input_ids": torch.tensor([2, 2, 3]).numpy()}])
    baseline.count_classes({"capital_labels": torch.tensor([[0, 0, 1], [0, -100, -100]])}, ["capital_labels"])
    score = baseline.scores([{"capital_labels": torch.tensor([[0, 1, -100]])}], ["capital_labels"])["capital_labels"]
    assert score.loss == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    assert score.accuracy == 0.5
