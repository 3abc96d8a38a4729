"""InferSent (Conneau et al. 2017): sentence vectors learned by natural language inference."""

from hf_ctxmodels.models.infersent.configuration_infersent import CtxInferSentConfig
from hf_ctxmodels.models.infersent.modeling_infersent import CtxInferSentForSequenceClassification, CtxInferSentModel
from hf_ctxmodels.models.infersent.tokenization_infersent import CtxInferSentTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, Traits

SPEC = FamilySpec(
    name="infersent",
    paper="Conneau et al. 2017, Supervised Learning of Universal Sentence Representations from Natural "
    "Language Inference Data (arXiv 1705.02364)",
    config=CtxInferSentConfig,
    tokenizer=CtxInferSentTokenizer,
    models={
        "AutoModel": CtxInferSentModel,
        "AutoModelForSequenceClassification": CtxInferSentForSequenceClassification,
    },
    # base: the paper; the others for a CPU
    sizes={
        "tiny": {"embedding_size": 100, "hidden_size": 512, "classifier_size": 128},
        "small": {"embedding_size": 300, "hidden_size": 1024},
        "base": {"embedding_size": 300, "hidden_size": 4096},
    },
    # The released encoders have 38,502,400 parameters without their GloVe or fastText vectors.
    published={"released": PublishedCount({"vocab_size": 1000}, {"AutoModel": 38_502_400 + 1000 * 300})},
    traits=Traits(is_recurrent=True),
)

__all__ = [
    "CtxInferSentConfig",
    "CtxInferSentForSequenceClassification",
    "CtxInferSentModel",
    "CtxInferSentTokenizer",
]
