"""Conversion between `CtxEncoderDecoderForConditionalGeneration` and transformers' `EncoderDecoderModel`.

The families convert the weights of both models; this module converts the cross-attention.
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import apply_umask
from hf_ctxmodels.core.weights import check_exportable

# module of a layer's cross-attention -> its name in transformers; and the prefix of a layer before its number
_BERT_NAMES = {
    "cross_attention.q_proj": "crossattention.self.query",
    "cross_attention.out_proj": "crossattention.output.dense",
    "cross_attention_norm": "crossattention.output.LayerNorm",
}
_BERT_LAYERS = "encoder.layer."
_GPT2_NAMES = {
    "cross_attention.q_proj": "crossattention.q_attn",
    "cross_attention.kv_proj": "crossattention.c_attn",
    "cross_attention.out_proj": "crossattention.c_proj",
    "cross_attention_norm": "ln_cross_attn",
}
_PROJECTION = "enc_to_dec_proj"
# `model_type` of decoders in transformers that have a class with cross-attention -> prefix of its weights
_PREFIXES = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "electra": "electra",
    "ernie": "ernie",
    "gpt2": "transformer",
}


def export_cross_attention(weights: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Reference names and layout of the weights of cross-attention, `layers.N.cross_attention...`."""
    exported = {}
    for name, weight in weights.items():
        match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
        assert match is not None, name
        number, module, suffix = match.groups()
        prefix = f"{_PREFIXES[model_type]}.{_BERT_LAYERS}{number}"
        if model_type == "gpt2":
            is_transposed = suffix == "weight" and module != "cross_attention_norm"
            exported[f"{_PREFIXES[model_type]}.h.{number}.{_GPT2_NAMES[module]}.{suffix}"] = (
                weight.T if is_transposed else weight
            )
        elif module == "cross_attention.kv_proj":
            for chunk, projection in zip(weight.chunk(2), ("key", "value"), strict=True):
                exported[f"{prefix}.crossattention.self.{projection}.{suffix}"] = chunk
        else:
            exported[f"{prefix}.{_BERT_NAMES[module]}.{suffix}"] = weight
    return exported


def import_cross_attention(weights: dict[str, Tensor], names: set[str], model_type: str) -> dict[str, Tensor]:
    """The inverse of `export_cross_attention`, for the native `names`."""
    imported = {}
    for name in names:
        placeholder = {name: torch.empty(2, 2)}  # only the exported names are used
        tensors = [weights[reference] for reference in export_cross_attention(placeholder, model_type)]
        value = torch.cat(tensors)
        is_transposed = model_type == "gpt2" and value.dim() == 2
        imported[name] = value.T if is_transposed else value
    return imported


def export_encoder_decoder(model: Any, directory: Path) -> None:
    """Write config.json and model.safetensors of transformers' `EncoderDecoderModel`; raises CtxError if transformers
    lacks one of the two models."""
    check_exportable(model)
    encoder, decoder = model.base_model.encoder, model.base_model.decoder
    model_type = decoder.reference_model_type or getattr(decoder.base_model, "reference_model_type", None)
    if model_type not in _PREFIXES:
        raise CtxError(
            f"transformers has no class for a decoder {type(decoder).__name__} with cross-attention.",
            hint="use save_pretrained.",
        )
    weights: dict[str, Tensor] = {}
    configs: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for name, side in (("encoder", encoder), ("decoder", decoder)):
            options = {"add_pooling_layer": False} if getattr(side, "pooler", True) is None else {}
            with torch.device("meta"):
                plain: Any = type(side)(side.config, **options)
            side_weights = side.state_dict()
            plain.load_state_dict({key: side_weights[key] for key in plain.state_dict()}, assign=True)
            plain.tie_weights()
            plain.export_reference(Path(folder) / name)
            exported = load_file(Path(folder) / name / "model.safetensors")
            weights |= {f"{name}.{key}": value for key, value in exported.items()}
            configs[name] = json.loads((Path(folder) / name / "config.json").read_text(encoding="utf-8"))
    stack = decoder.base_model
    cross_attention = {key: value for key, value in stack.state_dict().items() if "cross_attention" in key}
    exported = export_cross_attention(cross_attention, model_type)
    weights |= {f"decoder.{key}": value.contiguous().clone() for key, value in exported.items()}
    if model.base_model.source_projection is not None:
        projection = model.base_model.source_projection.state_dict()
        weights |= {f"{_PROJECTION}.{key}": value.clone() for key, value in projection.items()}
    configs["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
    names = ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
    token_ids = {name: getattr(model.config, name) for name in names}
    config = {"model_type": "encoder-decoder", "architectures": ["EncoderDecoderModel"], "is_encoder_decoder": True}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    apply_umask(directory.glob("*model*.safetensors"))
    values = config | token_ids | configs
    (directory / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(directory)


def load_reference_weights(model: Any, source: Any, **options: Any) -> dict[str, Any]:
    """Load the weights of a checkpoint of transformers' `EncoderDecoderModel`, with options of `from_pretrained`;
    returns the loading report. Raises CtxError if the decoder's cross-attention has another layout."""
    from transformers import EncoderDecoderModel

    reference, report = EncoderDecoderModel.from_pretrained(source, output_loading_info=True, **options)
    model_type = reference.config.decoder.model_type
    if model_type not in _PREFIXES:
        raise CtxError(f"Decoders of type {model_type!r} are not supported.", location=str(source))
    base_model = model.base_model
    weights = reference.decoder.state_dict()
    plain_weights = {name: value for name, value in weights.items() if not re.search("cross_?att", name)}
    with torch.no_grad():
        for side, side_weights in (
            (base_model.encoder, reference.encoder.state_dict()),
            (base_model.decoder, plain_weights),
        ):
            converted = type(side).from_pretrained(None, config=side.config, state_dict=side_weights)
            side.load_state_dict(converted.state_dict(), strict=False)
        stack = base_model.decoder.base_model
        names = {name for name in stack.state_dict() if "cross_attention" in name}
        stack.load_state_dict(import_cross_attention(weights, names, model_type), strict=False)
        if base_model.source_projection is not None:
            base_model.source_projection.load_state_dict(reference.enc_to_dec_proj.state_dict())
    return report
