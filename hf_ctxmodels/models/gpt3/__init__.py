"""GPT-3 (Brown et al. 2020): GPT-2 with alternating dense and locally banded attention layers."""

from typing import Any

from hf_ctxmodels.models.gpt3.configuration_gpt3 import CtxGpt3Config
from hf_ctxmodels.models.gpt3.modeling_gpt3 import (
    CtxGpt3ForCausalLM,
    CtxGpt3ForMultipleChoice,
    CtxGpt3ForQuestionAnswering,
    CtxGpt3ForSequenceClassification,
    CtxGpt3ForTokenClassification,
    CtxGpt3Model,
)
from hf_ctxmodels.models.gpt3.tokenization_gpt3 import CtxGpt3Tokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, Traits, encoder_size

# base to 175b: Brown et al. 2020, table 2.1, except for two sizes whose heads do not fit the width: XL (24 heads of 128
# for a width of 2,048; here 16 heads) and 13B (40 heads for a width of 5,140; here 5,120)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": encoder_size(128, 2, 2),
    "mini": encoder_size(256, 4, 4),
    "base": encoder_size(768, 12, 12),
    "medium": encoder_size(1024, 24, 16),
    "large": encoder_size(1536, 24, 16),
    "xl": encoder_size(2048, 24, 16),
    "2.7b": encoder_size(2560, 32, 32),
    "6.7b": encoder_size(4096, 32, 32),
    "13b": encoder_size(5120, 40, 40),
    "175b": encoder_size(12288, 96, 96),
}

SPEC = FamilySpec(
    name="gpt3",
    paper="Brown et al. 2020, Language Models are Few-Shot Learners (arXiv 2005.14165)",
    config=CtxGpt3Config,
    tokenizer=CtxGpt3Tokenizer,
    models={
        "AutoModel": CtxGpt3Model,
        "AutoModelForPreTraining": CtxGpt3ForCausalLM,
        "AutoModelForCausalLM": CtxGpt3ForCausalLM,
        "AutoModelForSequenceClassification": CtxGpt3ForSequenceClassification,
        "AutoModelForTokenClassification": CtxGpt3ForTokenClassification,
        "AutoModelForMultipleChoice": CtxGpt3ForMultipleChoice,
        "AutoModelForQuestionAnswering": CtxGpt3ForQuestionAnswering,
    },
    objective_classes={"clm": "DocumentLM", "prefix-lm": "PrefixLM"},
    sizes=SIZES,
    published={
        size: PublishedCount(SIZES[size], dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), count))
        for size, count in {
            "base": 125_226_240,
            "medium": 355_871_744,
            "large": 760_300_032,
            "xl": 1_315_723_264,
            "2.7b": 2_651_553_280,
            "6.7b": 6_658_404_352,
            "13b": 12_853_386_240,
            "175b": 174_604_259_328,
        }.items()
    },
    parent="gpt2",
    traits=Traits(tiny={"embedding_dropout_prob": 0.0, "window": 3}),
)

__all__ = [
    "CtxGpt3Config",
    "CtxGpt3ForCausalLM",
    "CtxGpt3ForMultipleChoice",
    "CtxGpt3ForQuestionAnswering",
    "CtxGpt3ForSequenceClassification",
    "CtxGpt3ForTokenClassification",
    "CtxGpt3Model",
    "CtxGpt3Tokenizer",
]
