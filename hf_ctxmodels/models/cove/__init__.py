"""CoVe (McCann et al. 2017): pretrained word vectors concatenated with the states of a translation model's encoder."""

from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.modeling_cove import (
    CtxCoveForConditionalGeneration,
    CtxCoveForQuestionAnswering,
    CtxCoveForSequenceClassification,
    CtxCoveForTokenClassification,
    CtxCoveModel,
)
from hf_ctxmodels.models.cove.tokenization_cove import CtxCoveTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Traits

SPEC = FamilySpec(
    name="cove",
    paper="McCann et al. 2017, Learned in Translation: Contextualized Word Vectors (arXiv 1708.00107)",
    config=CtxCoveConfig,
    tokenizer=CtxCoveTokenizer,
    models={
        "AutoModel": CtxCoveModel,
        "AutoModelForPreTraining": CtxCoveForConditionalGeneration,
        "AutoModelForSeq2SeqLM": CtxCoveForConditionalGeneration,
        "AutoModelForSequenceClassification": CtxCoveForSequenceClassification,
        "AutoModelForTokenClassification": CtxCoveForTokenClassification,
        "AutoModelForQuestionAnswering": CtxCoveForQuestionAnswering,
    },
    objective_classes={"translation": "Translation"},
    # base: the released encoder (section 6); tiny: for a CPU
    sizes={
        "tiny": {"embedding_size": 100, "hidden_size": 128, "biattention_size": 64},
        "base": {"embedding_size": 300, "hidden_size": 600},
    },
    # The released encoder has 3,609,600 parameters without its GloVe vectors.
    published={"released": PublishedCount({"vocab_size": 1000}, {"AutoModel": 3_609_600 + 1000 * 300})},
    traits=Traits(
        is_recurrent=True,
        uses_batch_norm=("AutoModelForSequenceClassification",),
        short_training=ShortTraining(steps=60),
        tiny={"biattention_size": 12},
        uses_max_pooling=("AutoModelForSequenceClassification",),
    ),
)

__all__ = [
    "CtxCoveConfig",
    "CtxCoveForConditionalGeneration",
    "CtxCoveForQuestionAnswering",
    "CtxCoveForSequenceClassification",
    "CtxCoveForTokenClassification",
    "CtxCoveModel",
    "CtxCoveTokenizer",
]
