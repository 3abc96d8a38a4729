"""Example sets and streams, their sampling order, and resuming."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import (
    DocumentStream,
    EpochBatchSampler,
    ExampleSet,
    ExampleStream,
    ShuffledStream,
    build_training_set,
    training_loader,
)
from hf_ctxmodels.data import examples as examples_module
from hf_ctxmodels.objectives import MaskedLM, MaskedLMWithNextSentence


@pytest.fixture
def objective(tokenizer):
    return MaskedLMWithNextSentence(tokenizer, max_length=32, seed=1, whole_word=True)


def to_lists(row):
    return {name: np.asarray(value).tolist() for name, value in row.items()}


def assert_same_batches(actual, expected):
    assert len(actual) == len(expected)
    for batch, expected_batch in zip(actual, expected, strict=True):
        assert batch.keys() == expected_batch.keys()
        for name in batch:
            assert torch.equal(batch[name], expected_batch[name]), name


def test_example_set_returns_its_examples(objective, documents, monkeypatch):
    examples = list(objective.examples(documents))
    for block_size in (1, 7, 10_000):
        monkeypatch.setattr(examples_module, "EXAMPLES_PER_BLOCK", block_size)
        stored = ExampleSet.build(iter(examples))
        assert len(stored) == len(examples)
        for index, row in enumerate(examples):
            assert to_lists(stored[3, index]) == to_lists({**row, "example_index": index, "epoch": 3})
        assert stored[0]["input_ids"].dtype == np.int32
        assert stored[0]["token_type_ids"].dtype == np.uint8


def test_statistics_count_documents_of_one_set(objective, documents):
    assert build_training_set(documents, objective).statistics["documents"] == 40
    assert build_training_set(documents[:10], objective).statistics["documents"] == 10


def test_set_epoch_applies_to_integer_indices(objective, documents):
    examples = build_training_set(documents, objective)
    assert examples[2]["epoch"] == 0
    examples.set_epoch(4)
    assert to_lists(examples[2]) == to_lists(examples[4, 2])
    assert to_lists(examples[-1]) == to_lists(examples[4, len(examples) - 1])
    with pytest.raises(IndexError, match="of a set of"):
        examples[len(examples)]


def test_stream_equals_example_set(objective, documents):
    examples = build_training_set(documents, objective)
    stream = build_training_set(documents, objective, streaming=True)
    assert [to_lists(row) for row in stream.one_pass(0)] == [to_lists(examples[0, i]) for i in range(len(examples))]
    assert [to_lists(row) for row in stream.one_pass(1)] != [to_lists(examples[1, i]) for i in range(len(examples))]


def test_documents_without_tokens_raise(tokenizer):
    objective = MaskedLM(tokenizer, max_length=32, seed=0)
    with pytest.raises(CtxError, match="have no tokens"):
        build_training_set([["\u200b"]], objective)
    with pytest.raises(CtxError, match="have no tokens"):
        next(iter(ShuffledStream(DocumentStream([["\u200b"]], objective), 2, seed=0)))


@given(size=st.integers(1, 50), batch_size=st.integers(1, 70), seed=st.integers(0, 99), start=st.integers(0, 60))
def test_sampler_covers_each_epoch_and_resumes(size, batch_size, seed, start):
    batches = list(islice(EpochBatchSampler(size, batch_size, seed), start + 5))
    assert all(len(batch) == batch_size for batch in batches)
    samples = [pair for batch in batches for pair in batch]
    assert [epoch for epoch, _ in samples] == [number // size for number in range(len(samples))]
    for epoch in range(len(samples) // size):
        assert sorted(index for _, index in samples[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert list(islice(EpochBatchSampler(size, batch_size, seed, start), 5)) == batches[start:]


def test_order_depends_on_epoch_and_seed():
    def sampled_indices(count, seed):
        return [index for batch in islice(EpochBatchSampler(100, 100, seed), count) for _, index in batch]

    assert sampled_indices(1, 0) != sampled_indices(1, 1)
    assert sampled_indices(2, 0)[:100] != sampled_indices(2, 0)[100:]


@pytest.mark.parametrize("arguments", [(0, 4, 0, 0), (4, 0, 0, 0), (4, 4, 0, -1)])
def test_invalid_sampler_arguments_raise(arguments):
    with pytest.raises(CtxError, match="Cannot make batches"):
        EpochBatchSampler(*arguments)


@settings(max_examples=25)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 9), start=st.integers(0, 12), buffer_size=st.integers(1, 60))
def test_shuffled_stream_covers_each_epoch_and_resumes(count, batch_size, start, buffer_size):
    class NumberedStream(ExampleStream):
        def one_pass(self, epoch):
            return iter([{"epoch": epoch, "example_index": index} for index in range(count)])

    stream = NumberedStream()
    num_rows = (start + 5) * batch_size
    samples = list(islice(ShuffledStream(stream, batch_size, 3, buffer_size=buffer_size), num_rows))
    counts = Counter((row["epoch"], row["example_index"]) for row in samples)
    assert set(counts.values()) == {1}
    assert [row["epoch"] for row in samples] == [number // count for number in range(num_rows)]
    resumed = ShuffledStream(stream, batch_size, 3, start_batch=start, buffer_size=buffer_size)
    assert list(islice(resumed, 5 * batch_size)) == samples[start * batch_size :]


@pytest.mark.parametrize("contiguous_rows", [None, 12])
@pytest.mark.parametrize("streaming", [False, True])
def test_batches_do_not_depend_on_workers_resuming_or_processes(objective, documents, streaming, contiguous_rows):
    """Each of two processes reads half of the rows of a batch."""
    examples = build_training_set(documents, objective, streaming=streaming)

    def loader(**options):
        options |= {"batch_size": 6, "seed": 2, "contiguous_rows": contiguous_rows}
        return training_loader(examples, objective.collate, **options)

    def rows(batches):
        return [
            [row[mask.bool()].tolist() for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)]
            for b in batches
        ]

    expected = list(islice(loader(), 20))
    for workers in (1, 2):
        assert_same_batches(list(islice(loader(workers=workers), 20)), expected)
    for workers in (0, 1):
        assert_same_batches(list(islice(loader(start_batch=7, workers=workers), 13)), expected[7:])
    options = {"num_processes": 2, "split_batches": True, "dispatch_batches": False, "put_on_device": False}
    for workers in (0, 2):
        loaders = [prepare_data_loader(loader(workers=workers), process_index=index, **options) for index in (0, 1)]
        halves = [rows(islice(batches_of_process, 8)) for batches_of_process in loaders]
        assert [first + second for first, second in zip(*halves, strict=True)] == rows(expected[:8])
