"""Encoder-decoder initialized with two language models (Ramachandran et al. 2016)."""

from hf_ctxmodels.models.lmseq2seq.configuration_lmseq2seq import CtxLmSeq2SeqConfig
from hf_ctxmodels.models.lmseq2seq.modeling_lmseq2seq import (
    CtxLmSeq2SeqForConditionalGeneration,
    CtxLmSeq2SeqForPreTraining,
    CtxLmSeq2SeqModel,
)
from hf_ctxmodels.models.lmseq2seq.tokenization_lmseq2seq import CtxLmSeq2SeqTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Target, Traits

# No count is published; layers of 4 * 1024 * (512 + 1024 + 2) and 4 * 1024 * (1024 + 1024 + 2), in the
# decoder too, a query of 1024 * 1025, a combination of 3072 * 1024 + 1024, and embeddings of each language.
_LANGUAGE_MODEL = 6_299_648 + 2 * 8_396_800 + 30_000 * 512

SPEC = FamilySpec(
    name="lmseq2seq",
    paper="Ramachandran et al. 2016, Unsupervised Pretraining for Sequence to Sequence Learning (arXiv 1611.02683)",
    config=CtxLmSeq2SeqConfig,
    tokenizer=CtxLmSeq2SeqTokenizer,
    models={
        "AutoModel": CtxLmSeq2SeqModel,
        "AutoModelForPreTraining": CtxLmSeq2SeqForPreTraining,
        "AutoModelForSeq2SeqLM": CtxLmSeq2SeqForConditionalGeneration,
    },
    objective_classes={"translation+lm": "TranslationWithLanguageModels", "translation": "Translation"},
    # widths as in the family seqae, which has the language models; layers as in the paper
    sizes={
        "tiny": {"embedding_size": 128, "hidden_size": 256, "num_hidden_layers": 2},
        "small": {"embedding_size": 256, "hidden_size": 512, "num_hidden_layers": 3},
        "base": {"embedding_size": 512, "hidden_size": 1024, "num_hidden_layers": 3},
    },
    published={
        "30,000 words": PublishedCount(
            {},
            {
                "AutoModel": _LANGUAGE_MODEL,
                "AutoModelForSeq2SeqLM": 2 * _LANGUAGE_MODEL + (1_049_600 + 3_146_752 + 30_000 * 1025),
            },
        )
    },
    traits=Traits(
        is_recurrent=True,
        short_training=ShortTraining(steps=60),
        targets={"source_labels": Target.NEXT_WORD, "target_labels": Target.DECODER_TOKEN},
    ),
)

__all__ = [
    "CtxLmSeq2SeqConfig",
    "CtxLmSeq2SeqForConditionalGeneration",
    "CtxLmSeq2SeqForPreTraining",
    "CtxLmSeq2SeqModel",
    "CtxLmSeq2SeqTokenizer",
]
