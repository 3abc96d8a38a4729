"""From examples to device batches, in an order that depends on nothing but the seed and the position."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch.utils.data import Dataset

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleStream, training_loader
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.interruption import ignore_signals

Collate = Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]
Batch = dict[str, torch.Tensor]

INDEX_KEY = "example_index"
_CORES_FOR_A_WORKER = 4


class EpochIndexed(Dataset):
    """Any map-style data set as the loop wants it: indexed by `(epoch, index)`, both noted in the item."""

    def __init__(self, examples: Sequence[Mapping[str, Any]]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        return {**self._examples[index], "epoch": epoch, INDEX_KEY: index}


class IndexedCollator:
    """A collator whose batches also say which examples they hold, so that an error can name them."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """The batch of `examples`, with their numbers as an extra entry "example_index"."""
        indices = [int(example[INDEX_KEY]) for example in examples]
        batch = dict(self._collate(examples))
        batch.pop("epoch", None)
        batch[INDEX_KEY] = torch.tensor(indices)
        return batch


class TrainingBatches:
    """Endless micro-batches; `close` ends the background processes that make them.

    Workers outlive the first SIGTERM (see `ignore_signals`), so a process that ends without closing waits for them.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """End the workers; further batches are not to be had."""
        self._batches.close()
        iterator = self._loader.base_dataloader._iterator
        if iterator is None:
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:  # those that did not listen
            worker.kill()


def training_batches(
    accelerator: Accelerator,
    examples: Dataset | ExampleStream,
    collate: Collate,
    arguments: LoopArguments,
    start_batch: int,
    contiguous: bool = False,
) -> TrainingBatches:
    """Endless micro-batches of this process, from the `start_batch`-th micro-batch of the run on.

    A micro-batch is drawn for all processes together and split among them, so that two processes with batch size 4 see
    what one with batch size 8 sees. Background workers only work ahead: what they have made and nobody has used is made
    again after a resume.

    Args:
        examples: indexed by `(epoch, index)` (see `EpochIndexed`), or an `ExampleStream`.
        contiguous: each row of a micro-batch continues that row of the same micro-batch of the step before.
    """
    if isinstance(examples, Sized) and len(examples) == 0:
        raise CtxError(
            "The training set holds no example.", hint="give --dataset or --train_file with at least one example."
        )
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
    # A generator of its own: starting a loader must not draw from the one that dropout uses.
    loader.generator = torch.Generator().manual_seed(arguments.seed)
    loader.worker_init_fn = ignore_signals
    loader.pin_memory = accelerator.device.type == "cuda"
    return TrainingBatches(accelerator.prepare_data_loader(loader))


def default_workers(accelerator: Accelerator) -> int:
    """Background processes that make batches unless the user says how many: 1, and 0 where few CPU cores train.

    A worker shares a core with one of the threads that train, and at every barrier the others wait for that thread.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    few = cores < _CORES_FOR_A_WORKER * accelerator.num_processes
    return 0 if few and accelerator.device.type == "cpu" else 1


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    """The next `count` micro-batches.

    Raises:
        CtxError: the stream ended before, or the data cannot be read.
    """
    try:
        taken = list(islice(batches, count))
    except CtxError as error:
        # From a worker it comes with the worker's traceback, at whose end it stands itself.
        raise CtxError(re.split(r"\n[\w.]+Error: ", str(error))[-1]) from None
    if len(taken) < count:
        raise CtxError("The data ended before the last step.", hint="lower --max_steps or give more data.")
    return taken


def count_items(batches: Iterable[Batch], targets: Sequence[str]) -> torch.Tensor:
    """Targets per name, then non-padding input tokens, over all `batches`: an int64 tensor (len(targets) + 1,).

    Every element of a floating-point target counts; of an integer target those that are not -100, of the columns of
    answers (`..._positions`) those inside the sequence. A target that is absent counts 0. Nothing is read back from
    the device.
    """
    batches = list(batches)
    tokens = torch.stack([_count_tokens(batch) for batch in batches]).sum()
    return torch.cat([count_targets(batches, targets), tokens[None]])


def count_targets(batches: Sequence[Mapping[str, torch.Tensor]], targets: Sequence[str]) -> torch.Tensor:
    """Targets per name over all `batches`, as in `count_items`: an int64 tensor (len(targets),)."""
    return torch.stack([_count_batch(batch, targets) for batch in batches]).sum(dim=0)


def _count_batch(batch: Mapping[str, torch.Tensor], targets: Sequence[str]) -> torch.Tensor:
    nothing = torch.zeros((), dtype=torch.int64, device=next(iter(batch.values())).device)
    return torch.stack([_count_target(batch, name) if name in batch else nothing for name in targets])


def _count_target(batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    target = batch[name]
    if target.is_floating_point():
        return torch.tensor(target.numel(), device=target.device)
    if name.endswith("_positions"):  # heads ignore those outside the sequence
        width = batch["input_ids" if "input_ids" in batch else "inputs_embeds"].shape[1]
        return ((target >= 0) & (target < width)).sum()
    return (target != IGNORED).sum()


def _count_tokens(batch: Batch) -> torch.Tensor:
    for name in ("sequence_ids", "attention_mask"):
        if name in batch:
            return (batch[name] != 0).sum()
    first = batch.get("input_ids", next(iter(batch.values())))
    return torch.tensor(first.numel(), device=first.device)
