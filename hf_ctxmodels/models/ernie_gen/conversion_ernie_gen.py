"""Weight conversion of ERNIE-GEN: BERT's, with four segment embeddings instead of two."""

from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION, BERT_EXPORT, segment_conversion
from hf_ctxmodels.models.ernie_gen.configuration_ernie_gen import CtxErnieGenConfig

_SEGMENTS = segment_conversion(CtxErnieGenConfig.copied_segments)
ERNIE_GEN_EXPORT: list[WeightTransform] = [*BERT_EXPORT, _SEGMENTS]
ERNIE_GEN_CONVERSION: list[WeightTransform] = [*BERT_CONVERSION, _SEGMENTS]
