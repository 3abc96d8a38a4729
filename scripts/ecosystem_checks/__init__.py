"""The rows of the table of tools, a module for each kind."""

from .evaluating import lm_eval, sentence_transformers
from .explaining import bertviz, captum
from .exporting import compiled, exported, onnx
from .opening import pipelines, trust_remote_code
from .quantizing import bitsandbytes, quantize_dynamic, torchao
from .training import ddp, fsdp2, peft, trainer
from .workplace import Check, Workplace

__all__ = ["CHECKS", "Check", "Workplace"]

CHECKS: tuple[Check, ...] = (
    *(trainer, ddp, fsdp2, peft),
    *(sentence_transformers, lm_eval),
    *(compiled, exported, onnx),
    *(quantize_dynamic, torchao, bitsandbytes),
    *(captum, bertviz),
    *(pipelines, trust_remote_code),
)
