r"""Convert a TensorFlow checkpoint of Grover and GPT-2's vocabulary to a model and its tokenizer, without TensorFlow.

hf-ctxmodels convert grover --checkpoint models/base/model.ckpt --vocabulary sample/encoder.json \
    --merges sample/vocab.bpe --output runs/grover
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ctxmodels.conversion.released_files import Conversion, load_weights
from hf_ctxmodels.conversion.tensorflow_files import TensorFlowCheckpoint
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.models.grover.configuration_grover import CtxGroverConfig
from hf_ctxmodels.models.grover.modeling_grover import CtxGroverForCausalLM, CtxGroverForSequenceClassification
from hf_ctxmodels.models.grover.tokenization_grover import CtxGroverTokenizer

_HEAD_DIM = 64  # in all released models
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
    """Create the language model, or the classifier, with the variables of the checkpoint `location`.

    The sizes follow from the variables, with heads of width 64. Variables of the optimizer are ignored. Raises CtxError
    if a variable is missing or has another shape.
    """
    layers = sorted(int(match[1]) for match in map(_LAYER.match, variables) if match)
    word_embeddings = variables.get("newslm/embeddings/word_embed")
    if word_embeddings is None or layers != list(range(len(layers))) or not layers:
        raise CtxError(
            f"The checkpoint is not a Grover model; it has {', '.join(sorted(variables)[:4])}, ...",
            location=location,
            hint="use a checkpoint of github.com/rowanz/grover.",
        )
    state_dict = {f"grover.{name}": _get_variable(variables, old, location) for old, name in _EMBEDDINGS.items()}
    for layer in layers:
        scope, native = f"newslm/layer{layer:02d}", f"grover.layers.{layer}"
        kernels, biases = (
            [_get_variable(variables, f"{scope}/{name}/{suffix}", location) for name in _QKV]
            for suffix in ("kernel", "bias")
        )
        state_dict[f"{native}.attention.qkv_proj.weight"] = torch.cat(kernels, 1).T.contiguous()
        state_dict[f"{native}.attention.qkv_proj.bias"] = torch.cat(biases)
        for old, name in _LINEAR.items():
            kernel = _get_variable(variables, f"{scope}/{old}/kernel", location)
            state_dict[f"{native}.{name}.weight"] = kernel.T.contiguous()
            state_dict[f"{native}.{name}.bias"] = _get_variable(variables, f"{scope}/{old}/bias", location)
        for old, name in _NORMS.items():
            state_dict[f"{native}.{name}.weight"] = _get_variable(variables, f"{scope}/{old}/gamma", location)
            state_dict[f"{native}.{name}.bias"] = _get_variable(variables, f"{scope}/{old}/beta", location)
    vocab_size, width = word_embeddings.shape
    config = CtxGroverConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=max(1, width // _HEAD_DIM),
        intermediate_size=state_dict["grover.layers.0.feed_forward.up_proj.weight"].shape[0],
        max_position_embeddings=state_dict["grover.position_embeddings.weight"].shape[0],
    )
    model: CtxGroverForCausalLM | CtxGroverForSequenceClassification
    if f"{_CLASSIFIER}/kernel" in variables:
        kernel = _get_variable(variables, f"{_CLASSIFIER}/kernel", location)
        state_dict["classifier.weight"] = kernel.T.contiguous()
        state_dict["classifier.bias"] = _get_variable(variables, f"{_CLASSIFIER}/bias", location)
        config.num_labels = kernel.shape[1]
        model = CtxGroverForSequenceClassification(config)
    else:
        model = CtxGroverForCausalLM(config)
    return load_weights(model, state_dict, location)


def _get_variable(variables: Mapping[str, Tensor], name: str, location: str) -> Tensor:
    if name not in variables:
        raise CtxError(f"The checkpoint has no {name}.", location=location, hint="use a complete checkpoint.")
    return variables[name].float()


@dataclass(kw_only=True)
class GroverConversion(Conversion):
    """Arguments of the conversion."""

    checkpoint: str = flag(REQUIRED, "Checkpoint without .index and .data-..., such as models/base/model.ckpt.")
    vocabulary: str = flag(REQUIRED, "encoder.json of Grover or GPT-2.")
    merges: str = flag(REQUIRED, "vocab.bpe of Grover or GPT-2.")

    def convert(self) -> tuple[CtxGroverForCausalLM | CtxGroverForSequenceClassification, CtxGroverTokenizer, str]:
        """The model, its tokenizer and the checkpoint."""
        model = read_grover_checkpoint(TensorFlowCheckpoint(self.checkpoint), self.checkpoint)
        max_length = model.config.max_position_embeddings
        tokenizer = CtxGroverTokenizer(vocab=self.vocabulary, merges=self.merges, model_max_length=max_length)
        return model, tokenizer, self.checkpoint
