"""Defaults of training that follow from the model, the objective and the data.

They apply to the flags that are not set. `model_cards/experiments/defaults.md` has the measurements behind them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.core.console import format_count
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flat_options, non_default_fields, parse_choice
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import TrainingDefaults, initializer_range_for_width
from hf_ctxmodels.training.arguments import (
    OPTIMIZERS,
    AdafactorOptions,
    AdamOptions,
    AdamWOptions,
    ConstantOptions,
    CosineOptions,
    LinearOptions,
    LoopArguments,
    MuonOptions,
    OptimizerOptions,
)

BASE_WIDTH, BASE_LAYERS = 768, 12  # BERT-base
PRETRAINING_RATE, FINETUNING_RATE = 1.4e-4, 5e-5  # of Adam, for BERT-base
MUON_PRETRAINING_RATE = 2.8e-4  # of Muon and its AdamW, extrapolated from the size `tiny` to BERT-base
# of steps multiplied by the root mean square of the parameter
SCALED_PRETRAINING_RATE, SCALED_FINETUNING_RATE = 1e-2, 1e-3
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv 2203.15556), table 3
MAX_PRETRAINING_EPOCHS = 40  # Devlin et al. 2019, appendix A.2
# Devlin et al. 2019, appendix A.3; Mosbach et al. 2021 (arXiv 2006.04884), section 6: more epochs for small datasets
MIN_FINETUNING_EPOCHS, MAX_FINETUNING_EPOCHS, FINETUNING_STEPS = 3, 20, 500


def family_defaults(config: PreTrainedConfig | None) -> TrainingDefaults:
    """The defaults of the family of a configuration, or of Transformers for a model of no family."""
    return next((family.training for family in FAMILIES.values() if type(config) is family.config), TrainingDefaults())


def rate_for_size(config: PreTrainedConfig | None, base_rate: float) -> float:
    """The peak learning rate of Adam: `base_rate` for BERT-base, and proportional to 1 / width (Yang et al. 2022, arXiv
    2203.03466, table 3) and to 1 / sqrt(layers) (Yang et al. 2024, arXiv 2310.02244), with two significant digits.

    Example:
        >>> from hf_ctxmodels import CtxBertConfig
        >>> rate_for_size(CtxBertConfig(hidden_size=192, num_hidden_layers=4), base_rate=1.4e-4)
        0.00097
    """
    width, layers = _width_and_layers(config)
    return float(f"{base_rate * BASE_WIDTH / width * math.sqrt(BASE_LAYERS / layers):.2g}")


def _width_and_layers(config: Any) -> tuple[int, int]:
    """Hidden size, and number of layers in the encoder or in the decoder."""
    if config is None:
        return BASE_WIDTH, BASE_LAYERS
    return getattr(config, "hidden_size", BASE_WIDTH), max(1, getattr(config, "num_hidden_layers", None) or 1)


def with_default_rates(arguments: LoopArguments, config: PreTrainedConfig | None) -> LoopArguments:
    """The arguments with an optimizer, its learning rate, and warm-up steps.

    Raises:
        CtxError: No learning rate is set, and there is no rule for the optimizer.
    """
    optimizer = arguments.optimizer or _family_optimizer(arguments, config)
    rate, warmup, scheduler = arguments.learning_rate, arguments.warmup_steps, arguments.lr_scheduler
    if rate is None:
        rate, _ = _default_rate(arguments, optimizer, config)
    if warmup is None:
        if isinstance(scheduler, ConstantOptions):
            warmup = 0  # the length of the run may change
        elif isinstance(scheduler, LinearOptions | CosineOptions) and not isinstance(
            optimizer, AdamOptions | AdafactorOptions
        ):
            warmup = 0  # there are no second moments to estimate
    return replace(arguments, optimizer=optimizer, learning_rate=rate, warmup_steps=warmup)


def _family_optimizer(arguments: LoopArguments, config: PreTrainedConfig | None) -> OptimizerOptions:
    defaults = family_defaults(config)
    name = defaults.finetuning_optimizer if arguments.is_finetuning else defaults.optimizer
    return parse_choice(name, OPTIMIZERS, "--optimizer")


def _default_rate(
    arguments: LoopArguments, optimizer: OptimizerOptions, config: PreTrainedConfig | None
) -> tuple[float, bool]:
    """The learning rate of an optimizer, and whether it depends on the size of the model."""
    defaults = family_defaults(config)
    rate = defaults.architecture_rates.get(getattr(config, "architecture", ""), defaults.learning_rate)
    if rate is not None and not arguments.is_finetuning and optimizer == _family_optimizer(arguments, config):
        return rate, False
    if isinstance(optimizer, MuonOptions) and not arguments.has_pretrained_weights and defaults.optimizer == "adamw":
        return rate_for_size(config, MUON_PRETRAINING_RATE), True
    if not isinstance(optimizer, AdamWOptions | AdafactorOptions):
        name = type(optimizer).__name__.removesuffix("Options")
        weights = " and pretrained weights" if arguments.has_pretrained_weights else ""
        raise CtxError(
            f"{name} has no default learning rate for this family{weights}.",
            location="--optimizer",
            hint="pass --learning_rate.",
        )
    if optimizer.scale_by_size:
        return (SCALED_FINETUNING_RATE if arguments.has_pretrained_weights else SCALED_PRETRAINING_RATE), False
    return rate_for_size(config, FINETUNING_RATE if arguments.has_pretrained_weights else PRETRAINING_RATE), True


def finetuning_epochs(num_examples: int, batch_size: int) -> float:
    """Passes over the examples for about `FINETUNING_STEPS` steps, from `MIN_FINETUNING_EPOCHS` to
    `MAX_FINETUNING_EPOCHS`."""
    epochs = math.ceil(FINETUNING_STEPS * batch_size / max(num_examples, 1))
    return float(min(max(MIN_FINETUNING_EPOCHS, epochs), MAX_FINETUNING_EPOCHS))


def with_default_length(
    arguments: LoopArguments,
    model: PreTrainedModel,
    num_examples: int | None,
    batch_size: int,
    tokens_per_example: Callable[[], float],
) -> LoopArguments:
    """The arguments with a number of epochs or steps.

    Fine-tuning takes `finetuning_epochs`. Pretraining takes the family's number of epochs, or `TOKENS_PER_PARAMETER`
    tokens for each parameter, but at most `MAX_PRETRAINING_EPOCHS`.

    Args:
        num_examples: Examples per epoch; None for a stream.
        batch_size: Examples per step.
    """
    if arguments.max_steps is not None or arguments.num_train_epochs is not None:
        return arguments
    if arguments.is_finetuning and num_examples is not None:
        return replace(arguments, num_train_epochs=finetuning_epochs(num_examples, batch_size))
    if (epochs := family_defaults(model.config).num_train_epochs) is not None and num_examples is not None:
        return replace(arguments, num_train_epochs=epochs)
    steps = math.ceil(TOKENS_PER_PARAMETER * model.num_parameters() / tokens_per_example() / batch_size)
    if num_examples is not None:
        steps = min(steps, math.ceil(MAX_PRETRAINING_EPOCHS * num_examples / batch_size))
    return replace(arguments, max_steps=steps)


def describe_defaults(
    arguments: LoopArguments, resolved: LoopArguments, config: PreTrainedConfig, total_steps: int
) -> str:
    """One line with the values chosen by default and their reasons; empty if all flags are set."""
    width, layers = _width_and_layers(config)
    length = format_count(total_steps, "step")
    if (epochs := resolved.num_train_epochs) is not None:
        length += f" ({epochs:g} epoch{'' if epochs == 1 else 's'})"
    elif family_defaults(config).num_train_epochs is None:
        length += f" ({TOKENS_PER_PARAMETER} tokens per parameter, at most {MAX_PRETRAINING_EPOCHS} epochs)"
    chosen = []
    initializer_range = initializer_range_for_width(width)
    has_new_weights = not config.name_or_path
    if has_new_weights and getattr(config, "initializer_range", None) == initializer_range:
        chosen.append(f"initializer_range {initializer_range:g} (width {width})")
    if has_new_weights and getattr(config, "convolutional_initialization", False):
        chosen.append("convolutional initialization")
    options = flat_options(resolved)
    if arguments.optimizer is None:
        chosen.append(str(options["optimizer"]))
    if arguments.learning_rate is None and resolved.optimizer is not None:
        rate, is_by_size = _default_rate(resolved, resolved.optimizer, config)
        chosen.append(f"learning rate {rate:g}" + (f" (width {width}, {layers} layers)" if is_by_size else ""))
    if arguments.warmup_steps is None:
        warmup = resolved.warmup(total_steps)
        share = f" ({100 * warmup / total_steps:.0f}%)" if warmup else ""
        chosen.append(f"{format_count(warmup, 'step')} of warm-up{share}")
    if "lr_scheduler" not in non_default_fields(arguments):
        chosen.append(f"{options['lr_scheduler']} schedule")
    if arguments.max_steps is None and arguments.num_train_epochs is None:
        chosen.append(length)
    return f"defaults: {', '.join(chosen)}" if chosen else ""
