"""Measure the package on a GPU, with the value that was counted or computed without one next to each measured value.

    python scripts/gpu_first.py --output gpu.json
    python scripts/gpu_first.py --parts environment heads --families bert t5
    python scripts/gpu_first.py --device cpu --size tiny --families bert gpt2 --overwrite --output cpu.json

Run it in a clone: the part `heads` uses the tiny models of the tests. The exit code is 1 if a value is not as expected.
Expected speeds are for one H100 at 30% of its 989 TFLOP/s in bfloat16.
"""

import copy
import json
import math
import platform
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate.state import AcceleratorState
from benchmarks import cases, compiled, encoders
from benchmarks.measure import measure
from benchmarks.settings import Settings
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import logging

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_number, run_script
from hf_ctxmodels.core.devices import DeviceArguments, select_device
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.layers.recurrent.recurrence import has_lstm_kernels
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.accelerator import describe_device, restore_determinism, use_deterministic_algorithms
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments, PretrainingRun, prepare_pretraining

Part = Literal["environment", "heads", "training", "transformers", "attention", "flex", "compile", "determinism"]
PARTS: tuple[Part, ...] = (
    *("environment", "heads", "training", "transformers"),
    *("attention", "flex", "compile", "determinism"),
)
PRETRAINED_FAMILIES = ("bert", "electra", "albert", "xlnet", "t5", "gpt2", "elmo", "ulmfit", "word2vec")
H100_FLOPS, UTILIZATION = 989e12, 0.3
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest relative difference between the gradients of the device and of the CPU."""
READ_STEP, PROFILED_STEP, FIRST_TIMED_STEP = 4, 6, 8
SHAPES = {"tiny": (32, 4, 10), "base": (128, 64, 40)}
"""Size -> length, batch size and number of steps of the part `training`."""


@dataclass
class GpuArguments:
    """What to measure."""

    parts: list[Part] = flag(PARTS, "Parts to run.")
    families: list[str] = flag(PRETRAINED_FAMILIES, "Families of the parts `heads` and `training`.", list(FAMILIES))
    size: Literal["tiny", "base"] = flag("base", "Size of the models, except in `heads`.")
    output: str | None = flag(None, "JSON file for the results.")
    overwrite: bool = flag(False, "Replace --output.")


@dataclass(frozen=True)
class Result:
    """One line of the output; `as_expected` is None if the expected value is an estimate."""

    name: str
    measured: str
    expected: str
    as_expected: bool | None = None

    def __str__(self) -> str:
        mark = {None: " ", True: "+", False: "!"}[self.as_expected]
        return f"{mark} {self.name:<44} {self.measured:<60} | {self.expected}"


def environment(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """Versions and abilities of the device."""
    yield Result("versions", f"torch {torch.__version__}, transformers {transformers.__version__}", platform.platform())
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = torch.cuda.get_device_capability(device)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Result("device", f"{properties.name}, capability {capability}, {memory}", "capability (8, 0) or higher")
        kernels = {"flash": torch.backends.cuda.is_flash_attention_available(), "cudnn": torch.backends.cudnn.version()}
        kernels["lstm"] = has_lstm_kernels(device)
        yield Result("kernels", str(kernels), "flash attention, Triton for LSTMs with clipping")


def heads(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """Loss and gradients of each head against the CPU."""
    for family in arguments.families:
        for dtype, tolerance in TOLERANCES.items():
            errors = {}
            for case in head_cases(family):
                for packed in (True, False):
                    try:
                        errors[f"{case.name}, {'packed' if packed else 'padded'}"] = head_error(
                            case, device, dtype, packed
                        )
                    except Exception as error:
                        errors[f"{case.name}, {type(error).__name__}: {error}"[:150]] = math.inf
            worst = max(errors, key=lambda name: errors[name])
            shown = f"{len(errors)} runs, largest difference {errors[worst]:.1e} ({worst})"
            yield Result(f"heads of {family}, {dtype}", shown, f"below {tolerance}", errors[worst] < tolerance)


def head_cases(family: str) -> list[Any]:
    """The cases (`zoo.Case`) of a family's heads with a loss that is not a random function."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from zoo import HEADS

    return [case for case in HEADS if case.family.name == family and not case.has_consistency_loss]


