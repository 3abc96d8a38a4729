"""Weight conversion of UniLM: BERT's, with six segment embeddings instead of two."""

from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION, BERT_EXPORT, segment_conversion
from hf_ctxmodels.models.unilm.segment_masks import COPIED_SEGMENTS

_SEGMENTS = segment_conversion(COPIED_SEGMENTS)
UNILM_EXPORT: list[WeightTransform] = [*BERT_EXPORT, _SEGMENTS]
UNILM_CONVERSION: list[WeightTransform] = [*BERT_CONVERSION, _SEGMENTS]
