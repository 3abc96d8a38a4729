"""Saving adapters to folders, and loading them from folders and the Hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import STACK_FILE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import read_json
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.adapters.configuration import config_from_file, fusion_from_file
from hf_ctxmodels.downstream.adapters.model import (
    add_adapter,
    add_fusion,
    delete_adapter,
    get_adapter_set,
    named_adapter,
    set_active_adapters,
)
from hf_ctxmodels.downstream.adapters.parameter_names import adapter_tensors, current_name, fusion_tensors, model_types
from hf_ctxmodels.downstream.adapters.prediction_heads import head_to_write, read_head
from hf_ctxmodels.downstream.adapters.saving import (
    CONFIG_FILE,
    FOLDER,
    FUSION_CONFIG_FILE,
    FUSION_WEIGHTS_FILE,
    HEAD_CONFIG_FILE,
    HEAD_WEIGHTS_FILE,
    WEIGHTS_FILE,
    write_adapter,
    write_fusion,
)

_PICKLES = {WEIGHTS_FILE: "pytorch_adapter.bin", FUSION_WEIGHTS_FILE: "pytorch_model_adapter_fusion.bin"}
_COPIES = ("adapter_norm_before.",)  # second names of a parameter


def save_adapter(model: PreTrainedModel, name: str, directory: str | Path, *, with_head: bool = False) -> None:
    """Write an adapter to a folder that the library adapters (AdapterHub) reads.

    Args:
        model: As in `add_adapter`.
        name: Of the adapter.
        directory: A folder of its own, made if needed; not a model's.
        with_head: Write the model's head beside it, if folders of adapters have such a one.

    Raises:
        CtxError: There is no such adapter or head, or the directory holds a model or cannot be written.
    """
    base, config = get_adapter_set(model).base, named_adapter(model, name)
    head = None
    if with_head:
        found = head_to_write(model)
        head = found.config, found.tensors(model, name)
    write_adapter(base, name, config, Path(directory), head=head)


def load_adapter(model: PreTrainedModel, source: str | Path, name: str | None = None, *, with_head: bool = True) -> str:
    """Add an adapter from a folder or the Hub; it is not active yet.

    Args:
        model: As in `add_adapter`.
        source: Folder, or Hub id, with `adapter_config.json` and `adapter.safetensors`.
        name: Of the adapter in the model; None for that in the file.
        with_head: Copy a head beside it into the model's, if that is one of the same kind and shape.

    Returns:
        The adapter's name.

    Raises:
        CtxError: There is no adapter, it is PEFT's or a pickle, or it belongs to a model of another type, width or
            depth.
    """
    folder = _folder(source)
    described = _described(folder, CONFIG_FILE, source)
    if "peft_type" in described:
        raise CtxError("The adapter is PEFT's.", location=str(source), hint="open it by model.load_adapter.")
    base, given = get_adapter_set(model).base, described.get("name") or folder.name
    name = given if name is None else name
    _check_fits(base, described, source)
    tensors = _tensors(folder, WEIGHTS_FILE, source)
    add_adapter(model, name, config_from_file(described.get("config"), str(folder / CONFIG_FILE)))
    try:
        _fill(adapter_tensors(base, name), _renamed(tensors, given, name), source)
    except CtxError:
        delete_adapter(model, name)
        raise
    if with_head and (folder / HEAD_CONFIG_FILE).is_file():
        _load_head(model, folder, given, source)
    return name


def has_saved_adapters(directory: str | Path) -> bool:
    """Whether `load_saved_adapters` finds any in a directory or Hub id."""
    if Path(directory).exists() or Path(directory).is_absolute():
        return (Path(directory) / FOLDER / STACK_FILE).is_file()
    try:
        return Path(hf_hub_download(str(directory), f"{FOLDER}/{STACK_FILE}")).is_file()
    except Exception:  # no such file or repository, no network, no valid id
        return False


def load_saved_adapters(model: PreTrainedModel, directory: str | Path) -> list[str]:
    """Add all adapters and fusions that `save_pretrained` or a command left in `directory/adapters`, as active as they
    were.

    Args:
        model: Opened from that directory.
        directory: Or Hub id.

    Returns:
        The adapters' names.

    Raises:
        CtxError: There are none, or as `load_adapter`.
    """
    folder = _folder(directory, [f"{FOLDER}/*"]) / FOLDER
    if not (folder / STACK_FILE).is_file():
        raise CtxError(f"There are no adapters, no {FOLDER}/{STACK_FILE}.", location=str(directory))
    found = sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))
    names = [load_adapter(model, path) for path in found]
    for path in sorted(folder.glob(f"*/{FUSION_CONFIG_FILE}")):
        load_fusion(model, path.parent)
    set_active_adapters(model, read_json(folder / STACK_FILE)["active"])
    return names


def save_fusion(model: PreTrainedModel, names: Sequence[str], directory: str | Path) -> None:
    """Write a fusion, without the adapters in it, to a folder of its own.

    Raises:
        CtxError: As `save_adapter`.
    """
    known, joined = get_adapter_set(model), ",".join(names)
    if joined not in known.fusions:
        raise CtxError(
            f"The model has no fusion of {', '.join(names)}.", hint=f"it has {', '.join(known.fusions) or 'none'}."
        )
    write_fusion(known.base, joined, known.fusions[joined], Path(directory))


def load_fusion(model: PreTrainedModel, source: str | Path) -> tuple[str, ...]:
    """Add a fusion of adapters that the model has, from a folder or the Hub.

    Returns:
        The names of its adapters.

    Raises:
        CtxError: As `load_adapter`, or an adapter is missing.
    """
    folder = _folder(source)
    described = _described(folder, FUSION_CONFIG_FILE, source)
    base = get_adapter_set(model).base
    _check_fits(base, described, source)
    joined = str(described.get("name"))
    names = tuple(described.get("adapter_names") or joined.split(","))
    tensors = _tensors(folder, FUSION_WEIGHTS_FILE, source)
    add_fusion(model, names, fusion_from_file(described.get("config"), str(folder / FUSION_CONFIG_FILE)))
    _fill(fusion_tensors(base, ",".join(names)), {current_name(key): tensors[key] for key in tensors}, source)
    return names


def _folder(source: str | Path, patterns: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """A local folder as it is, or that of a Hub id with the files of these patterns."""
    if Path(source).exists() or Path(source).is_absolute():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*patterns]))
    except Exception as error:  # no such repository, no network, no valid id
        raise CtxError(
            "There is no such adapter.", location=str(source), hint=f"give a folder with {CONFIG_FILE}, or a Hub id."
        ) from error


def _described(folder: Path, file: str, source: str | Path) -> dict[str, Any]:
    if not (folder / file).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{file}")) if folder.is_dir() else []
        raise CtxError(
            f"There is no {file}.",
            location=str(source),
            hint=f"it has folders of adapters: {', '.join(inside)}." if inside else "give the folder of an adapter.",
        )
    content = read_json(folder / file)
    if not isinstance(content, dict):
        raise CtxError("The file is no mapping.", location=str(folder / file), hint="copy it again.")
    return content


def _tensors(folder: Path, file: str, source: str | Path) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        CtxError: There is only a pickle, or nothing, or it is damaged.
    """
    if not (folder / file).is_file():
        raise CtxError(
            f"There is no {file}.",
            location=str(source),
            hint=f"a folder or Hub id with {_PICKLES[file]} is converted by "
            f"`python conversion/adapters.py --adapter {source} --output DIR`.",
        )
    try:
        return load_file(folder / file)
    except SafetensorError as error:
        raise CtxError(
            f"The weights are damaged: {error}.", location=str(folder / file), hint="copy it again."
        ) from error


