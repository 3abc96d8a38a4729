"""Pretrain families on the pretended device for some steps, and print what makes the host wait in a step as JSON.

Usage: PYTHONPATH=tests:tests/gpu python tests/gpu/training_records.py FAMILY ...
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pretended_device as gpu  # before torch
from commands import run_command
from training_runs import make_workspace

from hf_ctxmodels.training.training_step import TrainingStep

MEASURED_STEP = 3  # earlier steps initialise the optimizer
VOCABULARY_SIZES = {"t5": 170, "gpt2": 300, "bart": 300}  # which include 100 sentinels or 256 bytes


class LastStepError(Exception):
    """Ends a run after the measured step."""


def count_waits(family: str, folder: Path) -> Counter[str]:
    """The waits of a training step with its batch."""
    make_workspace(folder, family, vocab_size=VOCABULARY_SIZES.get(family, 80))
    train = TrainingStep.__call__
    steps = 0

    def measured_step(self: TrainingStep, batches: Any) -> Any:
        nonlocal steps
        steps += 1
        with gpu.recording() as record:
            result = train(self, batches)
        if steps == MEASURED_STEP:
            raise LastStepError(json.dumps(Counter(record.waits)))
        return result

    TrainingStep.__call__ = measured_step  # type: ignore[method-assign]
    try:
        with gpu.pretended_device():
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
        TrainingStep.__call__ = train  # type: ignore[method-assign]
    raise RuntimeError(f"{family}: the run ended before step {MEASURED_STEP}.")


if __name__ == "__main__":
    for family in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"family": family, "waits": count_waits(family, Path(folder))}), flush=True)
