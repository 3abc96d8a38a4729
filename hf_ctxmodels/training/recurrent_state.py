"""Recurrent states carried from one training step to the next."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils import ModelOutput

from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import write_tensors

_INDICES = "example_index"


class RecurrentStateCarrier:
    """The recurrent states of this process's contiguous text; see `hf_ctxmodels.data.ContiguousBatchSampler`.

    Each micro-batch of a step has separate states. Examples that do not continue the previous example, by their
    indices, start with zeros. Evaluation does not use these states.

    The model's `state_outputs` are the names of outputs that are inputs of the next step: `past_key_values`, a
    `RecurrentCache`, or others (XLNet's `mems`), sequences of tensors (batch, ...). Raises CtxError if there is none.
    """

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        self._names = tuple(getattr(model, "state_outputs", ()))
        if not self._names:
            raise CtxError(
                f"{type(model).__name__} has no recurrent state (`state_outputs`), which the objective requires.",
                hint="use a recurrent model, or an objective without memory (memory_length=0, carry=false).",
            )
        self._caches: list[dict[str, RecurrentCache]] = [{} for _ in range(micro_batches)]
        self._indices: list[torch.Tensor | None] = [None] * micro_batches

    def inputs(self, number: int, example_indices: torch.Tensor) -> dict[str, Any]:
        """The model's state inputs for micro-batch `number` with (batch,) example indices; empty in the first step."""
        previous_indices = self._indices[number]
        if previous_indices is None:
            return {}
        is_continued = example_indices == previous_indices + 1  # without synchronization
        caches = {name: cache.mask_rows(is_continued) for name, cache in self._caches[number].items()}
        return {
            name: cache if name == "past_key_values" else tuple(tensor for state in cache.states for tensor in state)
            for name, cache in caches.items()
        }

    def update(self, number: int, example_indices: torch.Tensor, output: ModelOutput) -> None:
        """Store the output states of micro-batch `number`; raises CtxError if a state is missing."""
        for name in self._names:
            state = output.get(name)
            if not state:
                raise CtxError(
                    f"The model returned no {name!r} to carry to the next step.",
                    hint="use a configuration with a recurrent state (stateful, or mem_len above 0).",
                )
            cache = state if isinstance(state, RecurrentCache) else RecurrentCache([tensor] for tensor in state)
            self._caches[number][name] = cache.detach()
            self._indices[number] = example_indices

    def save(self, directory: Path, process: int) -> None:
        """Write this process's states, if any, into a checkpoint."""
        tensors = {}
        for number, (caches, indices) in enumerate(zip(self._caches, self._indices, strict=True)):
            if indices is not None:
                tensors[f"{number}|{_INDICES}|"] = indices
            for name, cache in caches.items():
                tensors |= {f"{number}|{name}|{key}": tensor for key, tensor in cache.state_dict().items()}
        if tensors:
            write_tensors(directory / _file_name(process), tensors)

    def load(self, directory: Path, process: int, processes: int, device: torch.device) -> None:
        """Restore the states, also with another number of processes or micro-batches of the same global batch."""
        if not (directory / _file_name(0)).exists():
            return
        shards = [load_file(path) for path in sorted(directory.glob(_file_name("*")), key=_process_of)]
        rows_by_name: dict[str, list[torch.Tensor]] = {}  # by micro-batch, then by process
        for full_name in sorted(shards[0], key=lambda full_name: int(full_name.split("|", 1)[0])):
            rows_by_name.setdefault(full_name.split("|", 1)[1], []).extend(shard[full_name] for shard in shards)
        step_states = {name: torch.cat(rows) for name, rows in rows_by_name.items()}
        micro_batches = len(self._caches)
        for number in range(micro_batches):
            states: dict[str, dict[str, torch.Tensor]] = {}
            for full_name, rows in step_states.items():
                name, key = full_name.split("|")
                states.setdefault(name, {})[key] = rows.chunk(micro_batches)[number].chunk(processes)[process]
            if _INDICES in states:
                self._indices[number] = states.pop(_INDICES)[""].to(device)
            self._caches[number] = {
                name: RecurrentCache.from_state_dict(state).to(device) for name, state in states.items()
            }


def _process_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _file_name(process: int | str) -> str:
    return f"carried_{process}.safetensors"
