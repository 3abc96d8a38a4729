"""Folders of adapters in AdapterHub's format, with AdapterHub's parameter names for the families that it supports."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_ctxmodels.core.adapter_support import ADAPTERS_FOLDER, STACK_FILE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import MODEL_FILES, wrap_write_errors, write_tensors
from hf_ctxmodels.downstream.adapters.configuration import BottleneckConfig, FusionConfig, config_to_file
from hf_ctxmodels.downstream.adapters.insertion import get_invertible_adapters, list_sublayer_adapters

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter.safetensors"
FUSION_CONFIG_FILE, FUSION_WEIGHTS_FILE = "adapter_fusion_config.json", "model_adapter_fusion.safetensors"
HEAD_CONFIG_FILE, HEAD_WEIGHTS_FILE = "head_config.json", "model_head.safetensors"
PICKLED_FILES = {
    WEIGHTS_FILE: "pytorch_adapter.bin",
    HEAD_WEIGHTS_FILE: "pytorch_model_head.bin",
    FUSION_WEIGHTS_FILE: "pytorch_model_adapter_fusion.bin",
}


class FileLayout(NamedTuple):
    """Names of a family's adapters in files: the prefix (None for the base model's), pattern of a block's name -> its
    name in files, and sub-layer -> its name within the block; "encoder.feed_forward" applies to an encoder only."""

    prefix: str | None
    block_patterns: Mapping[str, str]
    sublayers: Mapping[str, str]


_SUBLAYERS = {
    "attention": "attention_adapters",
    "cross_attention": "cross_attention_adapters",
    "feed_forward": "output_adapters",
}
_NATIVE = FileLayout(None, {}, _SUBLAYERS)
_BERT = FileLayout(None, {r"^layers\.": "encoder.layer."}, {"attention": "attention.output", "feed_forward": "output"})
_LAYOUTS = {
    **dict.fromkeys(("bert", "ernie", "roberta", "xlm-roberta", "electra"), _BERT),
    "albert": FileLayout(
        "albert",
        {r"^layers\.(\d+)\.": r"encoder.albert_layer_groups.\1.albert_layers."},
        {"attention": "attention.attention_adapters", "feed_forward": "output_adapters"},
    ),
    "gpt2": FileLayout("transformer", {r"^layers\.": "h."}, _SUBLAYERS),
    "bart": FileLayout("model", {}, _SUBLAYERS),
    "t5": FileLayout(
        "transformer",
        {r"^(encoder|decoder)\.layers\.": r"\1.block."},
        {
            "attention": "layer.0",
            "cross_attention": "layer.1",
            "encoder.feed_forward": "layer.1",
            "feed_forward": "layer.2",
        },
    ),
}


def model_types(base: CtxPreTrainedModel) -> tuple[str, ...]:
    """Accepted values of `model_type` in files; the first one is written."""
    model_type = base.config.model_type
    return tuple(dict.fromkeys((base.reference_model_type or model_type, model_type)))


def file_tensors(base: CtxPreTrainedModel, name: str) -> dict[str, Tensor]:
    """The parameters of an adapter, or of a fusion named by its adapters joined by commas, by their names in files."""
    layout = _LAYOUTS.get(base.reference_model_type or "", _NATIVE)
    prefix = layout.prefix or base.base_model_prefix
    modules: dict[str, nn.Module] = {}
    for block, sublayer, adapters in list_sublayer_adapters(base):
        block_name = block.name
        for pattern, replacement in layout.block_patterns.items():
            block_name = re.sub(pattern, replacement, block_name)
        stack = block.name.split(".")[0]
        sublayer_name = layout.sublayers.get(f"{stack}.{sublayer}", layout.sublayers[sublayer])
        for group, members in (("adapters", adapters.members), ("adapter_fusion_layer", adapters.fusions)):
            if name in members:
                modules[f"{prefix}.{block_name}.{sublayer_name}.{group}.{name}"] = members[name]
    invertible_adapters = get_invertible_adapters(base)
    if invertible_adapters is not None and name in invertible_adapters.members:
        stack = "encoder." if base.config.is_encoder_decoder else ""
        modules[f"{prefix}.{stack}invertible_adapters.{name}"] = invertible_adapters.members[name]
    return {
        f"{module_name}.{key}": value
        for module_name, module in modules.items()
        for key, value in module.state_dict(keep_vars=True).items()
    }


def write_adapter(
    base: CtxPreTrainedModel,
    name: str,
    config: BottleneckConfig | FusionConfig,
    directory: Path,
    *,
    head: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None,
    values: Mapping[int, Tensor] | None = None,
) -> None:
    """Write an adapter or a fusion to a directory, through a temporary one.

    Args:
        base: The base model.
        name, config: The adapter, or the fusion named by its adapters joined by commas.
        directory: Its directory, created if needed.
        head: The entry `config` and the parameters of a head to write with the adapter, or None.
        values: id of a parameter -> its full value, for parameters that are sharded over processes.

    Raises:
        CtxError: The directory holds a model or an adapter of PEFT, or cannot be written.
    """
    is_local = Path(base.name_or_path).exists()
    content = {
        "hidden_size": base.config.hidden_size,
        "model_class": type(base).__name__,
        "model_name": "" if is_local else base.name_or_path,  # only a Hub id is valid on other machines
        "model_type": model_types(base)[0],
        "name": name,
        "version": "adapters.1.3.0",
    }
    files: dict[str, Any]
    if isinstance(config, FusionConfig):
        content |= {"config": {"temperature": False, **asdict(config)}, "adapter_names": name.split(",")}
        files = {FUSION_CONFIG_FILE: content, FUSION_WEIGHTS_FILE: file_tensors(base, name)}
    else:
        files = {CONFIG_FILE: content | {"config": config_to_file(config)}, WEIGHTS_FILE: file_tensors(base, name)}
    if head is not None:
        files |= {HEAD_CONFIG_FILE: content | {"config": dict(head[0])}, HEAD_WEIGHTS_FILE: head[1]}
    check_adapter_directory(directory)
    temporary = directory.with_name(f"{directory.name}.writing")
    with wrap_write_errors(directory):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file, values_or_tensors in files.items():
            if file.endswith(".json"):
                text = json.dumps(values_or_tensors, indent=2, sort_keys=True)
                (temporary / file).write_text(text + "\n", encoding="utf-8")
            else:
                tensors = {key: (values or {}).get(id(tensor), tensor) for key, tensor in values_or_tensors.items()}
                write_tensors(temporary / file, tensors)
        directory.mkdir(exist_ok=True)
        for file in sorted(files, reverse=True):
            (temporary / file).replace(directory / file)
        temporary.rmdir()


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


def saved_adapter_files(directory: Path) -> list[str]:
    """Files of the adapters and fusions that were saved with a model, relative to its directory.

    Only the files that `load_saved_adapters` reads; other files in the folder of adapters belong to no adapter.
    """
    folder = directory / ADAPTERS_FOLDER
    if not (folder / STACK_FILE).is_file():
        return []
    names = [STACK_FILE]
    for config_file, *other_files in (
        (CONFIG_FILE, WEIGHTS_FILE, HEAD_CONFIG_FILE, HEAD_WEIGHTS_FILE),
        (FUSION_CONFIG_FILE, FUSION_WEIGHTS_FILE),
    ):
        for path in sorted(folder.glob(f"*/{config_file}")):
            files = [config_file, *(file for file in other_files if (path.parent / file).is_file())]
            names += [f"{path.parent.name}/{file}" for file in files]
    return [f"{ADAPTERS_FOLDER}/{name}" for name in names]
