"""Folders of adapters: `adapter_config.json` and `adapter.safetensors`, as in the library adapters (AdapterHub)."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hf_ctxmodels.core.constants import ADAPTERS_FOLDER, STACK_FILE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import read_json
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import MODEL_FILES, wrap_write_errors
from hf_ctxmodels.downstream.adapters.configuration import FILE_VERSION, config_to_file, fusion_to_file
from hf_ctxmodels.downstream.adapters.parameter_names import adapter_tensors, fusion_tensors, model_types
from hf_ctxmodels.layers.adapters import BottleneckConfig, FusionConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter.safetensors"
FUSION_CONFIG_FILE, FUSION_WEIGHTS_FILE = "adapter_fusion_config.json", "model_adapter_fusion.safetensors"
HEAD_CONFIG_FILE, HEAD_WEIGHTS_FILE = "head_config.json", "model_head.safetensors"
FOLDER = ADAPTERS_FOLDER
"""Where `save_pretrained` and the commands leave adapters, beside a model's own files."""

Values = Mapping[int, Tensor]
"""id of a parameter -> what to write of it."""


def write_adapter(
    base: CtxPreTrainedModel,
    name: str,
    config: BottleneckConfig,
    directory: Path,
    *,
    head: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None,
    values: Values | None = None,
) -> None:
    """Write an adapter.

    Args:
        base: The base model.
        name, config: The adapter.
        directory: Made if needed.
        head: The entry `config` and the parameters of a head beside it, or None.
        values: What to write of parameters that are not whole in this process.

    Raises:
        CtxError: The directory holds a model or PEFT's adapter, or cannot be written.
    """
    files: dict[str, Any] = {
        CONFIG_FILE: _described(base, name, config_to_file(config)),
        WEIGHTS_FILE: adapter_tensors(base, name),
    }
    if head is not None:
        files |= {HEAD_CONFIG_FILE: _described(base, name, head[0]), HEAD_WEIGHTS_FILE: head[1]}
    _write(directory, files, values)


def write_fusion(
    base: CtxPreTrainedModel, names: str, config: FusionConfig, directory: Path, *, values: Values | None = None
) -> None:
    """Write a fusion; arguments as in `write_adapter`."""
    described = _described(base, names, fusion_to_file(config)) | {"adapter_names": names.split(",")}
    files = {FUSION_CONFIG_FILE: described, FUSION_WEIGHTS_FILE: fusion_tensors(base, names)}
    _write(directory, files, values)


def write_stack(directory: Path, active: Sequence[str | Sequence[str]]) -> None:
    """Write which of a directory's adapters are active, from the lowest up."""
    with wrap_write_errors(directory):
        temporary = directory / f"{STACK_FILE}.writing"
        temporary.write_text(json.dumps({"active": list(active)}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(directory / STACK_FILE)


def _described(base: CtxPreTrainedModel, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "config": dict(config),
        "hidden_size": base.config.hidden_size,
        "model_class": type(base).__name__,
        "model_name": ""
        if Path(base.name_or_path).exists()
        else base.name_or_path,  # a Hub id; no path of this machine
        "model_type": model_types(base)[0],
        "name": name,
        "version": FILE_VERSION,
    }


def check_own_folder(directory: Path) -> None:
    """Raise CtxError if the directory holds a model's own files, or an adapter of PEFT."""
    found = [name for name in MODEL_FILES if (directory / name).exists()]
    if found:
        raise CtxError(
            f"The directory holds a model ({found[0]}), beside which transformers takes {CONFIG_FILE} for PEFT's.",
            location=str(directory),
            hint=f"give a folder of its own, for example {directory / FOLDER / 'NAME'}.",
        )
    path = directory / CONFIG_FILE
    if path.exists() and "peft_type" in read_json(path):
        raise CtxError("The directory holds an adapter of PEFT.", location=str(path), hint="give another folder.")


def _write(directory: Path, files: Mapping[str, Any], values: Values | None) -> None:
    """Write all files under a temporary name, and move them into the directory, the weights first."""
    check_own_folder(directory)
    temporary = directory.with_name(f"{directory.name}.writing")
    with wrap_write_errors(directory):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, content in files.items():
            if name.endswith(".json"):
                text = json.dumps(content, indent=2, sort_keys=True)
                (temporary / name).write_text(text + "\n", encoding="utf-8")
            else:
                save_file(_whole(content, values), temporary / name)
        directory.mkdir(exist_ok=True)
        for name in sorted(files, reverse=True):
            (temporary / name).replace(directory / name)
        temporary.rmdir()


def _whole(tensors: Mapping[str, Tensor], values: Values | None) -> dict[str, Tensor]:
    found = {name: (values or {}).get(id(tensor), tensor) for name, tensor in tensors.items()}
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in found.items()}
