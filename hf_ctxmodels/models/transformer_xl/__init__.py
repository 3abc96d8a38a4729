"""Transformer-XL (Dai et al. 2019): language modeling with a memory of earlier segments and an adaptive softmax."""

from typing import Any

from hf_ctxmodels.models.transformer_xl.configuration_transformer_xl import CtxTransformerXLConfig
from hf_ctxmodels.models.transformer_xl.modeling_transformer_xl import (
    CtxTransformerXLForCausalLM,
    CtxTransformerXLForSequenceClassification,
    CtxTransformerXLForTokenClassification,
    CtxTransformerXLModel,
)
from hf_ctxmodels.models.transformer_xl.tokenization_transformer_xl import CtxTransformerXLTokenizer
from hf_ctxmodels.spec import SMALL_SIZES, FamilySpec, PublishedCount, Traits

_PLAIN: dict[str, Any] = {"cutoffs": [], "div_val": 1, "untie_r": False, "mem_len": 128, "clamp_len": -1}
# base, large: the released commands for WikiText-103; enwik8: for single characters
SIZES: dict[str, dict[str, Any]] = {
    name: {**fields, "embedding_size": fields["hidden_size"], "hidden_act": "relu", **_PLAIN}
    for name, fields in SMALL_SIZES.items()
} | {
    "base": {
        "hidden_size": 410,
        "embedding_size": 410,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "intermediate_size": 2100,
        "div_val": 1,
        "untie_r": False,
        "mem_len": 150,
        "clamp_len": -1,
        "same_length": False,
    },
    "large": {
        "mem_len": 384,
        "clamp_len": -1,
        "same_length": False,
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.2,
    },
    "enwik8": {
        "hidden_size": 512,
        "embedding_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        **_PLAIN,
        "mem_len": 512,
        "same_length": False,
    },
}

SPEC = FamilySpec(
    name="transformer_xl",
    paper="Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context (arXiv 1901.02860)",
    config=CtxTransformerXLConfig,
    tokenizer=CtxTransformerXLTokenizer,
    models={
        "AutoModel": CtxTransformerXLModel,
        "AutoModelForPreTraining": CtxTransformerXLForCausalLM,
        "AutoModelForCausalLM": CtxTransformerXLForCausalLM,
        "AutoModelForSequenceClassification": CtxTransformerXLForSequenceClassification,
        "AutoModelForTokenClassification": CtxTransformerXLForTokenClassification,
    },
    objective_classes={"clm": "SegmentLM"},
    sizes=SIZES,
    # Of the paper: 151 million (table 1) and 41 million (table 2, 12 layers). Of the released model: by hand, 18 layers
    # of 13,642,752, the embeddings and their projections, and the softmax's biases, symbols and first projection.
    published={
        name: PublishedCount(
            fields, {"AutoModel": encoder, "AutoModelForPreTraining": head, "AutoModelForCausalLM": head}
        )
        for name, fields, encoder, head in (
            ("WikiText-103 base", SIZES["base"], 150_838_570, 151_107_538),
            ("enwik8", {**SIZES["enwik8"], "vocab_size": 204}, 41_055_232, 41_055_436),
            ("released", {}, 283_885_936, 285_205_322),
        )
    },
    parent="xlnet",
    traits=Traits(
        tiny={"cutoffs": [6], "div_val": 2, "embedding_size": 32, "mem_len": 50, "hidden_act": "gelu"},
    ),
)

__all__ = [
    "CtxTransformerXLConfig",
    "CtxTransformerXLForCausalLM",
    "CtxTransformerXLForSequenceClassification",
    "CtxTransformerXLForTokenClassification",
    "CtxTransformerXLModel",
    "CtxTransformerXLTokenizer",
]
