"""Fine-tuning of a model on a task."""

import inspect
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.auto_classes import has_class
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import MULTITASK_MODEL_TYPE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import check_can_generate
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.data import RoundRobinMixture, UnlabeledCollator, mark_unlabeled
from hf_ctxmodels.data.hub_datasets import source_name
from hf_ctxmodels.downstream.finetuning.arguments import (
    FinetuningArguments,
    FinetuningLoopArguments,
    FinetuningMethods,
    SharedDecoderOptions,
    StartingModelArguments,
)
from hf_ctxmodels.downstream.finetuning.feature_cache import cache_features
from hf_ctxmodels.downstream.finetuning.model_pairs import load_pair, open_pair
from hf_ctxmodels.downstream.finetuning.reinitialization import replace_label_weights
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation, learned_baseline_scores
from hf_ctxmodels.downstream.finetuning.task_loss import TaskLoss
from hf_ctxmodels.downstream.networks.configuration import CtxTaskNetworkConfig
from hf_ctxmodels.downstream.networks.creation import (
    NETWORK_LEARNING_RATE,
    TRAINED_ENCODER_OPTIONS,
    needs_network,
    new_network,
    parse_features,
)
from hf_ctxmodels.downstream.networks.modeling import CtxTaskNetworkModel
from hf_ctxmodels.downstream.tasks import TASKS, Encoded, Task, TaskArguments
from hf_ctxmodels.downstream.tasks.base import Collator
from hf_ctxmodels.downstream.tasks.languages import set_language
from hf_ctxmodels.layers.common import layer_shares
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.base import CtxTokenizer, check_max_length, check_tokenizer_matches_model, tokenizer_digest
from hf_ctxmodels.training.accelerator import make_accelerator, restore_determinism
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint_files import check_run_directory
from hf_ctxmodels.training.defaults import with_default_rates
from hf_ctxmodels.training.loop import TrainingLoop, TrainingResult
from hf_ctxmodels.training.model_loading import (
    change_config,
    convert_reference_config,
    load_config,
    load_family_config,
    load_model,
    load_tokenizer,
    new_config,
    new_model,
    parse_config_options,
    prepare_for_training,
    set_embedding_fields,
    verify_weights,
)
from hf_ctxmodels.training.pretraining import TrainingSetup
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_state import flags_identity
from hf_ctxmodels.training.training_step import EpochIndexed

# Fields that a resumed run may change, because the model's class, configuration and tokenizer are compared.
UNCOMPARED_FIELDS = ("family", "config_options", "model", "decoder", "task_name", "predictions_file")
DATA_FILES = ("train_file", "validation_file", "unlabeled_file")


def network_arguments(
    arguments: FinetuningArguments, loop_arguments: LoopArguments, task: Task[Any]
) -> tuple[FinetuningArguments, LoopArguments]:
    """The arguments; for a model without a head for the task, the arguments of a task network on its last layer,
    which is trained with it.

    The model has the learning rate of its fine-tuning, and the network by default at least `NETWORK_LEARNING_RATE`.
    """
    source = arguments.model
    if source is None or arguments.task_name is not None or arguments.decoder is not None:
        return arguments, loop_arguments
    config = load_config(source)
    if not needs_network(config, task.auto_class):
        return arguments, loop_arguments
    rate = with_default_rates(loop_arguments, config).learning_rate
    if loop_arguments.head_learning_rate is None and isinstance(rate, float):
        head_rate = max(rate, NETWORK_LEARNING_RATE)
        loop_arguments = replace(loop_arguments, learning_rate=rate, head_learning_rate=head_rate)
    options = [f"{name}={json.dumps(value)}" for name, value in TRAINED_ENCODER_OPTIONS.items()]
    network = replace(
        arguments, model=None, features=[f"encoder={source}"], config_options=[*options, *arguments.config_options]
    )
    print_status(
        f"{source} has no head for {task.name}: it is trained with a task network on its last layer",
        PartialState().is_main_process,
    )
    return network, loop_arguments


