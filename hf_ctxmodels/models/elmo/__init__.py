"""ELMo (Peters et al. 2018): a bidirectional language model over characters."""

from typing import Any

from hf_ctxmodels.models.elmo.configuration_elmo import CtxElmoConfig
from hf_ctxmodels.models.elmo.modeling_elmo import (
    CtxElmoForPreTraining,
    CtxElmoForQuestionAnswering,
    CtxElmoForSequenceClassification,
    CtxElmoForTokenClassification,
    CtxElmoModel,
)
from hf_ctxmodels.models.elmo.tokenization_elmo import CtxElmoTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Traits


def _size(cell: int, projection: int, highways: int) -> dict[str, Any]:
    """Return the fields of a size; `hidden_size` is the total width of the projections of both directions."""
    return {"hidden_size": 2 * projection, "cell_size": cell, "num_highway_layers": highways}


# small, medium, base (the original): the released models; tiny: for a CPU
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {**_size(256, 128, 1), "filters": [[1, 16], [2, 32], [3, 64], [4, 64], [5, 80]]},
    "small": _size(1024, 128, 1),
    "medium": _size(2048, 256, 1),
    "base": _size(4096, 512, 2),
}

SPEC = FamilySpec(
    name="elmo",
    paper="Peters et al. 2018, Deep Contextualized Word Representations (arXiv 1802.05365)",
    config=CtxElmoConfig,
    tokenizer=CtxElmoTokenizer,
    models={
        "AutoModel": CtxElmoModel,
        "AutoModelForPreTraining": CtxElmoForPreTraining,
        "AutoModelForSequenceClassification": CtxElmoForSequenceClassification,
        "AutoModelForTokenClassification": CtxElmoForTokenClassification,
        "AutoModelForQuestionAnswering": CtxElmoForQuestionAnswering,
    },
    objective_classes={"bilm": "BidirectionalLM"},
    sizes=SIZES,
    published={
        size: PublishedCount(SIZES[size], {"AutoModel": count})
        for size, count in {"small": 13_593_312, "medium": 28_027_744, "base": 93_600_864}.items()
    },
    traits=Traits(
        is_recurrent=True,
        short_training=ShortTraining(
            learning_rate=1e-2, vocab_size=100, config_options=("filters=[[1,16],[2,16],[3,32]]",)
        ),
    ),
)

__all__ = [
    "CtxElmoConfig",
    "CtxElmoForPreTraining",
    "CtxElmoForQuestionAnswering",
    "CtxElmoForSequenceClassification",
    "CtxElmoForTokenClassification",
    "CtxElmoModel",
    "CtxElmoTokenizer",
]
