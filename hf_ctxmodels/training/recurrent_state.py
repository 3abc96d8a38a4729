"""Recurrent states carried from one training step to the next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import ModelOutput

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.recurrent_cache import RecurrentCache

_CACHE = "past_key_values"
_INDICES = "example_index"


def state_outputs(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's outputs that are inputs of the next step: its `state_outputs`.

    `past_key_values` is a `RecurrentCache`; other outputs (XLNet's `mems`) are sequences of tensors (rows, ...). The
    initial state is zero.

    Raises:
        CtxError: The model has none.
    """
    names = tuple(getattr(model, "state_outputs", ()))
    if not names:
        raise CtxError(
            f"{type(model).__name__} has no memory (`state_outputs`), which the objective requires.",
            hint="use a model with one, or switch the objective's memory off.",
        )
    return names


class RecurrentStateCarrier:
    """The states of this process's contiguous rows of text; see `hf_ctxmodels.data.ContiguousBatchSampler`.

    Each micro-batch of a step has its own states: 4 micro-batches of 4 rows are equal to one of 16. Rows that do not
    continue the previous row, by the examples' numbers, start with zeros. Evaluation does not use these states.

    Args:
        names: From `state_outputs`; empty for none.
        micro_batches: Micro-batches per step.
    """

    def __init__(self, names: Sequence[str], micro_batches: int) -> None:
        self._names = tuple(names)
        self._caches: list[dict[str, RecurrentCache]] = [{} for _ in range(micro_batches)]
        self._indices: list[torch.Tensor | None] = [None] * micro_batches

    def inputs(self, number: int, example_indices: torch.Tensor) -> dict[str, Any]:
        """The model's state inputs for micro-batch `number` of this step; none in the first step.

        Args:
            example_indices: (rows,) on the device.
        """
        before = self._indices[number]
        if before is None:
            return {}
        continues = example_indices == before + 1  # without synchronisation
        kept = {name: cache.mask_rows(continues) for name, cache in self._caches[number].items()}
        return {name: cache if name == _CACHE else _tensors(cache) for name, cache in kept.items()}

    def take(self, number: int, example_indices: torch.Tensor, output: ModelOutput) -> None:
        """Keep the output states of micro-batch `number`; raises CtxError if a state is missing."""
        for name in self._names:
            state = output.get(name)
            if not state:
                raise CtxError(
                    f"The model returned no {name!r} to carry to the next step.",
                    hint="use a configuration with a memory (stateful, or mem_len above 0).",
                )
            cache = state if isinstance(state, RecurrentCache) else RecurrentCache([tensor] for tensor in state)
            self._caches[number][name] = cache.detach()
            self._indices[number] = example_indices

    def save(self, directory: Path, process: int) -> None:
        """Write this process's states, if any, into a checkpoint."""
        tensors = {}
        for number, (caches, indices) in enumerate(zip(self._caches, self._indices, strict=True)):
            if indices is not None:
                tensors[f"{number}|{_INDICES}|"] = indices.to("cpu").contiguous()
            for name, cache in caches.items():
                tensors |= {f"{number}|{name}|{place}": each for place, each in cache.to("cpu").state_dict().items()}
        if tensors:
            save_file(tensors, directory / _file_name(process))

    def load(self, directory: Path, process: int, processes: int, device: torch.device) -> None:
        """Restore the states, also with another number of processes."""
        if not self._names or not (directory / _file_name(0)).exists():
            return
        saved = len(list(directory.glob(_file_name("*"))))
        if saved == processes:
            tensors = load_file(directory / _file_name(process))
        else:
            parts = [load_file(directory / _file_name(number)) for number in range(saved)]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            tensors = {name: tensor.chunk(processes)[process] for name, tensor in whole.items()}
        for number in range(len(self._caches)):
            found: dict[str, dict[str, torch.Tensor]] = {}
            for full_name, tensor in tensors.items():
                owner, name, place = full_name.split("|")
                if int(owner) == number:
                    found.setdefault(name, {})[place] = tensor
            if _INDICES in found:
                self._indices[number] = found.pop(_INDICES)[""].to(device)
            self._caches[number] = {
                name: RecurrentCache.from_state_dict(each).to(device) for name, each in found.items()
            }


def _tensors(cache: RecurrentCache) -> tuple[torch.Tensor, ...]:
    """The tensors of all layers."""
    return tuple(part for state in cache.states for part in state)


def _file_name(process: int | str) -> str:
    return f"carried_{process}.safetensors"
