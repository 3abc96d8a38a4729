"""RoBERTa (Liu et al. 2019): BERT's encoder, pretrained by masked language modeling on full sentences."""

from hf_ctxmodels.models.bert import SIZES
from hf_ctxmodels.models.roberta.configuration_roberta import CtxRobertaConfig
from hf_ctxmodels.models.roberta.modeling_roberta import (
    ROBERTA_CONVERSION,
    CtxRobertaForMaskedLM,
    CtxRobertaForMultipleChoice,
    CtxRobertaForQuestionAnswering,
    CtxRobertaForSequenceClassification,
    CtxRobertaForTokenClassification,
    CtxRobertaModel,
)
from hf_ctxmodels.models.roberta.tokenization_roberta import CtxRobertaTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount

SPEC = FamilySpec(
    name="roberta",
    paper="Liu et al. 2019, RoBERTa: A Robustly Optimized BERT Pretraining Approach (arXiv 1907.11692)",
    config=CtxRobertaConfig,
    tokenizer=CtxRobertaTokenizer,
    models={
        "AutoModel": CtxRobertaModel,
        "AutoModelForPreTraining": CtxRobertaForMaskedLM,
        "AutoModelForMaskedLM": CtxRobertaForMaskedLM,
        "AutoModelForSequenceClassification": CtxRobertaForSequenceClassification,
        "AutoModelForTokenClassification": CtxRobertaForTokenClassification,
        "AutoModelForQuestionAnswering": CtxRobertaForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxRobertaForMultipleChoice,
    },
    objective_classes={"full-sentences": "FullSentences", "mlm": "MaskedLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23; the encoder has its pooler
    published={
        size: PublishedCount(SIZES[size], dict(zip(("AutoModel", "AutoModelForMaskedLM"), counts)))
        for size, counts in {"base": (124_645_632, 124_697_433), "large": (355_359_744, 355_412_057)}.items()
    },
    conversion=ROBERTA_CONVERSION,
    parent="bert",
)

__all__ = [
    "CtxRobertaConfig",
    "CtxRobertaForMaskedLM",
    "CtxRobertaForMultipleChoice",
    "CtxRobertaForQuestionAnswering",
    "CtxRobertaForSequenceClassification",
    "CtxRobertaForTokenClassification",
    "CtxRobertaModel",
    "CtxRobertaTokenizer",
]
