"""Fine-tuning of a model on a task."""

import inspect
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import check_can_generate
from hf_ctxmodels.data import RoundRobinMixture, UnlabelledCollator, mark_unlabelled
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningArguments, StartingModelArguments
from hf_ctxmodels.downstream.finetuning.configuration import FinetuningConfig
from hf_ctxmodels.downstream.finetuning.language import set_language
from hf_ctxmodels.downstream.finetuning.seq2seq_targets import (
    resolve_label_smoothing,
    set_generation_tokens,
    training_collator,
)
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.downstream.finetuning.task_loss import TaskLoss
from hf_ctxmodels.downstream.multitask.checkpoint_loading import load_initial_model, open_config
from hf_ctxmodels.downstream.tasks import TASKS, Encoded, Task, TaskArguments
from hf_ctxmodels.downstream.tasks.base import Collator
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.base import CtxTokenizer, check_max_length, check_tokenizer_matches_model
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.batches import EpochIndexed
from hf_ctxmodels.training.loop import TrainingResult, make_accelerator, train
from hf_ctxmodels.training.model_loading import (
    load_tokenizer,
    new_config,
    new_model,
    parse_config_options,
    require_trainable,
    set_embedding_fields,
)
from hf_ctxmodels.training.pretraining import TrainingSetup
from hf_ctxmodels.training.training_state import flags_identity

# Fields that a resumed run may change, because the model's class, configuration and tokenizer are compared.
UNCOMPARED_FIELDS = ("family", "config_options", "model", "task_name", "predictions_file")


