"""Fine-tuning: the run, and methods against forgetting for the Accelerate loop and for Trainer."""

from hf_ctxmodels.downstream.finetuning.anchoring import ElasticWeightConsolidation, L2ToStart, without_decay
from hf_ctxmodels.downstream.finetuning.mixout import Mixout
from hf_ctxmodels.downstream.finetuning.reinitializing import reinitialize_layers, reset_head
from hf_ctxmodels.downstream.finetuning.thawing import ChainThaw, ThreeStages
from hf_ctxmodels.training.method import FinetuningMethod, MethodCallback
from hf_ctxmodels.training.optim.freezing import freeze_encoder
from hf_ctxmodels.training.optim.gradual_unfreezing import GradualUnfreezing, GradualUnfreezingCallback

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
