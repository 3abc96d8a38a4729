"""The variables of the released TensorFlow checkpoints -> a model."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.grover.configuration_grover import CtxGroverConfig
from hf_ctxmodels.models.grover.modeling_grover import CtxGroverForCausalLM, CtxGroverForSequenceClassification

_HEAD_SIZE = 64  # of every released model
_EMBEDDINGS = {
    "newslm/embeddings/word_embed": "word_embeddings.weight",
    "newslm/embeddings/pos_embed": "position_embeddings.weight",
    "newslm/embeddings/LayerNorm_embed_norm/gamma": "embedding_norm.weight",
    "newslm/embeddings/LayerNorm_embed_norm/beta": "embedding_norm.bias",
}
_LINEAR = {
    "context_projection_layer": "attention.out_proj",
    "intermediate": "feed_forward.up_proj",
    "output": "feed_forward.down_proj",
}
_NORMS = {"LayerNorm_mlp_ln0": "feed_forward_norm", "LayerNorm_mlp_ln1": "output_norm"}
_QKV = ("query_layer", "key_layer", "value_layer")
_LAYER = re.compile(r"newslm/layer(\d+)/query_layer/kernel$")
_CLASSIFIER = "classification/logits"


def read_grover_checkpoint(
    variables: Mapping[str, Tensor], location: str
) -> CtxGroverForCausalLM | CtxGroverForSequenceClassification:
    """The language model, or the classifier, of the variables of a checkpoint.

    Sizes are those of the variables, with heads of width 64 as in every released model. Variables of the optimizer are
    passed over. Kernels are stored as (in, out).

    Raises:
        CtxError: The variables are not those of a Grover, or have other shapes.
    """
    layers = sorted(int(found[1]) for found in map(_LAYER.match, variables) if found)
    table = variables.get("newslm/embeddings/word_embed")
    if table is None or layers != list(range(len(layers))) or not layers:
        raise CtxError(
            f"The checkpoint holds no Grover; it has {', '.join(sorted(variables)[:4])}, ...",
            location=location,
            hint="give a checkpoint of github.com/rowanz/grover.",
        )
    native = {f"grover.{name}": _variable(variables, old, location) for old, name in _EMBEDDINGS.items()}
    for layer in layers:
        for name, value in _layer(variables, f"newslm/layer{layer:02d}", location).items():
            native[f"grover.layers.{layer}.{name}"] = value
    words, width = table.shape
    config = CtxGroverConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=max(1, width // _HEAD_SIZE),
        intermediate_size=native["grover.layers.0.feed_forward.up_proj.weight"].shape[0],
        max_position_embeddings=native["grover.position_embeddings.weight"].shape[0],
    )
    if classifies := f"{_CLASSIFIER}/kernel" in variables:
        native["classifier.weight"] = _variable(variables, f"{_CLASSIFIER}/kernel", location).T.contiguous()
        native["classifier.bias"] = _variable(variables, f"{_CLASSIFIER}/bias", location)
        config.num_labels = len(native["classifier.bias"])
    else:
        native["lm_head.weight"] = native["grover.word_embeddings.weight"]
    model = CtxGroverForSequenceClassification(config) if classifies else CtxGroverForCausalLM(config)
    _check_shapes(native, model.state_dict(), location)
    model.load_state_dict(native)
    return model.eval()


def _layer(variables: Mapping[str, Tensor], scope: str, location: str) -> dict[str, Tensor]:
    """Native name -> weight of a layer; queries, keys and values are one map."""
    maps = {
        kind: [_variable(variables, f"{scope}/{name}/{kind}", location) for name in _QKV] for kind in ("kernel", "bias")
    }
    native = {
        "attention.qkv_proj.weight": torch.cat(maps["kernel"], 1).T.contiguous(),
        "attention.qkv_proj.bias": torch.cat(maps["bias"]),
    }
    for old, name in _LINEAR.items():
        native[f"{name}.weight"] = _variable(variables, f"{scope}/{old}/kernel", location).T.contiguous()
        native[f"{name}.bias"] = _variable(variables, f"{scope}/{old}/bias", location)
    for old, name in _NORMS.items():
        native[f"{name}.weight"] = _variable(variables, f"{scope}/{old}/gamma", location)
        native[f"{name}.bias"] = _variable(variables, f"{scope}/{old}/beta", location)
    return native


def _variable(variables: Mapping[str, Tensor], name: str, location: str) -> Tensor:
    if name not in variables:
        raise CtxError(f"The checkpoint has no {name}.", location=location, hint="give a whole checkpoint of Grover.")
    return variables[name].float()


def _check_shapes(native: Mapping[str, Tensor], expected: Mapping[str, Tensor], location: str) -> None:
    for name, weight in expected.items():
        if native[name].shape != weight.shape:
            raise CtxError(
                f"{name} is {tuple(native[name].shape)}, expected {tuple(weight.shape)}.",
                location=location,
                hint="give the weights of one model.",
            )
