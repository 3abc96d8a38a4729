"""GenSen (Subramanian et al. 2018): sentence embeddings from multi-task learning."""

from hf_ctxmodels.models.gensen.configuration_gensen import CtxGenSenConfig
from hf_ctxmodels.models.gensen.modeling_gensen import (
    CtxGenSenForPreTraining,
    CtxGenSenForSequenceClassification,
    CtxGenSenModel,
)
from hf_ctxmodels.models.gensen.tokenization_gensen import CtxGenSenTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Target, Traits

SPEC = FamilySpec(
    name="gensen",
    paper="Subramanian et al. 2018, Learning General Purpose Distributed Sentence Representations via Large "
    "Scale Multi-task Learning (arXiv 1804.00079)",
    config=CtxGenSenConfig,
    tokenizer=CtxGenSenTokenizer,
    models={
        "AutoModel": CtxGenSenModel,
        "AutoModelForPreTraining": CtxGenSenForPreTraining,
        "AutoModelForSequenceClassification": CtxGenSenForSequenceClassification,
    },
    objective_classes={"sentence-tasks": "SentenceTasks"},
    # base: the paper's larger model; the others for a CPU
    sizes={
        "tiny": {"embedding_size": 96, "hidden_size": 192, "classifier_size": 128},
        "small": {"embedding_size": 256, "hidden_size": 1024},
        "base": {},
    },
    # No count is published; a bidirectional GRU, 512 to 1024 in each direction, and 80,000 tokens.
    published={"larger model": PublishedCount({}, {"AutoModel": 80_000 * 512 + 2 * 3 * 1024 * (512 + 1024 + 2)})},
    traits=Traits(
        is_recurrent=True,
        short_training=ShortTraining(steps=60),
        tiny={"decoder_tasks": ["<one>", "next", "previous"], "relations": ["no", "yes"]},
        targets={"relation_labels": Target.PAIR_CLASS},
    ),
)

__all__ = [
    "CtxGenSenConfig",
    "CtxGenSenForPreTraining",
    "CtxGenSenForSequenceClassification",
    "CtxGenSenModel",
    "CtxGenSenTokenizer",
]
