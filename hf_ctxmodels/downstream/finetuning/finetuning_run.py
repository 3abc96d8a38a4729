"""Fine-tuning of a model on a task: what is opened, trained and evaluated."""

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
from hf_ctxmodels.training.checkpoint.identity import flags_identity
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

# Flags of which a resumed run may have others, if the model's class, configuration and tokenizer are the same.
UNCOMPARED_FIELDS = ("family", "config_options", "model", "task_name", "predictions_file")


def load_config_and_tokenizer(
    arguments: StartingModelArguments, task: Task[Any], own: bool = False
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Configuration and tokenizer of the checkpoint, or of a new model; `own` opens it by a family of the package.

    Raises:
        CtxError: both --model and --family are given, or neither, or flags of one with the other; or they cannot be
            opened.
    """
    if (arguments.model is None) == (arguments.family is None):
        raise CtxError("Expected exactly one of --model and --family.", hint="give exactly one of them.")
    if arguments.model is not None:
        changes = parse_config_options(arguments.config_options)
        config = open_config(arguments.model, changes, arguments.task_name, own=own)
        set_embedding_fields(config)
        return config, load_tokenizer(arguments.model, split_words=task.split_words)
    new = arguments.family
    if new is None or new.tokenizer is None:
        raise CtxError("A new model needs a tokenizer.", location="--family", hint="write --family NAME:tokenizer=DIR.")
    tokenizer = load_tokenizer(new.tokenizer, split_words=task.split_words)
    prepare_for_tasks(tokenizer)
    family = get_family(new.family)
    config = new_config(family, tokenizer, new.config, arguments.config_options)
    for name, value in task.config_fields(tokenizer).items():
        if not hasattr(config, name):
            raise CtxError(
                f"The tokenizer has {name}={value}, for which {type(config).__name__} has no field.",
                location=f"--family {family.name}:tokenizer={new.tokenizer}",
                hint="use a tokenizer of that family.",
            )
        setattr(config, name, value)
    return config, tokenizer


def prepare_for_tasks(tokenizer: PreTrainedTokenizerBase, max_length: int = 0) -> None:
    """Add the special tokens that the family's inputs of tasks have beside those of pretraining, if any.

    Raises:
        CtxError: inputs of `max_length` tokens (0 for any) have no room for text beside them.
    """
    if isinstance(tokenizer, CtxTokenizer):
        tokenizer.prepare_for_tasks()
    check_max_length(tokenizer, max_length)


def fit_config_and_tokenizer(
    arguments: FinetuningArguments, task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Make tokenizer and configuration fit each other and the task; raises CtxError where they cannot."""
    length = task.arguments.max_length
    if arguments.language is not None:
        set_language(config, tokenizer, arguments.language, "--language")
    check_tokenizer_matches_model(tokenizer, config, length, location=arguments.model or "--family")
    prepare_for_tasks(tokenizer, length)
    set_generation_tokens(task, config, tokenizer)


def open_model(
    arguments: StartingModelArguments, task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The checkpoint's model with the task's head and embeddings of all tokens, or a new one.

    Raises:
        CtxError: it cannot be opened, or does not take what the task gives.
    """
    if arguments.model is None:
        model = new_model(task.auto_class, config)
    else:
        model = load_initial_model(arguments.model, task.auto_class, config, arguments.task_name)
        if len(tokenizer) > (known := getattr(config, "vocab_size", len(tokenizer))):
            print_status(f"{len(tokenizer) - known} new tokens get embeddings drawn as in a new model")
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            model.num_new_tokens = len(tokenizer) - known
    if task.is_generative:
        check_can_generate(model)
    known = inspect.signature(model.forward).parameters
    if missing := [name for name in task.required_inputs if name not in known]:
        raise CtxError(
            f"{type(model).__name__} does not take {', '.join(missing)}, which the task {task.name} needs.",
            location=arguments.model or "--family",
            hint="use a model of this package.",
        )
    if task.arguments.both_orders and not getattr(model, "accepts_both_orders", False):
        raise CtxError(
            f"{type(model).__name__} reads a pair in one order.", location="--both_orders", hint="leave it out."
        )
    return model


def require_unsharded_generation(task: Task[Any], accelerator: Accelerator) -> None:
    """Raise CtxError if predictions are written and the weights are divided among processes."""
    deepspeed = (
        accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    )
    divided = accelerator.distributed_type == DistributedType.FSDP or (deepspeed and deepspeed.zero_stage == 3)
    if task.is_generative and divided:
        raise CtxError(
            f"The task {task.name} writes predictions, which needs all weights in every process.",
            location=f"accelerate launch with {accelerator.distributed_type.value}",
            hint="use data parallelism, as in scripts/accelerate/ddp_cpu.yaml.",
        )


def training_set(
    file: str | None, task: Task[Any], encoded: Encoded, collate: Collator, model: Any, tokenizer: Any
) -> tuple[Any, Collator]:
    """What the loop trains on: examples with labels, in turn with those of a file without.

    Raises:
        CtxError: the head does not learn without labels, or the file cannot be read.
    """
    if file is None:
        return EpochIndexed(encoded.features), collate
    if "views" not in getattr(model, "loss_targets", ()):
        raise CtxError(
            f"{type(model).__name__} learns from labels alone.",
            location=f"--unlabelled_file {file}",
            hint="leave it out, or take a family that learns without them, such as cvt.",
        )
    unlabelled = task.encode(task.read_unlabelled(file), tokenizer).features
    return RoundRobinMixture([encoded.features, mark_unlabelled(unlabelled)]), UnlabelledCollator(collate)


def sample(examples: list[Any], size: int | None) -> list[Any]:
    """So many of the examples, drawn with a fixed seed; all of them for None.

    Raises:
        CtxError: there are not so many.
    """
    if size is None:
        return examples
    if not 0 < size <= len(examples):
        raise CtxError(
            f"There are {len(examples)} training examples.",
            location=f"--train_examples {size}",
            hint="give a number from 1 to that.",
        )
    return random.Random(0).sample(examples, size)


@dataclass(frozen=True)
class FinetuningResult:
    """A fine-tuned model and what it was fine-tuned by.

    Attributes:
        training, validation: The task's examples.
        evaluation: Of the validation examples.
        baseline: The metrics of `Task.baseline` for them.
        ceiling: What the metrics are at most (`Task.ceiling`).
    """

    task: Task[Any]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    accelerator: Accelerator
    training: list[Any]
    validation: list[Any]
    evaluation: TaskEvaluation
    baseline: dict[str, float]
    ceiling: dict[str, float]
    result: TrainingResult

    def save_summary(self, arguments: FinetuningArguments) -> None:
        """Leave `TrainingSummary` in the output directory, with the baseline of the main metric and the ceilings."""
        main_metric, value = next(iter(self.baseline.items()))
        self.result.metrics[f"baseline_{main_metric}"] = value
        self.result.metrics |= {f"ceiling_{name}": most for name, most in self.ceiling.items()}
        summary = self.result.summary(
            task=arguments.task,
            dataset=Path(arguments.train_file).name,
            max_length=self.task.arguments.max_length,
        )
        summary.save(self.result.arguments.output_dir)


Learn = Callable[[Task[Any], list[Any], Encoded, TrainingSetup, PreTrainedTokenizerBase], tuple[TrainingSetup, Any]]
"""Task, training examples, their encoding, model and collator, tokenizer -> what is trained, on what."""


def finetune(
    arguments: FinetuningArguments,
    task_arguments: TaskArguments,
    loop_arguments: LoopArguments,
    how: FinetuningConfig | None = None,
    learn: Learn | None = None,
) -> FinetuningResult:
    """Read, train, evaluate and save; `learn` puts something else in the model's place in the loop, as distillation.

    Raises:
        CtxError: Files, model, tokenizer and flags do not fit.
    """
    how = how or FinetuningConfig()
    task = TASKS[arguments.task](task_arguments)
    task.refuse_unread_flags()
    training, validation = task.read(arguments.train_file, "train"), task.read(arguments.validation_file, "validation")
    training = sample(training, arguments.train_examples)
    config, tokenizer = load_config_and_tokenizer(arguments, task, own=learn is not None)
    fit_config_and_tokenizer(arguments, task, config, tokenizer)
    task.configure(config, training, validation)
    accelerator = make_accelerator(loop_arguments)  # first: it says what device and processes there are
    shown = accelerator.is_main_process
    print_status(f"tokenizing {len(training):,} training and {len(validation):,} validation examples", shown)
    train_collate = training_collator(task, config, tokenizer, loop_arguments.seed, shown)
    encoded, held_out = task.encode(training, tokenizer), task.encode(validation, tokenizer)
    baseline, ceiling = task.score(validation, task.baseline(training, validation)), task.ceiling(validation)
    require_unsharded_generation(task, accelerator)

    model = open_model(arguments, task, config, tokenizer)
    methods = how.prepare(model, arguments.model, loop_arguments, accelerator)
    loss_function = TaskLoss(model, task.targets, resolve_label_smoothing(task, config))
    collate = task.collator(tokenizer)
    examples, train_collate = training_set(arguments.unlabelled_file, task, encoded, train_collate, model, tokenizer)
    how.methods.cache(model, tokenizer, [*encoded.features, *held_out.features], collate, accelerator)
    require_trainable(model)
    if how.low_bits is not None:
        how.low_bits.start(model, encoded.features, collate, loop_arguments.per_device_batch_size, accelerator)
    evaluation = TaskEvaluation(task, validation, held_out, collate, loop_arguments.per_device_batch_size)
    learner = TrainingSetup(model, train_collate)
    if learn is not None:
        learner, examples = learn(task, training, encoded, learner, tokenizer)
    result = train(
        learner.model,
        examples,
        learner.collate,
        loop_arguments,
        accelerator,
        tokenizer=tokenizer,
        evaluate=evaluation,
        loss_function=loss_function if learn is None else None,
        callbacks=methods,
        identity={
            **how.identity(model),
            **flags_identity(arguments, UNCOMPARED_FIELDS, files=("train_file", "validation_file", "unlabelled_file")),
            **asdict(task_arguments),
            **learner.identity,
        },
    )
    if how.low_bits is not None:
        how.low_bits.save(model, tokenizer, loop_arguments.output_dir, accelerator)
    return FinetuningResult(
        task, model, tokenizer, accelerator, training, validation, evaluation, baseline, ceiling, result
    )