def load_config_and_tokenizer(
    arguments: StartingModelArguments, task: Task[Any], require_family: bool = False
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Load the configuration and the tokenizer of a checkpoint, or create the configuration of a new model.

    Args:
        arguments: The flags.
        task: The task.
        require_family: Whether to open reference checkpoints with a family of this package.

    Raises:
        CtxError: Not exactly one of --model and --family is given, or they cannot be opened.
    """
    if (arguments.model is None) == (arguments.family is None):
        raise CtxError("Expected exactly one of --model and --family.", hint="remove one of them, or add one.")
    if arguments.model is not None:
        changes = parse_config_options(arguments.config_options)
        config = open_config(arguments.model, changes, arguments.task_name, require_family=require_family)
        set_embedding_fields(config)
        return config, load_tokenizer(arguments.model, split_words=task.split_words)
    new_model_options = arguments.family
    if new_model_options is None or new_model_options.tokenizer is None:
        raise CtxError("A new model needs a tokenizer.", location="--family", hint="write --family NAME:tokenizer=DIR.")
    tokenizer = load_tokenizer(new_model_options.tokenizer, split_words=task.split_words)
    prepare_for_tasks(tokenizer)
    family = get_family(new_model_options.family)
    config = new_config(family, tokenizer, new_model_options.config, arguments.config_options)
    for name, value in task.config_fields(tokenizer).items():
        if not hasattr(config, name):
            raise CtxError(
                f"The tokenizer has {name}={value}, for which {type(config).__name__} has no field.",
                location=f"--family {family.name}:tokenizer={new_model_options.tokenizer}",
                hint="use a tokenizer of that family.",
            )
        setattr(config, name, value)
    return config, tokenizer


def prepare_for_tasks(tokenizer: PreTrainedTokenizerBase, max_length: int = 0) -> None:
    """Add the special tokens that the family uses in fine-tuning but not in pretraining, if any.

    Raises:
        CtxError: Inputs of `max_length` tokens (0 for any length) have no room for text besides special tokens.
    """
    if isinstance(tokenizer, CtxTokenizer):
        tokenizer.prepare_for_tasks()
    check_max_length(tokenizer, max_length)


def fit_config_and_tokenizer(
    arguments: FinetuningArguments, task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Adapt configuration and tokenizer to the task: language, special tokens, generation tokens.

    Raises:
        CtxError: They do not match each other or the task.
    """
    length = task.arguments.max_length
    if arguments.language is not None:
        set_language(config, tokenizer, arguments.language, "--language")
    check_tokenizer_matches_model(tokenizer, config, length, location=arguments.model or "--family")
    prepare_for_tasks(tokenizer, length)
    set_generation_tokens(task, config, tokenizer)


def open_model(
    arguments: StartingModelArguments, task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load the checkpoint or create a new model, with the task's head and embeddings for all tokens.

    Raises:
        CtxError: The model cannot be opened, or lacks an input that the task needs.
    """
    if arguments.model is None:
        model = new_model(task.auto_class, config)
    else:
        model = load_initial_model(arguments.model, task.auto_class, config, arguments.task_name)
        num_new_tokens = len(tokenizer) - getattr(config, "vocab_size", len(tokenizer))
        if num_new_tokens > 0:
            print_status(f"the embeddings of {num_new_tokens} new tokens are initialised as in a new model")
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            model.num_new_tokens = num_new_tokens
    if task.is_generative:
        check_can_generate(model)
    parameters = inspect.signature(model.forward).parameters
    if missing := [name for name in task.required_inputs if name not in parameters]:
        raise CtxError(
            f"{type(model).__name__} does not take {', '.join(missing)}, which the task {task.name} needs.",
            location=arguments.model or "--family",
            hint="use a model of this package.",
        )
    if task.arguments.both_orders and not getattr(model, "accepts_both_orders", False):
        raise CtxError(
            f"{type(model).__name__} does not support reading a pair in both orders.",
            location="--both_orders",
            hint="remove it.",
        )
    return model


def require_unsharded_generation(task: Task[Any], accelerator: Accelerator) -> None:
    """Raise CtxError if the task generates predictions and the weights are sharded."""
    deepspeed = (
        accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    )
    is_sharded = accelerator.distributed_type == DistributedType.FSDP or (deepspeed and deepspeed.zero_stage == 3)
    if task.is_generative and is_sharded:
        raise CtxError(
            f"The task {task.name} generates predictions, which needs all weights in every process.",
            location=f"accelerate launch with {accelerator.distributed_type.value}",
            hint="use data parallelism, as in scripts/accelerate/ddp_cpu.yaml.",
        )


def make_training_set(
    unlabelled_file: str | None, task: Task[Any], encoded: Encoded, collate: Collator, model: Any, tokenizer: Any
) -> tuple[Any, Collator]:
    """Training examples and their collator; batches of unlabelled examples alternate with labelled ones.

    Raises:
        CtxError: The head has no loss for unlabelled examples, or the file cannot be read.
    """
    if unlabelled_file is None:
        return EpochIndexed(encoded.features), collate
    if "views" not in getattr(model, "loss_targets", ()):
        raise CtxError(
            f"{type(model).__name__} has no loss for unlabelled examples.",
            location=f"--unlabelled_file {unlabelled_file}",
            hint="remove it, or use a family with such a loss, such as cvt.",
        )
    unlabelled = task.encode(task.read_unlabelled(unlabelled_file), tokenizer).features
    return RoundRobinMixture([encoded.features, mark_unlabelled(unlabelled)]), UnlabelledCollator(collate)


def sample_examples(examples: list[Any], size: int | None) -> list[Any]:
    """A fixed random subset of `size` examples; all of them for None.

    Raises:
        CtxError: There are fewer examples.
    """
    if size is None:
        return examples
    if not 0 < size <= len(examples):
        raise CtxError(
            f"There are {len(examples)} training examples.",
            location=f"--train_examples {size}",
            hint=f"use a number from 1 to {len(examples)}.",
        )
    return random.Random(0).sample(examples, size)


@dataclass(frozen=True)
class FinetuningResult:
    """A fine-tuned model, its data and its metrics.

    Attributes:
        task: The task, after `configure`.
        model: The fine-tuned model.
        tokenizer: Its tokenizer.
        accelerator: The run's Accelerator.
        training, validation: Training and validation examples.
        evaluation: The evaluation on the validation examples.
        baseline: Metrics of `Task.baseline` on the validation examples.
        upper_bounds: Upper bounds of the metrics (`Task.upper_bounds`).
        result: The result of the training loop.
    """

    task: Task[Any]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    accelerator: Accelerator
    training: list[Any]
    validation: list[Any]
    evaluation: TaskEvaluation
    baseline: dict[str, float]
    upper_bounds: dict[str, float]
    result: TrainingResult

    def save_summary(self, arguments: FinetuningArguments) -> None:
        """Write `TrainingSummary` into the output directory, with the main metric's baseline and the upper bounds."""
        main_metric, value = next(iter(self.baseline.items()))
        self.result.metrics[f"baseline_{main_metric}"] = value
        self.result.metrics |= {f"ceiling_{name}": bound for name, bound in self.upper_bounds.items()}
        summary = self.result.summary(
            task=arguments.task,
            dataset=Path(arguments.train_file).name,
            max_length=self.task.arguments.max_length,
        )
        summary.save(self.result.arguments.output_dir)


MakeTrainingSetup = Callable[
    [Task[Any], list[Any], Encoded, TrainingSetup, PreTrainedTokenizerBase], tuple[TrainingSetup, Any]
]
"""Task, training examples, their encoding, model with collator, tokenizer -> model with collator, training examples."""


def finetune(
    arguments: FinetuningArguments,
    task_arguments: TaskArguments,
    loop_arguments: LoopArguments,
    finetuning_config: FinetuningConfig | None = None,
    make_setup: MakeTrainingSetup | None = None,
) -> FinetuningResult:
    """Fine-tune a model on a task, evaluate it, and save it.

    Args:
        arguments: Model and data.
        task_arguments: Options of the task.
        loop_arguments: Arguments of the training loop.
        finetuning_config: Fine-tuning methods, adapters and low-bit weights; None for plain fine-tuning.
        make_setup: Wraps the model for another loss, as distillation does; None trains the model itself.

    Raises:
        CtxError: Files, model, tokenizer and flags do not match each other.
    """
    finetuning_config = finetuning_config or FinetuningConfig()
    batch_size = loop_arguments.per_device_batch_size

    # data, configuration, tokenizer
    task = TASKS[arguments.task](task_arguments)
    task.check_unused_arguments()
    training, validation = task.read(arguments.train_file, "train"), task.read(arguments.validation_file, "validation")
    training = sample_examples(training, arguments.train_examples)
    config, tokenizer = load_config_and_tokenizer(arguments, task, require_family=make_setup is not None)
    fit_config_and_tokenizer(arguments, task, config, tokenizer)
    task.configure(config, training, validation)
    accelerator = make_accelerator(loop_arguments)
    is_main = accelerator.is_main_process
    print_status(f"tokenizing {len(training):,} training and {len(validation):,} validation examples", is_main)
    train_collate = training_collator(task, config, tokenizer, loop_arguments.seed, is_main)
    encoded, validation_encoded = task.encode(training, tokenizer), task.encode(validation, tokenizer)
    baseline = task.score(validation, task.baseline(training, validation))
    upper_bounds = task.upper_bounds(validation)
    require_unsharded_generation(task, accelerator)

    # model, loss, fine-tuning methods
    model = open_model(arguments, task, config, tokenizer)
    callbacks = finetuning_config.prepare(model, arguments.model, loop_arguments, accelerator)
    loss_function = TaskLoss(model, task.targets, resolve_label_smoothing(task, config))
    collate = task.collator(tokenizer)
    examples, train_collate = make_training_set(
        arguments.unlabelled_file, task, encoded, train_collate, model, tokenizer
    )
    finetuning_config.methods.cache(
        model, tokenizer, [*encoded.features, *validation_encoded.features], collate, accelerator
    )
    require_trainable(model)
    if finetuning_config.low_bits is not None:
        finetuning_config.low_bits.start(model, encoded.features, collate, batch_size, accelerator)

    evaluation = TaskEvaluation(task, validation, validation_encoded, collate, batch_size)
    setup = TrainingSetup(model, train_collate)
    if make_setup is not None:
        setup, examples = make_setup(task, training, encoded, setup, tokenizer)
    result = train(
        setup.model,
        examples,
        setup.collate,
        loop_arguments,
        accelerator,
        tokenizer=tokenizer,
        evaluate=evaluation,
        loss_function=loss_function if make_setup is None else None,
        callbacks=callbacks,
        identity={
            **finetuning_config.identity(model),
            **flags_identity(arguments, UNCOMPARED_FIELDS, files=("train_file", "validation_file", "unlabelled_file")),
            **asdict(task_arguments),
            **setup.identity,
        },
    )
    if finetuning_config.low_bits is not None:
        finetuning_config.low_bits.save(model, tokenizer, loop_arguments.output_dir, accelerator)
    return FinetuningResult(
        task, model, tokenizer, accelerator, training, validation, evaluation, baseline, upper_bounds, result
    )