def head_error(case: Any, device: torch.device | str, dtype: str, packed: bool) -> float:
    """Norm of the difference between the gradients of a head on a device and on the CPU, relative to their norm.

    Args:
        case: A `zoo.Case`.
        dtype: "float32", or "bfloat16" for autocast on both.
        packed: Whether the model packs its tokens; else it pads.
    """
    from zoo import labeled_batch

    batch, model = labeled_batch(case), case.model(unpad=packed)
    moved_model = copy.deepcopy(model).to(device)
    gradients = []
    for place, moved in (("cpu", model), (device, moved_model)):
        autocast = torch.autocast(torch.device(place).type, torch.bfloat16, enabled=dtype == "bfloat16")
        with autocast:
            loss = moved(**CollatedBatch(batch).to(place)).loss
        loss.backward()
        parameters = [parameter.grad for parameter in moved.parameters() if parameter.grad is not None]
        gradients.append(torch.cat([gradient.to_dense().float().cpu().flatten() for gradient in parameters]))
    expected, actual = gradients
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


class StepMeasurement(TrainerCallback):
    """Measures steps of the training loop on a device: what makes the host wait, launches, time and memory.

    Attributes:
        waits: Line of code that waited for the device -> number, in one step.
        launches: Kernels of one step.
        seconds: Time of a step.
        peak_bytes: Peak memory of a step, with weights and optimizer state.
    """

    def __init__(self, device: torch.device, sync_mode: Literal["warn", "error"] = "warn") -> None:
        self._device, self._is_cuda, self._sync_mode = device, device.type == "cuda", sync_mode
        self._contexts, self._warnings = ExitStack(), list[warnings.WarningMessage]()
        self._profile: Any = None
        self._start = 0.0
        self.waits: Counter[str] = Counter()
        self.launches = self.peak_bytes = 0
        self.seconds = math.nan

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the measurement that is due at this step."""
        step = state.global_step + 1
        if step == READ_STEP and self._is_cuda:
            self._warnings = self._contexts.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode(self._sync_mode)
        elif step == PROFILED_STEP and self._is_cuda:
            self._profile = self._contexts.enter_context(profile(activities=[ProfilerActivity.CUDA]))
        elif step == FIRST_TIMED_STEP:
            if self._is_cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            self._start = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the measurement of this step."""
        if state.global_step == READ_STEP and self._is_cuda:
            torch.cuda.set_sync_debug_mode("default")
            self.waits.update(
                f"{Path(warning.filename).name}:{warning.lineno}"
                for warning in self._warnings
                if "synchroniz" in str(warning.message)
            )
        elif state.global_step == PROFILED_STEP:
            self._now()
        elif state.global_step == state.max_steps:
            self.seconds = (self._now() - self._start) / (state.max_steps - FIRST_TIMED_STEP + 1)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) if self._is_cuda else 0
        self._contexts.close()
        if self._profile is not None:
            self.launches = sum(event.device_type == DeviceType.CUDA for event in self._profile.events())

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def prepare_training(family: str, size: str, device: torch.device, folder: Path, **options: Any) -> PretrainingRun:
    """A pretraining run of a family on random words."""
    rng, length, batch, steps = random.Random(0), *SHAPES[size]
    words = ["".join(rng.choices("aeioulmnrst", k=rng.randint(1, 9))) for _ in range(2000)]
    documents = ["\n".join(" ".join(rng.choices(words, k=12)) for _ in range(batch)) for _ in range(20)]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    FAMILIES[family].tokenizer.train(documents, vocab_size=600).save_pretrained(folder / "tokenizer")
    pretraining = PretrainingArguments(
        family=family,
        config=size,
        tokenizer=str(folder / "tokenizer"),
        dataset=[str(folder / "text.txt")],
        max_length=length,
        document_separator="blank",
    )
    settings = {"max_steps": steps, "per_device_batch_size": batch, "logging_steps": steps, "save_steps": 0, **options}
    loop = LoopArguments(output_dir=str(folder / "run"), device=str(device), learning_rate=1e-4, **settings)
    return prepare_pretraining(pretraining, loop)


