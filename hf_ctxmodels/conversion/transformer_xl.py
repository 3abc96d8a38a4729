r"""Convert a released Transformer-XL (pytorch_model.bin and config.json of `transfo-xl-wt103`, and its vocabulary) to a
model and its tokenizer.

hf-ctxmodels convert transformer-xl --weights transfo-xl-wt103/pytorch_model.bin \
    --config transfo-xl-wt103/config.json --vocabulary transfo-xl-wt103/vocab.bin --output runs/transformer_xl
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.conversion.released_files import Conversion, load_weights, read_pickle, read_tensors, read_torch_file
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.models.transformer_xl.configuration_transformer_xl import CtxTransformerXLConfig
from hf_ctxmodels.models.transformer_xl.modeling_transformer_xl import CtxTransformerXLForCausalLM
from hf_ctxmodels.models.transformer_xl.tokenization_transformer_xl import CtxTransformerXLTokenizer

_NAMES = (  # patterns of released names, replacements
    (r"^transformer\.word_emb\.emb_layers\.(\d+)\.weight$", r"transformer.word_embeddings.clusters.\1.weight"),
    (r"^transformer\.word_emb\.emb_projs\.(\d+)$", r"transformer.word_embeddings.projections.\1"),
    (r"dec_attn\.qkv_net\.", "attention.qkv_proj."),
    (r"dec_attn\.r_net\.", "attention.position_proj."),
    (r"dec_attn\.o_net\.", "attention.out_proj."),
    (r"dec_attn\.layer_norm\.", "attention_norm."),
    (r"dec_attn\.r_w_bias$", "attention.content_bias"),
    (r"dec_attn\.r_r_bias$", "attention.position_bias"),
    (r"pos_ff\.CoreNet\.0\.", "feed_forward.up_proj."),
    (r"pos_ff\.CoreNet\.3\.", "feed_forward.down_proj."),
    (r"pos_ff\.layer_norm\.", "feed_forward_norm."),
    (r"^crit\.out_layers\.(\d+)\.bias$", r"softmax.biases.\1"),
    (r"^crit\.out_projs\.(\d+)$", r"softmax.projections.\1"),
    (r"^crit\.cluster_(weight|bias)$", r"softmax.cluster_\1"),
)
_FIELDS = (
    *("vocab_size", "d_model", "d_embed", "n_layer", "n_head", "d_inner", "dropout", "dropatt", "cutoffs", "div_val"),
    *("mem_len", "clamp_len", "same_length", "untie_r", "init_std", "proj_init_std", "layer_norm_epsilon"),
)
_SUPPORTED = {"pre_lnorm": (False,), "attn_type": (0,), "adaptive": (True,), "tie_weight": (True,)}


def read_config(file: str | Path) -> CtxTransformerXLConfig:
    """The configuration of a config.json; raises CtxError for another file or an unsupported variant."""
    values = read_json(file)
    if missing := [name for name in ("d_model", "n_head", "cutoffs") if name not in values]:
        raise CtxError(
            f"No configuration of Transformer-XL: {', '.join(missing)} missing.",
            location=str(file),
            hint="use the config.json of the release.",
        )
    if "n_token" in values:  # the name in early releases
        values.setdefault("vocab_size", values["n_token"])
    for name, supported in _SUPPORTED.items():
        if values.get(name, supported[0]) not in supported:
            raise CtxError(
                f"{name}={values[name]!r} is not supported.", location=str(file), hint="use the released model."
            )
    heads = values["n_head"]
    if values.get("d_head", values["d_model"] // heads) * heads != values["d_model"]:
        raise CtxError("n_head * d_head differs from d_model.", location=str(file), hint="use the released model.")
    fields = {name: values[name] for name in _FIELDS if name in values}
    tail_ties = [bool(values.get("proj_share_all_but_first", True))] * len(fields["cutoffs"])
    tie_projs = values.get("tie_projs") or [False, *tail_ties]
    return CtxTransformerXLConfig(**fields, tie_projs=list(tie_projs))


def read_transformer_xl(file: str | Path, config: CtxTransformerXLConfig) -> CtxTransformerXLForCausalLM:
    """Load released weights; raises CtxError if they do not match the configuration, or the softmax is not tied to the
    embeddings."""
    content = read_tensors(file)
    weights: dict[str, Tensor] = {}
    for name, value in content.items():
        if name.startswith(("transformer.pos_emb.", "transformer.r_", "transformer.mems")):
            continue
        if match := re.fullmatch(r"crit\.out_layers\.(\d+)\.weight", name):
            embedding = content.get(f"transformer.word_emb.emb_layers.{match[1]}.weight")
            if embedding is None or not torch.equal(embedding, value):
                raise CtxError(
                    f"{name} differs from the embeddings.", location=str(file), hint="use a model with tied weights."
                )
            continue
        if (match := re.fullmatch(r"crit\.out_projs\.(\d+)", name)) and (config.tie_projs or [])[int(match[1])]:
            continue
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        weights[name] = value.float()
    if config.div_val == 1:  # the clusters are in one matrix
        edges = [0, *(config.cutoffs or []), config.vocab_size]
        sizes = [stop - start for start, stop in pairwise(edges)]
        for name in ("transformer.word_embeddings.clusters.{}.weight", "softmax.biases.{}"):
            if (values := weights.pop(name.format(0), None)) is not None:
                weights |= {name.format(number): rows for number, rows in enumerate(values.split(sizes))}
    for layer in range(config.num_hidden_layers if not config.untie_r else 0):  # shared by all layers
        for source, target in (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias")):
            if (bias := content.get(f"transformer.{source}")) is not None:
                weights[f"transformer.layers.{layer}.attention.{target}"] = bias.float()
    return load_weights(CtxTransformerXLForCausalLM(config), weights, str(file))


def read_vocabulary(file: str | Path) -> list[str]:
    """Read the words by id of a released vocabulary.

    Args:
        file: vocab.bin of the release, vocab.pkl of `TransfoXLTokenizer.save_pretrained` of transformers 4, whose
            unpickling executes no code, or a .txt with a word per line.

    Raises:
        CtxError: The file is missing, damaged or no vocabulary.
    """
    suffix = Path(file).suffix
    if suffix == ".txt":
        return [line.rstrip("\n") for line in read_lines(file)]
    errors = {"message": "Cannot read the vocabulary", "hint": "use vocab.bin, vocab.pkl, or a .txt of words."}
    if suffix == ".pkl":
        content = read_pickle(file, **errors)
    else:
        content = read_torch_file(file, allowed=[Counter, OrderedDict], **errors)
    words = content.get("idx2sym") if isinstance(content, Mapping) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CtxError("The file has no list of words `idx2sym`.", location=str(file), hint=errors["hint"])
    return words


@dataclass(kw_only=True)
class TransformerXLConversion(Conversion):
    """Arguments of the conversion."""

    weights: str = flag(REQUIRED, "Weights, pytorch_model.bin.")
    config: str = flag(REQUIRED, "Its config.json.")
    vocabulary: str = flag(REQUIRED, "Words by id: vocab.bin, vocab.pkl, or a .txt with a word per line.")

    def convert(self) -> tuple[CtxTransformerXLForCausalLM, CtxTransformerXLTokenizer, str]:
        """The model, its tokenizer and the file of the weights."""
        config = read_config(self.config)
        words = read_vocabulary(self.vocabulary)
        tokenizer: Any = CtxTransformerXLTokenizer(vocab={word: number for number, word in enumerate(words)})
        if len(tokenizer) != config.vocab_size:
            raise CtxError(
                f"The vocabulary has {len(tokenizer):,} words, the configuration {config.vocab_size:,}.",
                location=self.vocabulary,
                hint="use the vocabulary of the checkpoint.",
            )
        config.eos_token_id = tokenizer.eos_token_id
        return read_transformer_xl(self.weights, config), tokenizer, self.weights
