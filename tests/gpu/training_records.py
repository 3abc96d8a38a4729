"""Pretrain families on the simulated device for some steps, and print what makes the host wait in a step as JSON.

Usage: PYTHONPATH=tests:tests/gpu python tests/gpu/training_records.py FAMILY ...

The name "Trainer" instead of a family trains BERT by `transformers.Trainer` with a collator of this package.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import simulated_device as gpu  # before torch
from commands import run_command
from training_runs import make_workspace
from transformers import AutoTokenizer, Trainer, TrainingArguments
from zoo import tiny_config

from hf_ctxmodels import CtxBertForMaskedLM
from hf_ctxmodels.objectives import MaskedLM
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.training_step import TrainingStep

MEASURED_STEP = 3  # earlier steps initialize the optimizer
# including 100 sentinels or 256 bytes
VOCABULARY_SIZES = {"t5": 170, **dict.fromkeys(("gpt2", "gpt3", "grover", "roberta", "bart"), 300)}


class LastStepError(Exception):
    """Ends a run after the measured step."""


def count_waits(family: str, folder: Path) -> Counter[str]:
    """Waits of a training step with its batch."""
    make_workspace(folder, family, vocab_size=VOCABULARY_SIZES.get(family, 80))
    original_call = TrainingStep.__call__
    steps = 0

    def measured_step(self: TrainingStep, batches: Any) -> Any:
        nonlocal steps
        steps += 1
        with gpu.recording() as record:
            result = original_call(self, batches)
        if steps == MEASURED_STEP:
            raise LastStepError(json.dumps(Counter(record.waits)))
        return result

    TrainingStep.__call__ = measured_step  # type: ignore[method-assign]
    try:
        with gpu.simulated_device():
            flags = {
                "family": family,
                "config": "tiny",
                "tokenizer": folder / "tokenizer",
                "dataset": folder / "text.txt",
            }
            flags |= {"max_length": 32, "per_device_batch_size": 4, "save_steps": 0, "output_dir": folder / "model"}
            run_command("pretrain", **flags, max_steps=10, dataloader_workers=0)
    except LastStepError as error:
        return Counter(json.loads(str(error)))
    finally:
        TrainingStep.__call__ = original_call  # type: ignore[method-assign]
    raise RuntimeError(f"{family}: the run ended before step {MEASURED_STEP}.")


def count_trainer_waits(folder: Path) -> Counter[str]:
    """Waits of a step of `transformers.Trainer`."""
    make_workspace(folder, "bert")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    objective = MaskedLM(tokenizer, max_length=32)
    text = (folder / "text.txt").read_text(encoding="utf-8")
    examples = list(objective.examples(document.splitlines() for document in text.split("\n\n")))
    features = [{**example, "example_index": index, "epoch": 0} for index, example in enumerate(examples)]
    options = {"max_steps": MEASURED_STEP, "per_device_train_batch_size": 4, "bf16": True, "save_strategy": "no"}
    waits: list[Counter[str]] = []

    class MeasuredTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with gpu.recording() as record:
                loss = super().training_step(*args, **kwargs)
            waits.append(Counter(record.waits))
            return loss

    with gpu.simulated_device():
        model = CtxBertForMaskedLM(tiny_config(FAMILIES["bert"], vocab_size=len(tokenizer)))
        arguments = TrainingArguments(str(folder / "model"), remove_unused_columns=False, report_to="none", **options)
        MeasuredTrainer(model, arguments, train_dataset=features, data_collator=objective).train()
    return waits[-1]


if __name__ == "__main__":
    for family in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            waits = count_trainer_waits(Path(folder)) if family == "Trainer" else count_waits(family, Path(folder))
            print(json.dumps({"family": family, "waits": waits}), flush=True)
