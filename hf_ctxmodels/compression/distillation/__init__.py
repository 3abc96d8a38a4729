"""Distillation: a small student learns from what a large teacher predicts and computes.

`CtxDistilled` is a student with such a loss; `terms` and `state_terms` say what may be learned, `layer_maps` which
layer learns from which. `Lesson` puts it in the place of a model that is pretrained or fine-tuned.
"""

from hf_ctxmodels.compression.distillation.collator import DistillationCollator
from hf_ctxmodels.compression.distillation.lesson import Lesson
from hf_ctxmodels.compression.distillation.model import TERMS, CtxDistilled
from hf_ctxmodels.compression.distillation.opening import Teacher, copy_layers, parse_terms
from hf_ctxmodels.compression.distillation.state_terms import Attention, Cosine, Embeddings, Hidden, Patient, Sentences
from hf_ctxmodels.compression.distillation.terms import HardTargets, LogitsError, SoftClasses, SoftTargets, Term

__all__ = [
    "TERMS",
    "Attention",
    "Cosine",
    "CtxDistilled",
    "DistillationCollator",
    "Embeddings",
    "HardTargets",
    "Hidden",
    "Lesson",
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
