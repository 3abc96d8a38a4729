"""BERT (Devlin et al. 2019): a bidirectional Transformer encoder, pretrained by masked language modeling and next
sentence prediction."""

from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION
from hf_ctxmodels.models.bert.modeling_bert import (
    CtxBertForMaskedLM,
    CtxBertForMultipleChoice,
    CtxBertForNextSentencePrediction,
    CtxBertForPreTraining,
    CtxBertForQuestionAnswering,
    CtxBertForSequenceClassification,
    CtxBertForTokenClassification,
    CtxBertModel,
)
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.spec import SMALL_SIZES, FamilySpec, PublishedCount, ShortTraining, Traits, encoder_size

SIZES = {
    **{name: {**fields, "convolutional_initialization": True} for name, fields in SMALL_SIZES.items()},
    "base": encoder_size(768, 12, 12),  # base, large: Devlin et al. 2019, section 3
    "large": encoder_size(1024, 24, 16),
}
# distilled: Sanh et al. 2019 (arXiv 1910.01108), Sun et al. 2019 (1908.09355), Jiao et al. 2020 (1909.10351), Wang et
# al. 2020 (2002.10957)
STUDENT_SIZES = {
    "distilbert": {**encoder_size(768, 6, 12), "type_vocab_size": 0},
    "pkd-3": encoder_size(768, 3, 12),
    "tinybert-4": {**encoder_size(312, 4, 12), "intermediate_size": 1200},
    "tinybert-6": encoder_size(768, 6, 12),
    "minilm-6x384": encoder_size(384, 6, 12),
    "minilm-6x768": encoder_size(768, 6, 12),
    "minilm-12x384": encoder_size(384, 12, 12),
}

# parameter counts of the classes of transformers 5.23; the encoder has its pooler
PUBLISHED = {
    name: PublishedCount(fields, dict(zip(("AutoModel", "AutoModelForMaskedLM", "AutoModelForPreTraining"), counts)))
    for name, fields, counts in (
        ("base uncased", {"vocab_size": 30522}, (109_482_240, 109_514_298, 110_106_428)),
        ("base cased", {"vocab_size": 28996}, (108_310_272, 108_340_804, 108_932_934)),
        ("large uncased", {**SIZES["large"], "vocab_size": 30522}, (335_141_888, 335_174_458, 336_226_108)),
        ("large cased", {**SIZES["large"], "vocab_size": 28996}, (333_579_264, 333_610_308, 334_661_958)),
        ("pkd-3 uncased", {**STUDENT_SIZES["pkd-3"], "vocab_size": 30522}, (45_691_392,)),
        ("tinybert-4 uncased", {**STUDENT_SIZES["tinybert-4"], "vocab_size": 30522}, (14_350_248,)),
        ("tinybert-6 uncased", {**STUDENT_SIZES["tinybert-6"], "vocab_size": 30522}, (66_955_008,)),
        ("minilm-6x384 uncased", {**STUDENT_SIZES["minilm-6x384"], "vocab_size": 30522}, (22_713_216,)),
        ("minilm-12x384 uncased", {**STUDENT_SIZES["minilm-12x384"], "vocab_size": 30522}, (33_360_000,)),
        ("multilingual cased", {"vocab_size": 119547}, (177_853_440, 177_974_523)),
        ("multilingual uncased", {"vocab_size": 105879}, (167_356_416, 167_463_831)),
    )
}
PUBLISHED["distilbert uncased"] = PublishedCount(
    {**STUDENT_SIZES["distilbert"], "vocab_size": 30522}, {"AutoModelForMaskedLM": 66_985_530}
)

SPEC = FamilySpec(
    name="bert",
    paper="Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding "
    "(arXiv 1810.04805)",
    config=CtxBertConfig,
    tokenizer=CtxBertTokenizer,
    models={
        "AutoModel": CtxBertModel,
        "AutoModelForPreTraining": CtxBertForPreTraining,
        "AutoModelForMaskedLM": CtxBertForMaskedLM,
        "AutoModelForNextSentencePrediction": CtxBertForNextSentencePrediction,
        "AutoModelForSequenceClassification": CtxBertForSequenceClassification,
        "AutoModelForTokenClassification": CtxBertForTokenClassification,
        "AutoModelForQuestionAnswering": CtxBertForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxBertForMultipleChoice,
    },
    objective_classes={"mlm+nsp": "MaskedLMWithNextSentence", "mlm": "MaskedLM"},
    sizes=SIZES | STUDENT_SIZES,
    published=PUBLISHED,
    conversion=BERT_CONVERSION,
    traits=Traits(short_training=ShortTraining(steps=240)),
)

__all__ = [
    "CtxBertConfig",
    "CtxBertForMaskedLM",
    "CtxBertForMultipleChoice",
    "CtxBertForNextSentencePrediction",
    "CtxBertForPreTraining",
    "CtxBertForQuestionAnswering",
    "CtxBertForSequenceClassification",
    "CtxBertForTokenClassification",
    "CtxBertModel",
    "CtxBertTokenizer",
]
