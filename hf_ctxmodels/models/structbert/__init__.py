"""StructBERT (Wang et al. 2019): BERT's network, pretrained with word and sentence structure objectives."""

from hf_ctxmodels.models.bert import SIZES
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION
from hf_ctxmodels.models.structbert.configuration_structbert import CtxStructBertConfig
from hf_ctxmodels.models.structbert.modeling_structbert import (
    CtxStructBertForMaskedLM,
    CtxStructBertForMultipleChoice,
    CtxStructBertForPreTraining,
    CtxStructBertForQuestionAnswering,
    CtxStructBertForSequenceClassification,
    CtxStructBertForTokenClassification,
    CtxStructBertModel,
)
from hf_ctxmodels.models.structbert.tokenization_structbert import CtxStructBertTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Target, Traits

SPEC = FamilySpec(
    name="structbert",
    paper="Wang et al. 2019, StructBERT: Incorporating Language Structures into Pre-training for Deep Language "
    "Understanding (arXiv 1908.04577)",
    config=CtxStructBertConfig,
    tokenizer=CtxStructBertTokenizer,
    models={
        "AutoModel": CtxStructBertModel,
        "AutoModelForPreTraining": CtxStructBertForPreTraining,
        "AutoModelForMaskedLM": CtxStructBertForMaskedLM,
        "AutoModelForSequenceClassification": CtxStructBertForSequenceClassification,
        "AutoModelForTokenClassification": CtxStructBertForTokenClassification,
        "AutoModelForQuestionAnswering": CtxStructBertForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxStructBertForMultipleChoice,
    },
    objective_classes={"mlm+structure": "MaskedLMWithStructure", "mlm": "MaskedLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23 (BERT, uncased); the encoder has its pooler
    published={
        size: PublishedCount(SIZES[size], dict(zip(("AutoModel", "AutoModelForMaskedLM"), counts)))
        for size, counts in {"base": (109_482_240, 109_514_298), "large": (335_141_888, 335_174_458)}.items()
    },
    conversion=BERT_CONVERSION,
    parent="bert",
    traits=Traits(short_training=ShortTraining(steps=160), targets={"shuffle_labels": Target.TOKEN_ID}),
)

__all__ = [
    "CtxStructBertConfig",
    "CtxStructBertForMaskedLM",
    "CtxStructBertForMultipleChoice",
    "CtxStructBertForPreTraining",
    "CtxStructBertForQuestionAnswering",
    "CtxStructBertForSequenceClassification",
    "CtxStructBertForTokenClassification",
    "CtxStructBertModel",
    "CtxStructBertTokenizer",
]
