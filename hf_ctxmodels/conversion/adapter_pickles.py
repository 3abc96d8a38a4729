"""Conversion of adapters whose weights are pickles, as on AdapterHub, to safetensors."""

import pickle
import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.downstream.adapters.saving import (
    FUSION_WEIGHTS_FILE,
    HEAD_WEIGHTS_FILE,
    WEIGHTS_FILE,
    check_adapter_directory,
)

PICKLES = {
    "pytorch_adapter.bin": WEIGHTS_FILE,
    "pytorch_model_head.bin": HEAD_WEIGHTS_FILE,
    "pytorch_model_adapter_fusion.bin": FUSION_WEIGHTS_FILE,
}
_CONFIGS = ("adapter_config.json", "head_config.json", "adapter_fusion_config.json")


def convert_adapter(source: str | Path, output: str | Path) -> str:
    """Write the adapter, head and fusion of a folder or Hub id as safetensors; returns a summary to print.

    Raises:
        CtxError: There is none, a pickle holds more than tensors, or the output holds a model or cannot be written.
    """
    folder, target = _folder(source), Path(output)
    found = {name: file for name, file in PICKLES.items() if (folder / name).is_file()}
    if not found:
        raise CtxError(
            "There is no pytorch_adapter.bin.", location=str(source), hint="give the folder or Hub id of an adapter."
        )
    check_adapter_directory(target)
    read = {file: _tensors(folder / name) for name, file in found.items()}
    with wrap_write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        for file, tensors in read.items():
            temporary = target / f"{file}.writing"
            save_file(tensors, temporary)
            temporary.replace(target / file)
        for name in _CONFIGS:
            if (folder / name).is_file() and folder.resolve() != target.resolve():
                shutil.copyfile(folder / name, target / name)
    counts = ", ".join(f"{file} ({sum(each.numel() for each in tensors.values()):,})" for file, tensors in read.items())
    return f"{counts} parameters: {source} -> {target}"


def _folder(source: str | Path) -> Path:
    if Path(source).exists() or Path(source).is_absolute():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*_CONFIGS, *PICKLES]))
    except Exception as error:  # no such repository, no network, no valid id
        raise CtxError("There is no such adapter.", location=str(source), hint="give a folder, or a Hub id.") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, which holds nothing else."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CtxError(
            f"The pickle cannot be read as weights: {str(error).splitlines()[0]}",
            location=str(path),
            hint="get the file again; one that holds programs is not opened.",
        ) from error
    if not isinstance(content, dict) or not all(isinstance(each, Tensor) for each in content.values()):
        raise CtxError("The pickle holds no named tensors.", location=str(path), hint="give an adapter's file.")
    return {str(name): each.detach().clone().contiguous() for name, each in content.items()}
