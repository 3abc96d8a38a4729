"""The size of a run: steps of a budget in words, floating-point operations or minutes, from a short trial run."""

import json
import math
import tempfile
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path

from hf_ctxmodels.comparison.flops import flop_counter
from hf_ctxmodels.comparison.plan import Plan, Variant, recipe_argv
from hf_ctxmodels.comparison.processes import device_flags
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.training.accelerator import restore_determinism
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.dry_run import StepTimer, trial_run
from hf_ctxmodels.training.pretraining import PretrainingArguments, prepare_pretraining

_MANY_STEPS = 1_000_000
_CHECKPOINT_SECONDS = 45.0  # a killed run loses at most a minute


@dataclass(frozen=True)
class RunSize:
    """Cost of a training step, and the number of steps of a budget.

    Attributes:
        parameters: Parameters of the model, tied weights once.
        words: Words of the training text, separated by white space.
        examples: Examples of an epoch, which consumes the text once.
        batch_size: Examples of a step, over all processes.
        flops_per_step: Floating-point operations of forward and backward pass, counted by torch; None for models that
            compute outside of torch's operators.
        seconds_per_step: Mean duration of a step after the first one.
        timed_seconds: Minimum duration of the timing.
    """

    parameters: int
    words: int
    examples: int
    batch_size: int
    flops_per_step: float | None
    seconds_per_step: float
    timed_seconds: float

    @property
    def words_per_step(self) -> float:
        """Words of the text that a step consumes on average: an epoch consumes all of them."""
        return self.words / self.examples * self.batch_size

    def steps(self, budget: str, size: float) -> int:
        """The steps of a budget, at least one; raises CtxError for FLOPs that cannot be counted."""
        if budget == "words":
            return max(1, round(size / self.words_per_step))
        if budget == "minutes":
            return max(1, round(size * 60 / self.seconds_per_step))
        if self.flops_per_step is None:
            raise CtxError(
                "The floating-point operations of this model are not counted.",
                location="budget.flops",
                hint="remove the family from the plan, or use a budget of words or minutes.",
            )
        return max(1, round(size / self.flops_per_step))

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints, less than a minute."""
        return max(1, math.floor(_CHECKPOINT_SECONDS / self.seconds_per_step))

    def save(self, file: Path) -> None:
        """Write a JSON file."""
        write_text_file(file, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, file: Path) -> "RunSize":
        """Read a file of `save`."""
        return cls(**read_json(file))


def checkpoint_steps(total_steps: int, number: int) -> list[int]:
    """Steps of the evaluated checkpoints: 0, and `number` steps, each half of the next one."""
    return sorted({0, *(math.ceil(total_steps / 2**power) for power in range(number))})


@restore_determinism()
def measure_size(plan: Plan, variant: Variant, tokenizer: Path, seconds: float, device: str | None = None) -> RunSize:
    """Train in a temporary directory for one step to count FLOPs, and for some seconds to time the steps."""
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--family", variant.family, "--dataset", *plan.dataset, "--tokenizer", str(tokenizer)]
        argv += ["--validation_fraction", str(plan.validation_fraction), "--seed", str(plan.seeds[0])]
        argv += ["--max_steps", str(_MANY_STEPS), "--output_dir", folder, *recipe_argv(variant.recipe, variant.name)]
        argv += device_flags(device)
        arguments, loop_arguments = parse_arguments(PretrainingArguments, LoopArguments, argv=argv)
        run = prepare_pretraining(arguments, replace(loop_arguments, output_dir=folder))
        documents = run.documents
        if documents is None or not hasattr(run.examples, "__len__"):
            raise CtxError("The text has no known length.", location="dataset", hint="use text in local files.")
        words = sum(len(sentence.split()) for document in documents for sentence in document)
        timer = StepTimer(seconds)
        with redirect_stderr(StringIO()):  # the log of the trials, with the time left of a million steps
            with flop_counter() as counter:
                result, _ = trial_run(run.loop, max_steps=1)
            trial_run(run.loop, timer, max_steps=_MANY_STEPS)
    processes = int((plan.accelerate or {}).get("num_processes", 1))
    flops = counter.get_total_flops() * processes
    return RunSize(
        parameters=result.parameters,
        words=words,
        examples=len(run.examples),  # type: ignore[arg-type]
        batch_size=result.global_batch_size * processes,
        flops_per_step=flops or None,
        seconds_per_step=timer.seconds_per_step,
        timed_seconds=seconds,
    )
