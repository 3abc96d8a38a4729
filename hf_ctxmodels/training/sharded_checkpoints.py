"""Checkpoints sharded over the processes of FSDP or DeepSpeed, by `torch.distributed.checkpoint` in safetensors files.

Each process writes its shards of the weights and of the optimizer's state into the folder `shards` of a checkpoint. A
weight has its name in model.safetensors, and a moment of the optimizer is `<parameter>|<moment>`. Any number of
processes, also a single one without sharding, reads the shards.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import file_digest
from hf_ctxmodels.core.output_files import write_tensors

SHARDS_FOLDER = "shards"
MOMENT_SEPARATOR = "|"
_MAX_FILE_BYTES = 1 << 29  # a file is assembled in memory
_TRAINING_FILES = re.compile(
    r"(trainer_state|manifest|(random|stream)_state_\d+)\.json|(optimizer|carried_\d+|best_of_stage)\.safetensors"
)


def is_sharded(checkpoint: str | Path) -> bool:
    """Whether a directory is a checkpoint with sharded weights."""
    return (Path(checkpoint) / SHARDS_FOLDER).is_dir()


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that `save_pretrained` writes, without tied copies; `DTensor`s if they are sharded."""
    ignored = model._keys_to_ignore_on_save or ()
    weights = {name: weight for name, weight in model.state_dict().items() if name not in ignored}
    placeholders = {name: torch.empty(weight.shape, device="meta") for name, weight in weights.items()}
    return {name: weights[name] for name in remove_tied_weights_from_state_dict(placeholders, model)}


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A copy of this process's shards, which training may not change while they are written."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    return stager.stage(dict(tensors))  # type: ignore[return-value]


def write_shards(checkpoint: Path, tensors: dict[str, Any], group: torch.distributed.ProcessGroup) -> dict[str, str]:
    """Write this process's shards and flush them to disk, on a process group with a CPU backend; a collective call.

    Returns:
        File, relative to the checkpoint -> SHA-256, of the files of all processes.

    Raises:
        Exception: The error of a process, on all processes.
    """
    folder = checkpoint / SHARDS_FOLDER
    file_numbers = _file_numbers(tensors, group.size())
    writer = HuggingFaceStorageWriter(str(folder), file_numbers, save_distributed=True)
    try:
        distributed_checkpoint.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # not an Exception
        raise _first_failure(error) from None
    digests: dict[str, str] | Exception
    try:
        files = folder.glob(f"shard-{group.rank() + 1:05d}-*")
        digests = {str(path.relative_to(checkpoint)): file_digest(path) for path in files}
    except OSError as failure:  # the other processes wait for the result
        digests = failure
    results: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(results, digests, group=group)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return {name: digest for result in results for name, digest in result.items()}


def _first_failure(error: CheckpointException) -> Exception:
    failure = next(iter(error.failures.values()))[0]
    return failure if isinstance(failure, Exception) else RuntimeError(str(failure))


def _file_numbers(tensors: Mapping[str, Tensor], num_processes: int) -> dict[str, int]:
    """Tensor -> number of its file, so that the files of a process are of bounded size."""
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size() // num_processes
        if size and size + num_bytes > _MAX_FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += num_bytes
    return numbers


def stored_tensors(checkpoint: str | Path) -> dict[str, TensorStorageMetadata]:
    """Name -> global size and dtype of all tensors."""
    return HuggingFaceStorageReader(str(Path(checkpoint) / SHARDS_FOLDER)).read_metadata().state_dict_metadata  # type: ignore[return-value]


def read_shards(checkpoint: str | Path, tensors: dict[str, Any]) -> None:
    """Read tensors in place; of a `DTensor` only this process's shard. Raises CtxError if one is missing or has another
    size."""
    reader = HuggingFaceStorageReader(str(Path(checkpoint) / SHARDS_FOLDER))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # each process reads without the others
            distributed_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CtxError(
            f"The checkpoint's tensors do not fit: {_first_failure(error)}.",
            location=str(checkpoint),
            hint="resume with the model and the optimizer of that run.",
        ) from error


def merge_checkpoint(checkpoint: Path, directory: Path, max_file_size: str = "5GB") -> None:
    """Write the model of a sharded checkpoint, as `from_pretrained` opens it, into an existing directory: weights in
    files of at most `max_file_size`, each of which is held in memory once, configuration and tokenizer."""
    for path in checkpoint.iterdir():
        if path.is_file() and not _TRAINING_FILES.fullmatch(path.name):
            shutil.copyfile(path, directory / path.name)
    stored = {name: tensor for name, tensor in stored_tensors(checkpoint).items() if MOMENT_SEPARATOR not in name}

    def empty(name: str, device: str) -> Tensor:
        return torch.empty(stored[name].size, dtype=stored[name].properties.dtype, device=device)

    split = split_torch_state_dict_into_shards(
        {name: empty(name, "meta") for name in stored},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_size,
    )
    for file, names in split.filename_to_tensors.items():
        weights = {name: empty(name, "cpu") for name in names}
        read_shards(checkpoint, weights)
        write_tensors(directory / file, weights, {"format": "pt"})
    if split.is_sharded:
        parameters = sum(tensor.size.numel() for tensor in stored.values())
        index = {
            "metadata": {"total_parameters": parameters, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
