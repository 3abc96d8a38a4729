"""What the training loop costs: tokens/s of `pretrain.py` end to end against the bare training step."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.encoders import Result
from benchmarks.measure import Measurement
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training import pretraining
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.batches import take, training_batches
from hf_ctxmodels.training.loop import make_accelerator
from hf_ctxmodels.training.optim.optimization import make_optimizer

_STEPS, _WARM_UP, _VOCABULARY = 24, 4, 4000
CASE = Case("bert", "pretrain.py", 4, 256, 128, 32, 1.0, 0.9, None)


def run(
    device: torch.device, dtype: torch.dtype, repeats: int, attention: str, only: str | None = None
) -> Iterator[Result]:
    """Alternate runs of the loop (data, collation, logging, clipping and schedule included) with bare steps on batches
    made beforehand; the spread and median are over the runs.

    Args:
        device, dtype: Where and in which precision.
        repeats: Runs of each side.
        attention: Not used: the peer is our own step.
        only: Run only if `Case.chosen_by` chooses it.
    """
    if CASE.chosen_by(only):
        family = FAMILIES[CASE.family]
        with tempfile.TemporaryDirectory() as folder:
            documents = load_documents("demo")
            family.tokenizer.train(documents.texts(), vocab_size=_VOCABULARY).save_pretrained(f"{folder}/tokenizer")
            loop_rates, bare_rates = [], []
            for number in range(repeats):
                loop_rates.append(_loop_rate(family, Path(folder), number, dtype))
                bare_rates.append(_bare_rate(family, Path(folder), dtype))
        yield Result(
            case=CASE,
            difference=float("nan"),
            ours=_measurement(loop_rates),
            peer=_measurement(bare_rates),
            tokens=1,
            utilisation=float("nan"),
        )


def _arguments(
    family: FamilySpec, folder: Path, output: str, dtype: torch.dtype
) -> tuple[pretraining.PretrainingArguments, LoopArguments]:
    what = pretraining.PretrainingArguments(
        dataset=["demo"], tokenizer=str(folder / "tokenizer"), family=family.name, config="mini", max_length=CASE.length
    )
    how = LoopArguments(
        output_dir=str(folder / output),
        max_steps=_STEPS + _WARM_UP,
        per_device_batch_size=CASE.batch,
        logging_steps=_WARM_UP,
        mixed_precision="no" if dtype == torch.float32 else "bf16",
    )
    return what, how


def _loop_rate(family: FamilySpec, folder: Path, number: int, dtype: torch.dtype) -> float:
    """Tokens per second of the loop, from the end of its warm-up to its last step."""
    summary = pretraining.pretrain(*_arguments(family, folder, f"run-{number}", dtype))
    records = [record for record in summary.curve if "tokens_per_second" in record][1:]
    seconds = sum(_tokens(summary.curve, record) / record["tokens_per_second"] for record in records)
    return sum(_tokens(summary.curve, record) for record in records) / seconds


def _tokens(curve: list[dict[str, float]], record: dict[str, float]) -> float:
    """Tokens between the record and the one before."""
    earlier = [other["tokens"] for other in curve if "tokens" in other and other["tokens"] < record["tokens"]]
    return record["tokens"] - max(earlier, default=0)


def _bare_rate(family: FamilySpec, folder: Path, dtype: torch.dtype) -> float:
    """Tokens per second of forward, backward and a fused AdamW update on batches made beforehand."""
    what, how = _arguments(family, folder, "bare", dtype)
    accelerator = make_accelerator(how)
    tokenizer = pretraining.load_tokenizer(pretraining.tokenizer_source(what))
    _, objective = pretraining.make_objective(family, tokenizer, what, how.seed)
    model = pretraining.make_model(family, objective, tokenizer, what).to(accelerator.device)
    examples, _ = pretraining.make_examples(what, objective)
    batches = take(training_batches(accelerator, examples, objective.collate, how, 0), _STEPS + _WARM_UP)
    optimizer = make_optimizer(model, how)
    model.train()
    start = tokens = 0.0
    for step, batch in enumerate(batches):
        if step == _WARM_UP:
            start, tokens = _now(accelerator.device), 0
        batch.pop("example_index")
        tokens += int(batch["attention_mask"].sum())
        _step(model, batch, dtype, optimizer)
    return tokens / (_now(accelerator.device) - start)


def _step(
    model: torch.nn.Module, batch: dict[str, Tensor], dtype: torch.dtype, optimizer: torch.optim.Optimizer
) -> None:
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _measurement(rates: list[float]) -> Measurement:
    """Seconds per token."""
    low, median, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
    return Measurement(1 / median, (high - low) / median, 0)
