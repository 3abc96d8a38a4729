"""Contiguous sampling: each row of a step continues the same row of the previous step."""

from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ContiguousBatchSampler, ContiguousStream, ExampleSet, ExampleStream, training_loader


class Numbers(ExampleStream):
    """A stream of `count` numbered examples."""

    def __init__(self, count):
        self.count = count

    def one_pass(self, epoch):
        return ({"epoch": epoch, "example_index": index} for index in range(self.count))


@given(
    batch_size=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    extra=st.integers(0, 40),
    seed=st.integers(0, 99),
    start=st.integers(0, 30),
)
def test_contiguous_sampler_continues_rows(batch_size, micro_batches, extra, seed, start):
    rows_per_step = batch_size * micro_batches
    size = rows_per_step + extra
    length = size // rows_per_step
    batches = list(islice(ContiguousBatchSampler(size, batch_size, rows_per_step, seed), 3 * length * micro_batches))
    assert all(len(batch) == batch_size for batch in batches)
    steps = [[*chain(*batches[first : first + micro_batches])] for first in range(0, len(batches), micro_batches)]
    for epoch in range(3):
        epoch_steps = steps[epoch * length : (epoch + 1) * length]
        assert {pair[0] for step in epoch_steps for pair in step} == {epoch}
        indices = [index for step in epoch_steps for _, index in step]
        assert len(set(indices)) == length * rows_per_step, "an example occurs twice in an epoch"
        indices_by_step = np.array([[index for _, index in step] for step in epoch_steps])
        breaks = np.diff(indices_by_step, axis=0) != 1
        assert breaks.sum() <= 1, "rows may break only after the last example"
        assert (indices_by_step[1:][breaks] == 0).all()
    full, resumed = (ContiguousBatchSampler(size, batch_size, rows_per_step, seed, first) for first in (0, start))
    assert list(islice(resumed, 5)) == list(islice(full, start, start + 5))


def test_row_offsets_depend_on_epoch_and_seed():
    def first_indices(seed, count=1):
        return [batch[0][1] for batch in islice(ContiguousBatchSampler(1000, 10, 10, seed), 0, 100 * count, 100)]

    assert first_indices(0) == first_indices(0)
    assert first_indices(0) != first_indices(1)
    assert len(set(first_indices(0, count=5))) == 5
    indices = {index for batch in islice(ContiguousBatchSampler(1007, 10, 10, 0), 100) for _, index in batch}
    assert len(indices) == 1000


@given(
    batch_size=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    extra=st.integers(0, 60),
    stretch=st.integers(1, 8),
    start=st.integers(0, 20),
)
def test_contiguous_stream_continues_rows(batch_size, micro_batches, extra, stretch, start):
    rows_per_step = batch_size * micro_batches
    count = rows_per_step + extra
    stream = ContiguousStream(Numbers(count), batch_size, rows_per_step, stretch=stretch)
    blocks = [min(stretch, (count - first) // rows_per_step) for first in range(0, count, rows_per_step * stretch)]
    steps_per_pass = sum(blocks)
    rows = list(islice(stream, 2 * steps_per_pass * rows_per_step))
    pass_size = steps_per_pass * rows_per_step
    assert [row["epoch"] for row in rows] == [0] * pass_size + [1] * pass_size
    indices_by_step = np.array([row["example_index"] for row in rows]).reshape(-1, rows_per_step)
    assert len(np.unique(indices_by_step[:steps_per_pass])) == steps_per_pass * rows_per_step
    starts = {0, *np.cumsum(blocks).tolist()}
    for step in range(1, steps_per_pass):
        if step not in starts:
            assert (indices_by_step[step] == indices_by_step[step - 1] + 1).all()
    resumed = ContiguousStream(Numbers(count), batch_size, rows_per_step, start_batch=start, stretch=stretch)
    first = start * batch_size
    assert list(islice(resumed, 3 * batch_size)) == list(islice(stream, first, first + 3 * batch_size))


@pytest.mark.parametrize("streaming", [False, True])
def test_fewer_examples_than_rows_raises(streaming):
    examples = Numbers(5) if streaming else ExampleSet.build({"input_ids": np.array([index])} for index in range(5))
    with pytest.raises(CtxError, match="5 examples cannot fill a step of 6 contiguous rows"):
        next(iter(training_loader(examples, list, batch_size=3, contiguous_rows=6, seed=0)))