def _check_fits(base: CtxPreTrainedModel, described: Mapping[str, Any], source: str | Path) -> None:
    """Raise CtxError for an adapter of another type of model or width."""
    types, width = model_types(base), base.config.hidden_size
    kind = described.get("model_type", types[0])
    if kind not in types:
        raise CtxError(
            f"The adapter is for models of the type {kind}, not {types[0]}.",
            location=str(source),
            hint="open that one.",
        )
    if described.get("hidden_size", width) != width:
        raise CtxError(
            f"The adapter is for models of width {described['hidden_size']}, this one has {width}.",
            location=str(source),
            hint="open the model that it was trained on.",
        )


def _renamed(tensors: Mapping[str, Tensor], given: str, name: str) -> dict[str, Tensor]:
    """The tensors under the names of the last release, of the adapter's name in the model."""
    found = {}
    for key, value in tensors.items():
        key = current_name(key)
        for kind in (".adapters.", "invertible_adapters."):
            key = key.replace(f"{kind}{given}.", f"{kind}{name}.")
        if not any(copy in key for copy in _COPIES):
            found[key] = value
    return found


@torch.no_grad()
def _fill(targets: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str | Path) -> None:
    """Copy a file's tensors, whose names may lack the first part or have more before it.

    Raises:
        CtxError: They are not those of this model.
    """
    endings = {target.split(".", 1)[1]: target for target in targets}
    found: dict[str, Tensor] = {}
    left = []
    for key, value in given.items():
        parts = key.split(".")
        tails = [".".join(parts[start:]) for start in range(min(3, len(parts)))]
        target = next((endings[tail] for tail in tails if tail in endings), None)
        if target is None:
            left.append(key)
        else:
            found[target] = value
    missing = sorted(set(targets) - set(found))
    if missing or left:
        what = f"it lacks {missing[0]}" if missing else f"the model has no place for {left[0]}"
        raise CtxError(
            f"The adapter belongs to another model: {what} ({len(missing)} missing, {len(left)} without a place).",
            location=str(source),
            hint="open a model of the same type and depth as it was trained on.",
        )
    for key, own in targets.items():
        if found[key].shape != own.shape:
            shapes = f"{tuple(found[key].shape)}, expected {tuple(own.shape)}"
            raise CtxError(f"The adapter belongs to another model: {key} is {shapes}.", location=str(source))
    for key, own in targets.items():
        own.copy_(found[key])


def _load_head(model: PreTrainedModel, folder: Path, given: str, source: str | Path) -> None:
    entry = _described(folder, HEAD_CONFIG_FILE, source).get("config") or {}
    tensors = load_file(folder / HEAD_WEIGHTS_FILE) if (folder / HEAD_WEIGHTS_FILE).is_file() else {}
    if not read_head(model, entry, tensors, given):
        print_status(
            f"{source}: the head beside it ({entry.get('head_type')}) is not that of {type(model).__name__}; not read"
        )
