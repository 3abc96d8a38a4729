"""UniLM (Dong et al. 2019): BERT's network, pretrained with four language modeling objectives."""

from hf_ctxmodels.models import bert
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION, segment_conversion
from hf_ctxmodels.models.unilm.configuration_unilm import CtxUniLMConfig
from hf_ctxmodels.models.unilm.modeling_unilm import (
    CtxUniLMForConditionalGeneration,
    CtxUniLMForMaskedLM,
    CtxUniLMForMultipleChoice,
    CtxUniLMForPreTraining,
    CtxUniLMForQuestionAnswering,
    CtxUniLMForSequenceClassification,
    CtxUniLMForTokenClassification,
    CtxUniLMModel,
)
from hf_ctxmodels.models.unilm.tokenization_unilm import CtxUniLMTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, Seq2SeqFinetuning, ShortTraining, Traits

SPEC = FamilySpec(
    name="unilm",
    paper="Dong et al. 2019, Unified Language Model Pre-training for Natural Language Understanding and Generation "
    "(arXiv 1905.03197)",
    config=CtxUniLMConfig,
    tokenizer=CtxUniLMTokenizer,
    models={
        "AutoModel": CtxUniLMModel,
        "AutoModelForPreTraining": CtxUniLMForPreTraining,
        "AutoModelForMaskedLM": CtxUniLMForMaskedLM,
        "AutoModelForSeq2SeqLM": CtxUniLMForConditionalGeneration,
        "AutoModelForSequenceClassification": CtxUniLMForSequenceClassification,
        "AutoModelForTokenClassification": CtxUniLMForTokenClassification,
        "AutoModelForQuestionAnswering": CtxUniLMForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxUniLMForMultipleChoice,
    },
    objective_classes={"unified-lm": "UnifiedLM", "masked-seq2seq": "MaskedSequenceToSequence", "mlm": "MaskedLM"},
    seq2seq_finetuning=Seq2SeqFinetuning("MaskedSequenceToSequence", label_smoothing=0.1),
    sizes=bert.SIZES,
    # BERT's parameter counts with the cased vocabulary and four additional segments; the encoder has its pooler
    published={
        size: PublishedCount(
            bert.SIZES[size],
            dict(
                zip(("AutoModel", "AutoModelForMaskedLM", "AutoModelForPreTraining", "AutoModelForSeq2SeqLM"), counts)
            ),
        )
        for size, counts in {
            "base": (108_313_344, 108_343_876, 108_936_006, 108_343_876),
            "large": (333_583_360, 333_614_404, 334_666_054, 333_614_404),
        }.items()
    },
    conversion=[*BERT_CONVERSION, segment_conversion(CtxUniLMConfig.copied_segments)],
    parent="bert",
    traits=Traits(short_training=ShortTraining(steps=240), tiny={"query_token_id": 3, "decoder_start_token_id": 1}),
)

__all__ = [
    "CtxUniLMConfig",
    "CtxUniLMForConditionalGeneration",
    "CtxUniLMForMaskedLM",
    "CtxUniLMForMultipleChoice",
    "CtxUniLMForPreTraining",
    "CtxUniLMForQuestionAnswering",
    "CtxUniLMForSequenceClassification",
    "CtxUniLMForTokenClassification",
    "CtxUniLMModel",
    "CtxUniLMTokenizer",
]