def load_config_and_tokenizer(
    arguments: StartingModelArguments, task: Task[Any], require_family: bool = False
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Load the configuration and the tokenizer of a checkpoint, or create the configuration of a new model.

    The configuration of a multi-task checkpoint is the configuration of a task's plain model. A reference checkpoint is
    opened as a model of its family, if the family supports it; with `require_family`, an error is raised if not.

    Raises:
        CtxError: Not exactly one of --model, --family and --features is given, they cannot be opened or have no head
            for the task, or a multi-task checkpoint needs a task, or has no such task.
    """
    if [arguments.model is not None, arguments.family is not None, bool(arguments.features)].count(True) != 1:
        raise CtxError(
            "Expected exactly one of --model, --family and --features.", hint="remove the others, or add one."
        )
    source, task_name, changes = arguments.model, arguments.task_name, parse_config_options(arguments.config_options)
    if arguments.features:
        check_has_head(CtxTaskNetworkConfig, task, "--features", "pass a model by --model.")
        return new_network(parse_features(arguments.features), changes)
    if arguments.decoder_model is not None:
        share_weights = isinstance(arguments.decoder, SharedDecoderOptions)
        return load_pair(str(source), arguments.decoder_model, share_weights, changes)
    if source is not None:
        config = load_config(source)
        if has_several_tasks(config, task_name, source):
            config = config.task_config(task_name)
        elif require_family:
            config = load_family_config(source)
        else:
            config = convert_reference_config(config, task.auto_class, source)
        config = change_config(config, changes, source)
        set_embedding_fields(config)
        tokenizer = load_tokenizer(source, split_words=task.split_words)
        if getattr(config, "pad_token_id", 0) is None:  # without it, classifiers of transformers refuse padded batches
            config.pad_token_id = tokenizer.pad_token_id
        return config, tokenizer
    options = arguments.family
    if options is None or options.tokenizer is None:
        raise CtxError("A new model needs a tokenizer.", location="--family", hint="write --family NAME:tokenizer=DIR.")
    tokenizer = load_tokenizer(options.tokenizer, split_words=task.split_words)
    prepare_for_tasks(tokenizer)
    family = get_family(options.family)
    check_has_head(family.config, task, f"--family {family.name}", "use another family.")
    config = new_config(family, tokenizer, options.config, arguments.config_options)
    for name, value in task.config_fields(tokenizer).items():
        if name not in type(config).__dataclass_fields__:  # a property cannot be set
            raise CtxError(
                f"The tokenizer has {name}={value}, for which {type(config).__name__} has no field.",
                location=f"--family {family.name}:tokenizer={options.tokenizer}",
                hint="use a tokenizer of that family.",
            )
        setattr(config, name, value)
    return config, tokenizer


def check_has_head(config_class: type[PreTrainedConfig], task: Task[Any], location: str, hint: str) -> None:
    """Raise CtxError if there is no head for a task."""
    if not has_class(task.auto_class, config_class):
        raise CtxError(
            f"{config_class.__name__.removesuffix('Config')} has no head for {task.name}.", location=location, hint=hint
        )


def has_several_tasks(config: PreTrainedConfig, task_name: str | None, source: str) -> bool:
    """Whether a configuration is of a multi-task model; raises CtxError unless exactly these have a `task_name`."""
    is_multitask = config.model_type == MULTITASK_MODEL_TYPE
    if is_multitask and task_name is None:
        raise CtxError(
            f"The model has several tasks: {', '.join(config.tasks or {})}.",
            location=source,
            hint="choose a task by --task_name.",
        )
    if not is_multitask and task_name is not None:
        raise CtxError(
            "The model was not trained on several tasks.",
            location=f"--model {source} --task_name {task_name}",
            hint="remove --task_name, or use a directory written by `finetune multitask`.",
        )
    return is_multitask


def read_examples(task: Task[Any], arguments: FinetuningArguments) -> tuple[list[Any], list[Any]]:
    """Training and validation examples; raises CtxError if there are fewer than `train_examples`."""
    training, validation = task.read_splits(arguments.train_file, arguments.validation_file)
    if (size := arguments.train_examples) is not None:
        if not 0 < size <= len(training):
            raise CtxError(
                f"There are {len(training)} training examples.",
                location=f"--train_examples {size}",
                hint=f"use a number from 1 to {len(training)}.",
            )
        training = random.Random(0).sample(training, size)  # the same subset for all seeds
    return training, validation


def prepare_for_tasks(tokenizer: PreTrainedTokenizerBase, max_length: int = 0) -> None:
    """Add the special tokens that the family uses only in fine-tuning; raises CtxError if inputs of `max_length` tokens
    (0 for any length) have no room for text."""
    if isinstance(tokenizer, CtxTokenizer):
        tokenizer.prepare_for_tasks()
    check_max_length(tokenizer, max_length)


def load_multitask_model(source: str) -> PreTrainedModel:
    """Load a multi-task model; raises CtxError if it cannot be opened, or its weights are damaged."""
    verify_weights(Path(source))
    return load_pretrained(AutoModel, source, "the multi-task model")


def open_model(
    arguments: StartingModelArguments,
    task: Task[Any],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    multitask_model: PreTrainedModel | None = None,
    *,
    require_head: bool = False,
) -> PreTrainedModel:
    """Load the checkpoint or create a new model, with the task's head and embeddings for all tokens.

    `multitask_model` is the model of a multi-task checkpoint if it is already loaded. With `require_head`, for
    predictions, the task's projected attention layers are added to the model. Raises CtxError if the model lacks an
    input that the task needs, with `require_head` if the checkpoint has no such head, and without it if the checkpoint
    has projected attention layers, which a model of one task cannot save.
    """
    source, task_name = arguments.model, arguments.task_name
    if source is None:
        model = new_model(task.auto_class, config)
    elif arguments.decoder_model is not None:
        model = open_pair(source, arguments.decoder_model, config)
    else:
        weights = None
        if task_name is not None:
            multitask_model = load_multitask_model(source) if multitask_model is None else multitask_model
            weights = multitask_model.task_weights(task_name)
            if multitask_model.task_attention is not None and not require_head:
                raise CtxError(
                    "The model has projected attention layers, which a model of one task would lack.",
                    location=source,
                    hint="use a multi-task model without --adapter projected-attention.",
                )
        model = load_model(source, task.auto_class, config, weights=weights, require_head=require_head)
        if multitask_model is not None:
            multitask_model.add_task_attention(model, str(task_name))
        num_new_tokens = len(tokenizer) - getattr(config, "vocab_size", len(tokenizer))
        if num_new_tokens > 0:
            print_status(f"the embeddings of {num_new_tokens} new tokens are initialized as in a new model")
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            model.num_new_tokens = num_new_tokens
    if task.is_generative:
        check_can_generate(model)
    parameters = inspect.signature(model.forward).parameters
    if missing := [name for name in task.required_inputs if name not in parameters]:
        raise CtxError(
            f"{type(model).__name__} does not take {', '.join(missing)}, which the task {task.name} needs.",
            location=source or "--family",
            hint="use a model of this package.",
        )
    if task.arguments.both_orders and not getattr(model, "accepts_both_orders", False):
        raise CtxError(
            f"{type(model).__name__} does not support reading a pair in both orders.",
            location="--both_orders",
            hint="remove it.",
        )
    return model


def require_full_weights(task: Task[Any], accelerator: Accelerator) -> None:
    """Raise CtxError if the weights are sharded, so that a task cannot generate its predictions."""
    if accelerator.distributed_type == DistributedType.FSDP:
        raise CtxError(
            f"The task {task.name} generates predictions, which needs all weights in every process.",
            location="accelerate launch with FSDP",
            hint="use data parallelism, as in scripts/accelerate/ddp_cpu.yaml.",
        )


def make_training_set(
    unlabeled_file: str | None, task: Task[Any], encoded: Encoded, collate: Collator, model: Any, tokenizer: Any
) -> tuple[Any, Collator]:
    """Training examples and their collator; batches of unlabeled examples alternate with labeled ones. Raises
    CtxError if the head has no loss for unlabeled examples."""
    if unlabeled_file is None:
        return EpochIndexed(encoded.features), collate
    if "views" not in getattr(model, "loss_targets", ()):
        raise CtxError(
            f"{type(model).__name__} has no loss for unlabeled examples.",
            location=f"--unlabeled_file {unlabeled_file}",
            hint="remove it, or use a family with such a loss, such as cvt.",
        )
    unlabeled = task.encode(task.read_unlabeled(unlabeled_file), tokenizer).features
    examples = RoundRobinMixture([encoded.features, mark_unlabeled(unlabeled)])
    return examples, UnlabeledCollator(collate, per_example=task.is_generative)


@dataclass(frozen=True)
class FinetuningResult:
    """A fine-tuned model, its task and examples, and its metrics.

    Attributes:
        evaluation: The evaluation on the validation examples.
        baseline, upper_bounds: Metrics of `Task.baseline`, and `Task.upper_bounds`, on the validation examples.
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

    @cached_property
    def learned_baseline(self) -> dict[str, float]:
        """Metrics of `Task.learned_baseline`, computed at the first use; empty without one."""
        return learned_baseline_scores(self.task, self.training, self.validation)

    def save_summary(self, arguments: FinetuningArguments) -> TrainingSummary:
        """Write `TrainingSummary` into the output directory, with the main metric's baselines and the upper bounds."""
        main_metric, value = next(iter(self.baseline.items()))
        self.result.metrics[f"baseline_{main_metric}"] = value
        if self.learned_baseline:
            self.result.metrics[f"baseline_{main_metric}_tfidf"] = self.learned_baseline[main_metric]
        scores = {name: self.result.metrics[f"eval_{name}"] for name in self.baseline}
        self.result.metrics |= {f"upper_bound_{name}": bound for name, bound in self.upper_bounds.items()}
        dataset, max_length = ", ".join(map(source_name, arguments.train_file)), self.task.arguments.max_length
        summary = self.result.summary(
            task=arguments.task,
            dataset=dataset,
            max_length=max_length,
            columns=self.task.arguments.saved_columns(),
            layer_shares=layer_shares(self.model),
            warnings=self.evaluation.warnings(scores, self.learned_baseline),
        )
        summary.save(self.result.arguments.output_dir)
        return summary


MakeTrainingSetup = Callable[
    [Task[Any], list[Any], Encoded, TrainingSetup, PreTrainedTokenizerBase], tuple[TrainingSetup, Any]
]
"""Task, training examples, their encoding, model with collator, tokenizer -> model with collator, training examples."""


@restore_determinism()
def finetune(
    arguments: FinetuningArguments,
    task_arguments: TaskArguments,
    loop_arguments: LoopArguments,
    methods: FinetuningMethods | None = None,
    make_setup: MakeTrainingSetup | None = None,
) -> FinetuningResult:
    """Fine-tune a model on a task, evaluate it, and save it.

    Args:
        arguments: Model and data.
        task_arguments, loop_arguments: Options of the task and of the training loop.
        methods: Fine-tuning methods, adapters and low-bit weights; None for plain fine-tuning.
        make_setup: Wraps the model for another loss, as distillation does; None trains the model itself.

    Raises:
        CtxError: Files, model, tokenizer and flags do not match each other.
    """
    methods = methods or FinetuningMethods()
    batch_size = loop_arguments.per_device_batch_size

    # examples, configuration, tokenizer
    check_run_directory(loop_arguments, arguments.tokenizer_source)
    if methods.cache_directory is not None and loop_arguments.dtype is None:
        loop_arguments = replace(loop_arguments, dtype="float32")  # the features are cached in the type of the weights
    accelerator = make_accelerator(loop_arguments, unused_parameters=methods.weights.unfreezes_layers)
    task = TASKS[arguments.task](task_arguments)
    task.check_unused_arguments()
    is_new_model = arguments.model is None
    arguments, loop_arguments = network_arguments(arguments, loop_arguments, task)
    config, tokenizer = load_config_and_tokenizer(arguments, task, require_family=make_setup is not None)
    training, validation = read_examples(task, arguments)
    if arguments.language is not None:
        set_language(config, tokenizer, arguments.language, "--language")
    location = arguments.model or ("--features" if arguments.features else "--family")
    check_tokenizer_matches_model(tokenizer, config, task_arguments.max_length, location=location)
    prepare_for_tasks(tokenizer, task_arguments.max_length)
    task.set_token_fields(config, tokenizer)
    task.configure(config, training, validation)

    is_main = accelerator.is_main_process
    print_status(f"tokenizing {len(training):,} training and {len(validation):,} validation examples", is_main)
    train_collate = task.training_collator(config, tokenizer, loop_arguments.seed, is_main)
    encoded, validation_encoded = task.encode(training, tokenizer), task.encode(validation, tokenizer)
    baseline = task.score(validation, task.baseline(training, validation))
    upper_bounds = task.upper_bounds(validation)
    if task.is_generative:
        require_full_weights(task, accelerator)

    # model, loss, fine-tuning methods
    if isinstance(loop_arguments, FinetuningLoopArguments):
        loop_arguments = replace(loop_arguments, is_new_model=is_new_model)
    model = open_model(arguments, task, config, tokenizer)
    prepare_for_training(model)
    if task.replaced_labels and arguments.model is not None:
        replace_label_weights(model, loop_arguments.seed)
        labels = (", ".join(names[:6]) + ", ..." * (len(names) > 6) for names in (task.replaced_labels, task.labels))
        print_status(
            "the head of {} for the labels {} is replaced by a new one for {}".format(arguments.model, *labels), is_main
        )
    callbacks = methods.prepare(model, arguments.model, loop_arguments, accelerator)
    loss_function = TaskLoss(model, task.targets, task.label_smoothing(config))
    collate = task.collator(tokenizer)
    examples, train_collate = make_training_set(
        arguments.unlabeled_file, task, encoded, train_collate, model, tokenizer
    )
    inputs = (collate([feature]) for feature in (*encoded.features, *validation_encoded.features))
    if methods.cache_directory is not None:
        model.to(accelerator.device)
        with accelerator.main_process_first():
            cache_features(
                model, methods.cache_directory, list(inputs), tokenizer_digest(tokenizer), show_progress=is_main
            )
    elif isinstance(model.base_model, CtxTaskNetworkModel):
        model.to(accelerator.device)
        model.base_model.cache_vectors(inputs, show_progress=is_main)
    if methods.low_bits is not None:
        methods.low_bits.start(model, encoded.features, collate, batch_size, accelerator)

    # training
    evaluation = TaskEvaluation(task, validation, validation_encoded, collate, batch_size)
    setup = TrainingSetup(model, train_collate)
    if make_setup is not None:
        setup, examples = make_setup(task, training, encoded, setup, tokenizer)
    result = TrainingLoop(
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
            **methods.identity(model),
            **flags_identity(arguments, UNCOMPARED_FIELDS, DATA_FILES),
            **asdict(task_arguments),
            **setup.identity,
        },
    ).run()
    if methods.low_bits is not None:
        methods.low_bits.save(model, tokenizer, loop_arguments.output_dir, accelerator)
    return FinetuningResult(
        task, model, tokenizer, accelerator, training, validation, evaluation, baseline, upper_bounds, result
    )
