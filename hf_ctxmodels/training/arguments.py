"""Flags of the training loop."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import ClassVar, Literal

from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments, Dtype
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag, parse_choices

_optimization_flag = partial(flag, group="optimization")
_record_flag = partial(flag, group="logging, evaluation and checkpoints")


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of all optimizers."""

    weight_decay: float = flag(0.01, "Weight decay, except for biases and normalization weights.")

    def __post_init__(self) -> None:
        check_range(self, "weight_decay", at_least=0, location="--optimizer")


@dataclass(frozen=True)
class AdamOptions(OptimizerOptions):
    """Options of optimizers with two moments."""

    beta1: float = flag(0.9, "Decay of the first moment.")
    beta2: float = flag(0.999, "Decay of the second moment.")
    epsilon: float = flag(1e-6, "Added to the denominator.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "epsilon", above=0, location="--optimizer")
        check_range(self, "beta1", "beta2", at_least=0, below=1, location="--optimizer")


@dataclass(frozen=True)
class AdamWOptions(AdamOptions):
    """AdamW (Loshchilov & Hutter 2019), optionally with steps scaled by the root mean square of the parameters."""

    scale_by_size: bool = flag(False, "Multiply the step of each parameter by its root mean square, as for T5.")


@dataclass(frozen=True)
class LambOptions(AdamOptions):
    """LAMB (You et al. 2020), for very large batches."""


@dataclass(frozen=True)
class MuonOptions(AdamOptions):
    """Muon (Jordan et al. 2024) for the linear layers of the stack, AdamW for all other parameters."""

    momentum: float = flag(0.95, "Momentum of Muon; beta1, beta2 and epsilon apply to AdamW.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "momentum", at_least=0, below=1, location="--optimizer")


@dataclass(frozen=True)
class AdafactorOptions(OptimizerOptions):
    """Adafactor (Shazeer & Stern 2018), with factored second moments that need little memory."""

    scale_by_size: bool = flag(False, "Multiply the step of each parameter by its root mean square.")


@dataclass(frozen=True)
class AdaGradOptions(OptimizerOptions):
    """AdaGrad (Duchi et al. 2011), for word vectors."""

    weight_decay: float = flag(0.0, "Weight decay; impossible with sparse gradients.")
    initial_accumulator: float = flag(
        0.0, "Initial sum of squares; with 0, the first update of a weight has the size of the learning rate."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "initial_accumulator", at_least=0, location="--optimizer")


@dataclass(frozen=True)
class SGDOptions(OptimizerOptions):
    """Plain stochastic gradient descent."""

    weight_decay: float = flag(0.0, "Weight decay; impossible with sparse gradients.")


@dataclass(frozen=True)
class ASGDOptions(OptimizerOptions):
    """SGD with weights averaged from the first step (Polyak & Juditsky 1992)."""


@dataclass(frozen=True)
class NTASGDOptions(ASGDOptions):
    """SGD with weights averaged once the validation loss stops falling (Merity et al. 2017); needs --eval_steps."""

    patience: int = flag(5, "Evaluations without a lower validation loss before averaging starts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "patience", above=0, location="--optimizer")


MAX_WARMUP_STEPS = 10_000
"""Limit of the default warm-up (Devlin et al. 2019, appendix A.2)."""
OPTIMIZERS: dict[str, type] = {
    "adamw": AdamWOptions,
    "lamb": LambOptions,
    "muon": MuonOptions,
    "adafactor": AdafactorOptions,
    "adagrad": AdaGradOptions,
    "sgd": SGDOptions,
    "asgd": ASGDOptions,
    "nt-asgd": NTASGDOptions,
}


@dataclass(frozen=True)
class LinearOptions:
    """Linear decay to 0."""


@dataclass(frozen=True)
class CosineOptions:
    """Cosine decay."""

    min_rate: float = flag(0.0, "Lowest learning rate, as a fraction of the peak; GPT-3: 0.1.")

    def __post_init__(self) -> None:
        check_range(self, "min_rate", at_least=0, below=1, location="--lr_scheduler")


@dataclass(frozen=True)
class ConstantOptions:
    """A constant learning rate."""


@dataclass(frozen=True)
class InverseSquareRootOptions:
    """The inverse square root of the step (T5); the peak until the end of the warm-up."""


@dataclass(frozen=True)
class SlantedTriangularOptions:
    """The slanted triangular learning rate of ULMFiT."""

    ratio: float = flag(32.0, "Ratio of the peak to the lowest learning rate.")

    def __post_init__(self) -> None:
        check_range(self, "ratio", at_least=1, location="--lr_scheduler")


SchedulerOptions = LinearOptions | CosineOptions | ConstantOptions | InverseSquareRootOptions | SlantedTriangularOptions
SCHEDULERS: dict[str, type] = {
    "linear": LinearOptions,
    "cosine": CosineOptions,
    "constant": ConstantOptions,
    "rsqrt": InverseSquareRootOptions,
    "slanted-triangular": SlantedTriangularOptions,
}


@dataclass
class LoopArguments(DeviceArguments):
    """Training.

    `optimizer` and `lr_scheduler` may be given as on the command line, `"adamw:beta2=0.98"`. An optimizer,
    learning rate, warm-up or length of None is chosen from the model and the data, see `training.defaults`.
    """

    is_finetuning: ClassVar[bool] = False
    output_dir: str = flag(REQUIRED, "Directory for the model, its checkpoints and logs.")
    max_steps: int | None = flag(
        None,
        "Optimizer steps to train; by default chosen from the model and the data.",
        conflicts=("num_train_epochs",),
    )
    num_train_epochs: float | None = flag(None, "Passes over the data to train, instead of --max_steps.")
    per_device_batch_size: int = flag(32, "Examples per process and micro-batch.")
    gradient_accumulation_steps: int = _optimization_flag(1, "Micro-batches per optimizer step.")
    optimizer: OptimizerOptions | None = flag(
        None, "Optimizer; by default the family's, adamw for most.", OPTIMIZERS, group="optimization"
    )
    learning_rate: float | Literal["auto"] | None = _optimization_flag(
        None,
        "Peak learning rate, by default chosen from the width and the number of layers; `auto` for the result of a "
        "learning-rate range test before the first step.",
    )
    lr_scheduler: SchedulerOptions = flag(
        "linear", "Learning rate after the warm-up.", SCHEDULERS, group="optimization"
    )
    warmup_steps: float | None = _optimization_flag(
        None,
        "Steps of linear warm-up; a fraction of all steps if below 1; by default 0.1, at most 10,000, with adamw, "
        "lamb, muon or adafactor, if the rate decays.",
    )
    layerwise_lr_decay: float = _optimization_flag(
        1.0, "Factor between the learning rates of adjacent layers; ULMFiT: 2.6."
    )
    head_learning_rate: float | None = _optimization_flag(
        None, "Peak learning rate of the heads; by default --learning_rate."
    )
    lr_reference_targets: float = _optimization_flag(
        0.0, "Scale the learning rate of a step by its number of targets divided by this; 0 disables scaling."
    )
    max_grad_norm: float = _optimization_flag(1.0, "Gradient norm to clip to; 0 disables clipping.")
    seed: int = flag(42, "Seed of initialization, data order, masking and dropout.")
    logging_steps: int = _record_flag(50, "Steps between log records.")
    eval_steps: int = _record_flag(0, "Steps between evaluations; 0 evaluates at the end only.")
    save_steps: int = _record_flag(500, "Steps between checkpoints; 0 saves at the end only.")
    save_total_limit: int = _record_flag(2, "Number of newest checkpoints to keep.")
    save_at: list[int] = flag((), "See `PretrainingLoopArguments`.", fixed=True)
    resume: bool | Literal["finish"] = _record_flag(
        False,
        "Continue from the newest checkpoint in --output_dir, if there is one; `--resume finish` ends the run "
        "there: it evaluates and saves the model without further steps.",
    )
    overwrite: bool = _record_flag(
        False, "Start a new run, and delete the run and the model in --output_dir at its first checkpoint."
    )
    report_to: Literal["none", "tensorboard", "trackio"] = _record_flag("none", "Experiment tracker.")
    dataloader_workers: int | None = flag(
        None,
        "Processes that collate batches; 0: the training process. By default 1, or 0 without a GPU and with fewer than "
        "4 cores for each process.",
    )
    _: KW_ONLY
    dtype: Dtype | None = flag(
        None,
        "Data type of the forward pass; the weights are float32. By default bfloat16 on a GPU of compute capability "
        "8.0 or higher, else float32; under `accelerate launch` its --mixed_precision.",
        group="device",
    )
    deterministic: bool = flag(
        False,
        "Use deterministic algorithms, so that repeated and resumed runs on the same GPU are equal; slower.",
        group="device",
    )
    compile: bool = flag(
        False,
        "Compile the model by torch.compile: the first steps take a minute or more, later ones less time.",
        group="device",
    )

    gradient_checkpointing: bool = flag(
        False,
        "Recompute the activations of each layer in the backward pass instead of storing them (Chen et al. 2016).",
        group="device",
    )
    timeout: float = flag(
        30.0,
        "Timeout of collective operations in minutes, after which the run ends with an error.",
        group="device",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_choices(self)
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise CtxError(
                "The length of training is given twice.",
                location=f"--max_steps {self.max_steps} --num_train_epochs {self.num_train_epochs}",
                hint="pass at most one of --max_steps and --num_train_epochs.",
            )
        check_range(self, "max_steps", "num_train_epochs", "per_device_batch_size", above=0)
        check_range(self, "gradient_accumulation_steps", "head_learning_rate", "timeout", above=0)
        if self.learning_rate != "auto":
            check_range(self, "learning_rate", above=0)
        elif self.head_learning_rate is not None:
            raise CtxError(
                "The range test varies all learning rates by one factor.",
                location="--learning_rate auto --head_learning_rate",
                hint="remove --head_learning_rate, or pass a number as --learning_rate.",
            )
        check_range(self, "logging_steps", "save_total_limit", above=0)
        check_range(self, "warmup_steps", "max_grad_norm", "eval_steps", "save_steps", at_least=0)
        check_range(self, "dataloader_workers", "lr_reference_targets", at_least=0)
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)
        if any(step < 0 for step in self.save_at):
            raise CtxError(
                "A step is 0 or more.",
                location=f"--save_at {' '.join(map(str, self.save_at))}",
                hint="give steps of the run, such as 0 100 1000.",
            )
        check_range(self, "layerwise_lr_decay", at_least=1)
        if self.resume and self.overwrite:
            raise CtxError(
                "A run is either continued or overwritten.",
                location="--resume --overwrite",
                hint="use only one of them.",
            )
        if isinstance(self.lr_scheduler, InverseSquareRootOptions) and self.warmup_steps == 0:
            raise CtxError(
                "The inverse square root of the step starts after the warm-up.",
                location="--lr_scheduler rsqrt --warmup_steps 0",
                hint="pass --warmup_steps; T5: 10000.",
            )
        if isinstance(self.optimizer, NTASGDOptions) and not self.eval_steps:
            raise CtxError(
                "nt-asgd needs evaluations during training.",
                location="--optimizer nt-asgd --eval_steps 0",
                hint="pass --eval_steps, or use --optimizer asgd.",
            )

    @property
    def has_pretrained_weights(self) -> bool:
        """Whether the run starts from pretrained weights; `learning_rate` is then lower by default."""
        return False

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of `total_steps`."""
        if self.warmup_steps is None:
            return min(steps_of(0.1, total_steps), MAX_WARMUP_STEPS)
        return steps_of(self.warmup_steps, total_steps)


@dataclass
class PretrainingLoopArguments(LoopArguments):
    """Training."""

    save_at: list[int] = flag(
        (),
        "Further steps to save a checkpoint at, which is kept; 0 saves the initial weights.",
        group="logging, evaluation and checkpoints",
    )


def steps_of(value: float, total_steps: int) -> int:
    """A number of steps; a value below 1 is a fraction of all steps."""
    return round(value * total_steps) if value < 1 else int(value)
