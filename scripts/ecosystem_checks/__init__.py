"""Checks of third-party tools, one row each in the table of docs/ecosystem.md."""

from .context import Check, CheckContext
from .evaluation import lm_eval, sentence_transformers
from .explanation import bertviz, captum
from .export import compiled, exported, onnx
from .loading import pipelines, trust_remote_code
from .quantization import bitsandbytes, quantize_dynamic, torchao
from .training import ddp, fsdp2, peft, trainer

__all__ = ["CHECKS", "Check", "CheckContext"]

CHECKS: tuple[Check, ...] = (
    *(trainer, ddp, fsdp2, peft),
    *(sentence_transformers, lm_eval),
    *(compiled, exported, onnx),
    *(quantize_dynamic, torchao, bitsandbytes),
    *(captum, bertviz),
    *(pipelines, trust_remote_code),
)
