"""What `pretrain.py` takes a token from end to end, against its own bare training step, and against the Trainer."""

import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.clock import StepClock
from benchmarks.encoders import Result
from benchmarks.measure import Measurement
from benchmarks.trainer import train_with_trainer
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.layers.cpu.allocator import retain_freed_memory
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training import pretraining
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.batches import INDEX_KEY, count_items, next_batches, training_batches
from hf_ctxmodels.training.loop import make_accelerator
from hf_ctxmodels.training.optim.optimizers import make_optimizer

STEPS, WARM_UP, DATASET = 16, 4, "demo"
_BARE: Final = "pretrain.py, the peer is its bare step"
_TRAINER: Final = "pretrain.py, the peer is Trainer"
_OBJECTIVES = {_BARE: "mlm+nsp", _TRAINER: "mlm"}
# The demo text has 27,837 pieces for the vocabulary of BERT's size.
CASES = [
    Case("bert", _BARE, 4, 256, 128, 32, 1.0, 0.9, None, {"vocab_size": 4000}, busy_speed=0.9),
    Case("bert", _TRAINER, 4, 256, 128, 32, 1.0, 3.0, None, {"vocab_size": 30_522}, busy_speed=3.0),
]

Pace = tuple[float, float]
"""Seconds and CPU seconds a token."""


def run(
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    attention: str,
    only: str | None = None,
    busy: bool = False,
) -> Iterator[Result]:
    """Alternate short runs of `pretrain.py` (data, collation, logging, clipping and schedule included) and of the peer.

    Tokens are those of the text, without padding. Median and spread are over the runs.

    Args:
        device, dtype: Where and in which precision.
        repeats: Runs of each side.
        attention: Attention implementation of the Trainer's model.
        only: Run the cases that `Case.chosen_by` chooses.
        busy: Whether another process spins on one core meanwhile.
    """
    for case in [case.when(busy) for case in CASES]:
        if case.chosen_by(only):
            yield _run_case(case, device, dtype, repeats, attention)


def _run_case(case: Case, device: torch.device, dtype: torch.dtype, repeats: int, attention: str) -> Result:
    ours: list[Pace] = []
    peer: list[Pace] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = get_family(case.family).tokenizer
        texts = load_documents(DATASET).texts()
        tokenizer.train(texts, vocab_size=case.config["vocab_size"]).save_pretrained(f"{folder}/tokenizer")
        for number in range(repeats):
            what, how = _arguments(case, Path(folder), f"run-{number}", dtype)
            # Both print records of their losses.
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                ours.append(_loop_pace(what, how, device))
                how = replace(how, output_dir=f"{folder}/peer-{number}")
                step = _bare_pace if case.work == _BARE else _trainer_pace
                peer.append(step(what, how, device, attention))
    return Result(
        case=case,
        difference=float("nan"),
        ours=Measurement.summarise(ours),
        peer=Measurement.summarise(peer),
        tokens=1,
        utilisation=float("nan"),
    )


def _arguments(
    case: Case, folder: Path, output: str, dtype: torch.dtype
) -> tuple[pretraining.PretrainingArguments, LoopArguments]:
    sizes = {
        "hidden_size": case.width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.width // 64,
        "intermediate_size": 4 * case.width,
    }
    what = pretraining.PretrainingArguments(
        dataset=[DATASET],
        tokenizer=str(folder / "tokenizer"),
        family=case.family,
        config_options=[f"{name}={value}" for name, value in sizes.items()],
        objective=_OBJECTIVES[case.work],
        max_length=case.length,
    )
    how = LoopArguments(
        output_dir=str(folder / output),
        max_steps=STEPS,
        per_device_batch_size=case.batch,
        logging_steps=WARM_UP,
        mixed_precision="no" if dtype == torch.float32 else "bf16",
    )
    return what, how


def _forget_accelerator() -> None:
    """The two sides set up accelerate each in its own way."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _loop_pace(what: pretraining.PretrainingArguments, how: LoopArguments, device: torch.device) -> Pace:
    _forget_accelerator()
    with StepClock(WARM_UP, STEPS, device) as clock:
        summary = pretraining.pretrain(what, how)
    tokens = {record["step"]: record["tokens"] for record in summary.curve if "tokens" in record}
    return clock.pace(tokens[STEPS] - tokens[WARM_UP])


def _bare_pace(
    what: pretraining.PretrainingArguments, how: LoopArguments, device: torch.device, attention: str
) -> Pace:
    """Forward, backward and a fused AdamW update on batches made beforehand."""
    _forget_accelerator()
    accelerator = make_accelerator(how)
    family = get_family(str(what.family))
    tokenizer = pretraining.load_tokenizer(pretraining.tokenizer_source(what))
    _, objective = pretraining.make_objective(family, tokenizer, what, how.seed)
    model = pretraining.make_model(family, objective, tokenizer, what).to(device).train()
    examples, _ = pretraining.make_examples(what, objective)
    batches = next_batches(training_batches(accelerator, examples, objective.collate, how, 0), STEPS)
    tokens = int(count_items(batches[WARM_UP:], ())[-1])
    optimizer = make_optimizer(model, how)
    with StepClock(WARM_UP, STEPS, device) as clock, retain_freed_memory():
        for batch in batches:
            del batch[INDEX_KEY]
            _step(model, batch, how.mixed_precision == "bf16", optimizer)
    return clock.pace(tokens)


def _step(model: torch.nn.Module, batch: dict[str, Tensor], half: bool, optimizer: torch.optim.Optimizer) -> None:
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=half):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _trainer_pace(
    what: pretraining.PretrainingArguments, how: LoopArguments, device: torch.device, attention: str
) -> Pace:
    """The reference class opened from our model's export, on the same rows."""
    _forget_accelerator()
    family = get_family(str(what.family))
    tokenizer = pretraining.load_tokenizer(pretraining.tokenizer_source(what))
    _, objective = pretraining.make_objective(family, tokenizer, what, how.seed)
    model = pretraining.make_model(family, objective, tokenizer, what)
    examples, _ = pretraining.make_examples(what, objective)
    with StepClock(WARM_UP, STEPS, device) as clock:
        tokens = train_with_trainer(model, tokenizer, examples, how, device, attention)
    return clock.pace(sum(tokens[WARM_UP:STEPS]))
