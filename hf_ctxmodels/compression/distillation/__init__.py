"""Distillation: a small student learns from the predictions and states of a large teacher.

`CtxDistillationModel` is a student with distillation losses, which `prediction_losses` and `state_losses` define;
`layer_maps` pairs the layers of both models. `DistillationSetup` replaces a model that is pretrained or fine-tuned.
"""

from hf_ctxmodels.compression.distillation.collator import DistillationCollator
from hf_ctxmodels.compression.distillation.distillation_setup import DistillationSetup
from hf_ctxmodels.compression.distillation.model import DISTILLATION_LOSSES, CtxDistillationModel, DistillationOutput
from hf_ctxmodels.compression.distillation.prediction_losses import (
    DistillationLoss,
    HardTargetLoss,
    LogitLoss,
    SoftClassLoss,
    SoftTargetLoss,
)
from hf_ctxmodels.compression.distillation.state_losses import (
    AttentionScoreLoss,
    CosineLoss,
    EmbeddingLoss,
    HiddenStateLoss,
    PatientLoss,
    SentenceVectorLoss,
)
from hf_ctxmodels.compression.distillation.teacher import Teacher, copy_layers, parse_losses

__all__ = [
    "DISTILLATION_LOSSES",
    "AttentionScoreLoss",
    "CosineLoss",
    "CtxDistillationModel",
    "DistillationCollator",
    "DistillationLoss",
    "DistillationOutput",
    "DistillationSetup",
    "EmbeddingLoss",
    "HardTargetLoss",
    "HiddenStateLoss",
    "LogitLoss",
    "PatientLoss",
    "SentenceVectorLoss",
    "SoftClassLoss",
    "SoftTargetLoss",
    "Teacher",
    "copy_layers",
    "parse_losses",
]
