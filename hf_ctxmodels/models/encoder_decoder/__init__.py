"""Encoder-decoders from two checkpoints (Rothe et al. 2020).

They are not a family: the encoder and the decoder are models of any families. `registry` adds them to the families.
"""

from hf_ctxmodels.models.encoder_decoder.configuration_encoder_decoder import CtxEncoderDecoderConfig
from hf_ctxmodels.models.encoder_decoder.modeling_encoder_decoder import (
    CtxEncoderDecoderForConditionalGeneration,
    CtxEncoderDecoderModel,
)

MODELS = {
    "AutoModel": CtxEncoderDecoderModel,
    "AutoModelForSeq2SeqLM": CtxEncoderDecoderForConditionalGeneration,
}

__all__ = ["CtxEncoderDecoderConfig", "CtxEncoderDecoderForConditionalGeneration", "CtxEncoderDecoderModel"]
