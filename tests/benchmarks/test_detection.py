"""Replaced token detection: F1, its best threshold, and the detector without context."""

import numpy as np
import pytest
from benchmarks.detection import TokenDetector, best_threshold, f1_of_flags


def test_token_detector_flags_frequent_replacements():
    detector = TokenDetector(5)
    input_ids = np.array([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    replaced = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=bool)
    detector.count(input_ids[:6], replaced[:6])
    detector.count(input_ids[6:], replaced[6:])
    # Flagging 1 alone has F1 2 * 3 / (4 + 4), flagging 2 as well 2 * 4 / (8 + 4), everything 2 * 4 / (12 + 4).
    assert detector.f1(np.array([1, 1, 2, 3, 4]), np.array([True, False, True, False, False])) == pytest.approx(0.5)


def test_token_detector_flags_everything_if_identity_is_uninformative():
    detector = TokenDetector(4)
    input_ids = np.array([1, 2, 3] * 5)
    detector.count(input_ids, np.arange(15) < 3)
    assert detector.f1(input_ids, np.arange(15) < 3) == pytest.approx(2 * 3 / (15 + 3))


def test_best_threshold_maximises_f1():
    generator = np.random.default_rng(0)
    replaced = generator.random(300) < 0.2
    scores = np.round(generator.normal(size=300) + replaced, 1)  # many ties, which are flagged together
    best = max(f1_of_flags(scores >= threshold, replaced) for threshold in np.unique(scores))
    assert f1_of_flags(scores >= best_threshold(scores, replaced), replaced) == best
    assert best > f1_of_flags(np.ones(300, bool), replaced)
    assert f1_of_flags(np.zeros(3, bool), np.zeros(3, bool)) == 0
