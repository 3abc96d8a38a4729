"""Fine-tuning: the run, and fine-tuning methods for the training loop and for Trainer."""

from hf_ctxmodels.downstream.finetuning.anchoring import ElasticWeightConsolidation, L2SPPenalty, without_decay
from hf_ctxmodels.downstream.finetuning.mixout import Mixout
from hf_ctxmodels.downstream.finetuning.reinitialization import reinitialize_head, reinitialize_layers
from hf_ctxmodels.downstream.finetuning.task_loss import TaskLoss
from hf_ctxmodels.downstream.finetuning.unfreezing import ChainThaw, ThreeStageUnfreezing
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.freezing import GradualUnfreezing, freeze_encoder

__all__ = [
    "ChainThaw",
    "ElasticWeightConsolidation",
    "FinetuningCallback",
    "GradualUnfreezing",
    "L2SPPenalty",
    "Mixout",
    "TaskLoss",
    "ThreeStageUnfreezing",
    "freeze_encoder",
    "reinitialize_head",
    "reinitialize_layers",
    "without_decay",
]
