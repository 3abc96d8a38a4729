"""Distillation: a small student learns from the predictions and states of a large teacher."""

from hf_ctxmodels.compression.distillation.distillation_setup import (
    DistillationSetup,
    Teacher,
    copy_layers,
    parse_losses,
)
from hf_ctxmodels.compression.distillation.losses import (
    DISTILLATION_LOSSES,
    AttentionScoreLoss,
    CosineLoss,
    DistillationLoss,
    EmbeddingLoss,
    HardTargetLoss,
    HiddenStateLoss,
    LogitLoss,
    MiniLMLoss,
    MiniLMv2Loss,
    PatientLoss,
    SentenceVectorLoss,
    SoftClassLoss,
    SoftTargetLoss,
)
from hf_ctxmodels.compression.distillation.model import CtxDistillationModel, DistillationCollator, DistillationOutput
