"""StructBERT: shuffled n-grams and three classes of segment pairs against reference loops, and rates."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import numbered_documents, with_index

from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import DataCollatorForMaskedLMWithStructure, MaskedLMWithStructure
from hf_ctxmodels.objectives.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.structure import NEXT, PREVIOUS, RANDOM

CLS, SEP, FIRST = 2, 3, 5


def make_batch(tokenizer, documents, epoch=0, max_length=48, seed=0, **options):
    objective = MaskedLMWithStructure(tokenizer, max_length=max_length, seed=seed, **options)
    rows = with_index(objective.examples(documents), epoch)
    return objective, rows, objective.collate(rows)


def make_documents(documents=40, sentences=12, words=6):
    return numbered_documents([[words] * sentences] * documents)


@given(
    candidates=st.lists(st.booleans(), min_size=1, max_size=80),
    length=st.integers(2, 5),
    probability=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_sampled_ngrams_do_not_overlap(tokenizer, candidates, length, probability, seed):
    options = {"shuffle_probability": probability, "shuffled_length": length}
    collate = DataCollatorForMaskedLMWithStructure(tokenizer, **options)
    windows = [start for start in range(len(candidates) - length + 1) if all(candidates[start : start + length])]
    assert collate.ngrams(np.array(candidates)).tolist() == windows
    sampled = collate.sample_ngrams(np.array(candidates), generator(seed, 0, 0))
    assert set(sampled) <= set(windows)
    positions = [position for start in sampled for position in range(start, start + length)]
    assert len(positions) == len(set(positions)), "no token is in two n-grams"
    count = round(probability * len(windows))
    assert len(sampled) <= count
    if len(sampled) < count:
        assert all(set(range(start, start + length)) & set(positions) for start in windows), "no other n-gram fits"


@pytest.mark.parametrize("side", ["right", "left"])
def test_shuffled_ngrams_and_targets(tokenizer, monkeypatch, side):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    documents, _ = make_documents()
    _, rows, batch = make_batch(tokenizer, documents, shuffle_probability=0.2)
    width, num_shuffled = batch["input_ids"].shape[1], 0
    for number, row in enumerate(rows):
        offset = width - len(row["input_ids"]) if side == "left" else 0
        columns = slice(offset, offset + len(row["input_ids"]))
        ids, labels, targets = (batch[name][number].tolist() for name in ("input_ids", "labels", "shuffle_labels"))
        assert set(targets[: columns.start] + targets[columns.stop :]) <= {IGNORE_INDEX}, "padding is not a target"
        originals, position = row["input_ids"].tolist(), columns.start
        while position < columns.stop:
            original = originals[position - offset]
            if targets[position] == IGNORE_INDEX:
                if labels[position] == IGNORE_INDEX:
                    assert ids[position] == original, "other tokens are unchanged"
                position += 1
                continue
            window = range(position, position + 3)
            assert [labels[index] for index in window] == [IGNORE_INDEX] * 3, "masked tokens are not shuffled"
            assert [targets[index] for index in window] == originals[position - offset : position - offset + 3]
            assert sorted(ids[position : position + 3]) == sorted(targets[position : position + 3])
            assert not {CLS, SEP} & set(ids[position : position + 3])
            num_shuffled += 1
            position += 3
    assert num_shuffled > 100


def test_shuffling_rates(tokenizer):
    documents, _ = make_documents()
    total = Counter()
    moved_shares = []
    for epoch in range(6):
        objective, _, batch = make_batch(tokenizer, documents, epoch, max_length=200)
        total.update(objective.count_batch(batch))
        targets = batch["shuffle_labels"] != IGNORE_INDEX
        moved_shares.append(float((batch["input_ids"] != batch["shuffle_labels"])[targets].float().mean()))
    rates = objective.rates(total)
    assert rates["selected_share"] == pytest.approx(0.15, abs=0.01)
    assert rates["shuffled_ngram_share"] == pytest.approx(0.05, abs=0.01)
    assert rates["shuffled_token_share"] == pytest.approx(0.15 * 0.85**3, abs=0.03)  # 3 x 5%, if no token is masked
    assert rates["moved_token_share"] == pytest.approx(2 / 3, abs=0.05)  # permutations are equally likely
    assert rates["moved_token_share"] == pytest.approx(np.mean(moved_shares), abs=0.01)


def reference_classes(rows, document_of):
    """The class of each row, derived from its word numbers."""
    targets = []
    for row in rows:
        ends = np.flatnonzero(row["input_ids"] == SEP)
        first, second = (segment[1:] - FIRST for segment in np.split(row["input_ids"], ends)[:2])
        if document_of[int(first[0])] != document_of[int(second[0])]:
            targets.append(RANDOM)
        else:
            is_next = second[0] == first[-1] + 1
            targets.append(NEXT if is_next else PREVIOUS)
            assert is_next or first[0] == second[-1] + 1
    return targets


@pytest.mark.parametrize(
    ("task", "shares"),
    [("three-way", [1 / 3, 1 / 3, 1 / 3]), ("next", [0.5, 0, 0.5]), ("order", [0.5, 0.5, 0])],
    ids=["three-way", "next", "order"],
)
def test_pair_classes_and_shares(tokenizer, task, shares):
    documents, document_of = make_documents(sentences=24, words=3)
    labels = []
    for seed in range(12):
        options = {"sentence_task": task, "short_seq_probability": 0.0}
        objective = MaskedLMWithStructure(tokenizer, max_length=39, seed=seed, **options)
        rows = list(objective.examples(documents))
        rows = [row for row in rows if row["sentence_label"] != IGNORE_INDEX]
        assert reference_classes(rows, document_of) == [row["sentence_label"] for row in rows]
        labels += [row["sentence_label"] for row in rows]
    # the last row of a document may have a single sentence, without a neighbor
    assert np.bincount(labels, minlength=3) / len(labels) == pytest.approx(shares, abs=0.06)
    _, _, batch = make_batch(tokenizer, documents, sentence_task=task)
    rates = objective.rates(objective.count_batch(batch))
    batch_labels = batch["sentence_label"].tolist()
    for label, name in ((NEXT, "next"), (PREVIOUS, "previous"), (RANDOM, "random")):
        labeled = len(batch_labels) - batch_labels.count(IGNORE_INDEX)
        assert rates[f"{name}_share"] == pytest.approx(batch_labels.count(label) / labeled)


def test_objectives_can_be_disabled(tokenizer):
    documents, _ = make_documents(4)
    _, _, batch = make_batch(tokenizer, documents, shuffle_probability=0.0)
    assert set(batch["shuffle_labels"].flatten().tolist()) == {IGNORE_INDEX}
    _, rows, _ = make_batch(tokenizer, [["wa"]], sentence_task="order")
    assert [row["sentence_label"] for row in rows] == [IGNORE_INDEX], "one sentence has no order"
    _, rows, batch = make_batch(tokenizer, [*documents[:1], ["wa"]], sentence_task="none")
    assert set(batch["sentence_label"].tolist()) == {IGNORE_INDEX}
    assert sum((row["input_ids"] == SEP).sum() == 1 for row in rows) == 1, "one sentence is one segment"
