"""Checks of third-party tools, one row each in the table of docs/ecosystem.md."""

from .context import Check, CheckContext
from .evaluation import bert_score, cross_encoder, lm_eval, minicons, sentence_transformers, sparse_encoder
from .explanation import bertviz, captum, shap
from .export import compiled, ctranslate2, exported, onnx
from .loading import pipelines, trust_remote_code
from .quantization import bitsandbytes, quantize_dynamic, torchao
from .training import ddp, fsdp2, lightning, peft, setfit, trainer, trl

__all__ = ["CHECKS", "Check", "CheckContext"]

CHECKS: tuple[Check, ...] = (
    *(trainer, lightning, ddp, fsdp2, peft, trl),
    *(sentence_transformers, cross_encoder, sparse_encoder, setfit),
    *(lm_eval, minicons, bert_score),
    *(compiled, exported, onnx, ctranslate2),
    *(quantize_dynamic, torchao, bitsandbytes),
    *(captum, bertviz, shap),
    *(pipelines, trust_remote_code),
)
