"""Sequence auto-encoder and language model (Dai & Le 2015): an LSTM that encodes a text and generates it again."""

from hf_ctxmodels.models.seqae.configuration_seqae import CtxSeqaeConfig
from hf_ctxmodels.models.seqae.modeling_seqae import (
    CtxSeqaeForCausalLM,
    CtxSeqaeForQuestionAnswering,
    CtxSeqaeForSequenceClassification,
    CtxSeqaeForTokenClassification,
    CtxSeqaeModel,
)
from hf_ctxmodels.models.seqae.tokenization_seqae import CtxSeqaeTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Traits

# No count is published; from section 4: an LSTM of 4 * 1024 * (512 + 1024 + 2), vectors of 512, and a
# softmax of 1024 and a bias for each word.
_HEAD = 6_299_648 + 30_000 * (512 + 1024 + 1)

SPEC = FamilySpec(
    name="seqae",
    paper="Dai & Le 2015, Semi-supervised Sequence Learning (arXiv 1511.01432)",
    config=CtxSeqaeConfig,
    tokenizer=CtxSeqaeTokenizer,
    models={
        "AutoModel": CtxSeqaeModel,
        "AutoModelForPreTraining": CtxSeqaeForCausalLM,
        "AutoModelForCausalLM": CtxSeqaeForCausalLM,
        "AutoModelForSequenceClassification": CtxSeqaeForSequenceClassification,
        "AutoModelForTokenClassification": CtxSeqaeForTokenClassification,
        "AutoModelForQuestionAnswering": CtxSeqaeForQuestionAnswering,
    },
    objective_classes={"sae": "SequenceAutoencoding", "clm": "CausalLM"},
    # base: the paper (section 4); the others have its proportions, for a CPU
    sizes={
        "tiny": {"embedding_size": 128, "hidden_size": 256},
        "small": {"embedding_size": 256, "hidden_size": 512},
        "base": {"embedding_size": 512, "hidden_size": 1024},
    },
    published={
        "section 4": PublishedCount(
            {"vocab_size": 30_000},
            {
                "AutoModel": 6_299_648 + 30_000 * 512,
                "AutoModelForPreTraining": _HEAD,
                "AutoModelForCausalLM": _HEAD,
            },
        )
    },
    traits=Traits(is_recurrent=True, short_training=ShortTraining(steps=60, learning_rate=1e-2)),
)

__all__ = [
    "CtxSeqaeConfig",
    "CtxSeqaeForCausalLM",
    "CtxSeqaeForQuestionAnswering",
    "CtxSeqaeForSequenceClassification",
    "CtxSeqaeForTokenClassification",
    "CtxSeqaeModel",
    "CtxSeqaeTokenizer",
]
