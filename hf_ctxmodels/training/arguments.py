"""The flags of the training loop, shared by all scripts."""

from dataclasses import dataclass, field
from typing import Literal

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag


@dataclass
class LoopArguments:
    """Arguments of the training loop besides model, data and collator.

    Raises:
        CtxError: A value is out of range, or not exactly one of `max_steps` and `num_train_epochs` is given.
    """

    output_dir: str = field(metadata={"help": "Directory for the model, its checkpoints and logs."})
    max_steps: int | None = flag(None, "Optimizer steps to train.")
    num_train_epochs: float | None = flag(None, "Passes over the data to train, instead of --max_steps.")
    per_device_batch_size: int = flag(32, "Examples per process and micro-batch.")
    gradient_accumulation_steps: int = flag(1, "Micro-batches per optimizer step.")
    optimizer: Literal["adamw", "lamb", "adafactor", "adagrad", "sgd", "asgd", "nt-asgd"] = flag(
        "adamw",
        "AdamW; LAMB for very large batches; Adafactor for moments of little memory; AdaGrad or plain SGD for word "
        "vectors; averaged SGD, from the start or (nt-asgd) once the held-out loss stops falling.",
    )
    scale_by_size: bool = flag(
        False,
        "Multiply the step of each parameter by its root mean square: adamw and adafactor, for models whose weights "
        "are of very different sizes, as T5's.",
    )
    average_after: int = flag(5, "Evaluations for which nt-asgd waits for a better held-out loss.")
    lr_reference_targets: float = flag(
        0.0, "Scale the learning rate of a step by its number of targets divided by this; 0: no scaling."
    )
    learning_rate: float = flag(1e-4, "Peak learning rate.")
    weight_decay: float = flag(0.01, "Decoupled weight decay, except for biases and normalisation weights.")
    adam_beta1: float = flag(0.9, "Decay of the first moment.")
    adam_beta2: float = flag(0.999, "Decay of the second moment.")
    adam_epsilon: float = flag(1e-6, "Added to the denominator.")
    lr_scheduler: Literal["linear", "cosine", "constant", "rsqrt", "slanted-triangular"] = flag(
        "linear",
        "Learning rate after the warm-up; rsqrt is that of T5, the inverse square root of the step, and the peak until "
        "then; slanted-triangular is that of ULMFiT.",
    )
    min_lr_rate: float = flag(0.0, "Lowest learning rate of cosine, as a share of the peak; GPT-3: 0.1.")
    slant_ratio: float = flag(32.0, "Ratio of the peak to the lowest rate of slanted-triangular.")
    warmup_steps: float = flag(0.0, "Steps of linear warm-up; a value below 1 is a share of all steps.")
    layerwise_lr_decay: float = flag(1.0, "Factor between the learning rates of adjacent layers; ULMFiT: 2.6.")
    head_learning_rate: float | None = flag(
        None, "Peak learning rate of the heads, everything above the encoder's layers; by default --learning_rate."
    )
    unfreeze_steps: float = flag(
        0.0, "Steps after which gradual unfreezing trains one more layer; below 1 a share of all; 0 trains all layers."
    )
    max_grad_norm: float = flag(1.0, "Clip the gradient to this norm; 0 does not clip.")
    mixed_precision: Literal["no", "bf16", "fp16"] | None = flag(
        None, "Precision of the forward pass; by default that of `accelerate launch`, else no."
    )
    seed: int = flag(42, "Seed of initialisation, data order, masks and dropout.")
    logging_steps: int = flag(50, "Steps between two log records.")
    eval_steps: int = flag(0, "Steps between two evaluations; 0 evaluates at the end only.")
    save_steps: int = flag(500, "Steps between two checkpoints; 0 saves at the end only.")
    save_total_limit: int = flag(2, "Newest checkpoints to keep.")
    resume: bool = flag(False, "Continue exactly from the newest checkpoint in --output_dir, if there is one.")
    overwrite: bool = flag(False, "Delete the run and the model in --output_dir, and start a new run.")
    report_to: Literal["none", "tensorboard", "trackio"] = flag("none", "Experiment tracker.")
    dataloader_workers: int | None = flag(
        None,
        "Background processes that make batches; 0 makes them in the training process. By default 1, or 0 with fewer "
        "than four CPU cores.",
    )

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.num_train_epochs is None):
            raise CtxError(
                f"The length of training is {'given twice' if self.max_steps is not None else 'missing'}.",
                location=f"--max_steps {self.max_steps} --num_train_epochs {self.num_train_epochs}",
                hint="give exactly one of --max_steps and --num_train_epochs.",
            )
        for name in ("max_steps", "num_train_epochs", "per_device_batch_size", "gradient_accumulation_steps"):
            self._require(name, above=0)
        for name in ("learning_rate", "logging_steps", "average_after", "save_total_limit", "adam_epsilon"):
            self._require(name, above=0)
        for name in ("weight_decay", "warmup_steps", "unfreeze_steps", "max_grad_norm", "eval_steps", "save_steps"):
            self._require(name, at_least=0)
        for name in ("slant_ratio", "layerwise_lr_decay"):
            self._require(name, at_least=1)
        self._require("head_learning_rate", above=0)
        for name in ("dataloader_workers", "seed", "lr_reference_targets"):
            self._require(name, at_least=0)
        if self.resume and self.overwrite:
            raise CtxError(
                "A run is either continued or overwritten.",
                location="--resume --overwrite",
                hint="leave one of them out.",
            )
        if self.min_lr_rate and (self.lr_scheduler != "cosine" or not 0 < self.min_lr_rate < 1):
            raise CtxError(
                "A lowest learning rate is a share of the peak, from 0 to below 1, and needs cosine decay.",
                location=f"--lr_scheduler {self.lr_scheduler} --min_lr_rate {self.min_lr_rate}",
                hint="leave it out, or use --lr_scheduler cosine --min_lr_rate 0.1, for example.",
            )
        if self.scale_by_size and self.optimizer not in ("adamw", "adafactor"):
            raise CtxError(
                "Steps are scaled by the size of the parameters with adamw and adafactor only.",
                location=f"--optimizer {self.optimizer} --scale_by_size",
                hint="leave it out, or use one of these optimizers.",
            )
        if self.lr_scheduler == "rsqrt" and not self.warmup_steps:
            raise CtxError(
                "The inverse square root of the step needs a step from which on it applies.",
                location="--lr_scheduler rsqrt --warmup_steps 0",
                hint="give --warmup_steps; T5: 10000.",
            )
        if self.optimizer == "nt-asgd" and not self.eval_steps:
            raise CtxError(
                "nt-asgd needs evaluations during training.",
                location="--optimizer nt-asgd --eval_steps 0",
                hint="give --eval_steps, or use --optimizer asgd.",
            )

    def _require(self, name: str, above: float | None = None, at_least: float | None = None) -> None:
        value = getattr(self, name)
        if value is None or (above is not None and value > above) or (at_least is not None and value >= at_least):
            return
        expected = f"above {above}" if above is not None else f"at least {at_least}"
        raise CtxError(f"--{name} must be {expected}.", location=f"--{name} {value}", hint=f"give a value {expected}.")

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of `total_steps`."""
        return _steps(self.warmup_steps, total_steps)

    def unfreezing(self, total_steps: int) -> int:
        """Steps between unfreezing two groups of layers in a run of `total_steps`; 0 for no freezing."""
        return max(1, _steps(self.unfreeze_steps, total_steps)) if self.unfreeze_steps else 0


def _steps(value: float, total_steps: int) -> int:
    """A number of steps, or a share of all if below 1."""
    return round(value * total_steps) if value < 1 else int(value)
