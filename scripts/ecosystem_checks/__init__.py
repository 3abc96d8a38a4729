"""Checks of third-party tools, one row each in the table of docs/ecosystem.md."""

from .context import Check, CheckContext
from .evaluation import cross_encoder, lm_eval, sentence_transformers, sparse_encoder
from .explanation import bertviz, captum, shap
from .export import compiled, ctranslate2, exported, onnx
from .loading import pipelines, trust_remote_code
from .quantization import bitsandbytes, quantize_dynamic, torchao
from .training import ddp, fsdp2, peft, setfit, trainer, trl

__all__ = ["CHECKS", "Check", "CheckContext"]

CHECKS: tuple[Check, ...] = (
    *(trainer, ddp, fsdp2, peft, trl),
    *(sentence_transformers, cross_encoder, sparse_encoder, setfit, lm_eval),
    *(compiled, exported, onnx, ctranslate2),
    *(quantize_dynamic, torchao, bitsandbytes),
    *(captum, bertviz, shap),
    *(pipelines, trust_remote_code),
)
