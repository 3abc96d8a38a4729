"""Folders of adapters in AdapterHub's format: `adapter_config.json` and `adapter.safetensors`."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hf_ctxmodels.core.adapter_files import ADAPTERS_FOLDER, STACK_FILE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import read_json
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import MODEL_FILES, wrap_write_errors
from hf_ctxmodels.downstream.adapters.configuration import (
    FILE_VERSION,
    BottleneckConfig,
    FusionConfig,
    config_to_file,
    fusion_to_file,
)
from hf_ctxmodels.downstream.adapters.parameter_names import adapter_tensors, fusion_tensors, model_types

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter.safetensors"
FUSION_CONFIG_FILE, FUSION_WEIGHTS_FILE = "adapter_fusion_config.json", "model_adapter_fusion.safetensors"
HEAD_CONFIG_FILE, HEAD_WEIGHTS_FILE = "head_config.json", "model_head.safetensors"

GatheredValues = Mapping[int, Tensor]
"""id of a parameter -> its full value, for parameters that are sharded over processes."""


def write_adapter(
    base: CtxPreTrainedModel,
    name: str,
    config: BottleneckConfig,
    directory: Path,
    *,
    head: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None,
    values: GatheredValues | None = None,
) -> None:
    """Write an adapter.

    Args:
        base: The base model.
        name, config: The adapter.
        directory: The adapter's directory; created if needed.
        head: The entry `config` and the parameters of a head to write with the adapter, or None.
        values: Full values of sharded parameters.

    Raises:
        CtxError: The directory holds a model or an adapter of PEFT, or cannot be written.
    """
    files: dict[str, Any] = {
        CONFIG_FILE: _file_content(base, name, config_to_file(config)),
        WEIGHTS_FILE: adapter_tensors(base, name),
    }
    if head is not None:
        files |= {HEAD_CONFIG_FILE: _file_content(base, name, head[0]), HEAD_WEIGHTS_FILE: head[1]}
    _write_files(directory, files, values)


def write_fusion(
    base: CtxPreTrainedModel,
    fusion: str,
    config: FusionConfig,
    directory: Path,
    *,
    values: GatheredValues | None = None,
) -> None:
    """Write a fusion, whose name is the adapters' names joined by commas; other arguments as in `write_adapter`."""
    content = _file_content(base, fusion, fusion_to_file(config)) | {"adapter_names": fusion.split(",")}
    _write_files(directory, {FUSION_CONFIG_FILE: content, FUSION_WEIGHTS_FILE: fusion_tensors(base, fusion)}, values)


def write_stack(directory: Path, active: Sequence[str | Sequence[str]]) -> None:
    """Write the active adapters of a directory, from the lowest up."""
    with wrap_write_errors(directory):
        temporary = directory / f"{STACK_FILE}.writing"
        temporary.write_text(json.dumps({"active": list(active)}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(directory / STACK_FILE)


def _file_content(base: CtxPreTrainedModel, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    is_local = Path(base.name_or_path).exists()
    return {
        "config": dict(config),
        "hidden_size": base.config.hidden_size,
        "model_class": type(base).__name__,
        "model_name": "" if is_local else base.name_or_path,  # only a Hub id is valid on other machines
        "model_type": model_types(base)[0],
        "name": name,
        "version": FILE_VERSION,
    }


def check_adapter_directory(directory: Path) -> None:
    """Raise CtxError if the directory holds the files of a model, or an adapter of PEFT."""
    model_files = [name for name in MODEL_FILES if (directory / name).exists()]
    if model_files:
        raise CtxError(
            f"The directory holds a model ({model_files[0]}); transformers would read {CONFIG_FILE} there as PEFT's.",
            location=str(directory),
            hint=f"use another directory, for example {directory / ADAPTERS_FOLDER / 'NAME'}.",
        )
    path = directory / CONFIG_FILE
    if path.exists() and "peft_type" in read_json(path):
        raise CtxError("The directory holds an adapter of PEFT.", location=str(path), hint="use another directory.")


def _write_files(directory: Path, files: Mapping[str, Any], values: GatheredValues | None) -> None:
    """Write all files to a temporary directory, and move them, the weights first."""
    check_adapter_directory(directory)
    temporary = directory.with_name(f"{directory.name}.writing")
    with wrap_write_errors(directory):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, content in files.items():
            if name.endswith(".json"):
                text = json.dumps(content, indent=2, sort_keys=True)
                (temporary / name).write_text(text + "\n", encoding="utf-8")
            else:
                save_file(_cpu_tensors(content, values or {}), temporary / name)
        directory.mkdir(exist_ok=True)
        for name in sorted(files, reverse=True):
            (temporary / name).replace(directory / name)
        temporary.rmdir()


def _cpu_tensors(tensors: Mapping[str, Tensor], values: GatheredValues) -> dict[str, Tensor]:
    full_tensors = {name: values.get(id(tensor), tensor) for name, tensor in tensors.items()}
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in full_tensors.items()}
