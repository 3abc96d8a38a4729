"""Fine-tuning: the run, and fine-tuning methods for the training loop and for Trainer."""

from hf_ctxmodels.downstream.finetuning.ewc import ElasticWeightConsolidation
from hf_ctxmodels.downstream.finetuning.l2_sp import L2SPPenalty, disable_weight_decay
from hf_ctxmodels.downstream.finetuning.mixout import Mixout
from hf_ctxmodels.downstream.finetuning.reinitialization import reinitialize_head, reinitialize_layers
from hf_ctxmodels.downstream.finetuning.task_loss import TaskLoss
from hf_ctxmodels.downstream.finetuning.unfreezing import ChainThaw, ThreeStageUnfreezing
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.freezing import GradualUnfreezing, freeze_encoder
