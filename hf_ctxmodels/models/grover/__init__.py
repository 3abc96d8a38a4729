"""Grover (Zellers et al. 2019): a causal Transformer pretrained on the fields of news articles."""

from hf_ctxmodels.models.grover.configuration_grover import CtxGroverConfig
from hf_ctxmodels.models.grover.modeling_grover import (
    CtxGroverForCausalLM,
    CtxGroverForSequenceClassification,
    CtxGroverModel,
)
from hf_ctxmodels.models.grover.tokenization_grover import CtxGroverTokenizer
from hf_ctxmodels.spec import SMALL_SIZES, FamilySpec, PublishedCount, ShortTraining, Traits, encoder_size

# base, large, mega: released models (lm/configs of the released code)
SIZES = SMALL_SIZES | {
    "base": encoder_size(768, 12, 12),
    "large": encoder_size(1024, 24, 16),
    "mega": {**encoder_size(1536, 48, 24), "initializer_range": 0.0141},
}

SPEC = FamilySpec(
    name="grover",
    paper="Zellers et al. 2019, Defending Against Neural Fake News (arXiv 1905.12616)",
    config=CtxGroverConfig,
    tokenizer=CtxGroverTokenizer,
    models={
        "AutoModel": CtxGroverModel,
        "AutoModelForPreTraining": CtxGroverForCausalLM,
        "AutoModelForCausalLM": CtxGroverForCausalLM,
        "AutoModelForSequenceClassification": CtxGroverForSequenceClassification,
    },
    objective_classes={"fields": "NewsFieldsLM"},
    sizes=SIZES,
    # sums of the shapes in the released code: 50,270 tokens and 1,024 positions of width w with a norm of 2 w, and
    # 12 w^2 + 13 w per layer; rounded to 124 M, 355 M and 1.5 B in the paper
    published={
        size: PublishedCount(SIZES[size], dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), count))
        for size, count in {"base": 124_449_792, "large": 354_836_480, "mega": 1_438_703_616}.items()
    },
    traits=Traits(short_training=ShortTraining(steps=160)),
)

__all__ = [
    "CtxGroverConfig",
    "CtxGroverForCausalLM",
    "CtxGroverForSequenceClassification",
    "CtxGroverModel",
    "CtxGroverTokenizer",
]
