"""Sharded streams: processes and workers read disjoint parts, and a resumed run continues where it stopped."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleStream, SampledStream, ShardedStream, training_loader
from hf_ctxmodels.data.streams import POSITION_KEY

SIZES = [13, 0, 40, 7, 22, 9, 31]


class NumberedPart(ExampleStream):
    """A part of numbered examples that records when it is read."""

    def __init__(self, first: int, size: int, log: list[int]) -> None:
        self.first, self.size, self.log = first, size, log

    def one_pass(self, epoch: int):
        self.log.append(self.first)
        for index in range(self.first, self.first + self.size):
            yield {"epoch": epoch, "example_index": index}


class NumberedParts(ExampleStream):
    """Parts of numbered examples."""

    def __init__(self, sizes: list[int], log: list[int]) -> None:
        starts = np.cumsum([0, *sizes])
        self.parts = [NumberedPart(int(start), size, log) for start, size in zip(starts, sizes)]

    def one_pass(self, epoch: int):
        for part in self.parts:
            yield from part.one_pass(epoch)

    def part_streams(self):
        return [self.parts]


class Run:
    """Batches of all processes, and the states to resume from."""

    def __init__(self, examples: ExampleStream, processes: int, workers: int, **options: Any) -> None:
        self.start_batch, states = options.pop("start_batch", 0), options.pop("states", [])
        self.loaders = [
            training_loader(
                examples,
                lambda batch: {"rows": torch.tensor([(row["epoch"], row["example_index"]) for row in batch])},
                batch_size=4 * processes,
                seed=3,
                workers=workers,
                process_index=index,
                num_processes=processes,
                start_batch=self.start_batch,
                **options,
            )
            for index in range(processes)
        ]
        self.streams = [loader.dataset for loader in self.loaders]
        assert all(isinstance(stream, ShardedStream) for stream in self.streams)
        self.is_exact = [stream.load_state_dicts(states) for stream in self.streams] if states else []
        self.batches = [iter(loader) for loader in self.loaders]

    def steps(self, number: int) -> list[list[list[tuple[int, int]]]]:
        result = []
        for _ in range(number):
            result.append([])
            for stream, batches in zip(self.streams, self.batches):
                batch = next(batches)
                stream.record(batch[POSITION_KEY])
                result[-1].append([tuple(row) for row in batch["rows"].tolist()])
        return result

    def states(self) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(stream.state_dict())) for stream in self.streams]


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (3, 0), (2, 2)])
@pytest.mark.parametrize("order", ["shuffled", "contiguous", "sampled"])
def test_shards_read_every_example_once_and_resume_exactly(order: str, processes: int, workers: int) -> None:
    log: list[int] = []
    examples: ExampleStream = NumberedParts(SIZES, log)
    options = {"contiguous_rows": 4 * processes} if order == "contiguous" else {}
    if order == "sampled":
        examples = SampledStream([examples, NumberedParts([5, 6], log)], np.array([0.7, 0.3]), seed=1)
    run = Run(examples, processes, workers, **options)
    steps = run.steps(7)
    states = run.states()
    remaining = run.steps(60)
    resumed = Run(examples, processes, workers, start_batch=7, states=states, **options)
    log.clear()
    assert resumed.steps(20) == remaining[:20]
    assert set(resumed.is_exact) == {True}
    resumed = Run(examples, processes, workers, start_batch=27, states=resumed.states(), **options)
    assert resumed.steps(40) == remaining[20:]
    if workers == 0 and order == "shuffled":
        assert len(log) <= len(SIZES) * 60 * 4 * processes // sum(SIZES) + 2 * len(SIZES) * processes

    counts = Counter(row for step in steps + remaining for batch in step for row in batch)
    assert set(counts.values()) == {1}
    if order == "shuffled":  # the slowest shard has finished the first epoch
        assert sum(epoch == 0 for epoch, _ in counts) == sum(SIZES)
    if order == "contiguous":
        rows = [[row for batch in step for row in batch] for step in steps + remaining]
        pairs = [pair for step, next_step in pairwise(rows) for pair in zip(step, next_step)]
        continues = [(epoch, index + 1) == following for (epoch, index), following in pairs]
        assert np.mean(continues) > 0.5


def test_resuming_with_fewer_shards_skips_finished_parts() -> None:
    log: list[int] = []
    run = Run(NumberedParts([20] * 10, log), 2, 0)
    run.steps(13)  # 52 examples per process: two and a half parts
    resumed = Run(NumberedParts([20] * 10, log), 1, 0, start_batch=13, states=run.states())
    assert resumed.is_exact == [False]
    finished = {row[1] // 20 for step in Run(NumberedParts([20] * 10, log), 2, 0).steps(10) for b in step for row in b}
    read_parts = {index // 20 for step in resumed.steps(30) for batch in step for epoch, index in batch if epoch == 0}
    assert len(finished) == 4
    assert read_parts == set(range(10)) - finished


def test_parts_without_examples_raise() -> None:
    for sizes, options, message in (([0, 0], {}, "no tokens"), ([3, 3], {"contiguous_rows": 4}, "cannot fill a step")):
        with pytest.raises(CtxError, match=message):
            Run(NumberedParts(sizes, []), 1, 0, **options).steps(1)
