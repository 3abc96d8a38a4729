"""What guessing by frequency gets, against the definition."""

import math

import numpy as np
import pytest
import torch

from hf_ctxmodels.training.metrics.baselines import (
    FrequencyGuesser,
    Guess,
    TokenDetector,
    best_threshold,
    f1_of_flags,
    named_guesses,
)

PAD, MASK = 0, 1
TARGETS = ["labels", "order_label"]


def test_tokens_are_guessed_by_their_smoothed_frequency_among_ordinary_tokens():
    guesser = FrequencyGuesser(5, [PAD, MASK])
    guesser.count_tokens([{"input_ids": torch.tensor(ids).numpy()} for ids in ([2, 2, 3, PAD], [2, MASK, PAD])])
    batches = [
        {"labels": torch.tensor([[2, -100], [4, -100]])},
        {"labels": torch.tensor([[3, 2]])},
    ]
    frequency = {2: 4 / 7, 3: 2 / 7, 4: 1 / 7}  # counts 3, 1, 0, each and one more
    guess = guesser.guesses(batches, ["labels"])["labels"]
    assert guess.loss == pytest.approx(-sum(math.log(frequency[token]) for token in (2, 4, 3, 2)) / 4)
    assert guess.accuracy == 0.5


def test_classes_of_rows_are_guessed_by_their_frequency_in_training():
    guesser = FrequencyGuesser(5, [])
    guesser.count_classes({"order_label": torch.tensor([1, 1, 0, -100]), "seed": torch.tensor(4 * [2**62])}, TARGETS)
    guesser.count_classes({"order_label": torch.tensor([1, 1])}, TARGETS)
    guess = guesser.guesses([{"order_label": torch.tensor([0, 0, 1])}], ["order_label"])["order_label"]
    assert guess.loss == pytest.approx(-(2 * math.log(2 / 7) + math.log(5 / 7)) / 3)
    assert guess.accuracy == pytest.approx(1 / 3)


def test_a_class_that_training_never_showed_has_a_finite_loss():
    guesser = FrequencyGuesser(5, [])
    guesser.count_classes({"order_label": torch.tensor([0, 0])}, TARGETS)
    guess = guesser.guesses([{"order_label": torch.tensor([1])}], ["order_label"])["order_label"]
    assert guess.loss == pytest.approx(math.log(4))
    assert guess.accuracy == 0.0


def test_targets_that_are_not_there_have_no_guess():
    guesser = FrequencyGuesser(5, [])
    batches = [{"labels": torch.full((2, 2), -100), "scores": torch.zeros(2)}]
    assert guesser.guesses(batches, ["labels", "absent"]) == {}


def test_guesses_stand_under_the_names_of_the_metrics():
    guesser = FrequencyGuesser(4, [])
    batch = {"labels": torch.tensor([[1, -100]]), "order_label": torch.tensor([1])}
    guesser.count_classes(batch, TARGETS)
    guesses = guesser.guesses([batch], ["labels", "order_label"])
    both = {"eval_loss": 3.0, "eval_mlm_loss": 2.0, "eval_order_loss": 1.0, "eval_order_accuracy": 0.5}
    named = named_guesses(guesses, ("labels", "order_label"), both)
    assert named.keys() == {"baseline_mlm_loss", "baseline_order_loss", "baseline_order_accuracy"}
    assert named["baseline_mlm_loss"] == pytest.approx(math.log(4))
    assert named_guesses(guesses, ("labels",), {"eval_loss": 3.0}) == {"baseline_loss": named["baseline_mlm_loss"]}


def test_a_detector_by_identity_flags_what_is_replaced_often():
    detector = TokenDetector(5)
    read = np.array([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    replaced = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=bool)
    detector.count(read[:6], replaced[:6])
    detector.count(read[6:], replaced[6:])
    # Flagging 1 alone has F1 2 * 3 / (4 + 4), flagging 2 as well 2 * 4 / (8 + 4), everything 2 * 4 / (12 + 4).
    assert detector.f1(np.array([1, 1, 2, 3, 4]), np.array([True, False, True, False, False])) == pytest.approx(0.5)


def test_a_detector_by_identity_flags_everything_when_tokens_do_not_tell():
    detector = TokenDetector(4)
    read = np.array([1, 2, 3] * 5)
    detector.count(read, np.arange(15) < 3)
    assert detector.f1(read, np.arange(15) < 3) == pytest.approx(2 * 3 / (15 + 3))


def test_a_detector_is_compared_with_flagging_everything():
    metrics = {"eval_loss": 3.0, "eval_mlm_loss": 2.0, "eval_rtd_loss": 0.3, "eval_rtd_f1": 0.5, "eval_rtd_share": 0.1}
    named = named_guesses({"labels": Guess(4.0, 0.1), "all": Guess(9.0, 0.1)}, ("labels", "all"), metrics)
    assert named.keys() == {"baseline_mlm_loss", "baseline_rtd_loss", "baseline_rtd_f1"}
    assert named["baseline_mlm_loss"] == 4.0
    assert named["baseline_rtd_loss"] == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9))
    precision, recall = 0.1, 1.0
    assert named["baseline_rtd_f1"] == pytest.approx(2 * precision * recall / (precision + recall))


def test_the_best_threshold_is_the_best_of_all():
    generator = np.random.default_rng(0)
    replaced = generator.random(300) < 0.2
    scores = np.round(generator.normal(size=300) + replaced, 1)  # many equal ones, which are flagged together
    best = max(f1_of_flags(scores >= threshold, replaced) for threshold in np.unique(scores))
    assert f1_of_flags(scores >= best_threshold(scores, replaced), replaced) == best
    assert best > f1_of_flags(np.ones(300, bool), replaced)
    assert f1_of_flags(np.zeros(3, bool), np.zeros(3, bool)) == 0
