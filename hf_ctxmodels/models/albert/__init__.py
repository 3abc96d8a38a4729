"""ALBERT (Lan et al. 2019): BERT with factorized embeddings and layers that share their weights."""

from typing import Any

from hf_ctxmodels.models.albert.configuration_albert import CtxAlbertConfig
from hf_ctxmodels.models.albert.modeling_albert import (
    ALBERT_CONVERSION,
    CtxAlbertForMaskedLM,
    CtxAlbertForMultipleChoice,
    CtxAlbertForPreTraining,
    CtxAlbertForQuestionAnswering,
    CtxAlbertForSequenceClassification,
    CtxAlbertForTokenClassification,
    CtxAlbertModel,
)
from hf_ctxmodels.models.albert.tokenization_albert import CtxAlbertTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Traits, encoder_size


def _size(width: int, layers: int, heads: int, *, embedding: int = 128, dropout: float = 0.0) -> dict[str, Any]:
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return {**encoder_size(width, layers, heads), "embedding_size": embedding, **dropouts}


# base to xxlarge: Lan et al. 2019, table 1, in version 2 (without dropout) and version 1 (-v1); tiny to small: for CPUs
SIZES: dict[str, dict[str, Any]] = {
    "tiny": _size(128, 2, 2),
    "mini": _size(256, 4, 4, embedding=64),
    "small": _size(512, 6, 8),
    "base": _size(768, 12, 12),
    "large": _size(1024, 24, 16),
    "xlarge": _size(2048, 24, 16),
    "xxlarge": _size(4096, 12, 64),
    "base-v1": _size(768, 12, 12, dropout=0.1),
    "large-v1": _size(1024, 24, 16, dropout=0.1),
    "xlarge-v1": _size(2048, 24, 16, dropout=0.1),
    "xxlarge-v1": _size(4096, 12, 64),
}

SPEC = FamilySpec(
    name="albert",
    paper="Lan et al. 2019, ALBERT: A Lite BERT for Self-supervised Learning of Language Representations "
    "(arXiv 1909.11942)",
    config=CtxAlbertConfig,
    tokenizer=CtxAlbertTokenizer,
    models={
        "AutoModel": CtxAlbertModel,
        "AutoModelForPreTraining": CtxAlbertForPreTraining,
        "AutoModelForMaskedLM": CtxAlbertForMaskedLM,
        "AutoModelForSequenceClassification": CtxAlbertForSequenceClassification,
        "AutoModelForTokenClassification": CtxAlbertForTokenClassification,
        "AutoModelForQuestionAnswering": CtxAlbertForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxAlbertForMultipleChoice,
    },
    objective_classes={"mlm+sop": "MaskedLMWithSentenceOrder", "mlm": "MaskedLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23
    published={
        size: PublishedCount(
            SIZES[size], dict(zip(("AutoModel", "AutoModelForPreTraining", "AutoModelForMaskedLM"), counts))
        )
        for size, counts in {
            "base": (11_683_584, 11_813_810, 11_221_680),
            "large": (17_683_968, 17_847_474, 16_795_824),
            "xlarge": (58_724_864, 59_021_490, 54_821_040),
            "xxlarge": (222_595_584, 223_158_450, 206_368_944),
            "base-v1": (11_683_584, 11_813_810, 11_221_680),
        }.items()
    },
    conversion=ALBERT_CONVERSION,
    # short documents, where the order of segments is learnable
    traits=Traits(
        short_training=ShortTraining(
            learning_rate=3e-3, config_options=("initializer_range=0.05",), text="news_*.txt.gz"
        )
    ),
)

__all__ = [
    "CtxAlbertConfig",
    "CtxAlbertForMaskedLM",
    "CtxAlbertForMultipleChoice",
    "CtxAlbertForPreTraining",
    "CtxAlbertForQuestionAnswering",
    "CtxAlbertForSequenceClassification",
    "CtxAlbertForTokenClassification",
    "CtxAlbertModel",
    "CtxAlbertTokenizer",
]
