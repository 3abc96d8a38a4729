"""Fine-tuning: the run, and methods against forgetting for the Accelerate loop and for Trainer."""

from hf_ctxmodels.downstream.finetuning.anchoring import ElasticWeightConsolidation, L2SPPenalty, without_decay
from hf_ctxmodels.downstream.finetuning.mixout import Mixout
from hf_ctxmodels.downstream.finetuning.reinitialization import reinitialize_head, reinitialize_layers
from hf_ctxmodels.downstream.finetuning.unfreezing import ChainThaw, ThreeStageUnfreezing
from hf_ctxmodels.training.callbacks import FinetuningCallback, MethodCallback
from hf_ctxmodels.training.optim.freezing import freeze_encoder
from hf_ctxmodels.training.optim.gradual_unfreezing import GradualUnfreezing, GradualUnfreezingCallback

__all__ = [
    "ChainThaw",
    "ElasticWeightConsolidation",
    "FinetuningCallback",
    "GradualUnfreezing",
    "GradualUnfreezingCallback",
    "L2SPPenalty",
    "MethodCallback",
    "Mixout",
    "ThreeStageUnfreezing",
    "freeze_encoder",
    "reinitialize_head",
    "reinitialize_layers",
    "without_decay",
]
