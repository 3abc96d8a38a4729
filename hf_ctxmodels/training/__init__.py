"""Training: an Accelerate loop for pretraining and fine-tuning, and ways to fine-tune for it and for Trainer."""

from hf_ctxmodels.training.finetuning.anchoring import ElasticWeightConsolidation, L2ToStart, without_decay
from hf_ctxmodels.training.finetuning.method import FinetuningMethod, MethodCallback
from hf_ctxmodels.training.finetuning.mixout import Mixout
from hf_ctxmodels.training.finetuning.reinitializing import reinitialize_layers, reset_head
from hf_ctxmodels.training.finetuning.thawing import (
    ChainThaw,
    GradualUnfreezing,
    GradualUnfreezingCallback,
    ThreeStages,
)
from hf_ctxmodels.training.optim.freezing import freeze_encoder

__all__ = [
    "ChainThaw",
    "ElasticWeightConsolidation",
    "FinetuningMethod",
    "GradualUnfreezing",
    "GradualUnfreezingCallback",
    "L2ToStart",
    "MethodCallback",
    "Mixout",
    "ThreeStages",
    "freeze_encoder",
    "reinitialize_layers",
    "reset_head",
    "without_decay",
]
