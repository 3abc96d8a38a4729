"""Saving adapters to directories, and loading them from directories and the Hub."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.adapter_support import (
    ADAPTERS_FOLDER,
    STACK_FILE,
    has_saved_adapters,
    suppress_adapter_notice,
)
from hf_ctxmodels.core.config import CtxConfig
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.loading import load_pretrained, read_json, require_existing_path
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.adapters.adapter_files import (
    CONFIG_FILE,
    FUSION_CONFIG_FILE,
    FUSION_WEIGHTS_FILE,
    HEAD_CONFIG_FILE,
    HEAD_WEIGHTS_FILE,
    PICKLED_FILES,
    WEIGHTS_FILE,
    file_tensors,
    model_types,
    write_adapter,
)
from hf_ctxmodels.downstream.adapters.configuration import config_from_file, fusion_from_file
from hf_ctxmodels.downstream.adapters.management import (
    add_adapter,
    add_fusion,
    delete_adapter,
    get_adapter_set,
    remove_fusion,
    set_active_adapters,
)
from hf_ctxmodels.downstream.adapters.prediction_heads import find_flexible_head, load_head
from hf_ctxmodels.registry import checkpoint_class
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import (
    convert_reference_config,
    load_config,
    load_family_config,
    load_model,
    load_tokenizer,
    require_single_task,
    verify_weights,
    without_load_report,
)

_COPY_AGAIN = "copy the file again."
_DUPLICATE_KEY = "adapter_norm_before."  # a second name of a parameter in AdapterHub's files


def save_adapter(model: PreTrainedModel, name: str, directory: str | Path, *, with_head: bool = False) -> None:
    """Save an adapter to a directory that AdapterHub reads, with the model's head if `with_head`.

    Raises:
        CtxError: There is no such adapter or head, or the directory holds a model or cannot be written.
    """
    adapter_set, head = get_adapter_set(model), None
    adapter_set.check_names([name])
    if with_head:
        flexible_head = find_flexible_head(model)
        if flexible_head is None:
            raise CtxError(
                f"The head of {type(model).__name__} is not supported in adapter files.",
                hint="save the adapter without a head; save_pretrained saves the head with the model.",
            )
        head = flexible_head.config, flexible_head.tensors(model, name)
    write_adapter(adapter_set.base, name, adapter_set.configs[name], Path(directory), head=head)


def load_adapter(model: PreTrainedModel, source: str | Path, name: str | None = None, *, with_head: bool = True) -> str:
    """Add an adapter from a directory or the Hub; it is not active yet.

    Args:
        model: As in `add_adapter`.
        source: Directory or Hub id with `adapter_config.json` and `adapter.safetensors`.
        name: Name of the adapter in the model, which is returned; None for the name in the file.
        with_head: Copy the head in `source`, if any, into the model's head if both have the same form and shapes.

    Raises:
        CtxError: There is no adapter, it belongs to PEFT or is pickled, or it is for models of another type,
            width or depth.
    """
    base, folder = get_adapter_set(model).base, resolve_folder(source)
    content, saved_tensors = _read_files(base, folder, CONFIG_FILE, WEIGHTS_FILE, source)
    head = _read_head(folder, source) if with_head else None
    saved_name = content.get("name") or folder.name
    name = saved_name if name is None else name
    tensors = {}
    for key, tensor in saved_tensors.items():
        for prefix in (".adapters.", "invertible_adapters."):
            key = key.replace(f"{prefix}{saved_name}.", f"{prefix}{name}.")
        if _DUPLICATE_KEY not in key:
            tensors[key] = tensor
    add_adapter(model, name, config_from_file(content.get("config"), str(folder / CONFIG_FILE)))
    try:
        _copy_tensors(file_tensors(base, name), tensors, source)
    except CtxError:
        delete_adapter(model, name)
        raise
    if head is not None and not load_head(model, *head, saved_name):
        print_status(
            f"{source}: its head ({head[0].get('head_type')}) does not fit {type(model).__name__} and is not loaded"
        )
    return name


def load_saved_adapters(model: PreTrainedModel, directory: str | Path) -> list[str]:
    """Add the adapters and fusions saved with a model, and activate those that were active; returns the adapters'
    names. Raises CtxError if there are none, and as `load_adapter`."""
    folder = resolve_folder(directory, [f"{ADAPTERS_FOLDER}/*"]) / ADAPTERS_FOLDER
    if not (folder / STACK_FILE).is_file():
        raise CtxError(
            f"There are no adapters: {ADAPTERS_FOLDER}/{STACK_FILE} is missing.",
            location=str(directory),
            hint="use a model that was saved with adapters.",
        )
    names = [load_adapter(model, path.parent) for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))]
    for path in sorted(folder.glob(f"*/{FUSION_CONFIG_FILE}")):
        load_fusion(model, path.parent)
    with wrap_errors("The active adapters cannot be read", location=str(folder / STACK_FILE), hint=_COPY_AGAIN):
        set_active_adapters(model, read_json(folder / STACK_FILE)["active"])
    return names


def load_model_with_adapters(
    source: str | Path, auto_class: str, config: PreTrainedConfig, *, require_head: bool = False
) -> PreTrainedModel:
    """`load_model` with the saved adapters; raises CtxError also for a head of a model with several tasks."""
    if auto_class != AutoModel.__name__:
        require_single_task(config, str(source))
    with suppress_adapter_notice():
        model = load_model(source, auto_class, config, require_head=require_head)
    return add_saved_adapters(model, source)


def load_saved_model(source: str) -> PreTrainedModel:
    """A model with its saved head and adapters, in evaluation mode; a reference checkpoint as a model of its family.

    An encoder whose checkpoint has no pooler has none.

    Raises:
        CtxError: The checkpoint is damaged, lacks weights, has several tasks, or belongs to no family.
    """
    config = load_config(source)
    require_single_task(config, source)
    if not isinstance(config, CtxConfig):
        config = load_family_config(source)
    verify_weights(Path(source))
    with suppress_adapter_notice(), without_load_report():
        model, report = load_pretrained(checkpoint_class(config), source, "the model", output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        model.pooler = None
    elif missing:
        raise CtxError(
            f"The checkpoint lacks {len(missing)} weights of {type(model).__name__}, for example {missing[0]}.",
            location=source,
            hint="use a checkpoint that was saved with its head.",
        )
    return add_saved_adapters(model, source).eval()


def add_saved_adapters(model: PreTrainedModel, source: str | Path) -> PreTrainedModel:
    """Add the adapters saved in a directory or Hub id to a model, if any; raises CtxError as `load_adapter`."""
    if has_saved_adapters(source):
        print_status(
            f"{source}: the adapters {', '.join(load_saved_adapters(model, source))} are loaded with the model"
        )
    return model


def load_model_and_tokenizer(
    source: str, auto_class: str | Callable[[PreTrainedConfig], str], max_length: int = 0, *, require_head: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load_model_with_adapters`, and the tokenizer of the model; a reference checkpoint as a model of its family, if
    the family supports it.

    `auto_class` is the name of the head's Auto class, or a function that chooses it by the configuration. The longest
    input in tokens, `max_length`, must fit the model. `require_head`: see `load_model`.
    """
    config, tokenizer = load_config(source), load_tokenizer(source)
    name = auto_class if isinstance(auto_class, str) else auto_class(config)
    config = convert_reference_config(config, name, source)
    check_tokenizer_matches_model(tokenizer, config, max_length, location=source)
    return load_model_with_adapters(source, name, config, require_head=require_head), tokenizer


