"""Saving adapters to directories, and loading them from directories and the Hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.core.adapter_files import ADAPTERS_FOLDER, STACK_FILE
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import read_json
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.adapters.adapter_set import get_adapter_set
from hf_ctxmodels.downstream.adapters.configuration import config_from_file, fusion_from_file
from hf_ctxmodels.downstream.adapters.management import (
    add_adapter,
    add_fusion,
    delete_adapter,
    get_adapter_config,
    set_active_adapters,
)
from hf_ctxmodels.downstream.adapters.parameter_names import adapter_tensors, current_name, fusion_tensors, model_types
from hf_ctxmodels.downstream.adapters.prediction_heads import load_head, require_flexible_head
from hf_ctxmodels.downstream.adapters.saving import (
    CONFIG_FILE,
    FUSION_CONFIG_FILE,
    FUSION_WEIGHTS_FILE,
    HEAD_CONFIG_FILE,
    HEAD_WEIGHTS_FILE,
    WEIGHTS_FILE,
    write_adapter,
    write_fusion,
)

_PICKLES = {WEIGHTS_FILE: "pytorch_adapter.bin", FUSION_WEIGHTS_FILE: "pytorch_model_adapter_fusion.bin"}
_DUPLICATE_KEY = "adapter_norm_before."  # a second name of a parameter in AdapterHub's files


def save_adapter(model: PreTrainedModel, name: str, directory: str | Path, *, with_head: bool = False) -> None:
    """Save an adapter to a directory that AdapterHub reads.

    Args:
        model: As in `add_adapter`.
        name: Name of the adapter.
        directory: The adapter's directory, created if needed; not the directory of a model.
        with_head: Save the model's head too, if it has a form in adapter files.

    Raises:
        CtxError: There is no such adapter or head, or the directory holds a model or cannot be written.
    """
    config = get_adapter_config(model, name)
    head = None
    if with_head:
        flexible_head = require_flexible_head(model)
        head = flexible_head.config, flexible_head.tensors(model, name)
    write_adapter(get_adapter_set(model).base, name, config, Path(directory), head=head)


def load_adapter(model: PreTrainedModel, source: str | Path, name: str | None = None, *, with_head: bool = True) -> str:
    """Add an adapter from a directory or the Hub; it is not active yet.

    Args:
        model: As in `add_adapter`.
        source: Directory or Hub id with `adapter_config.json` and `adapter.safetensors`.
        name: Name of the adapter in the model; None for the name in the file.
        with_head: Copy the head in `source`, if any, into the model's head, if both have the same form and shapes.

    Returns:
        The adapter's name.

    Raises:
        CtxError: There is no adapter, it belongs to PEFT or is pickled, or it is for models of another type, width or
            depth.
    """
    folder = _resolve_folder(source)
    content = _read_config(folder, CONFIG_FILE, source)
    if "peft_type" in content:
        raise CtxError("The adapter belongs to PEFT.", location=str(source), hint="load it by model.load_adapter.")
    base, saved_name = get_adapter_set(model).base, content.get("name") or folder.name
    name = saved_name if name is None else name
    _check_compatible(base, content, source)
    tensors = _read_tensors(folder, WEIGHTS_FILE, source)
    add_adapter(model, name, config_from_file(content.get("config"), str(folder / CONFIG_FILE)))
    try:
        _copy_tensors(adapter_tensors(base, name), _rename_tensors(tensors, saved_name, name), source)
    except CtxError:
        delete_adapter(model, name)
        raise
    if with_head and (folder / HEAD_CONFIG_FILE).is_file():
        _load_head(model, folder, saved_name, source)
    return name


def has_saved_adapters(directory: str | Path) -> bool:
    """Whether a directory or Hub id has adapters that `load_saved_adapters` loads."""
    if Path(directory).exists() or Path(directory).is_absolute():
        return (Path(directory) / ADAPTERS_FOLDER / STACK_FILE).is_file()
    try:
        return Path(hf_hub_download(str(directory), f"{ADAPTERS_FOLDER}/{STACK_FILE}")).is_file()
    except Exception:  # no such file or repository, no network, no valid id
        return False


def load_saved_adapters(model: PreTrainedModel, directory: str | Path) -> list[str]:
    """Add all adapters and fusions that were saved with a model, and activate those that were active.

    Args:
        model: The model loaded from `directory`.
        directory: Directory or Hub id that `save_pretrained` or a command wrote.

    Returns:
        The adapters' names.

    Raises:
        CtxError: There are none, or as `load_adapter`.
    """
    folder = _resolve_folder(directory, [f"{ADAPTERS_FOLDER}/*"]) / ADAPTERS_FOLDER
    if not (folder / STACK_FILE).is_file():
        raise CtxError(f"There are no adapters: {ADAPTERS_FOLDER}/{STACK_FILE} is missing.", location=str(directory))
    names = [load_adapter(model, path.parent) for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))]
    for path in sorted(folder.glob(f"*/{FUSION_CONFIG_FILE}")):
        load_fusion(model, path.parent)
    set_active_adapters(model, read_json(folder / STACK_FILE)["active"])
    return names


def save_fusion(model: PreTrainedModel, names: Sequence[str], directory: str | Path) -> None:
    """Save a fusion, without the fused adapters, to a directory.

    Raises:
        CtxError: As `save_adapter`.
    """
    adapter_set, fusion = get_adapter_set(model), ",".join(names)
    if fusion not in adapter_set.fusions:
        raise CtxError(
            f"The model has no fusion of {', '.join(names)}.",
            hint=f"use one of: {', '.join(adapter_set.fusions) or 'none'}.",
        )
    write_fusion(adapter_set.base, fusion, adapter_set.fusions[fusion], Path(directory))


def load_fusion(model: PreTrainedModel, source: str | Path) -> tuple[str, ...]:
    """Add a fusion of adapters that the model has, from a directory or the Hub.

    Returns:
        The names of the fused adapters.

    Raises:
        CtxError: As `load_adapter`, or an adapter is missing.
    """
    folder = _resolve_folder(source)
    content = _read_config(folder, FUSION_CONFIG_FILE, source)
    base = get_adapter_set(model).base
    _check_compatible(base, content, source)
    names = tuple(content.get("adapter_names") or str(content.get("name")).split(","))
    tensors = _read_tensors(folder, FUSION_WEIGHTS_FILE, source)
    add_fusion(model, names, fusion_from_file(content.get("config"), str(folder / FUSION_CONFIG_FILE)))
    tensors = {current_name(key): tensor for key, tensor in tensors.items()}
    _copy_tensors(fusion_tensors(base, ",".join(names)), tensors, source)
    return names


def _resolve_folder(source: str | Path, patterns: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """A local directory, or the downloaded files of a Hub id that match the patterns."""
    if Path(source).exists() or Path(source).is_absolute():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*patterns]))
    except Exception as error:  # no such repository, no network, no valid id
        raise CtxError(
            "There is no such adapter.",
            location=str(source),
            hint=f"use a directory with {CONFIG_FILE}, or a Hub id.",
        ) from error


def _read_config(folder: Path, file: str, source: str | Path) -> dict[str, Any]:
    if not (folder / file).is_file():
        names = sorted(path.parent.name for path in folder.glob(f"*/{file}")) if folder.is_dir() else []
        raise CtxError(
            f"There is no {file}.",
            location=str(source),
            hint=f"use one of its subdirectories: {', '.join(names)}." if names else "use an adapter's directory.",
        )
    content = read_json(folder / file)
    if not isinstance(content, dict):
        raise CtxError("The file is not a JSON object.", location=str(folder / file), hint="copy the file again.")
    return content


def _read_tensors(folder: Path, file: str, source: str | Path) -> dict[str, Tensor]:
    """The tensors of a file; raises CtxError if it is missing, possibly for a pickle, or damaged."""
    if not (folder / file).is_file():
        raise CtxError(
            f"There is no {file}.",
            location=str(source),
            hint=f"convert a directory or Hub id with {_PICKLES[file]} by "
            f"`python -m hf_ctxmodels.conversion.adapters --adapter {source} --output DIR`.",
        )
    try:
        return load_file(folder / file)
    except SafetensorError as error:
        raise CtxError(
            f"The weights are damaged: {error}.", location=str(folder / file), hint="copy the file again."
        ) from error


def _check_compatible(base: CtxPreTrainedModel, content: Mapping[str, Any], source: str | Path) -> None:
    """Raise CtxError for an adapter of another model type or width."""
    types, hidden_size = model_types(base), base.config.hidden_size
    model_type = content.get("model_type", types[0])
    if model_type not in types:
        raise CtxError(
            f"The adapter is for models of type {model_type}, not {types[0]}.",
            location=str(source),
            hint="load a model of that type.",
        )
    if content.get("hidden_size", hidden_size) != hidden_size:
        raise CtxError(
            f"The adapter is for models of width {content['hidden_size']}, but this model has width {hidden_size}.",
            location=str(source),
            hint="load the model that the adapter was trained in.",
        )


def _rename_tensors(tensors: Mapping[str, Tensor], saved_name: str, name: str) -> dict[str, Tensor]:
    """The tensors under AdapterHub's current names, with the adapter's name in the model."""
    renamed = {}
    for key, tensor in tensors.items():
        key = current_name(key)
        for prefix in (".adapters.", "invertible_adapters."):
            key = key.replace(f"{prefix}{saved_name}.", f"{prefix}{name}.")
        if _DUPLICATE_KEY not in key:
            renamed[key] = tensor
    return renamed


@torch.no_grad()
def _copy_tensors(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Copy a file's tensors, whose names may lack the first component or have up to two more.

    Raises:
        CtxError: The names or shapes differ.
    """
    names_by_suffix = {name.split(".", 1)[1]: name for name in parameters}
    matched: dict[str, Tensor] = {}
    unmatched = []
    for key, tensor in tensors.items():
        components = key.split(".")
        suffixes = [".".join(components[start:]) for start in range(min(3, len(components)))]
        name = next((names_by_suffix[suffix] for suffix in suffixes if suffix in names_by_suffix), None)
        if name is None:
            unmatched.append(key)
        else:
            matched[name] = tensor
    missing = sorted(set(parameters) - set(matched))
    if missing or unmatched:
        problem = f"it lacks {missing[0]}" if missing else f"the model has no parameter {unmatched[0]}"
        raise CtxError(
            f"The adapter does not fit the model: {problem} ({len(missing)} missing, {len(unmatched)} unexpected).",
            location=str(source),
            hint="load a model of the type and depth that the adapter was trained in.",
        )
    for name, parameter in parameters.items():
        if matched[name].shape != parameter.shape:
            raise CtxError(
                f"The adapter does not fit the model: {name} has shape {tuple(matched[name].shape)}, expected "
                f"{tuple(parameter.shape)}.",
                location=str(source),
            )
    for name, parameter in parameters.items():
        parameter.copy_(matched[name])


def _load_head(model: PreTrainedModel, folder: Path, name: str, source: str | Path) -> None:
    entry = _read_config(folder, HEAD_CONFIG_FILE, source).get("config") or {}
    tensors = load_file(folder / HEAD_WEIGHTS_FILE) if (folder / HEAD_WEIGHTS_FILE).is_file() else {}
    if not load_head(model, entry, tensors, name):
        print_status(
            f"{source}: its head ({entry.get('head_type')}) does not fit {type(model).__name__} and is not loaded"
        )
