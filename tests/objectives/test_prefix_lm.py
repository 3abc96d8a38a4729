"""Prefix language modeling with a decoder: split of each sequence and targets."""

from collections import Counter

import numpy as np
import pytest
from numbered_text import numbered_documents

from hf_ctxmodels.data.examples import ExampleSet
from hf_ctxmodels.objectives import DocumentLM, PrefixLM

DOCUMENTS, _ = numbered_documents([[5, 9], [30, 2, 2], [1], [40] * 12])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_targets_are_tokens_after_prefix(eos_tokenizer, packing, side, monkeypatch):
    monkeypatch.setattr(eos_tokenizer, "padding_side", side)
    options = {"max_length": 24, "seed": 3, "packing": packing}
    objective, causal_objective = PrefixLM(eos_tokenizer, **options), DocumentLM(eos_tokenizer, **options)
    examples = ExampleSet.build(objective.examples(DOCUMENTS))
    features = [examples[number] for number in range(len(examples))]
    batch, causal_batch = objective.collate(features), causal_objective.collate(features)
    prefix_masks = batch.pop("prefix_mask")
    is_prefix = prefix_masks.bool()
    assert not (is_prefix & (batch["attention_mask"] == 0)).any()
    labels = causal_batch["labels"].clone()
    labels[:, :-1][is_prefix] = -100
    assert batch.keys() == causal_batch.keys()
    assert all((batch[name] == (labels if name == "labels" else causal_batch[name])).all() for name in batch)
    sequences = batch["sequence_ids"] if packing else batch["attention_mask"]
    for labels_row, sequence_ids, prefix_mask in zip(batch["labels"], sequences, prefix_masks, strict=True):
        for number in set(sequence_ids.tolist()) - {0}:
            columns = np.flatnonzero(sequence_ids == number)
            length = int(prefix_mask[columns].sum())
            assert prefix_mask[columns].tolist() == [1] * length + [0] * (len(columns) - length)
            targets = labels_row[columns[0] : columns[-1] + 2]
            assert 1 <= length <= len(columns)
            assert (targets[length : len(columns)] != -100).all()
            assert (targets != -100).any()
    assert objective.config_fields == {"prefix_lm": True}
    assert causal_objective.config_fields == {"prefix_lm": False}


def test_prefix_lengths_are_uniform_and_vary_by_epoch(eos_tokenizer):
    objective = PrefixLM(eos_tokenizer, max_length=8, seed=0)
    feature = {"input_ids": np.arange(5, 10), "following": 10, "epoch": 0}
    lengths = [int(objective.prefix(feature | {"example_index": number}).sum()) for number in range(5000)]
    counts = Counter(lengths)
    assert sorted(counts) == [1, 2, 3, 4, 5]
    assert all(abs(count - 1000) < 150 for count in counts.values())
    assert lengths == [int(objective.prefix(feature | {"example_index": number}).sum()) for number in range(5000)]
    next_epoch = [int(objective.prefix(feature | {"example_index": n, "epoch": 1}).sum()) for n in range(5000)]
    assert 0.7 < np.mean(np.array(next_epoch) != lengths) < 0.9
    without_following = {"input_ids": np.arange(5, 10), "example_index": 0, "epoch": 0}
    assert {int(objective.prefix(without_following | {"epoch": epoch}).sum()) for epoch in range(100)} == {1, 2, 3, 4}
