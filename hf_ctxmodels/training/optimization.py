"""Optimizer and learning-rate schedule."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from hf_ctxmodels.training.arguments import LoopArguments


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: matrices with weight decay, biases and normalisation weights without.

    Everything with fewer than two dimensions is a bias or a normalisation weight (BERT, appendix A.2, decays neither).
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim >= 2]
    spared = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, arguments: LoopArguments) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), in its fused form: one kernel for all parameters, on CPU as on CUDA."""
    return torch.optim.AdamW(
        parameter_groups(model, arguments.weight_decay),
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=True,
    )


def make_scheduler(optimizer: torch.optim.Optimizer, arguments: LoopArguments, total_steps: int) -> LRScheduler:
    """Linear warm-up, then linear or cosine decay to 0 at `total_steps`, or a constant rate."""
    name = "constant_with_warmup" if arguments.lr_scheduler == "constant" else arguments.lr_scheduler
    return get_scheduler(
        name, optimizer, num_warmup_steps=arguments.warmup(total_steps), num_training_steps=total_steps
    )
