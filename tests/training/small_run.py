"""A run of the loop on the small training problem, in this process."""

import json
from pathlib import Path

import torch

from hf_ctxmodels import CtxBertConfig, CtxBertForPreTraining
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.loop import make_accelerator, train


def new_model(workspace, config: str = "exact.json") -> CtxBertForPreTraining:
    torch.manual_seed(0)
    return CtxBertForPreTraining(CtxBertConfig(**json.loads((workspace.folder / config).read_text())))


def arguments(output_dir: Path, **more: object) -> LoopArguments:
    fixed = {
        "max_steps": 3,
        "per_device_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 0,
        "dataloader_workers": 0,
        "lr_scheduler": "constant",
    }
    return LoopArguments(output_dir=str(output_dir), **{**fixed, **more})


def run(model, problem, options: LoopArguments, collate=None, **more):
    tokenizer, objective, examples = problem
    accelerator = make_accelerator(options)
    return train(model, examples, collate or objective.collate, options, accelerator, tokenizer=tokenizer, **more)
