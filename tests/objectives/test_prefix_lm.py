"""Prefix language modeling with a decoder: the split of each sequence, and its targets."""

from collections import Counter

import numpy as np
import pytest
from numbered_text import numbered_documents

from hf_ctxmodels.data.examples import ExampleSet
from hf_ctxmodels.objectives import DocumentLM, PrefixLM

DOCUMENTS, _ = numbered_documents([[5, 9], [30, 2, 2], [1], [40] * 12])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_targets_are_the_tokens_after_the_prefix(separated, packing, side, monkeypatch):
    monkeypatch.setattr(separated, "padding_side", side)
    options = {"max_length": 24, "seed": 3, "packing": packing}
    objective, causal = PrefixLM(separated, **options), DocumentLM(separated, **options)
    examples = ExampleSet.build(objective.examples(DOCUMENTS))
    features = [examples[number] for number in range(len(examples))]
    batch, reference = objective.collate(features), causal.collate(features)
    prefix = batch.pop("prefix_mask")
    is_prefix = prefix.bool()
    assert not (is_prefix & (batch["attention_mask"] == 0)).any()
    labels = reference["labels"].clone()
    labels[:, :-1][is_prefix] = -100
    assert batch.keys() == reference.keys()
    assert all((batch[name] == (labels if name == "labels" else reference[name])).all() for name in batch)
    sequences = batch["sequence_ids"] if packing else batch["attention_mask"]
    for row, ids, marks in zip(batch["labels"], sequences, prefix):
        for number in set(ids.tolist()) - {0}:
            columns = np.flatnonzero(ids == number)
            length = int(marks[columns].sum())
            assert marks[columns].tolist() == [1] * length + [0] * (len(columns) - length)
            targets = row[columns[0] : columns[-1] + 2]
            assert 1 <= length <= len(columns)
            assert (targets[length : len(columns)] != -100).all()
            assert (targets != -100).any()
    assert objective.config_fields == {"prefix_lm": True}
    assert causal.config_fields == {"prefix_lm": False}


def test_splits_are_uniform_and_differ_between_epochs(separated):
    objective = PrefixLM(separated, max_length=8, seed=0)
    feature = {"input_ids": np.arange(5, 10), "following": 10, "epoch": 0}
    lengths = [int(objective.prefix(feature | {"example_index": number}).sum()) for number in range(5000)]
    counts = Counter(lengths)
    assert sorted(counts) == [1, 2, 3, 4, 5]
    assert all(abs(count - 1000) < 150 for count in counts.values())
    assert lengths == [int(objective.prefix(feature | {"example_index": number}).sum()) for number in range(5000)]
    other = [int(objective.prefix(feature | {"example_index": n, "epoch": 1}).sum()) for n in range(5000)]
    assert 0.7 < np.mean(np.array(other) != lengths) < 0.9
    last = {"input_ids": np.arange(5, 10), "example_index": 0, "epoch": 0}
    assert {int(objective.prefix(last | {"epoch": epoch}).sum()) for epoch in range(100)} == {1, 2, 3, 4}
