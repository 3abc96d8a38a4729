"""SpanBERT (Joshi et al. 2020): BERT's network, pretrained by predicting masked spans and with a span boundary
objective."""

from hf_ctxmodels.models.bert import SIZES
from hf_ctxmodels.models.spanbert.configuration_spanbert import CtxSpanBertConfig
from hf_ctxmodels.models.spanbert.modeling_spanbert import (
    SPANBERT_CONVERSION,
    CtxSpanBertForMaskedLM,
    CtxSpanBertForMultipleChoice,
    CtxSpanBertForPreTraining,
    CtxSpanBertForQuestionAnswering,
    CtxSpanBertForSequenceClassification,
    CtxSpanBertForTokenClassification,
    CtxSpanBertModel,
)
from hf_ctxmodels.models.spanbert.tokenization_spanbert import CtxSpanBertTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, Target, Traits

SPEC = FamilySpec(
    name="spanbert",
    paper="Joshi et al. 2020, SpanBERT: Improving Pre-training by Representing and Predicting Spans (arXiv 1907.10529)",
    config=CtxSpanBertConfig,
    tokenizer=CtxSpanBertTokenizer,
    models={
        "AutoModel": CtxSpanBertModel,
        "AutoModelForPreTraining": CtxSpanBertForPreTraining,
        "AutoModelForMaskedLM": CtxSpanBertForMaskedLM,
        "AutoModelForSequenceClassification": CtxSpanBertForSequenceClassification,
        "AutoModelForTokenClassification": CtxSpanBertForTokenClassification,
        "AutoModelForQuestionAnswering": CtxSpanBertForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxSpanBertForMultipleChoice,
    },
    objective_classes={"span-mlm+sbo": "SpanBoundary", "mlm": "MaskedLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23 (BERT, cased); the encoder has its pooler
    published={
        size: PublishedCount(SIZES[size], dict(zip(("AutoModel", "AutoModelForMaskedLM"), counts)))
        for size, counts in {"base": (108_310_272, 108_340_804), "large": (333_579_264, 333_610_308)}.items()
    },
    conversion=SPANBERT_CONVERSION,
    parent="bert",
    traits=Traits(
        tiny={"max_pair_targets": 3, "pair_position_size": 6},
        targets={"boundary_labels": Target.SPAN_TOKEN},
    ),
)

__all__ = [
    "CtxSpanBertConfig",
    "CtxSpanBertForMaskedLM",
    "CtxSpanBertForMultipleChoice",
    "CtxSpanBertForPreTraining",
    "CtxSpanBertForQuestionAnswering",
    "CtxSpanBertForSequenceClassification",
    "CtxSpanBertForTokenClassification",
    "CtxSpanBertModel",
    "CtxSpanBertTokenizer",
]
