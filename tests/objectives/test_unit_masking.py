"""Words, phrases and entities as units: how they are found, selected and replaced, and the pairs of ERNIE 1.0."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import examples_of, indexed, numbered_documents, segments, word

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import TokenMasker, UnitMaskingWithPairs
from hf_ctxmodels.objectives.masking import IGNORE_INDEX, UnitMaskingRule
from hf_ctxmodels.objectives.unit_masking import Phrases

CLS, SEP, MASK = 2, 3, 4
WORDS = ["wa", "wb", "wc", "waxa", "wbxaxb"]  # of one, two and three tokens
words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30)


def units_by_hand(text: list[str], phrases: list[list[str]]) -> list[list[str]]:
    """Left to right, the longest phrase that stands there, else a word."""
    units, position = [], 0
    while position < len(text):
        length = 1
        for phrase in phrases:
            if text[position : position + len(phrase)] == phrase:
                length = max(length, len(phrase))
        units.append(text[position : position + length])
        position += length
    return units


@settings(max_examples=150)
@given(text=words, phrases=st.lists(st.lists(st.sampled_from(WORDS), min_size=2, max_size=4), min_size=1, max_size=6))
def test_phrases_are_found_from_left_to_right_the_longest_first(tokenizer, text, phrases):
    encoded = tokenizer(" ".join(text), add_special_tokens=False)
    ids, numbers = np.array(encoded.input_ids), np.array(encoded.word_ids())
    joined = Phrases(tokenizer, map(" ".join, phrases)).join(ids, numbers)
    expected = [
        number
        for number, unit in enumerate(units_by_hand(text, phrases))
        for _ in tokenizer(" ".join(unit), add_special_tokens=False).input_ids
    ]
    assert (np.diff(joined) != 0).tolist() == (np.diff(expected) != 0).tolist()


def test_phrases_that_are_refused(tokenizer, tmp_path):
    file = tmp_path / "units.txt"
    file.write_text("wa\n\nwa unknown\n")
    with pytest.raises(CtxError, match=r"no phrase of two or more words(.|\n)*data units"):
        Phrases.from_file(tokenizer, file)
    file.write_text("wa\n\n  wa wb  \n")
    joined = Phrases.from_file(tokenizer, file).join(np.array([5, 6, 5]), np.array([-1, 0, 1]))
    assert joined.tolist() == [-1, 1, 2], "a special token is in no unit"


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    special=st.sets(st.integers(0, 39)),
    probability=st.floats(0.05, 0.6),
    limit=st.none() | st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_a_share_of_the_units_each_as_a_whole(tokenizer, sizes, special, probability, limit, seed):
    units = np.repeat(np.arange(len(sizes)), sizes)
    candidates = ~np.isin(units, list(special))
    rule = UnitMaskingRule(probability, max_predictions=limit)
    chosen = set(rule.select(candidates, units, generator(seed, 0, 0)).tolist())
    whole = {number: set(np.flatnonzero(units == number).tolist()) for number in range(len(sizes))}
    there = [number for number in whole if number not in special]
    selected = [number for number in whole if whole[number] & chosen]
    assert not set(selected) & special
    assert chosen == set().union(*(whole[number] for number in selected)), "all tokens of a unit or none"
    expected = max(1, round(len(there) * probability)) if there else 0
    if limit is None:
        assert len(selected) == expected
    else:
        assert len(chosen) <= limit or len(selected) == 1
        assert bool(selected) == bool(there)


def test_each_token_of_a_unit_draws_its_own_replacement(tokenizer):
    """Of units of three tokens, .8^3 are masked as a whole; one draw for the unit would mask .8."""
    masker, kinds, whole = TokenMasker(tokenizer, UnitMaskingRule(0.15)), Counter(), []
    ids, units = np.full(900, 9), np.repeat(np.arange(300), 3)
    for epoch in range(60):
        corrupted, labels = masker.mask(ids, units, generator(0, epoch, 0))
        selected = labels != IGNORE_INDEX
        assert selected.sum() == 3 * round(300 * 0.15)
        kinds.update(np.where(corrupted == MASK, "mask", np.where(corrupted == ids, "kept", "random"))[selected])
        whole += (corrupted == MASK).reshape(-1, 3)[selected.reshape(-1, 3)[:, 0]].all(1).tolist()
    total = kinds.total()
    for kind, share in (("mask", 0.8), ("random", 0.1), ("kept", 0.1)):
        assert kinds[kind] / total == pytest.approx(share, abs=5 * (share * (1 - share) / total) ** 0.5 + 0.001), kind
    assert np.mean(whole) == pytest.approx(0.8**3, abs=5 * 0.5 / len(whole) ** 0.5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_are_masked_by_units_with_the_given_probability(share):
    rule, units = UnitMaskingRule(0.15, unit_rows=share), np.repeat(np.arange(20), 5)
    rows = [rule.select(np.ones(100, bool), units, generator(0, 0, row)) for row in range(2000)]
    by_units = [bool((np.bincount(units[row], minlength=20) % 5 == 0).all()) for row in rows]
    assert {len(row) for row in rows} == {15}
    assert np.mean(by_units) == pytest.approx(share, abs=5 * (share * (1 - share) / 2000) ** 0.5 + 0.002)


def test_halves_change_places_in_half_of_the_pairs(tokenizer):
    shape = np.random.default_rng(0).integers(2, 9, (12, 30)).tolist()
    options = {"passes": 12, "pairs": "swapped", "short_seq_probability": 0.0}
    objective, home, rows = examples_of(UnitMaskingWithPairs, tokenizer, [*shape, [7], [1]], **options)
    labeled = [row for row in rows if row["next_sentence_labels"] != IGNORE_INDEX]
    assert len(rows) - len(labeled) == 12, "a text of one token has no order"
    used = Counter()
    for row in labeled:
        first, second = segments(row)[:: 1 if row["next_sentence_labels"] == 0 else -1]
        assert home[int(first[0])] == home[int(second[-1])]
        if len(row["input_ids"]) < 24:
            assert second[0] == first[-1] + 1, "nothing was cut, so the halves are neighbors"
        assert abs(len(first) - len(second)) <= 9
        used.update([*first.tolist(), *second.tolist()])
    assert max(used.values()) == 12
    share = np.mean([row["next_sentence_labels"] for row in labeled])
    assert share == pytest.approx(0.5, abs=5 * 0.5 / len(labeled) ** 0.5)
    assert not objective.samples_other_documents


def test_random_pairs_are_those_of_bert(tokenizer):
    objective, home, rows = examples_of(UnitMaskingWithPairs, tokenizer, [[3] * 40] * 6, passes=10)
    for row in rows:
        homes = [home[int(segment[0])] for segment in segments(row)]
        assert row["next_sentence_labels"] == (homes[0] != homes[1])
    assert 0.5 < np.mean([row["next_sentence_labels"] for row in rows]) < 0.6
    batch = objective.collate(indexed(rows))
    rates = objective.rates(objective.count_batch(batch))
    assert rates["random_next_share"] == pytest.approx(float(batch["next_sentence_labels"].float().mean()))


def test_units_of_a_file_reach_the_masks(tokenizer, tmp_path):
    (tmp_path / "units.txt").write_text(f"{word(0)} {word(1)} {word(2)}\n{word(4)} {word(5)}\n")
    options = {"units": str(tmp_path / "units.txt"), "pairs": "swapped", "max_length": 32, "mlm_probability": 0.3}
    objective, _, rows = examples_of(UnitMaskingWithPairs, tokenizer, [[9, 9]], **options)
    first = next(row for row in rows if 5 in row["input_ids"])
    joined = {}
    for token, unit in zip(first["input_ids"].tolist(), first["word_ids"].tolist(), strict=True):
        joined.setdefault(unit, []).append(token - 5)
    assert [numbers for numbers in joined.values() if len(numbers) > 1 and numbers[0] >= 0] == [[0, 1, 2], [4, 5]]
    masks = [objective.collate(indexed([first], epoch))["labels"][0] for epoch in range(30)]
    numbers = [set((labels[labels != IGNORE_INDEX] - 5).tolist()) for labels in masks]
    assert all(len(chosen & {0, 1, 2}) in (0, 3) and len(chosen & {4, 5}) in (0, 2) for chosen in numbers)
    assert len(set(map(frozenset, numbers))) > 10, "a new mask in every epoch"


def test_a_document_has_units_of_its_own_in_place_of_those_of_the_file(tokenizer, tmp_path):
    """From a column of the data."""
    (tmp_path / "units.txt").write_text(f"{word(3)} {word(4)}\n{word(21)} {word(22)}\n")
    documents, _ = numbered_documents([[6, 6], [6, 6]])
    units = [f"{word(0)} {word(1)}", word(3), f"{word(8)} {word(9)} {word(10)}"]
    rows = [{"text": "\n".join(text), "units": phrases} for text, phrases in zip(documents, (units, None))]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = load_documents(str(tmp_path / "text.jsonl"), units_column="units", language_tags=["-"])
    options = {"units": str(tmp_path / "units.txt"), "pairs": "swapped"}
    objective = UnitMaskingWithPairs(tokenizer, max_length=32, seed=0, **options)
    joined = {}
    for number, row in enumerate(objective.examples(read)):
        for token, unit in zip(row["input_ids"].tolist(), row["word_ids"].tolist(), strict=True):
            joined.setdefault((number, unit), []).append(token - 5)
    units = sorted(unit for unit in joined.values() if len(unit) > 1 and min(unit) >= 0)
    assert units == [[0, 1], [8, 9, 10], [21, 22]]
    for wrong in ("New York", [3], {"a": "b"}):
        (tmp_path / "text.jsonl").write_text(json.dumps({"text": "A.", "units": wrong}))
        with pytest.raises(CtxError, match=r"'units' does not contain a list of phrases(.|\n)*text\.jsonl:1"):
            list(read)
    with pytest.raises(CtxError, match="has no column 'units'"):
        list(load_documents(str(tmp_path / "units.txt"), units_column="units"))
