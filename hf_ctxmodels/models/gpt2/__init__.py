"""GPT-2 (Radford et al. 2019): a causal pre-norm Transformer, pretrained by language modeling."""

from hf_ctxmodels.models.gpt2.configuration_gpt2 import CtxGpt2Config
from hf_ctxmodels.models.gpt2.modeling_gpt2 import (
    GPT2_CONVERSION,
    CtxGpt2ForCausalLM,
    CtxGpt2ForMultipleChoice,
    CtxGpt2ForQuestionAnswering,
    CtxGpt2ForSequenceClassification,
    CtxGpt2ForTokenClassification,
    CtxGpt2Model,
)
from hf_ctxmodels.models.gpt2.tokenization_gpt2 import CtxGpt2Tokenizer
from hf_ctxmodels.spec import SMALL_SIZES, FamilySpec, PublishedCount, Traits, encoder_size

# base, medium, large, xl: released models (Radford et al. 2019, table 2; sizes of the model card)
SIZES = SMALL_SIZES | {
    "base": encoder_size(768, 12, 12),
    "medium": encoder_size(1024, 24, 16),
    "large": encoder_size(1280, 36, 20),
    "xl": encoder_size(1600, 48, 25),
}

SPEC = FamilySpec(
    name="gpt2",
    paper="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    config=CtxGpt2Config,
    tokenizer=CtxGpt2Tokenizer,
    models={
        "AutoModel": CtxGpt2Model,
        "AutoModelForPreTraining": CtxGpt2ForCausalLM,
        "AutoModelForCausalLM": CtxGpt2ForCausalLM,
        "AutoModelForSequenceClassification": CtxGpt2ForSequenceClassification,
        "AutoModelForTokenClassification": CtxGpt2ForTokenClassification,
        "AutoModelForQuestionAnswering": CtxGpt2ForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxGpt2ForMultipleChoice,
    },
    objective_classes={"clm": "DocumentLM", "prefix-lm": "PrefixLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23
    published={
        size: PublishedCount(SIZES[size], dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), count))
        for size, count in zip(
            ("base", "medium", "large", "xl"), (124_439_808, 354_823_168, 774_030_080, 1_557_611_200)
        )
    },
    conversion=GPT2_CONVERSION,
    traits=Traits(tiny={"embedding_dropout_prob": 0.0}),
)

__all__ = [
    "CtxGpt2Config",
    "CtxGpt2ForCausalLM",
    "CtxGpt2ForMultipleChoice",
    "CtxGpt2ForQuestionAnswering",
    "CtxGpt2ForSequenceClassification",
    "CtxGpt2ForTokenClassification",
    "CtxGpt2Model",
    "CtxGpt2Tokenizer",
]
