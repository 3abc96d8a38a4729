"""Masking of words, phrases and entities as units, and the segment pairs of ERNIE 1.0."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import make_examples, numbered_documents, split_segments, with_index, word

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import TokenMasker, UnitMaskingWithPairs
from hf_ctxmodels.objectives.masking import IGNORE_INDEX, UnitMaskingRule
from hf_ctxmodels.objectives.unit_masking import Phrases

CLS, SEP, MASK = 2, 3, 4
NUM_WORDS = ["wa", "wb", "wc", "waxa", "wbxaxb"]  # of one, two and three tokens
words = st.lists(st.sampled_from(NUM_WORDS), min_size=1, max_size=30)


def reference_units(text: list[str], phrases: list[list[str]]) -> list[list[str]]:
    """From left to right, the longest phrase at each position, or else a word."""
    units, position = [], 0
    while position < len(text):
        length = 1
        for phrase in phrases:
            if text[position : position + len(phrase)] == phrase:
                length = max(length, len(phrase))
        units.append(text[position : position + length])
        position += length
    return units


@given(
    text=words, phrases=st.lists(st.lists(st.sampled_from(NUM_WORDS), min_size=2, max_size=4), min_size=1, max_size=6)
)
def test_longest_phrases_are_joined(tokenizer, text, phrases):
    encoded = tokenizer(" ".join(text), add_special_tokens=False)
    ids, word_ids = np.array(encoded.input_ids), np.array(encoded.word_ids())
    joined = Phrases(tokenizer, map(" ".join, phrases)).join(ids, word_ids)
    expected = [
        number
        for number, unit in enumerate(reference_units(text, phrases))
        for _ in tokenizer(" ".join(unit), add_special_tokens=False).input_ids
    ]
    assert (np.diff(joined) != 0).tolist() == (np.diff(expected) != 0).tolist()


def test_invalid_phrases(tokenizer, tmp_path):
    file = tmp_path / "units.txt"
    file.write_text("wa\n\nwa unknown\n")
    with pytest.raises(CtxError, match=r"no phrase of two or more words(.|\n)*data units"):
        Phrases.from_file(tokenizer, file)
    file.write_text("wa\n\n  wa wb  \n")
    joined = Phrases.from_file(tokenizer, file).join(np.array([5, 6, 5]), np.array([-1, 0, 1]))
    assert joined.tolist() == [-1, 1, 2], "a special token is in no unit"


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    special=st.sets(st.integers(0, 39)),
    probability=st.floats(0.05, 0.6),
    limit=st.none() | st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_units_are_selected_as_a_whole(tokenizer, sizes, special, probability, limit, seed):
    units = np.repeat(np.arange(len(sizes)), sizes)
    candidates = ~np.isin(units, list(special))
    rule = UnitMaskingRule(probability, max_predictions=limit)
    positions = set(rule.select(candidates, units, generator(seed, 0, 0)).tolist())
    members = {number: set(np.flatnonzero(units == number).tolist()) for number in range(len(sizes))}
    allowed = [number for number in members if number not in special]
    selected = [number for number in members if members[number] & positions]
    assert not set(selected) & special
    assert positions == set().union(*(members[number] for number in selected)), "all tokens of a unit or none"
    expected = max(1, round(len(allowed) * probability)) if allowed else 0
    if limit is None:
        assert len(selected) == expected
    else:
        assert len(positions) <= limit or len(selected) == 1
        assert bool(selected) == bool(allowed)


def test_tokens_of_unit_are_replaced_independently(tokenizer):
    """Units of three tokens consist of mask tokens with probability 0.8^3; one sample per unit would give 0.8."""
    masker, counts, fully_masked = TokenMasker(tokenizer, UnitMaskingRule(0.15)), Counter(), []
    ids, units = np.full(900, 9), np.repeat(np.arange(300), 3)
    for epoch in range(60):
        corrupted, labels = masker.mask(ids, units, generator(0, epoch, 0))
        selected = labels != IGNORE_INDEX
        assert selected.sum() == 3 * round(300 * 0.15)
        counts.update(np.where(corrupted == MASK, "mask", np.where(corrupted == ids, "kept", "random"))[selected])
        fully_masked += (corrupted == MASK).reshape(-1, 3)[selected.reshape(-1, 3)[:, 0]].all(1).tolist()
    total = counts.total()
    for name, share in (("mask", 0.8), ("random", 0.1), ("kept", 0.1)):
        assert counts[name] / total == pytest.approx(share, abs=5 * (share * (1 - share) / total) ** 0.5 + 0.001), name
    assert np.mean(fully_masked) == pytest.approx(0.8**3, abs=5 * 0.5 / len(fully_masked) ** 0.5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_share_of_rows_masked_by_units(share):
    rule, units = UnitMaskingRule(0.15, unit_rows=share), np.repeat(np.arange(20), 5)
    rows = [rule.select(np.ones(100, bool), units, generator(0, 0, row)) for row in range(2000)]
    by_units = [bool((np.bincount(units[row], minlength=20) % 5 == 0).all()) for row in rows]
    assert {len(row) for row in rows} == {15}
    assert np.mean(by_units) == pytest.approx(share, abs=5 * (share * (1 - share) / 2000) ** 0.5 + 0.002)


def test_half_of_pairs_are_swapped(tokenizer):
    shape = np.random.default_rng(0).integers(2, 9, (12, 30)).tolist()
    options = {"passes": 12, "pairs": "swapped", "short_seq_probability": 0.0}
    objective, document_of, rows = make_examples(UnitMaskingWithPairs, tokenizer, [*shape, [7], [1]], **options)
    labeled = [row for row in rows if row["next_sentence_labels"] != IGNORE_INDEX]
    assert len(rows) - len(labeled) == 12, "a text of one token has no order"
    word_counts = Counter()
    for row in labeled:
        first, second = split_segments(row)[:: 1 if row["next_sentence_labels"] == 0 else -1]
        assert document_of[int(first[0])] == document_of[int(second[-1])]
        if len(row["input_ids"]) < 24:
            assert second[0] == first[-1] + 1, "without truncation, the halves are adjacent"
        assert abs(len(first) - len(second)) <= 9
        word_counts.update([*first.tolist(), *second.tolist()])
    assert max(word_counts.values()) == 12
    share = np.mean([row["next_sentence_labels"] for row in labeled])
    assert share == pytest.approx(0.5, abs=5 * 0.5 / len(labeled) ** 0.5)
    assert not objective.samples_other_documents


def test_random_pairs(tokenizer):
    objective, document_of, rows = make_examples(UnitMaskingWithPairs, tokenizer, [[3] * 40] * 6, passes=10)
    for row in rows:
        document_ids = [document_of[int(segment[0])] for segment in split_segments(row)]
        assert row["next_sentence_labels"] == (document_ids[0] != document_ids[1])
    assert 0.5 < np.mean([row["next_sentence_labels"] for row in rows]) < 0.6
    batch = objective.collate(with_index(rows))
    rates = objective.rates(objective.count_batch(batch))
    assert rates["random_next_share"] == pytest.approx(float(batch["next_sentence_labels"].float().mean()))


def test_units_from_file(tokenizer, tmp_path):
    (tmp_path / "units.txt").write_text(f"{word(0)} {word(1)} {word(2)}\n{word(4)} {word(5)}\n")
    options = {"units": str(tmp_path / "units.txt"), "pairs": "swapped", "max_length": 32, "mlm_probability": 0.3}
    objective, _, rows = make_examples(UnitMaskingWithPairs, tokenizer, [[9, 9]], **options)
    example = next(row for row in rows if 5 in row["input_ids"])
    units = {}
    for token, unit in zip(example["input_ids"].tolist(), example["word_ids"].tolist(), strict=True):
        units.setdefault(unit, []).append(token - 5)
    assert [numbers for numbers in units.values() if len(numbers) > 1 and numbers[0] >= 0] == [[0, 1, 2], [4, 5]]
    masks = [objective.collate(with_index([example], epoch))["labels"][0] for epoch in range(30)]
    numbers = [set((labels[labels != IGNORE_INDEX] - 5).tolist()) for labels in masks]
    assert all(len(selected & {0, 1, 2}) in (0, 3) and len(selected & {4, 5}) in (0, 2) for selected in numbers)
    assert len(set(map(frozenset, numbers))) > 10, "masks differ between epochs"


def test_units_from_data_column(tokenizer, tmp_path):
    """Units in a column of the data replace those of the file."""
    (tmp_path / "units.txt").write_text(f"{word(3)} {word(4)}\n{word(21)} {word(22)}\n")
    documents, _ = numbered_documents([[6, 6], [6, 6]])
    units = [f"{word(0)} {word(1)}", word(3), f"{word(8)} {word(9)} {word(10)}"]
    rows = [{"text": "\n".join(text), "units": phrases} for text, phrases in zip(documents, (units, None))]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = load_documents(str(tmp_path / "text.jsonl"), units_column="units", language_tags=["-"])
    options = {"units": str(tmp_path / "units.txt"), "pairs": "swapped"}
    objective = UnitMaskingWithPairs(tokenizer, max_length=32, seed=0, **options)
    unit_words = {}
    for number, row in enumerate(objective.examples(loaded)):
        for token, unit in zip(row["input_ids"].tolist(), row["word_ids"].tolist(), strict=True):
            unit_words.setdefault((number, unit), []).append(token - 5)
    units = sorted(unit for unit in unit_words.values() if len(unit) > 1 and min(unit) >= 0)
    assert units == [[0, 1], [8, 9, 10], [21, 22]]
    for invalid in ("New York", [3], {"a": "b"}):
        (tmp_path / "text.jsonl").write_text(json.dumps({"text": "A.", "units": invalid}))
        with pytest.raises(CtxError, match=r"'units' does not contain a list of phrases(.|\n)*text\.jsonl:1"):
            list(loaded)
    with pytest.raises(CtxError, match="has no column 'units'"):
        list(load_documents(str(tmp_path / "units.txt"), units_column="units"))
