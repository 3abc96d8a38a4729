"""Time per token of the pretraining loop, compared with its bare training step and with the Trainer."""

import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from accelerate.state import AcceleratorState, GradientState

from benchmarks.cases import Case
from benchmarks.clock import StepClock
from benchmarks.encoders import Result
from benchmarks.measure import Measurement
from benchmarks.settings import Settings
from benchmarks.trainer import train_with_trainer
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training import pretraining
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.loop import retain_freed_memory
from hf_ctxmodels.training.optimizers import make_optimizer
from hf_ctxmodels.training.training_step import INDEX_KEY, count_items, next_batches, training_batches

STEPS, WARM_UP, DATASET = 10, 2, "demo"
_BARE: Final = "training loop, bare step as reference"
_TRAINER: Final = "training loop, Trainer as reference"
_OBJECTIVES = {("bert", _BARE): "mlm+nsp", ("bert", _TRAINER): "mlm", ("gpt2", _TRAINER): "clm"}
# The demo text has 27,837 tokens with a vocabulary of BERT's size.
CASES = [
    Case("bert", _BARE, 4, 256, 128, 32, 1.0, 0.9, None, {"vocab_size": 4000}, busy_min_speedup=0.9),
    Case("bert", _TRAINER, 4, 256, 128, 32, 1.0, 3.0, None, {"vocab_size": 30_522}, busy_min_speedup=3.0),
    Case("gpt2", _TRAINER, 4, 256, 128, 32, 1.0, 1.5, None, {"vocab_size": 30_522}, busy_min_speedup=1.5),
]

TimePerToken = tuple[float, float]
"""Seconds and CPU seconds per token."""


def run(settings: Settings) -> Iterator[Result]:
    """Alternate short runs of pretraining (data, collation, logging, clipping and schedule included) and the reference.

    Times are per token, without padding. Median and spread are over the runs.
    """
    for case in [case.with_load(settings.busy) for case in CASES]:
        if settings.select_row(case.title):
            yield _run_case(case, settings)


def _run_case(case: Case, settings: Settings) -> Result:
    loop_times: list[TimePerToken] = []
    reference_times: list[TimePerToken] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = get_family(case.family).tokenizer
        texts = load_documents(DATASET).texts()
        tokenizer.train(texts, vocab_size=case.config["vocab_size"]).save_pretrained(f"{folder}/tokenizer")
        for number in range(settings.repeats):
            pretraining_arguments, loop_arguments = _arguments(case, Path(folder), f"run-{number}", settings)
            # Both print their losses.
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                loop_times.append(_time_pretraining_loop(pretraining_arguments, loop_arguments, settings))
                loop_arguments = replace(loop_arguments, output_dir=f"{folder}/reference-{number}")
                time_reference = _time_bare_steps if case.workload == _BARE else _time_trainer
                reference_times.append(time_reference(pretraining_arguments, loop_arguments, settings))
    return Result(
        case=case,
        difference=float("nan"),
        model=Measurement.summarize(loop_times),
        reference=Measurement.summarize(reference_times),
        tokens=1,
        utilization=float("nan"),
    )


def _arguments(
    case: Case, folder: Path, output: str, settings: Settings
) -> tuple[pretraining.PretrainingArguments, LoopArguments]:
    sizes = {
        "hidden_size": case.width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.width // 64,
        "intermediate_size": 4 * case.width,
    }
    pretraining_arguments = pretraining.PretrainingArguments(
        dataset=[DATASET],
        tokenizer=str(folder / "tokenizer"),
        family=case.family,
        config_options=[f"{name}={value}" for name, value in sizes.items()],
        objective=_OBJECTIVES[case.family, case.workload],
        max_length=case.length,
    )
    loop_arguments = LoopArguments(
        output_dir=str(folder / output),
        max_steps=STEPS,
        per_device_batch_size=case.batch,
        logging_steps=WARM_UP,
        dtype=settings.dtype,
    )
    return pretraining_arguments, loop_arguments


def _reset_accelerator() -> None:
    """Discard the state of accelerate, which the next run configures differently."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _time_pretraining_loop(
    pretraining_arguments: pretraining.PretrainingArguments, loop_arguments: LoopArguments, settings: Settings
) -> TimePerToken:
    _reset_accelerator()
    with StepClock(WARM_UP, STEPS, settings.torch_device) as clock:
        summary = pretraining.pretrain(pretraining_arguments, loop_arguments)
    tokens = {record["step"]: record["tokens"] for record in summary.curve if "tokens" in record}
    return clock.per_token(tokens[STEPS] - tokens[WARM_UP])


def _time_bare_steps(
    pretraining_arguments: pretraining.PretrainingArguments, loop_arguments: LoopArguments, settings: Settings
) -> TimePerToken:
    """Time forward, backward and a fused AdamW update on precomputed batches."""
    _reset_accelerator()
    accelerator = make_accelerator(loop_arguments)
    family = get_family(str(pretraining_arguments.family))
    tokenizer = pretraining.load_tokenizer(pretraining.require_tokenizer_source(pretraining_arguments))
    _, objective = pretraining.make_objective(family, tokenizer, pretraining_arguments, loop_arguments.seed)
    config = pretraining.model_config(family, tokenizer, pretraining_arguments)
    model = pretraining.make_model(config, objective, tokenizer, pretraining_arguments).to(settings.device).train()
    examples, _ = pretraining.make_examples(*pretraining_arguments.load(), pretraining_arguments, objective)
    batches = next_batches(training_batches(accelerator, examples, objective.collate, loop_arguments, 0), STEPS)
    tokens = int(count_items(batches[WARM_UP:], ())[-1])
    optimizer = make_optimizer(model, loop_arguments)
    with StepClock(WARM_UP, STEPS, settings.torch_device) as clock, retain_freed_memory():
        for batch in batches:
            del batch[INDEX_KEY]
            with settings.autocast():
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return clock.per_token(tokens)


def _time_trainer(
    pretraining_arguments: pretraining.PretrainingArguments, loop_arguments: LoopArguments, settings: Settings
) -> TimePerToken:
    """Time the Trainer with the exported model of transformers on the same examples."""
    _reset_accelerator()
    family = get_family(str(pretraining_arguments.family))
    tokenizer = pretraining.load_tokenizer(pretraining.require_tokenizer_source(pretraining_arguments))
    _, objective = pretraining.make_objective(family, tokenizer, pretraining_arguments, loop_arguments.seed)
    config = pretraining.model_config(family, tokenizer, pretraining_arguments)
    model = pretraining.make_model(config, objective, tokenizer, pretraining_arguments)
    examples, _ = pretraining.make_examples(*pretraining_arguments.load(), pretraining_arguments, objective)
    with StepClock(WARM_UP, STEPS, settings.torch_device) as clock:
        tokens = train_with_trainer(model, tokenizer, examples, loop_arguments, settings)
    return clock.per_token(sum(tokens[WARM_UP:STEPS]))
