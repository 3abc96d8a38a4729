"""Distillation: a small student learns from what a large teacher predicts and computes.

`CtxDistillationModel` is a student with such a loss; `terms` and `state_terms` say what may be learned, `layer_maps` which
layer learns from which. `DistillationSetup` puts it in the place of a model that is pretrained or fine-tuned.
"""

from hf_ctxmodels.compression.distillation.collator import DistillationCollator
from hf_ctxmodels.compression.distillation.distillation_setup import DistillationSetup
from hf_ctxmodels.compression.distillation.model import TERMS, CtxDistillationModel
from hf_ctxmodels.compression.distillation.prediction_losses import (
    HardTargets,
    LogitsError,
    SoftClasses,
    SoftTargets,
    Term,
)
from hf_ctxmodels.compression.distillation.state_losses import Attention, Cosine, Embeddings, Hidden, Patient, Sentences
from hf_ctxmodels.compression.distillation.teacher import Teacher, copy_layers, parse_terms

__all__ = [
    "TERMS",
    "Attention",
    "Cosine",
    "CtxDistillationModel",
    "DistillationCollator",
    "DistillationSetup",
    "Embeddings",
    "HardTargets",
    "Hidden",
    "LogitsError",
    "Patient",
    "Sentences",
    "SoftClasses",
    "SoftTargets",
    "Teacher",
    "Term",
    "copy_layers",
    "parse_terms",
]
