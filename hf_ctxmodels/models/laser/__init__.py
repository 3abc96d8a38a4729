"""LASER (Artetxe & Schwenk 2019): multilingual sentence embeddings in a joint space, learned by translation."""

from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig
from hf_ctxmodels.models.laser.modeling_laser import (
    CtxLaserForConditionalGeneration,
    CtxLaserForSequenceClassification,
    CtxLaserModel,
)
from hf_ctxmodels.models.laser.tokenization_laser import CtxLaserTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Traits

SPEC = FamilySpec(
    name="laser",
    paper="Artetxe & Schwenk 2019, Massively Multilingual Sentence Embeddings for Zero-Shot Cross-Lingual "
    "Transfer and Beyond (arXiv 1812.10464)",
    config=CtxLaserConfig,
    tokenizer=CtxLaserTokenizer,
    models={
        "AutoModel": CtxLaserModel,
        "AutoModelForPreTraining": CtxLaserForConditionalGeneration,
        "AutoModelForSeq2SeqLM": CtxLaserForConditionalGeneration,
        "AutoModelForSequenceClassification": CtxLaserForSequenceClassification,
    },
    objective_classes={"translation": "TranslationToLanguages"},
    # base: the paper; the others for a CPU
    sizes={
        "tiny": {
            "embedding_size": 64,
            "hidden_size": 256,
            "num_hidden_layers": 1,
            "language_size": 16,
            "decoder_size": 192,
        },
        "small": {"embedding_size": 160, "hidden_size": 512, "num_hidden_layers": 3, "decoder_size": 512},
        "base": {},
    },
    # The layers of the released encoder, and embeddings of 50,000 tokens.
    published={"93 languages": PublishedCount({}, {"AutoModel": 28_614_656 + 50_000 * 320})},
    traits=Traits(is_recurrent=True, short_training=ShortTraining(steps=60)),
)

__all__ = [
    "CtxLaserConfig",
    "CtxLaserForConditionalGeneration",
    "CtxLaserForSequenceClassification",
    "CtxLaserModel",
    "CtxLaserTokenizer",
]
