"""word2vec (Mikolov et al. 2013): words predicted from their neighbors."""

from hf_ctxmodels.architectures.configurations import WORD_VECTOR_SIZES
from hf_ctxmodels.models.word2vec.configuration_word2vec import CtxWord2VecConfig
from hf_ctxmodels.models.word2vec.modeling_word2vec import (
    CtxWord2VecForPreTraining,
    CtxWord2VecForSequenceClassification,
    CtxWord2VecForTokenClassification,
    CtxWord2VecModel,
)
from hf_ctxmodels.models.word2vec.tokenization_word2vec import CtxWord2VecTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, TrainingDefaults, Traits

SPEC = FamilySpec(
    name="word2vec",
    paper="Mikolov et al. 2013, Distributed Representations of Words and Phrases and their Compositionality "
    "(arXiv 1310.4546); Efficient Estimation of Word Representations in Vector Space (arXiv 1301.3781)",
    config=CtxWord2VecConfig,
    tokenizer=CtxWord2VecTokenizer,
    models={
        "AutoModel": CtxWord2VecModel,
        "AutoModelForPreTraining": CtxWord2VecForPreTraining,
        "AutoModelForSequenceClassification": CtxWord2VecForSequenceClassification,
        "AutoModelForTokenClassification": CtxWord2VecForTokenClassification,
    },
    objective_classes={"skip-gram": "SkipGram", "cbow": "ContinuousBagOfWords"},
    sizes=WORD_VECTOR_SIZES,
    # 3 million words and phrases of news articles; only the input vectors are published.
    published={"news": PublishedCount({"vocab_size": 3_000_000, "hidden_size": 300}, {"AutoModel": 900_000_000})},
    # the defaults of the released code
    training=TrainingDefaults(
        optimizer="sgd", learning_rate=0.025, architecture_rates={"cbow": 0.05}, num_train_epochs=5
    ),
    traits=Traits(short_training=ShortTraining(steps=400)),
)

__all__ = [
    "CtxWord2VecConfig",
    "CtxWord2VecForPreTraining",
    "CtxWord2VecForSequenceClassification",
    "CtxWord2VecForTokenClassification",
    "CtxWord2VecModel",
    "CtxWord2VecTokenizer",
]
