"""T5 (Raffel et al. 2020): an encoder-decoder pretrained by span corruption, in its versions 1.0 and 1.1."""

from typing import Any

from hf_ctxmodels.models.t5.configuration_t5 import CtxT5Config
from hf_ctxmodels.models.t5.conversion_t5 import T5_CONVERSION
from hf_ctxmodels.models.t5.modeling_t5 import (
    CtxT5EncoderModel,
    CtxT5ForConditionalGeneration,
    CtxT5ForQuestionAnswering,
    CtxT5ForSequenceClassification,
    CtxT5ForTokenClassification,
    CtxT5Model,
)
from hf_ctxmodels.models.t5.tokenization_t5 import CtxT5Tokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, TrainingDefaults, Traits


def t5_size(width: int, layers: int, heads: int, inner: int, head_dim: int = 64) -> dict[str, Any]:
    """Configuration fields of a T5 of version 1.0."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "decoder_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "head_dim": head_dim,
    }


def t5_v1_1_size(width: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """Configuration fields of a T5 of version 1.1."""
    return t5_size(width, layers, heads, inner) | {"hidden_act": "gated-gelu", "tie_word_embeddings": False}


# T5's weights have very different sizes, for which plain Adam has no common learning rate
_OPTIMIZER = "adamw:scale_by_size=true"

# small to 11b: Raffel et al. 2020, section 3.7, table 14; v1_1: the gin files t5.1.1.* of the release
SIZES: dict[str, dict[str, Any]] = {
    "tiny": t5_size(128, 2, 2, 512),
    "mini": t5_size(256, 4, 4, 1024),
    "small": t5_size(512, 6, 8, 2048),
    "base": t5_size(768, 12, 12, 3072),
    "large": t5_size(1024, 24, 16, 4096),
    "3b": t5_size(1024, 24, 32, 16384, head_dim=128),
    "11b": t5_size(1024, 24, 128, 65536, head_dim=128),
    "v1_1_tiny": t5_v1_1_size(128, 2, 2, 256),
    "v1_1_mini": t5_v1_1_size(256, 4, 4, 704),
    "v1_1_small": t5_v1_1_size(512, 8, 6, 1024),
    "v1_1_base": t5_v1_1_size(768, 12, 12, 2048),
    "v1_1_large": t5_v1_1_size(1024, 24, 16, 2816),
    "v1_1_xl": t5_v1_1_size(2048, 24, 32, 5120),
    "v1_1_xxl": t5_v1_1_size(4096, 24, 64, 10240),
}

SPEC = FamilySpec(
    name="t5",
    paper="Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer "
    "(arXiv 1910.10683)",
    config=CtxT5Config,
    tokenizer=CtxT5Tokenizer,
    models={
        "AutoModel": CtxT5Model,
        "AutoModelForTextEncoding": CtxT5EncoderModel,
        "AutoModelForPreTraining": CtxT5ForConditionalGeneration,
        "AutoModelForSeq2SeqLM": CtxT5ForConditionalGeneration,
        "AutoModelForSequenceClassification": CtxT5ForSequenceClassification,
        "AutoModelForTokenClassification": CtxT5ForTokenClassification,
        "AutoModelForQuestionAnswering": CtxT5ForQuestionAnswering,
    },
    objective_classes={"span-corruption": "SpanCorruption"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23 without and with the output layer, which version 1.0 ties;
    # for version 1.1 its 32,128 rows are added, since these classes cannot untie it
    published={
        size: PublishedCount(SIZES[size], {"AutoModel": base_count, "AutoModelForSeq2SeqLM": head_count})
        for size, (base_count, head_count) in {
            "small": (60_506_624, 60_506_624),
            "base": (222_903_552, 222_903_552),
            "large": (737_668_096, 737_668_096),
            "3b": (2_851_598_336, 2_851_598_336),
            "11b": (11_307_321_344, 11_307_321_344),
            "v1_1_small": (60_511_616, 76_961_152),
            "v1_1_base": (222_903_552, 247_577_856),
            "v1_1_large": (750_251_008, 783_150_080),
            "v1_1_xl": (2_783_959_040, 2_849_757_184),
            "v1_1_xxl": (11_003_736_064, 11_135_332_352),
        }.items()
    },
    conversion=T5_CONVERSION,
    training=TrainingDefaults(optimizer=_OPTIMIZER, finetuning_optimizer=_OPTIMIZER),
    traits=Traits(tiny={"head_dim": 6, "hidden_act": "gated-gelu"}),
)

__all__ = [
    "CtxT5Config",
    "CtxT5EncoderModel",
    "CtxT5ForConditionalGeneration",
    "CtxT5ForQuestionAnswering",
    "CtxT5ForSequenceClassification",
    "CtxT5ForTokenClassification",
    "CtxT5Model",
    "CtxT5Tokenizer",
]
