"""Training batches on the device, in an order that depends only on seed and position."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch.utils.data import Dataset

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleStream, training_loader
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.distributed import ignore_signals

Collate = Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]
Batch = dict[str, torch.Tensor]

INDEX_KEY = "example_index"
_MIN_CORES_PER_PROCESS = 4  # for a worker in the background


class EpochIndexed(Dataset):
    """A map-style dataset indexed by `(epoch, index)`; items contain both, as "epoch" and "example_index"."""

    def __init__(self, examples: Sequence[Mapping[str, Any]]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        return {**self._examples[index], "epoch": epoch, INDEX_KEY: index}


class IndexedCollator:
    """A collator that adds the indices of the examples to batches, for error messages."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """The batch of `examples`, with their indices as "example_index"."""
        indices = [int(example[INDEX_KEY]) for example in examples]
        batch = dict(self._collate(examples))
        batch.pop("epoch", None)
        batch[INDEX_KEY] = torch.tensor(indices)
        return batch


class TrainingBatches:
    """Endless micro-batches; `close` ends the background processes that make them.

    Workers ignore the first SIGTERM (see `ignore_signals`), so a process that exits without closing waits for them.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """End the workers; there are no further batches."""
        self._batches.close()
        iterator = self._loader.base_dataloader._iterator
        if iterator is None:
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:  # that did not react
            worker.kill()


def training_batches(
    accelerator: Accelerator,
    examples: Dataset | ExampleStream,
    collate: Collate,
    arguments: LoopArguments,
    start_batch: int,
    contiguous: bool = False,
) -> TrainingBatches:
    """Endless micro-batches of this process, beginning with micro-batch `start_batch` of the run.

    A micro-batch is sampled for all processes together and split among them, so two processes with batch size 4 see the
    same examples as one with batch size 8. Batches that workers prefetched are made again after a resume.

    Args:
        accelerator, arguments: The run's.
        examples: Indexed by `(epoch, index)` (see `EpochIndexed`), or an `ExampleStream`.
        collate: List of examples -> arguments of the model's forward.
        start_batch: Micro-batches to skip.
        contiguous: Each row of a micro-batch continues the same row of this micro-batch in the previous step.

    Raises:
        CtxError: There are no examples.
    """
    if isinstance(examples, Sized) and len(examples) == 0:
        raise CtxError("The training set is empty.", hint="pass --dataset or --train_file with at least one example.")
    batch_size = arguments.per_device_batch_size * accelerator.num_processes
    loader = training_loader(
        examples,  # type: ignore[arg-type]
        IndexedCollator(collate),
        batch_size=batch_size,
        seed=arguments.seed,
        start_batch=start_batch,
        workers=default_workers(accelerator) if arguments.dataloader_workers is None else arguments.dataloader_workers,
        contiguous_rows=batch_size * arguments.gradient_accumulation_steps if contiguous else None,
        batches_per_step=arguments.gradient_accumulation_steps,
    )
    # a separate generator: starting a loader must not advance the global one, which dropout uses
    loader.generator = torch.Generator().manual_seed(arguments.seed)
    loader.worker_init_fn = ignore_signals
    loader.pin_memory = accelerator.device.type == "cuda"
    return TrainingBatches(accelerator.prepare_data_loader(loader))


def default_workers(accelerator: Accelerator) -> int:
    """The default number of background processes that make batches: 1, or 0 with few CPU cores, where a worker would
    slow one training thread and thereby all others at each barrier."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    has_few_cores = cores < _MIN_CORES_PER_PROCESS * accelerator.num_processes
    return 0 if has_few_cores and accelerator.device.type == "cpu" else 1


def next_batches(batches: Iterator[Batch], count: int) -> list[Batch]:
    """The next `count` micro-batches.

    Raises:
        CtxError: The stream ends earlier, or the data cannot be read.
    """
    try:
        step_batches = list(islice(batches, count))
    except CtxError as error:
        # the message of a worker's error is at the end of a traceback
        raise CtxError(re.split(r"\n[\w.]+Error: ", str(error))[-1]) from None
    if len(step_batches) < count:
        raise CtxError("The data ended before the last step.", hint="lower --max_steps or use more data.")
    return step_batches


def count_items(batches: Iterable[Batch], targets: Sequence[str]) -> torch.Tensor:
    """(len(targets) + 1,) int64: the number of targets per name, then of non-padding input tokens, over all `batches`.

    Counted are all elements of floating-point targets, elements of integer targets that are not -100, and answer
    positions (`..._positions`) inside the sequence; absent targets count 0. Nothing synchronises with the device.
    """
    batches = list(batches)
    tokens = torch.stack([_count_tokens(batch) for batch in batches]).sum()
    return torch.cat([count_targets(batches, targets), tokens[None]])


def count_targets(batches: Sequence[Mapping[str, torch.Tensor]], targets: Sequence[str]) -> torch.Tensor:
    """Targets per name over all `batches`, as in `count_items`: an int64 tensor (len(targets),)."""
    if not targets:
        return torch.zeros(0, dtype=torch.int64)
    counts = []
    for batch in batches:
        zero = torch.zeros((), dtype=torch.int64, device=next(iter(batch.values())).device)
        counts.append(torch.stack([_count_target(batch, name) if name in batch else zero for name in targets]))
    return torch.stack(counts).sum(dim=0)


def _count_target(batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    target = batch[name]
    if target.is_floating_point():
        return torch.tensor(target.numel(), device=target.device)
    if name.endswith("_positions"):  # heads ignore positions outside the sequence
        length = batch["input_ids" if "input_ids" in batch else "inputs_embeds"].shape[1]
        return ((target >= 0) & (target < length)).sum()
    return (target != IGNORE_INDEX).sum()


def _count_tokens(batch: Batch) -> torch.Tensor:
    for name in ("sequence_ids", "attention_mask"):
        if name in batch:
            return (batch[name] != 0).sum()
    first = batch.get("input_ids", next(iter(batch.values())))
    return torch.tensor(first.numel(), device=first.device)