def save_fusion(model: PreTrainedModel, names: Sequence[str], directory: str | Path) -> None:
    """Save a fusion, without the fused adapters, to a directory, as `save_adapter`."""
    adapter_set, fusion = get_adapter_set(model), ",".join(names)
    if fusion not in adapter_set.fusions:
        raise CtxError(
            f"The model has no fusion of {', '.join(names)}.",
            hint=f"use one of: {', '.join(adapter_set.fusions) or 'none'}.",
        )
    write_adapter(adapter_set.base, fusion, adapter_set.fusions[fusion], Path(directory))


def load_fusion(model: PreTrainedModel, source: str | Path) -> tuple[str, ...]:
    """Add a fusion of adapters that the model has; arguments and errors as for `load_adapter`; returns their names."""
    base, folder = get_adapter_set(model).base, resolve_folder(source)
    content, tensors = _read_files(base, folder, FUSION_CONFIG_FILE, FUSION_WEIGHTS_FILE, source)
    file = str(folder / FUSION_CONFIG_FILE)
    with wrap_errors("The names of the fused adapters cannot be read", location=file, hint=_COPY_AGAIN):
        names = tuple(content.get("adapter_names") or content["name"].split(","))
    add_fusion(model, names, fusion_from_file(content.get("config"), file))
    try:
        _copy_tensors(file_tensors(base, ",".join(names)), tensors, source)
    except CtxError:
        remove_fusion(model, names)
        raise
    return names


