"""BART (Lewis et al. 2020): an encoder-decoder pretrained to restore corrupted text."""

from hf_ctxmodels.models.bart.configuration_bart import CtxBartConfig
from hf_ctxmodels.models.bart.conversion_bart import BART_CONVERSION
from hf_ctxmodels.models.bart.modeling_bart import (
    CtxBartForConditionalGeneration,
    CtxBartForQuestionAnswering,
    CtxBartForSequenceClassification,
    CtxBartModel,
)
from hf_ctxmodels.models.bart.tokenization_bart import CtxBartTokenizer
from hf_ctxmodels.spec import SMALL_SEQ2SEQ_SIZES, FamilySpec, PublishedCount, ShortTraining, Traits, seq2seq_size

# base, large: Lewis et al. 2020, sections 4 and 5
SIZES = SMALL_SEQ2SEQ_SIZES | {"base": seq2seq_size(768, 6, 12), "large": seq2seq_size(1024, 12, 16)}

SPEC = FamilySpec(
    name="bart",
    paper="Lewis et al. 2020, BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation, "
    "Translation, and Comprehension (arXiv 1910.13461)",
    config=CtxBartConfig,
    tokenizer=CtxBartTokenizer,
    models={
        "AutoModel": CtxBartModel,
        "AutoModelForPreTraining": CtxBartForConditionalGeneration,
        "AutoModelForSeq2SeqLM": CtxBartForConditionalGeneration,
        "AutoModelForSequenceClassification": CtxBartForSequenceClassification,
        "AutoModelForQuestionAnswering": CtxBartForQuestionAnswering,
    },
    objective_classes={"denoising": "Denoising"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23
    published={
        size: PublishedCount(SIZES[size], dict.fromkeys(("AutoModel", "AutoModelForSeq2SeqLM"), count))
        for size, count in {"base": 139_420_416, "large": 406_291_456}.items()
    },
    conversion=BART_CONVERSION,
    parent="roberta",
    traits=Traits(
        tiny={
            "decoder_layers": 3,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 40,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        short_training=ShortTraining(steps=60, config_options=("decoder_layers=1", "decoder_ffn_dim=128")),
    ),
)

__all__ = [
    "CtxBartConfig",
    "CtxBartForConditionalGeneration",
    "CtxBartForQuestionAnswering",
    "CtxBartForSequenceClassification",
    "CtxBartModel",
    "CtxBartTokenizer",
]
