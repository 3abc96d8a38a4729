"""What a model remembers from one step to the next: outputs that are inputs again."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils import ModelOutput

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.checkpoint.optimizer_state import save_tensors

_INDICES = "example_index"


def state_outputs(model: nn.Module) -> tuple[str, ...]:
    """Names of the outputs that a model takes back as inputs of the same name: its `state_outputs`.

    Each is a list of tensors, the first dimension of which is the batch's, and of which zeros mean "nothing yet".

    Raises:
        CtxError: it has none, so that contiguous examples are of no use to it.
    """
    names = tuple(getattr(model, "state_outputs", ()))
    if not names:
        raise CtxError(
            f"{type(model).__name__} has no memory (`state_outputs`), which the objective is made for.",
            hint="train a model that has one, or switch the objective's memory off.",
        )
    return names


class RecurrentStateCarrier:
    """The states of this process's contiguous rows; see `hf_ctxmodels.data.ContiguousBatchSampler`.

    Every micro-batch of a step has rows of its own, and so states of its own: 4 micro-batches of 4 rows make the step
    that one of 16 makes. Rows whose text does not continue that of the row before, as the examples' numbers tell,
    start with zeros. Evaluation does not come here: it neither sees nor changes what training remembers.

    Args:
        names: from `state_outputs`; empty to carry nothing.
        micro_batches: of a step.
    """

    def __init__(self, names: Sequence[str], micro_batches: int) -> None:
        self._names = tuple(names)
        self._states: list[dict[str, list[torch.Tensor]]] = [{} for _ in range(micro_batches)]

    def inputs(self, number: int, example_indices: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """What the model gets beside micro-batch `number` of this step; nothing in the first step.

        Args:
            example_indices: (rows,) of the micro-batch, on its device.
        """
        state = self._states[number]
        if not state:
            return {}
        (before,) = state[_INDICES]
        continues = example_indices == before + 1  # stays on the device: nobody waits for it
        return {name: [_kept(tensor, continues) for tensor in state[name]] for name in self._names}

    def take(self, number: int, example_indices: torch.Tensor, output: ModelOutput) -> None:
        """Remember what the model made of micro-batch `number`.

        Raises:
            CtxError: the output lacks it.
        """
        if not self._names:
            return
        missing = [name for name in self._names if not output.get(name)]
        if missing:
            raise CtxError(
                f"The model gave no {missing[0]!r} to carry to the next step.",
                hint="use a configuration with a memory (mem_len above 0).",
            )
        state = {name: [tensor.detach() for tensor in output[name]] for name in self._names}
        self._states[number] = {**state, _INDICES: [example_indices]}

    def save(self, directory: Path, process: int) -> None:
        """Write this process's memory, if there is any, into the directory of a checkpoint."""
        tensors = {
            f"{number}|{name}|{place}": tensor.to("cpu").contiguous()
            for number, state in enumerate(self._states)
            for name, values in state.items()
            for place, tensor in enumerate(values)
        }
        if tensors:
            save_tensors(tensors, directory / _file_name(process))

    def load(self, directory: Path, process: int, processes: int, device: torch.device) -> None:
        """Load what `save` wrote, also when as many rows are spread over another number of processes now."""
        if not self._names or not (directory / _file_name(0)).exists():
            return
        saved = len(list(directory.glob(_file_name("*"))))
        if saved == processes:
            tensors = load_file(directory / _file_name(process))
        else:
            parts = [load_file(directory / _file_name(number)) for number in range(saved)]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            tensors = {name: tensor.chunk(processes)[process] for name, tensor in whole.items()}
        for full_name in sorted(tensors, key=lambda full_name: int(full_name.rpartition("|")[2])):
            number, name, _ = full_name.split("|")
            self._states[int(number)].setdefault(name, []).append(tensors[full_name].to(device))


def _kept(tensor: torch.Tensor, continues: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that continue, zeros for the others."""
    return torch.where(continues.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0)


def _file_name(process: int | str) -> str:
    return f"carried_{process}.safetensors"