def resolve_folder(source: str | Path, patterns: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """A local directory, or the downloaded files of a Hub id that match the patterns; raises CtxError if there is no
    such repository."""
    require_existing_path(source)
    if Path(source).exists():
        return Path(source)
    hint = f"use a directory with {CONFIG_FILE}, or a Hub id."
    with wrap_errors("There is no such adapter", location=str(source), hint=hint):
        return Path(snapshot_download(str(source), allow_patterns=[*patterns]))


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
        raise CtxError("The file is not a JSON object.", location=str(folder / file), hint=_COPY_AGAIN)
    return content


def _read_head(folder: Path, source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The configuration and the tensors of the head that was saved with an adapter; None without a head."""
    if not (folder / HEAD_CONFIG_FILE).is_file():
        return None
    entry = _read_config(folder, HEAD_CONFIG_FILE, source).get("config") or {}
    if not isinstance(entry, dict):
        location = str(folder / HEAD_CONFIG_FILE)
        raise CtxError("The file does not describe a head.", location=location, hint=_COPY_AGAIN)
    weights_file = folder / HEAD_WEIGHTS_FILE
    return entry, _read_tensors(weights_file) if weights_file.is_file() else {}


def _read_tensors(file: Path) -> dict[str, Tensor]:
    with wrap_errors("The weights are damaged", location=str(file), hint=_COPY_AGAIN):
        return load_file(file)


def _read_files(
    base: CtxPreTrainedModel, folder: Path, config_file: str, weights_file: str, source: str | Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of a configuration file, and the tensors by AdapterHub's current names."""
    content = _read_config(folder, config_file, source)
    if "peft_type" in content:
        raise CtxError("The adapter belongs to PEFT.", location=str(source), hint="load it by model.load_adapter.")
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
    if not (folder / weights_file).is_file():
        raise CtxError(
            f"There is no {weights_file}.",
            location=str(source),
            hint=f"convert a directory or Hub id with {PICKLED_FILES[weights_file]} by "
            f"`hf-ctxmodels convert adapter --adapter {source} --output DIR`.",
        )
    renamed = {}
    for key, tensor in _read_tensors(folder / weights_file).items():  # from names of earlier releases
        key = re.sub(r"\.(attention|layer)_text_(task|lang)_adapters\.", ".adapters.", key)
        renamed[re.sub(r"(^|\.)invertible_lang_adapters\.", r"\1invertible_adapters.", key)] = tensor
    return content, renamed


@torch.no_grad()
def _copy_tensors(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Copy a file's tensors, whose names may lack the first component or have one more."""
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
                hint="load the model that the adapter was trained in.",
            )
    for name, parameter in parameters.items():
        parameter.copy_(matched[name])
