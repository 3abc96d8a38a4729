"""Masking of tokens: selection, replacement, random numbers, padding, whole words and n-grams."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.data.training_set import build_training_set
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.objectives import DataCollatorForMaskedLM, MaskedLM, MaskingRule, TokenMasker
from hf_ctxmodels.objectives.masking import IGNORE_INDEX, masking_rates

FIRST_WORD = 5  # after the special tokens


def features_of(lengths, epoch=0, **columns):
    """Rows [CLS] words [SEP] with the given numbers of words."""
    rng = np.random.default_rng(sum(lengths))
    rows = [np.concatenate([[2], rng.integers(FIRST_WORD, 3000, size=length), [3]]) for length in lengths]
    return [{"input_ids": row, "example_index": index, "epoch": epoch, **columns} for index, row in enumerate(rows)]


@given(
    words=st.integers(0, 200),
    probability=st.floats(0.01, 1.0),
    limit=st.none() | st.integers(1, 30),
    seed=st.integers(0, 10**6),
)
def test_number_of_predictions(tokenizer, words, probability, limit, seed):
    masker = TokenMasker(tokenizer, MaskingRule(probability, max_predictions=limit))
    ids = features_of([words])[0]["input_ids"]
    corrupted, labels = masker.mask(ids, None, generator(seed, 0, 0))
    selected = labels != IGNORE_INDEX
    expected = min(max(1, round(words * probability)), limit or words) if words else 0
    assert selected.sum() == expected
    assert (labels[selected] == ids[selected]).all()
    assert (corrupted[~selected] == ids[~selected]).all()
    assert not selected[[0, -1]].any(), "a special token was selected"


@pytest.mark.parametrize(("mask_share", "random_share"), [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.3, 0.3)])
def test_replacement_shares(tokenizer, mask_share, random_share):
    masker = TokenMasker(tokenizer, MaskingRule(0.15, mask_share, random_share))
    counts = Counter()
    for index in range(400):
        ids = np.random.default_rng(index).integers(FIRST_WORD, 3000, size=200)
        corrupted, labels = masker.mask(ids, None, generator(1, 0, index))
        replaced = corrupted[(labels != IGNORE_INDEX) & (corrupted != tokenizer.mask_token_id)]
        assert not np.isin(replaced, tokenizer.all_special_ids).any(), "a special token was sampled as a replacement"
        counts.update(
            masker.count_batch({"input_ids": torch.tensor(corrupted)[None], "labels": torch.tensor(labels)[None]})
        )
    rates = masking_rates(counts)
    assert counts["selected_tokens"] == 400 * 30
    assert rates["selected_share"] == 0.15
    bound = 5 * 0.5 / 12000**0.5  # five standard deviations at most
    assert rates["mask_token_share"] == pytest.approx(mask_share, abs=bound)
    assert rates["random_token_share"] == pytest.approx(random_share, abs=bound)
    assert rates["unchanged_token_share"] == pytest.approx(1 - mask_share - random_share, abs=bound)
    assert rates["predictions_per_example"] == 30


def test_positions_and_replacements_are_uniform(tokenizer):
    masker = TokenMasker(tokenizer, MaskingRule(0.2, mask_share=0, random_share=1))
    ids = np.full(50, FIRST_WORD)
    selected, samples = np.zeros(50), []
    for epoch in range(2000):
        corrupted, labels = masker.mask(ids, None, generator(0, epoch, 0))
        selected += labels != IGNORE_INDEX
        samples.append(corrupted[labels != IGNORE_INDEX])
    assert np.abs(selected - 400).max() < 5 * (2000 * 0.2 * 0.8) ** 0.5
    samples = np.concatenate(samples)
    assert samples.mean() == pytest.approx(masker.non_special.ids.mean(), rel=0.03)
    assert samples.min() < 100, "words with the lowest ids are sampled"
    assert samples.max() > 2900, "words with the highest ids are sampled"


def test_whole_words_fill_the_budget(tokenizer):
    rule = MaskingRule(0.15, whole_word=True)
    masker = TokenMasker(tokenizer, rule)
    lengths = [1, 1, 2, 1, 3, 1, 1, 2] * 10
    word_ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.full(len(word_ids), 9)
    counts = [(masker.mask(ids, word_ids, generator(0, epoch, 0))[1] != IGNORE_INDEX).sum() for epoch in range(200)]
    assert set(counts) == {rule.budget(len(ids))}, "single-token words fill the rest of the budget"


def test_equal_word_ids_of_two_segments_are_two_words(tokenizer):
    word_ids = np.array([-1, 0, -1, 0, -1])
    ids = np.array([2, 9, 3, 10, 3])
    rule = MaskingRule(0.5, whole_word=True)
    _, labels = TokenMasker(tokenizer, rule).mask(ids, word_ids, generator(3, 0, 0))
    assert (labels != IGNORE_INDEX).sum() == 1


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [None, 8])
def test_padding_side_and_multiple(tokenizer, side, multiple):
    padded = CtxBertTokenizer(vocab=tokenizer.get_vocab(), padding_side=side)
    features = features_of([3, 10, 1])
    for feature in features:
        feature["token_type_ids"] = np.ones(len(feature["input_ids"]), dtype=np.uint8)
    batch = DataCollatorForMaskedLM(padded, pad_to_multiple_of=multiple)(features)
    width = 12 if multiple is None else 16
    for name, padding in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORE_INDEX), ("token_type_ids", 0)):
        assert batch[name].shape == (3, width)
        assert batch[name].dtype == torch.int64
        for row, feature in enumerate(features):
            length = len(feature["input_ids"])
            padded_values = batch[name][row, length:] if side == "right" else batch[name][row, : width - length]
            assert (padded_values == padding).all()
    assert batch["attention_mask"].sum(1).tolist() == [5, 12, 3]
    original_ids = torch.where(batch["labels"] == IGNORE_INDEX, batch["input_ids"], batch["labels"])
    for row, feature in enumerate(features):
        assert original_ids[row][batch["attention_mask"][row].bool()].tolist() == feature["input_ids"].tolist()


def test_padded_features_keep_attention_mask(tokenizer):
    feature = {"input_ids": [2, 9, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "example_index": 0, "epoch": 0}
    batch = DataCollatorForMaskedLM(tokenizer)([feature])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 9, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]


@pytest.mark.parametrize("invalid_id", [-1, 10**6])
def test_id_outside_vocabulary_raises(tokenizer, invalid_id):
    feature = features_of([5])[0]
    feature["input_ids"][2] = invalid_id
    with pytest.raises(CtxError, match=f"Token id {invalid_id} is outside"):
        DataCollatorForMaskedLM(tokenizer)([feature])


@given(
    first=st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.sampled_from(Purpose)),
    second=st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.sampled_from(Purpose)),
)
def test_generators_differ_for_different_arguments(first, second):
    is_equal = generator(*first).integers(2**62) == generator(*second).integers(2**62)
    assert is_equal == (first == second)


def test_smoothing_selects_rare_tokens_more_often(tokenizer):
    """Weights are counts in the training text to a power (DistilBERT's released code). The expected shares sum over all
    orders of sampling without replacement. Missing counts and whole words raise an error."""
    counts, ids = {7: 1, 8: 6, 9: 40, 10: 0, 11: 900}, np.array([2, 7, 8, 9, 10, 11, 8, 3])
    text = np.concatenate([np.full(number, token) for token, number in counts.items()]).astype(np.int64)
    masker = TokenMasker(tokenizer, MaskingRule(0.5, smoothing=0.7))
    with pytest.raises(CtxError, match=r"mlm_smoothing.*counts"):
        masker.mask(ids, None, generator(0, 0, 0))
    masker.set_token_counts(text)
    weights = {position: max(1, counts[int(ids[position])]) ** -0.7 for position in range(1, 7)}
    expected = dict.fromkeys(weights, 0.0)
    for order in permutations(weights, 3):
        probability, remaining = 1.0, sum(weights.values())
        for position in order:
            probability, remaining = probability * weights[position] / remaining, remaining - weights[position]
        for position in order:
            expected[position] += probability
    num_samples = 4000
    selected = sum(
        (masker.mask(ids, None, generator(0, 0, row))[1] != IGNORE_INDEX).astype(int) for row in range(num_samples)
    )
    assert selected[[0, 7]].sum() == 0
    assert selected.sum() == 3 * num_samples
    for position, share in expected.items():
        assert abs(selected[position] / num_samples - share) < 5 * (share * (1 - share) / num_samples) ** 0.5 + 1e-9, (
            position
        )
    for options in ({"smoothing": -1.0}, {"smoothing": 0.7, "whole_word": True}):
        with pytest.raises(CtxError, match="mlm_smoothing"):
            MaskingRule(**options)
    words = tokenizer.convert_ids_to_tokens([40, 41])
    documents = [[" ".join([words[0]] * 2)] * 30, [words[1]]]
    objective = MaskedLM(tokenizer, max_length=32, seed=0, mlm_smoothing=0.7)
    build_training_set(documents, objective)
    masker_weights = objective.masker.weights
    assert masker_weights[41] / masker_weights[40] == pytest.approx(60**0.7)


LENGTH_SHARES = np.array([6, 3, 2]) / 11


def run_lengths(selected):
    """Lengths of the maximal runs of True values."""
    edges = np.diff(np.concatenate([[0], np.asarray(selected, dtype=int), [0]]))
    return np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)


def test_ngram_length_distribution():
    samples = MaskingRule(ngram=3).ngram_lengths(100_000, generator(0, 0, 0))
    shares = np.bincount(samples, minlength=4) / len(samples)
    assert shares[0] == 0
    assert np.abs(shares[1:] - LENGTH_SHARES).max() < 5 * 0.5 / 100_000**0.5
    assert set(MaskingRule(ngram=1).ngram_lengths(9, generator(0, 0, 0)).tolist()) == {1}


def test_masked_runs_have_ngram_lengths(tokenizer):
    """At 2%, runs are rarely adjacent or cut, so that the observed lengths are the sampled lengths."""
    masker = TokenMasker(tokenizer, MaskingRule(0.02, ngram=3))
    ids, word_ids = np.full(3000, 9), np.arange(3000)
    lengths = []
    for epoch in range(100):
        _, labels = masker.mask(ids, word_ids, generator(0, epoch, 0))
        lengths += run_lengths(labels != IGNORE_INDEX).tolist()
    shares = np.bincount(lengths, minlength=4)[1:4] / len(lengths)
    assert np.abs(shares - LENGTH_SHARES).max() < 0.04
    assert np.mean(np.array(lengths) > 3) < 0.03, "only where two runs are adjacent"


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    special=st.sets(st.integers(0, 59)),
    probability=st.floats(0.05, 0.6),
    limit=st.none() | st.integers(1, 20),
    ngram=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_whole_words_stay_within_budget(tokenizer, lengths, special, probability, limit, ngram, seed):
    word_ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.where(np.isin(word_ids, list(special)), tokenizer.sep_token_id, 9)
    rule = MaskingRule(probability, whole_word=True, ngram=ngram, max_predictions=limit)
    _, labels = TokenMasker(tokenizer, rule).mask(ids, word_ids, generator(seed, 0, 0))
    selected = labels != IGNORE_INDEX
    assert not selected[ids == tokenizer.sep_token_id].any()
    non_special = {word: length for word, length in enumerate(lengths) if word not in special}
    sizes = [selected[word_ids == word].sum() for word in non_special]
    budget = rule.budget(sum(non_special.values()))
    if not non_special:
        return
    shortest, longest = min(non_special.values()), max(non_special.values())
    if shortest <= budget:
        assert 1 <= selected.sum() <= budget
        assert all(size in (0, length) for size, length in zip(sizes, non_special.values()))
    else:  # no word fits: the shortest word, cut at the limit
        assert sorted(sizes)[-1] == selected.sum() == min(shortest, limit or shortest)
    if longest == 1:
        assert selected.sum() == budget, "the budget is used exactly"


def test_runs_do_not_cross_special_tokens(tokenizer):
    ids = np.tile([tokenizer.sep_token_id, 9], 200)
    masker = TokenMasker(tokenizer, MaskingRule(0.1, ngram=3))
    num_pairs = 0
    for epoch in range(100):
        selected = masker.mask(ids, np.arange(400), generator(0, epoch, 0))[1][1::2] != IGNORE_INDEX
        assert selected.sum() == 20
        num_pairs += (selected[1:] & selected[:-1]).sum()
    expected = 100 * 199 * (20 / 200) * (19 / 199)  # as if words were selected independently
    assert num_pairs == pytest.approx(expected, rel=0.3)


def test_rates_of_ngram_masking(tokenizer):
    masker = TokenMasker(tokenizer, MaskingRule(0.15, ngram=3, max_predictions=20))
    rows = [masker.mask(np.full(length, 9), np.arange(length), generator(0, 0, length)) for length in (100, 120, 500)]
    assert [(labels != IGNORE_INDEX).sum() for _, labels in rows] == [15, 18, 20]
    ids, labels = (torch.from_numpy(column)[None] for column in rows[0])
    rates = masking_rates(masker.count_batch({"input_ids": ids, "labels": labels}))
    assert rates["selected_share"] == 0.15
    assert rates["selected_run_length"] == pytest.approx(run_lengths(labels[0] != IGNORE_INDEX).mean())


def test_missing_word_ids_raise(tokenizer):
    with pytest.raises(CtxError, match="requires word ids"):
        TokenMasker(tokenizer, MaskingRule(ngram=2)).mask(np.array([2, 9, 3]), None, generator(0, 0, 0))