def training(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """The training loop of each family: host reads, launches, speed and memory."""
    for family in arguments.families:
        if not FAMILIES[family].objectives:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = prepare_training(family, arguments.size, device, Path(folder))
            measurement = StepMeasurement(run.loop.accelerator.device)
            run.loop.callbacks = [measurement]
            result = run.loop.run()
            setting = describe_device(run.loop.accelerator)
        tokens = result.tokens / result.steps
        weights = sum(weight.numel() for name, weight in run.model.named_parameters() if "embeddings" not in name)
        rate = H100_FLOPS * UTILIZATION / (6 * max(weights, 1))
        name = f"{family} {arguments.size}"
        shown = f"{format_number(tokens / measurement.seconds)} tokens/s, {measurement.seconds * 1e3:.1f} ms a step"
        yield Result(f"{name}, {setting}", shown, f"{format_number(rate)} tokens/s if limited by its products")
        if device.type == "cuda":
            waits = ", ".join(f"{line} {number}" for line, number in measurement.waits.most_common(4))
            number = measurement.waits.total()
            yield Result(f"{name}, host waits in a step", f"{number} {waits}", "0", number == 0)
            memory = f"{measurement.launches:,} kernels, peak {measurement.peak_bytes / 2**30:.1f} GiB"
            yield Result(f"{name}, launches and memory", memory, "kernels of transformers' BERT-base: 998")


def compare_with_transformers(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """Speed and peak memory against transformers with the same weights (`scripts/benchmark.py` has more cases)."""
    layers, width = (2, 64) if arguments.size == "tiny" else (12, 768)
    settings = Settings(repeats=3, device=str(device), dtype="bfloat16")
    shapes = [(2, 16)] if arguments.size == "tiny" else [(32, 128), (64, 512)]
    for family in ("bert", "gpt2"):
        for batch, length in shapes:
            for fill in (1.0, cases.FILL):
                vocabulary = {"vocab_size": 300} if arguments.size == "tiny" else {}
                case = cases.Case(family, "pretraining", layers, width, length, batch, fill, None, None, vocabulary)
                (result,) = encoders.run(settings, cases=[case])
                speedup = result.reference.seconds / result.model.seconds
                memory = result.model.peak_bytes / max(result.reference.peak_bytes, 1)
                shown = f"{speedup:.2f} times as fast, {memory:.2f} of the memory"
                bound = 1 / fill if device.type == "cuda" else 1.0
                yield Result(f"{family}, {case.name}", shown, f"{bound:.1f} times as fast, if limited by its products")


def attention(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """Packed attention by head width and data type: it runs, equals padded attention, and uses flash attention."""
    has_flash = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    for width, num_heads in ((128, 2), (52, 2), (512, 2)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            sizes = {"hidden_size": width, "num_attention_heads": num_heads, "intermediate_size": 64}
            config = FAMILIES["bert"].config(vocab_size=100, num_hidden_layers=2, **sizes)
            torch.manual_seed(0)
            model = FAMILIES["bert"].models["AutoModel"](config).to(device, dtype).eval()
            mask = (torch.arange(24) < torch.tensor([[24], [9], [17]])).long().to(device)
            outputs, uses_flash = [], False
            for packed in (True, False):
                model.config.unpad = packed
                recorder = profile(activities=[ProfilerActivity.CUDA]) if packed and has_flash else None
                with torch.no_grad(), recorder or nullcontext():
                    outputs.append(model(input_ids=mask * 7, attention_mask=mask).last_hidden_state[mask.bool()])
                if recorder is not None:
                    uses_flash = any("flash" in event.name.lower() for event in recorder.events())
            error = float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max())
            head_width = width // num_heads
            is_flash = has_flash and dtype != torch.float32 and head_width % 8 == 0 and head_width <= 256
            expected = f"below 0.02{', flash attention' if is_flash else ''}"
            shown = f"difference of packed and padded {error:.1e}{', flash attention' if uses_flash else ''}"
            as_expected = error < 0.02 and uses_flash >= is_flash
            yield Result(f"heads of width {head_width}, {dtype}", shown, expected, as_expected)


def flex(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """FlexAttention, which reads the position terms of T5 and of XLNet by distance, against sdpa with a dense bias, on
    sequences that fill 75% of the batch; on a CPU, where FlexAttention has no gradients, in inference."""
    is_tiny, is_cuda = arguments.size == "tiny", device.type == "cuda"
    layers, num_heads, batch, length = (1, 2, 2, 128) if is_tiny else (12, 12, 32, 512)
    sizes: dict[str, float] = {"num_hidden_layers": layers, "num_attention_heads": num_heads, "vocab_size": 600}
    sizes |= {"hidden_size": 64 * num_heads, "intermediate_size": 256 * num_heads, "hidden_dropout_prob": 0.0}
    lengths = torch.linspace(length // 2, length, batch, device=device).long()
    mask = (torch.arange(length, device=device) < lengths[:, None]).long()
    ids = torch.randint(6, 600, (batch, length), device=device)
    targets = torch.arange(length // 4, device=device).expand(batch, -1)
    ranks = torch.arange(length, device=device).expand(batch, -1)
    ranks = ranks.where(ranks < targets.shape[1], -1)
    # On a CPU, FlexAttention may fail to compile for a second number of queries: the last layer has only the targets.
    streams = {"permutation_order": ranks, "target_positions": targets} if is_cuda else {}
    bias_bytes = batch * num_heads * length**2 * (2 if is_cuda else 4)
    torch.manual_seed(0)
    for family, auto_class, parameter, options, expected in (
        ("t5", "AutoModelForTextEncoding", "encoder.position_bias.buckets.weight", {}, "the memory of 1 dense bias"),
        ("xlnet", "AutoModel", "layers.0.attention.position_bias", streams, "at least 1.0 times as fast"),
    ):
        model = FAMILIES[family].models[auto_class](FAMILIES[family].config(**sizes)).to(device)
        inputs = {"input_ids": ids, "attention_mask": mask, **options}
        yield from _compare_flex(family, model, inputs, parameter, bias_bytes, expected)


def _compare_flex(
    family: str,
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    parameter: str,
    bias_bytes: int,
    expected: str,
) -> Iterator[Result]:
    """The outputs, on a GPU the gradients of `parameter`, then speed and memory, in units of `bias_bytes`, the size of
    a bias for all heads, queries and keys."""
    is_cuda = model.device.type == "cuda"
    values: dict[str, torch.Tensor] = {}

    def step(implementation: str) -> None:
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with torch.set_grad_enabled(is_cuda), torch.autocast(model.device.type, torch.bfloat16, enabled=is_cuda):
            states = model(**inputs).last_hidden_state
        if "target_positions" not in inputs:
            states = states[inputs["attention_mask"] == 1]
        if is_cuda:
            states.float().square().mean().backward()
            states = model.get_parameter(parameter).grad
        values[implementation] = states.clone()

    steps = {name: partial(step, name) for name in ("sdpa", "flex_attention")}
    dense, by_distance = measure(steps, Settings(repeats=5, device=str(model.device))).values()
    error = float((values["flex_attention"] - values["sdpa"]).norm() / values["sdpa"].norm())
    tolerance = TOLERANCES["bfloat16" if is_cuda else "float32"]
    name, compared = f"FlexAttention, {family}", "gradients of the position term" if is_cuda else "outputs"
    yield Result(f"{name}, {compared}", f"difference {error:.1e}", f"below {tolerance}", error < tolerance)
    saved = (dense.peak_bytes - by_distance.peak_bytes) / bias_bytes
    shown = f"{dense.seconds / by_distance.seconds:.2f} times as fast, saves the memory of {saved:.1f} dense biases"
    yield Result(f"{name}, {'training' if is_cuda else 'inference'}", shown, f"{expected}, in training")


def compilation(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """torch.compile of training on batches of different lengths (`scripts/benchmark.py --suite compile` has more)."""
    layers, width = (2, 64) if arguments.size == "tiny" else (12, 768)
    settings = Settings(repeats=3, device=str(device), dtype="bfloat16")
    for family in ("bert",) if arguments.size == "tiny" else ("bert", "gpt2", "t5"):
        workload: cases.Workload = "training" if family == "t5" else "gradients"
        case = cases.Case(family, workload, layers, width, compiled.LENGTHS[0], 16, cases.FILL, None, None)
        result = compiled.run_case(case, settings)
        shown = f"{result.uncompiled.seconds / result.compiled.seconds:.2f} times as fast, {result.graphs} graphs, "
        shown += f"{result.breaks} breaks, first step {result.compilation:.0f} s"
        yield Result(f"{family}, torch.compile", shown, "at least 1.0 times as fast, at most 2 graphs, no break")


def determinism(device: torch.device, arguments: GpuArguments) -> Iterator[Result]:
    """Whether a repeated run has equal weights, with and without `--deterministic`."""
    for deterministic in (False, True):
        runs = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                with restore_determinism():
                    run = prepare_training("bert", arguments.size, device, Path(folder), deterministic=deterministic)
                    run.loop.run()
                runs.append(torch.cat([weight.detach().flatten() for weight in run.model.parameters()]))
        is_equal = torch.equal(*runs)
        must_be_equal = deterministic or device.type == "cpu"
        shown = "equal bit for bit" if is_equal else f"largest difference {float((runs[0] - runs[1]).abs().max()):.1e}"
        expected = "equal bit for bit" if must_be_equal else "equal up to rounding"
        name = f"two runs{' with --deterministic' if deterministic else ''}"
        yield Result(name, shown, expected, is_equal if must_be_equal else None)


FUNCTIONS: dict[Part, Callable[[torch.device, GpuArguments], Iterator[Result]]] = dict(
    zip(
        PARTS,
        (environment, heads, training, compare_with_transformers, attention, flex, compilation, determinism),
        strict=True,
    )
)


def main() -> None:
    """Run the parts and print each result as soon as it is measured."""
    arguments, placement = parse_arguments(GpuArguments, (DeviceArguments, ["device"]), description=__doc__)
    if arguments.output is not None:
        check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
    device = select_device(placement.device)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if "determinism" in arguments.parts:  # cuBLAS reads the variable when it is first used
        with restore_determinism():
            use_deterministic_algorithms()
    results = []
    print(f"{'  measurement':<46} {'measured':<60} | expected")
    for part in PARTS:
        if part not in arguments.parts:
            continue
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            for result in FUNCTIONS[part](device, arguments):
                results.append(result)
                print(result, flush=True)
        except Exception as error:  # the other parts can be measured
            results.append(Result(part, f"{type(error).__name__}: {error}"[:300], "runs", False))
            print(results[-1], flush=True)
    if arguments.output is not None:
        write_text_file(arguments.output, json.dumps([asdict(result) for result in results], indent=2) + "\n")
    differing = [result.name for result in results if result.as_expected is False]
    print(f"{len(results)} results, {len(differing)} not as expected{': ' if differing else ''}{', '.join(differing)}")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    run_script(main)
