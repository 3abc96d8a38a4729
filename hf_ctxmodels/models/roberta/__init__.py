"""RoBERTa (Liu et al. 2019): BERT's encoder, pretrained by masked language modelling on full sentences."""

from typing import Any

from hf_ctxmodels.models.roberta.configuration_roberta import CtxRobertaConfig
from hf_ctxmodels.models.roberta.conversion_roberta import ROBERTA_CONVERSION
from hf_ctxmodels.models.roberta.modeling_roberta import (
    CtxRobertaForMaskedLM,
    CtxRobertaForMultipleChoice,
    CtxRobertaForQuestionAnswering,
    CtxRobertaForSequenceClassification,
    CtxRobertaForTokenClassification,
    CtxRobertaModel,
)
from hf_ctxmodels.models.roberta.tokenization_roberta import CtxRobertaTokenizer
from hf_ctxmodels.objectives import FullSentences, MaskedLM
from hf_ctxmodels.spec import FamilySpec, PublishedCount, encoder_size

# tiny to small: Turc et al. 2019 (arXiv 1908.08962), table 1; base, large: Liu et al. 2019, sections 4 and 5
SIZES: dict[str, dict[str, Any]] = {
    "tiny": encoder_size(128, 2, 2),
    "mini": encoder_size(256, 4, 4),
    "small": encoder_size(512, 4, 8),
    "base": encoder_size(768, 12, 12),
    "large": encoder_size(1024, 24, 16),
}

# parameter counts of the classes of transformers 5.23; the encoder has its pooler
PUBLISHED = {
    size: PublishedCount(SIZES[size], dict(zip(("AutoModel", "AutoModelForMaskedLM"), counts)))
    for size, counts in {"base": (124_645_632, 124_697_433), "large": (355_359_744, 355_412_057)}.items()
}

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
    objectives={"full-sentences": FullSentences, "mlm": MaskedLM},
    sizes=SIZES,
    published=PUBLISHED,
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
