"""Quantized checkpoints with missing or invalid codes, scales or configurations are refused; vocabularies are fixed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.compression.low_bits.quantizer import (
    find_quantizable_modules,
    pack_model,
    replace_with_fake_quantized,
)
from hf_ctxmodels.registry import FAMILIES

CODES, SCALE = "layers.0.feed_forward.up_proj.codes", "layers.0.feed_forward.up_proj.code_scale"
PACKED, STEP = "layers.0.feed_forward.up_proj.packed", "layers.0.feed_forward.up_proj.step"


def save_quantized(folder: Path, family: str, method: str = "int8") -> dict[str, Tensor]:
    """Save an encoder; returns the tensors of the file."""
    model = Case(FAMILIES[family], "AutoModel").model()
    if method == "int8":
        quantize_model(model, CtxInt8Config())
    else:
        replace_with_fake_quantized(model, dict.fromkeys(find_quantizable_modules(model)[0], 4), 8)
        model = pack_model(model)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def change_first(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scale: torch.cat([scale.new_tensor([value]), scale[1:]])


@pytest.mark.parametrize(
    ("method", "name", "change", "message"),
    [
        ("int8", CODES, None, "codes is missing"),
        ("int8", SCALE, None, "code_scale is missing"),
        ("int8", SCALE, change_first(float("nan")), "not finite and positive"),
        ("int8", SCALE, change_first(-1.0), "not finite and positive"),
        ("int8", SCALE, change_first(0.0), "not finite and positive"),
        ("int8", CODES, lambda codes: codes + 0.5, "float32, expected integers"),
        ("low bits", PACKED, None, "packed is missing"),
        ("low bits", STEP, change_first(0.0), "not finite and positive"),
        ("low bits", PACKED, lambda packed: packed + 0.5, "float32, expected integers"),
    ],
)
def test_codes_and_scales(
    method: str, name: str, change: Callable[[Tensor], Tensor] | None, message: str, tmp_path: Path
) -> None:
    tensors = save_quantized(tmp_path, "bert", method)
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CtxError, match=f"{name.split('.')[-2]}.*{message}"):
        AutoModel.from_pretrained(tmp_path)


def test_scales_of_recurrent_weights(tmp_path: Path) -> None:
    tensors = save_quantized(tmp_path, "ulmfit")
    name = next(name for name in tensors if name.endswith("original1"))
    tensors[name] = -tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CtxError, match="not finite and positive"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("int8", {"activations": "static"}, "input_scale is missing"),
        ("int8", {"block_size": 64}, "no field 'block_size'"),
        ("low bits", {"block_size": 64}, "no field 'block_size'"),
        ("low bits", {"groups": 0}, "at least one group"),
    ],
)
def test_configuration(method: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, "bert", method)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CtxError, match=message):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForMaskedLM"])
def test_resizing_is_refused(auto_class: str) -> None:
    model = Case(FAMILIES["bert"], auto_class).model()
    quantize_model(model, CtxInt8Config())
    with pytest.raises(CtxError, match="Quantized embeddings cannot be resized"):
        model.resize_token_embeddings(model.config.vocab_size + 1)
