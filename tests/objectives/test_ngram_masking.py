"""Runs of whole words: how long they are, where they may stand, and what stops them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import MaskingRule, TokenMasker
from hf_ctxmodels.objectives.masking import IGNORE_INDEX, masking_rates

SHARES = np.array([6, 3, 2]) / 11


def runs_of(selected):
    """Lengths of the maximal runs of True."""
    edges = np.diff(np.concatenate([[0], np.asarray(selected, dtype=int), [0]]))
    return np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)


def test_lengths_are_drawn_in_proportion_to_their_inverse():
    drawn = MaskingRule(ngram=3).ngram_lengths(100_000, generator(0, 0, 0))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert shares[0] == 0
    assert np.abs(shares[1:] - SHARES).max() < 5 * 0.5 / 100_000**0.5
    assert drawn.mean() == pytest.approx(18 / 11, abs=0.02)
    assert set(MaskingRule(ngram=1).ngram_lengths(9, generator(0, 0, 0)).tolist()) == {1}


def test_runs_in_a_row_have_the_lengths_drawn(tokenizer):
    """At 2% runs seldom meet or are cut, so what is seen is what was drawn."""
    masker = TokenMasker(tokenizer, MaskingRule(0.02, ngram=3))
    ids, words = np.full(3000, 9), np.arange(3000)
    lengths = []
    for epoch in range(100):
        _, labels = masker.mask(ids, words, generator(0, epoch, 0))
        lengths += runs_of(labels != IGNORE_INDEX).tolist()
    shares = np.bincount(lengths, minlength=4)[1:4] / len(lengths)
    assert np.abs(shares - SHARES).max() < 0.04
    assert np.mean(np.array(lengths) > 3) < 0.03, "only where two runs meet"


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    special=st.sets(st.integers(0, 59)),
    probability=st.floats(0.05, 0.6),
    limit=st.none() | st.integers(1, 20),
    ngram=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_whole_words_within_the_budget_and_never_special_tokens(
    tokenizer, lengths, special, probability, limit, ngram, seed
):
    words = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.where(np.isin(words, list(special)), tokenizer.sep_token_id, 9)
    rule = MaskingRule(probability, whole_word=True, ngram=ngram, max_predictions=limit)
    _, labels = TokenMasker(tokenizer, rule).mask(ids, words, generator(seed, 0, 0))
    selected = labels != IGNORE_INDEX
    assert not selected[ids == tokenizer.sep_token_id].any()
    non_special = [length for word, length in enumerate(lengths) if word not in special]
    budget = rule.budget(sum(non_special))
    if limit is not None:
        assert selected.sum() <= limit
    if non_special and min(non_special) <= budget:
        assert 1 <= selected.sum() <= budget
        for word, length in enumerate(lengths):
            assert selected[words == word].sum() in (0, length)
    if non_special and max(non_special) == 1:
        assert selected.sum() == budget, "the share is met exactly"


def test_a_run_does_not_jump_over_a_special_token(tokenizer):
    ids = np.tile([tokenizer.sep_token_id, 9], 200)
    masker = TokenMasker(tokenizer, MaskingRule(0.1, ngram=3))
    pairs = 0
    for epoch in range(100):
        selected = masker.mask(ids, np.arange(400), generator(0, epoch, 0))[1][1::2] != IGNORE_INDEX
        assert selected.sum() == 20
        pairs += (selected[1:] & selected[:-1]).sum()
    expected = 100 * 199 * (20 / 200) * (19 / 199)  # as if words were selected one by one
    assert pairs == pytest.approx(expected, rel=0.3)


def test_the_share_is_met_and_the_runs_are_reported(tokenizer):
    masker = TokenMasker(tokenizer, MaskingRule(0.15, ngram=3, max_predictions=20))
    rows = [masker.mask(np.full(length, 9), np.arange(length), generator(0, 0, length)) for length in (100, 120, 500)]
    assert [(labels != IGNORE_INDEX).sum() for _, labels in rows] == [15, 18, 20]
    ids, labels = (torch.from_numpy(column)[None] for column in rows[0])
    rates = masking_rates(masker.count_batch({"input_ids": ids, "labels": labels}))
    assert rates["selected_share"] == 0.15
    assert rates["selected_run_length"] == pytest.approx(runs_of(labels[0] != IGNORE_INDEX).mean())


def test_words_that_are_not_known_are_an_error(tokenizer):
    with pytest.raises(CtxError, match="requires word ids"):
        TokenMasker(tokenizer, MaskingRule(ngram=2)).mask(np.array([2, 9, 3]), None, generator(0, 0, 0))
