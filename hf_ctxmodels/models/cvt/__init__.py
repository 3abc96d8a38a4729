"""Cross-view training (Clark et al. 2018): auxiliary predictions from partial views match the full prediction."""

from hf_ctxmodels.models.cvt.configuration_cvt import CtxCvtConfig
from hf_ctxmodels.models.cvt.modeling_cvt import (
    CtxCvtForQuestionAnswering,
    CtxCvtForSequenceClassification,
    CtxCvtForTokenClassification,
    CtxCvtModel,
)
from hf_ctxmodels.models.cvt.parsing import CtxCvtForDependencyParsing
from hf_ctxmodels.models.cvt.tokenization_cvt import CtxCvtTokenizer
from hf_ctxmodels.models.cvt.translation import CtxCvtForConditionalGeneration
from hf_ctxmodels.spec import FamilySpec, PublishedCount, Target, Traits

SPEC = FamilySpec(
    name="cvt",
    paper="Clark et al. 2018, Semi-Supervised Sequence Modeling with Cross-View Training (arXiv 1809.08370)",
    config=CtxCvtConfig,
    tokenizer=CtxCvtTokenizer,
    models={
        "AutoModel": CtxCvtModel,
        "AutoModelForSequenceClassification": CtxCvtForSequenceClassification,
        "AutoModelForTokenClassification": CtxCvtForTokenClassification,
        "AutoModelForQuestionAnswering": CtxCvtForQuestionAnswering,
        "AutoModelForSeq2SeqLM": CtxCvtForConditionalGeneration,
        "AutoModelForDependencyParsing": CtxCvtForDependencyParsing,
    },
    # base: the paper's; tiny and small: for a CPU
    sizes={
        "tiny": {
            "hidden_size": 128,
            "cell_size": 128,
            "prediction_size": 64,
            "target_embedding_size": 100,
            "character_embedding_size": 16,
            "filters": [[2, 32], [3, 32], [4, 32]],
        },
        "small": {
            "hidden_size": 256,
            "cell_size": 256,
            "prediction_size": 128,
            "character_embedding_size": 25,
            "target_embedding_size": 100,
        },
        "base": {},
    },
    # No count is published; it follows from section 4.1. Characters 262 * 50; filters 100 * (50 * 9 + 3), 300 to 1024;
    # each layer and direction 4 * 1024 * (1024 + 512 + 1) + 1024 * 512.
    published={"section 4.1": PublishedCount({}, {"AutoModel": 13_100 + 45_300 + 308_224 + 4 * 6_819_840})},
    traits=Traits(
        is_recurrent=True,
        tiny={"word_dropout": 0.0, "attention_view_dropout": 0.0, "hard_target_max_length": 7},
        targets={"views": Target.CONSISTENCY},
    ),
)

__all__ = [
    "CtxCvtConfig",
    "CtxCvtForConditionalGeneration",
    "CtxCvtForDependencyParsing",
    "CtxCvtForQuestionAnswering",
    "CtxCvtForSequenceClassification",
    "CtxCvtForTokenClassification",
    "CtxCvtModel",
    "CtxCvtTokenizer",
]
