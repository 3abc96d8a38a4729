"""ERNIE-GEN (Xiao et al. 2020, arXiv 2001.11314): BERT's network, pretrained and fine-tuned by infilling
generation, in which a query token at the position of each target token predicts it."""

from pathlib import Path
from typing import Any, ClassVar

from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.bert.conversion_bert import BERT_EXPORT, exported_bert_fields, segment_conversion
from hf_ctxmodels.models.ernie_gen.configuration_ernie_gen import TARGET_SEGMENT, CtxErnieGenConfig


class CtxErnieGenPreTrainedModel(CtxPreTrainedModel):
    """Base class of the ERNIE-GEN models, with BERT's weight names."""

    config: CtxErnieGenConfig
    base_model_prefix = "bert"
    reference_model_type: ClassVar[str | None] = "bert"
    export_conversion = [*BERT_EXPORT, segment_conversion(CtxErnieGenConfig.copied_segments)]
    _keys_to_ignore_on_load_unexpected = bert.CtxBertPreTrainedModel._keys_to_ignore_on_load_unexpected

    def reference_config(self) -> dict[str, Any]:
        """The configuration of the BERT class, see `exported_bert_fields`."""
        return super().reference_config() | exported_bert_fields(self)


class CtxErnieGenModel(TransformerEncoder, CtxErnieGenPreTrainedModel):
    """The ERNIE-GEN encoder without a head."""


class CtxErnieGenHeadModel(heads.HeadModel, CtxErnieGenPreTrainedModel):
    """Base class of the ERNIE-GEN models with a head."""

    encoder_class = CtxErnieGenModel


class CtxErnieGenForMaskedLM(heads.ForMaskedLM, CtxErnieGenHeadModel):
    """ERNIE-GEN with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = bert.TIED_WEIGHTS


class CtxErnieGenForConditionalGeneration(QueryForConditionalGeneration, CtxErnieGenHeadModel, GenerationMixin):
    """ERNIE-GEN that generates a target from a source (sections 3.1 and 3.2).

    A target begins with `[CLS]`, which is not predicted. With `span_ids` it is also predicted span by span.
    """

    reference_model_type: ClassVar[str | None] = None
    target_segment = TARGET_SEGMENT
    _tied_weights_keys = bert.TIED_WEIGHTS

    def export_reference(self, save_directory: str | Path) -> None:
        """Write the weights and config.json of a `transformers.BertForMaskedLM`; see `bert.export_masked_lm`."""
        bert.export_masked_lm(self, CtxErnieGenForMaskedLM, save_directory)
