"""ERNIE-GEN (Xiao et al. 2020): BERT's network, pretrained and fine-tuned with infilling generation."""

from hf_ctxmodels.models import bert
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION, segment_conversion
from hf_ctxmodels.models.ernie_gen.configuration_ernie_gen import CtxErnieGenConfig
from hf_ctxmodels.models.ernie_gen.modeling_ernie_gen import (
    CtxErnieGenForConditionalGeneration,
    CtxErnieGenForMaskedLM,
    CtxErnieGenModel,
)
from hf_ctxmodels.models.ernie_gen.tokenization_ernie_gen import CtxErnieGenTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, Seq2SeqFinetuning, ShortTraining, Traits

SPEC = FamilySpec(
    name="ernie_gen",
    paper="Xiao et al. 2020, ERNIE-GEN: An Enhanced Multi-Flow Pre-training and Fine-tuning Framework for Natural "
    "Language Generation (arXiv 2001.11314)",
    config=CtxErnieGenConfig,
    tokenizer=CtxErnieGenTokenizer,
    models={
        "AutoModel": CtxErnieGenModel,
        "AutoModelForPreTraining": CtxErnieGenForConditionalGeneration,
        "AutoModelForSeq2SeqLM": CtxErnieGenForConditionalGeneration,
        "AutoModelForMaskedLM": CtxErnieGenForMaskedLM,
    },
    objective_classes={"infilling": "Infilling", "noisy-seq2seq": "NoisySequenceToSequence", "mlm": "MaskedLM"},
    seq2seq_finetuning=Seq2SeqFinetuning("NoisySequenceToSequence", label_smoothing=0.1),
    sizes=bert.SIZES,
    # BERT's parameter counts with the uncased vocabulary and two additional segments; the encoder has its pooler
    published={
        size: PublishedCount(
            bert.SIZES[size], {"AutoModel": encoder, "AutoModelForMaskedLM": head, "AutoModelForSeq2SeqLM": head}
        )
        for size, encoder, head in (("base", 109_483_776, 109_515_834), ("large", 335_143_936, 335_176_506))
    },
    conversion=[*BERT_CONVERSION, segment_conversion(CtxErnieGenConfig.copied_segments)],
    parent="bert",
    traits=Traits(short_training=ShortTraining(steps=60), tiny={"query_token_id": 3, "decoder_start_token_id": 1}),
)

__all__ = [
    "CtxErnieGenConfig",
    "CtxErnieGenForConditionalGeneration",
    "CtxErnieGenForMaskedLM",
    "CtxErnieGenModel",
    "CtxErnieGenTokenizer",
]
