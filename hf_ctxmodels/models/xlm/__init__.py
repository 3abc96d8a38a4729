"""XLM (Lample & Conneau 2019): a Transformer for several languages, pretrained on text and on translations."""

from hf_ctxmodels.models.xlm.configuration_xlm import CtxXLMConfig
from hf_ctxmodels.models.xlm.modeling_xlm import (
    XLM_CONVERSION,
    CtxXLMForBeamSearchQuestionAnswering,
    CtxXLMForCausalLM,
    CtxXLMForMaskedLM,
    CtxXLMForMultipleChoice,
    CtxXLMForQuestionAnswering,
    CtxXLMForSequenceClassification,
    CtxXLMForTokenClassification,
    CtxXLMModel,
)
from hf_ctxmodels.models.xlm.tokenization_xlm import CtxXLMTokenizer
from hf_ctxmodels.spec import SMALL_SIZES, FamilySpec, PublishedCount, ShortTraining, Traits, encoder_size

# base: XNLI-15 (section 5.1); translation: the models of two languages; large: the models of 17 and 100 languages;
# english: xlm-mlm-en-2048
SIZES = {
    name: {**size, "initializer_range": None}  # hidden_size ** -0.5, of the embeddings only
    for name, size in {
        **SMALL_SIZES,
        "base": encoder_size(1024, 12, 8),
        "translation": encoder_size(1024, 6, 8),
        "large": encoder_size(1280, 16, 16),
        "english": encoder_size(2048, 12, 16),
    }.items()
}

SPEC = FamilySpec(
    name="xlm",
    paper="Lample & Conneau 2019, Cross-lingual Language Model Pretraining (arXiv 1901.07291)",
    config=CtxXLMConfig,
    tokenizer=CtxXLMTokenizer,
    models={
        "AutoModel": CtxXLMModel,
        "AutoModelForPreTraining": CtxXLMForMaskedLM,
        "AutoModelForMaskedLM": CtxXLMForMaskedLM,
        "AutoModelForCausalLM": CtxXLMForCausalLM,
        "AutoModelForSequenceClassification": CtxXLMForSequenceClassification,
        "AutoModelForTokenClassification": CtxXLMForTokenClassification,
        "AutoModelForQuestionAnswering": CtxXLMForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxXLMForMultipleChoice,
    },
    alternative_heads={"AutoModelForQuestionAnswering": CtxXLMForBeamSearchQuestionAnswering},
    objective_classes={
        "mlm": "StreamMaskedLM",
        "mlm+tlm": "CrossLingualLM",
        "tlm": "TranslationLM",
        "clm": "StreamCausalLM",
    },
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23
    published={
        "base": PublishedCount(
            {**SIZES["base"], "vocab_size": 95000, "n_langs": 15},
            {"AutoModel": 248_976_384, "AutoModelForMaskedLM": 249_071_384},
        ),
        "large": PublishedCount(
            {**SIZES["large"], "vocab_size": 200_000, "n_langs": 17, "use_lang_emb": False},
            {"AutoModelForMaskedLM": 571_696_960},
        ),
        "english": PublishedCount(
            {**SIZES["english"], "vocab_size": 30145}, {"AutoModel": 667_088_896, "AutoModelForMaskedLM": 667_119_041}
        ),
    },
    conversion=XLM_CONVERSION,
    traits=Traits(
        short_training=ShortTraining(steps=160),
        tiny={"intermediate_size": None},
        infers_padding=True,
        has_different_initialization=True,
    ),
)

__all__ = [
    "CtxXLMConfig",
    "CtxXLMForBeamSearchQuestionAnswering",
    "CtxXLMForCausalLM",
    "CtxXLMForMaskedLM",
    "CtxXLMForMultipleChoice",
    "CtxXLMForQuestionAnswering",
    "CtxXLMForSequenceClassification",
    "CtxXLMForTokenClassification",
    "CtxXLMModel",
    "CtxXLMTokenizer",
]
