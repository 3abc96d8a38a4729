"""SpanBERT's spans and boundary targets against reference loops of the released data preparation."""

import math
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import numbered_documents, with_index

from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import SpanBoundary
from hf_ctxmodels.objectives.masking import IGNORE_INDEX, SpanMaskingRule, TokenMasker
from hf_ctxmodels.objectives.spans import geometric

SEP, MASK, FIRST = 3, 4, 5


def reference_spans(words, budget, probabilities, rng):
    """Selected positions of a row; `words` has the word of each token, and None for special tokens."""
    text_positions = [position for position, word in enumerate(words) if word is not None]
    selected = set()
    while len(selected) < budget:
        size = budget - len(selected)
        lengths = 1 + rng.choice(len(probabilities), size=size, p=probabilities)
        anchors = rng.integers(len(text_positions), size=size)
        for length, anchor in zip(lengths.tolist(), (text_positions[number] for number in anchors)):
            if anchor in selected or len(selected) == budget:
                continue
            column = anchor
            while column > 0 and words[column - 1] == words[anchor]:
                column -= 1
            visited = []
            while column < len(words) and words[column] is not None and len(selected) < budget:
                if not visited or words[column] != visited[-1]:
                    visited.append(words[column])
                if len(visited) > length:
                    break
                selected.add(column)
                column += 1
    return sorted(selected)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    special=st.sets(st.integers(0, 39)),
    probability=st.floats(0.01, 1.0),
    max_span=st.integers(1, 10),
    seed=st.integers(0, 10**6),
)
def test_spans_match_reference_loop_and_use_budget(tokenizer, lengths, special, probability, max_span, seed):
    word_ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.where(np.isin(word_ids, list(special)), SEP, 9)
    rule = SpanMaskingRule(probability, max_span=max_span)
    selected = rule.select(ids != SEP, word_ids, generator(seed, 0, 0))
    budget = math.ceil(probability * int((ids != SEP).sum()))
    words = [None if token == SEP else word for token, word in zip(ids.tolist(), word_ids.tolist())]
    assert selected.tolist() == reference_spans(words, budget, geometric(0.2, max_span), generator(seed, 0, 0))
    assert len(selected) == budget
    assert not (ids[selected] == SEP).any()


def test_mean_span_length_equals_paper():
    probabilities = geometric(0.2, 10)
    weights = [0.2 * 0.8**number for number in range(10)]
    np.testing.assert_allclose(probabilities, np.array(weights) / sum(weights))
    assert probabilities @ np.arange(1, 11) == pytest.approx(3.797, abs=5e-4)


def test_one_replacement_per_span(tokenizer):
    masker = TokenMasker(tokenizer, SpanMaskingRule())
    pool, ids = np.array([8] * 9 + [9]), np.full(400, 7)
    replacements, random_tokens, num_mixed = [], [], 0
    for epoch in range(300):
        corrupted, labels = masker.mask(ids, np.arange(400), generator(0, epoch, 0), pool)
        assert (labels != IGNORE_INDEX).sum() == 60
        for selected, run in groupby(enumerate(labels.tolist()), lambda item: item[1] != IGNORE_INDEX):
            if selected:
                columns = [column for column, _ in run]
                tokens = {{7: "kept", MASK: "mask"}.get(int(corrupted[column]), "random") for column in columns}
                num_mixed += len(tokens) > 1
                replacements += tokens
                random_tokens += [int(corrupted[column]) for column in columns if corrupted[column] in (8, 9)]
    assert not num_mixed
    shares = [replacements.count(replacement) / len(replacements) for replacement in ("mask", "random", "kept")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.03)
    assert random_tokens.count(8) / len(random_tokens) == pytest.approx(0.9, abs=0.03)


def reference_boundaries(row, labels, max_targets, edges):
    """Targets of a row: the first labels of each run between two tokens that are not in `edges`."""
    targets = [IGNORE_INDEX] * len(row)
    for selected, run in groupby(range(len(row)), lambda column: labels[column] != IGNORE_INDEX):
        columns = list(run)
        before, after = columns[0] - 1, columns[-1] + 1
        if selected and before >= 0 and after < len(row) and row[before] not in edges and row[after] not in edges:
            for column in columns[:max_targets]:
                targets[column] = labels[column]
    return targets


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("packing", [False, True])
def test_boundary_targets_match_reference_loop(tokenizer, monkeypatch, side, packing):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    documents, _ = numbered_documents([[9, 14], [30], [3], [1, 1], [60, 2], [8], [25, 25]])
    options = {"mlm_probability": 0.4, "max_pair_targets": 4, "packing": packing}
    objective = SpanBoundary(tokenizer, max_length=48, seed=3, **options)
    rows = with_index(objective.examples(documents))
    batch = objective.collate(rows)
    edges = {tokenizer.cls_token_id, SEP, tokenizer.pad_token_id}
    expected = [
        reference_boundaries(row, labels, 4, edges)
        for row, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist())
    ]
    assert batch["boundary_labels"].tolist() == expected
    num_targets = sum(label != IGNORE_INDEX for row in expected for label in row)
    num_selected = int((batch["labels"] != IGNORE_INDEX).sum())
    assert 0 < num_targets < num_selected
    rates = objective.rates(objective.count_batch(batch))
    assert rates["boundary_share"] == pytest.approx(num_targets / num_selected)
    assert rates["selected_share"] == pytest.approx(0.4, abs=0.03)


def test_replacements_are_sampled_from_text(tokenizer):
    """90% of the tokens are the same word."""
    objective = SpanBoundary(tokenizer, max_length=64, seed=0)
    text = [["wa " * 9 + "wb"] * 6] * 200
    rows = list(objective.examples(text))
    pool = np.concatenate([row["replacement_ids"] for row in rows])
    assert len(pool) >= 0.15 * sum(len(row["input_ids"]) for row in rows)
    assert set(pool.tolist()) == {FIRST, FIRST + 1}
    assert (pool == FIRST).mean() == pytest.approx(0.9, abs=0.03)
    next_pass = np.concatenate([row["replacement_ids"] for row in objective.examples(text, 1)])
    assert not np.array_equal(pool, next_pass)
    uniform = SpanBoundary(tokenizer, max_length=64, seed=0, corpus_replacements=False)
    (row, *_) = uniform.examples(text)
    assert "replacement_ids" not in row
    assert uniform.collate(with_index([row]))


def test_boundary_objective_can_be_disabled(tokenizer):
    documents, _ = numbered_documents([[20, 20], [30]])
    batches = []
    for boundary in (True, False):
        objective = SpanBoundary(tokenizer, max_length=64, seed=0, boundary=boundary)
        rows = with_index(objective.examples(documents))
        batches.append(objective.collate(rows))
        assert objective.rates(objective.count_batch(batches[-1]))["boundary_share"] > 0 or not boundary
    with_boundary, masking_only = batches
    assert with_boundary.keys() - masking_only.keys() == {"boundary_labels"}
    assert all(torch.equal(with_boundary[name], masking_only[name]) for name in masking_only)
