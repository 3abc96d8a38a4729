"""GloVe (Pennington et al. 2014): least squares on co-occurrence counts."""

from hf_ctxmodels.architectures.configurations import WORD_VECTOR_SIZES
from hf_ctxmodels.models.glove.configuration_glove import CtxGloveConfig
from hf_ctxmodels.models.glove.modeling_glove import (
    CtxGloveForPreTraining,
    CtxGloveForSequenceClassification,
    CtxGloveForTokenClassification,
    CtxGloveModel,
)
from hf_ctxmodels.models.glove.tokenization_glove import CtxGloveTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, TrainingDefaults, Traits

SPEC = FamilySpec(
    name="glove",
    paper="Pennington, Socher, Manning 2014, GloVe: Global Vectors for Word Representation (EMNLP)",
    config=CtxGloveConfig,
    tokenizer=CtxGloveTokenizer,
    models={
        "AutoModel": CtxGloveModel,
        "AutoModelForPreTraining": CtxGloveForPreTraining,
        "AutoModelForSequenceClassification": CtxGloveForSequenceClassification,
        "AutoModelForTokenClassification": CtxGloveForTokenClassification,
    },
    objective_classes={"cooccurrence": "Cooccurrence"},
    sizes=WORD_VECTOR_SIZES,
    # 400,000 words; only the sum of both tables is published.
    published={
        f"6B, {width}": PublishedCount(
            {"vocab_size": 400_000, "hidden_size": width, "context_vectors": False}, {"AutoModel": 400_000 * width}
        )
        for width in (50, 100, 200, 300)
    },
    # the rate and the passes of the released code; its AdaGrad differs, see the model card
    training=TrainingDefaults(optimizer="adagrad", learning_rate=0.05, num_train_epochs=25),
    traits=Traits(short_training=ShortTraining(steps=200)),
)

__all__ = [
    "CtxGloveConfig",
    "CtxGloveForPreTraining",
    "CtxGloveForSequenceClassification",
    "CtxGloveForTokenClassification",
    "CtxGloveModel",
    "CtxGloveTokenizer",
]
