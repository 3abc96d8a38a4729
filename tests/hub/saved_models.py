"""Saved models, with the files that the commands write."""

from pathlib import Path

import torch
from zoo import pretraining_auto_class

from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import record_tokenizer_digest
from hf_ctxmodels.training.summary import TrainingSummary

TEXTS = ["the cat sat on the mat", "a dog ran after the cat", "cats and dogs sat and ran on a mat"] * 3


def save_model(family: FamilySpec, directory: Path) -> Path:
    """Save a tiny model, its tokenizer and a training summary, with the files that the commands write."""
    tokenizer = family.tokenizer.train(TEXTS, vocab_size=300)
    torch.manual_seed(0)
    config = family.config(vocab_size=len(tokenizer), **family.sizes["tiny"])
    model = family.models[pretraining_auto_class(family)](config)
    record_tokenizer_digest(model.config, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    TrainingSummary(
        task="pretraining" if family.objectives else "sequence-classification",
        model_class=type(model).__name__,
        model_type=config.model_type,
        dataset="demo",
        seed=13,
        parameters=model.num_parameters(),
        steps=40,
        global_batch_size=8,
        max_length=32,
        tokens=4321,
        objective=next(iter(family.objectives), None),
        objective_options={"mlm_probability": 0.15},
        rates={"masked": 0.1498},
        metrics={"eval_loss": 2.25, "baseline_loss": 3.5},
        hyperparameters={"learning_rate": 1e-4},
        curve=[{"step": step, "loss": 5.0 - step / 20} for step in range(5, 41, 5)],
    ).save(directory)
    return directory
