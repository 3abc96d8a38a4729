"""XLM-R (Conneau et al. 2020): RoBERTa, pretrained on text in a hundred languages."""

from hf_ctxmodels.models.roberta import SIZES
from hf_ctxmodels.models.roberta.modeling_roberta import ROBERTA_CONVERSION
from hf_ctxmodels.models.xlm_roberta.configuration_xlm_roberta import CtxXLMRobertaConfig
from hf_ctxmodels.models.xlm_roberta.modeling_xlm_roberta import (
    CtxXLMRobertaForMaskedLM,
    CtxXLMRobertaForMultipleChoice,
    CtxXLMRobertaForQuestionAnswering,
    CtxXLMRobertaForSequenceClassification,
    CtxXLMRobertaForTokenClassification,
    CtxXLMRobertaModel,
)
from hf_ctxmodels.models.xlm_roberta.tokenization_xlm_roberta import CtxXLMRobertaTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount

SPEC = FamilySpec(
    name="xlm_roberta",
    paper="Conneau et al. 2020, Unsupervised Cross-lingual Representation Learning at Scale (arXiv 1911.02116)",
    config=CtxXLMRobertaConfig,
    tokenizer=CtxXLMRobertaTokenizer,
    models={
        "AutoModel": CtxXLMRobertaModel,
        "AutoModelForPreTraining": CtxXLMRobertaForMaskedLM,
        "AutoModelForMaskedLM": CtxXLMRobertaForMaskedLM,
        "AutoModelForSequenceClassification": CtxXLMRobertaForSequenceClassification,
        "AutoModelForTokenClassification": CtxXLMRobertaForTokenClassification,
        "AutoModelForQuestionAnswering": CtxXLMRobertaForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxXLMRobertaForMultipleChoice,
    },
    objective_classes={"full-sentences": "FullSentences", "mlm": "MaskedLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23; the encoder has its pooler
    published={
        size: PublishedCount(SIZES[size], dict(zip(("AutoModel", "AutoModelForMaskedLM"), counts)))
        for size, counts in {"base": (278_043_648, 278_295_186), "large": (559_890_432, 560_142_482)}.items()
    },
    conversion=ROBERTA_CONVERSION,
    parent="roberta",
)

__all__ = [
    "CtxXLMRobertaConfig",
    "CtxXLMRobertaForMaskedLM",
    "CtxXLMRobertaForMultipleChoice",
    "CtxXLMRobertaForQuestionAnswering",
    "CtxXLMRobertaForSequenceClassification",
    "CtxXLMRobertaForTokenClassification",
    "CtxXLMRobertaModel",
    "CtxXLMRobertaTokenizer",
]
