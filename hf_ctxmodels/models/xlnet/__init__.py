"""XLNet (Yang et al. 2019): permutation language modeling with two streams of attention."""

from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.conversion_xlnet import XLNET_CONVERSION
from hf_ctxmodels.models.xlnet.modeling_xlnet import (
    CtxXLNetForMultipleChoice,
    CtxXLNetForPreTraining,
    CtxXLNetForQuestionAnswering,
    CtxXLNetForQuestionAnsweringSimple,
    CtxXLNetForSequenceClassification,
    CtxXLNetForTokenClassification,
    CtxXLNetModel,
)
from hf_ctxmodels.models.xlnet.tokenization_xlnet import CtxXLNetTokenizer
from hf_ctxmodels.spec import SMALL_SIZES, FamilySpec, PublishedCount, encoder_size

# base, large: the released models (appendix A.4)
SIZES = SMALL_SIZES | {"base": encoder_size(768, 12, 12), "large": encoder_size(1024, 24, 16)}

SPEC = FamilySpec(
    name="xlnet",
    paper="Yang et al. 2019, XLNet: Generalized Autoregressive Pretraining for Language Understanding "
    "(arXiv 1906.08237)",
    config=CtxXLNetConfig,
    tokenizer=CtxXLNetTokenizer,
    models={
        "AutoModel": CtxXLNetModel,
        "AutoModelForPreTraining": CtxXLNetForPreTraining,
        "AutoModelForCausalLM": CtxXLNetForPreTraining,
        "AutoModelForSequenceClassification": CtxXLNetForSequenceClassification,
        "AutoModelForTokenClassification": CtxXLNetForTokenClassification,
        "AutoModelForQuestionAnswering": CtxXLNetForQuestionAnsweringSimple,
        "AutoModelForMultipleChoice": CtxXLNetForMultipleChoice,
    },
    alternative_heads={"AutoModelForQuestionAnswering": CtxXLNetForQuestionAnswering},
    objective_classes={"plm": "PermutationLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23
    published={
        size: PublishedCount(
            SIZES[size], {"AutoModel": encoder, "AutoModelForPreTraining": head, "AutoModelForCausalLM": head}
        )
        for size, encoder, head in (("base", 116_718_336, 116_750_336), ("large", 360_268_800, 360_300_800))
    },
    conversion=XLNET_CONVERSION,
)

__all__ = [
    "CtxXLNetConfig",
    "CtxXLNetForMultipleChoice",
    "CtxXLNetForPreTraining",
    "CtxXLNetForQuestionAnswering",
    "CtxXLNetForQuestionAnsweringSimple",
    "CtxXLNetForSequenceClassification",
    "CtxXLNetForTokenClassification",
    "CtxXLNetModel",
    "CtxXLNetTokenizer",
]
