"""StructBERT's shuffled n-grams and three classes of pairs, against plain loops, and their rates."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import indexed, numbered_documents

from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import DataCollatorForMaskedLMWithStructure, MaskedLMWithStructure
from hf_ctxmodels.objectives.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.structure import NEXT, PREVIOUS, RANDOM

CLS, SEP, FIRST = 2, 3, 5


def collated(tokenizer, documents, epoch=0, max_length=48, seed=0, **options):
    objective = MaskedLMWithStructure(tokenizer, max_length=max_length, seed=seed, **options)
    rows = indexed(objective.examples(documents), epoch)
    return objective, rows, objective.collate(rows)


def texts(documents=40, sentences=12, words=6):
    return numbered_documents([[words] * sentences] * documents)


@settings(max_examples=100)
@given(
    free=st.lists(st.booleans(), min_size=1, max_size=80),
    length=st.integers(2, 5),
    probability=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_ngrams_are_drawn_without_overlaps_from_all_windows(tokenizer, free, length, probability, seed):
    options = {"shuffle_probability": probability, "shuffled_length": length}
    collate = DataCollatorForMaskedLMWithStructure(tokenizer, **options)
    windows = [start for start in range(len(free) - length + 1) if all(free[start : start + length])]
    assert collate.ngrams(np.array(free)).tolist() == windows
    chosen = collate.sample_ngrams(np.array(free), generator(seed, 0, 0))
    assert set(chosen) <= set(windows)
    positions = [position for start in chosen for position in range(start, start + length)]
    assert len(positions) == len(set(positions)), "no token is in two of them"
    count = round(probability * len(windows))
    assert len(chosen) <= count
    if len(chosen) < count:
        assert all(set(range(start, start + length)) & set(positions) for start in windows), "no room is left"


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_shuffled_and_what_is_predicted(tokenizer, monkeypatch, side):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    documents, _ = texts()
    _, rows, batch = collated(tokenizer, documents, shuffle_probability=0.2)
    width, shuffled_rows = batch["input_ids"].shape[1], 0
    for number, row in enumerate(rows):
        offset = width - len(row["input_ids"]) if side == "left" else 0
        columns = slice(offset, offset + len(row["input_ids"]))
        ids, labels, order = (batch[name][number].tolist() for name in ("input_ids", "labels", "shuffle_labels"))
        assert set(order[: columns.start] + order[columns.stop :]) <= {IGNORE_INDEX}, "padding is not a target"
        originals, position = row["input_ids"].tolist(), columns.start
        while position < columns.stop:
            original = originals[position - offset]
            if order[position] == IGNORE_INDEX:
                if labels[position] == IGNORE_INDEX:
                    assert ids[position] == original, "other tokens stay"
                position += 1
                continue
            window = range(position, position + 3)
            assert [labels[index] for index in window] == [IGNORE_INDEX] * 3, "masked tokens are not shuffled"
            assert [order[index] for index in window] == originals[position - offset : position - offset + 3]
            assert sorted(ids[position : position + 3]) == sorted(order[position : position + 3])
            assert not {CLS, SEP} & set(ids[position : position + 3])
            shuffled_rows += 1
            position += 3
    assert shuffled_rows > 100


def test_rates_of_shuffling(tokenizer):
    documents, _ = texts()
    total = Counter()
    moved = []
    for epoch in range(6):
        objective, _, batch = collated(tokenizer, documents, epoch, max_length=200)
        total.update(objective.count_batch(batch))
        targets = batch["shuffle_labels"] != IGNORE_INDEX
        moved.append(float((batch["input_ids"] != batch["shuffle_labels"])[targets].float().mean()))
    rates = objective.rates(total)
    assert rates["selected_share"] == pytest.approx(0.15, abs=0.01)
    assert rates["shuffled_ngram_share"] == pytest.approx(0.05, abs=0.01)
    assert rates["shuffled_token_share"] == pytest.approx(0.15 * 0.85**3, abs=0.03)  # 3 x 5% of what is not masked
    assert rates["moved_token_share"] == pytest.approx(2 / 3, abs=0.05)  # every permutation of three is as likely
    assert rates["moved_token_share"] == pytest.approx(np.mean(moved), abs=0.01)


def kinds_by_reading(rows, home):
    """The class of each row, from the words' numbers, which run through the text."""
    targets = []
    for row in rows:
        ends = np.flatnonzero(row["input_ids"] == SEP)
        first, second = (part[1:] - FIRST for part in np.split(row["input_ids"], ends)[:2])
        if home[int(first[0])] != home[int(second[0])]:
            targets.append(RANDOM)
        else:
            targets.append(NEXT if second[0] == first[-1] + 1 else PREVIOUS)
            assert NEXT in targets or first[0] == second[-1] + 1
    return targets


@pytest.mark.parametrize(
    ("task", "shares"),
    [("three-way", [1 / 3, 1 / 3, 1 / 3]), ("next", [0.5, 0, 0.5]), ("order", [0.5, 0.5, 0])],
    ids=["three-way", "next", "order"],
)
def test_classes_are_what_the_segments_say_and_have_their_shares(tokenizer, task, shares):
    documents, home = texts(sentences=24, words=3)
    labels = []
    for seed in range(12):
        options = {"sentence_task": task, "short_seq_probability": 0.0}
        objective = MaskedLMWithStructure(tokenizer, max_length=39, seed=seed, **options)
        rows = list(objective.examples(documents))
        rows = [row for row in rows if row["sentence_label"] != IGNORE_INDEX]
        assert kinds_by_reading(rows, home) == [row["sentence_label"] for row in rows]
        labels += [row["sentence_label"] for row in rows]
    # a document's last row may be of a single sentence, which has no neighbor
    assert np.bincount(labels, minlength=3) / len(labels) == pytest.approx(shares, abs=0.06)
    _, _, batch = collated(tokenizer, documents, sentence_task=task)
    rates = objective.rates(objective.count_batch(batch))
    kinds = batch["sentence_label"].tolist()
    for kind, name in ((NEXT, "next"), (PREVIOUS, "previous"), (RANDOM, "random")):
        labeled = len(kinds) - kinds.count(IGNORE_INDEX)
        assert rates[f"{name}_share"] == pytest.approx(kinds.count(kind) / labeled)


def test_each_objective_can_be_left_out(tokenizer):
    documents, _ = texts(4)
    _, _, batch = collated(tokenizer, documents, shuffle_probability=0.0)
    assert set(batch["shuffle_labels"].flatten().tolist()) == {IGNORE_INDEX}
    _, rows, _ = collated(tokenizer, [["wa"]], sentence_task="order")
    assert [row["sentence_label"] for row in rows] == [IGNORE_INDEX], "one sentence has no order"
    _, rows, batch = collated(tokenizer, [*documents[:1], ["wa"]], sentence_task="none")
    assert set(batch["sentence_label"].tolist()) == {IGNORE_INDEX}
    assert sum((row["input_ids"] == SEP).sum() == 1 for row in rows) == 1, "one sentence is one segment"
