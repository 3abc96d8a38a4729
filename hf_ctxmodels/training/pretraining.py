"""Pretraining of any family from raw text, for `hf-ctxmodels pretrain`."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data import ExampleSet, Mixture
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.prepared import TOKENIZER_FOLDER
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import check_positions, check_tokenizer_matches_model
from hf_ctxmodels.training.accelerator import (
    load_weights_in_all_processes,
    make_accelerator,
    receives_weights,
    restore_determinism,
)
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint_files import check_run_directory
from hf_ctxmodels.training.corpora import (
    FILE_FLAGS,
    CorpusArguments,
    excluded_text,
    fetch_examples,
    make_examples,
    make_objective,
    objective_files,
    open_examples,
    prepared_objective,
)
from hf_ctxmodels.training.evaluation import (
    Examples,
    LossEvaluation,
    frequency_baselines,
    sample_batches,
    training_baselines,
    unlearned_losses,
)
from hf_ctxmodels.training.loop import Evaluate, TrainingLoop
from hf_ctxmodels.training.model_loading import (
    load_config,
    load_model,
    load_tokenizer,
    new_config,
    new_model,
    new_model_without_memory,
    parse_config_options,
    prepare_for_training,
    require_single_task,
)
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.token_embeddings import EmbeddingTrainingArguments
from hf_ctxmodels.training.training_log import plot_losses
from hf_ctxmodels.training.training_state import flags_identity
from hf_ctxmodels.training.training_step import Collate

_BATCHES_FOR_RATES = 50
# Fields that a resumed run may change, because the model's class, configuration and tokenizer and the objective with
# its options are compared.
_UNCOMPARED_FIELDS = ("family", "config", "config_options", "model", "tokenizer", "num_proc", "no_cache")


@dataclass(kw_only=True)
class PretrainingArguments(CorpusArguments):
    """Model, objective and data of pretraining."""

    config: str | None = flag(
        None, "Configuration of a new model: a size (tiny, mini, small, base, large) or a JSON file; default: tiny."
    )
    model: str | None = flag(
        None, "Checkpoint to continue from (directory or Hub id), of this package or of transformers."
    )
    config_options: list[str] = flag((), "Configuration fields to change, as key=value.")
    no_cache: bool = flag(
        False, "Keep the examples of a large text in memory, instead of in files in HF_HOME for later runs."
    )

    @property
    def tokenizer_source(self) -> str | None:
        """Directory or Hub id of the tokenizer, by default of the prepared examples, else of `model`."""
        prepared = self.prepared_directory
        return self.tokenizer or (str(prepared / TOKENIZER_FOLDER) if prepared is not None else self.model)


@dataclass(frozen=True)
class TrainingSetup:
    """The model that the loop trains, and its collator.

    Attributes:
        model: A model with a training loss. In evaluation mode it returns the output of the model that is saved, for
            batches of the objective's or the task's own collator.
        collate: List of examples -> a training batch.
        identity: JSON values that must be equal when the run is resumed, in addition to the flags.
    """

    model: PreTrainedModel
    collate: Collate
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingMixture:
    """The objective's examples mixed with others.

    Attributes:
        examples: The mixture.
        collate: Examples of the mixture -> a training batch.
        evaluate: The evaluation of all members.
        identity: JSON values that must be equal when the run is resumed, in addition to the flags.
        rates: The rates of the members, for `TrainingSummary.rates`.
    """

    examples: Mixture
    collate: Collate
    evaluate: Evaluate
    identity: Mapping[str, Any]
    rates: Mapping[str, float]


@dataclass(frozen=True)
class PretrainingExtensions:
    """Optional extensions of a pretraining run.

    Attributes:
        add_adapter: Adds an adapter to a pretrained model and freezes the other weights; returns JSON values that must
            be equal when the run is resumed.
        embedding_training: Train only the token embeddings of a pretrained model.
        make_setup: Wraps the model for another loss, as distillation does.
        make_mixture: Mixes the examples with others, as multi-task pretraining does: the objective, its examples, the
            model, the evaluation on held-out text or None -> the mixture.
    """

    add_adapter: Callable[[PreTrainedModel], dict[str, Any]] | None = None
    embedding_training: EmbeddingTrainingArguments | None = None
    make_setup: Callable[[PreTrainedModel, Objective], TrainingSetup] | None = None
    make_mixture: Callable[[Objective, Examples, PreTrainedModel, Evaluate | None], TrainingMixture] | None = None


@dataclass(frozen=True)
class PretrainingRun:
    """A training loop with its objective, training documents (None for prepared examples), examples, held-out examples
    or None, and the rates of a mixture for `TrainingSummary.rates`."""

    loop: TrainingLoop
    objective_name: str
    objective: Objective
    model: PreTrainedModel
    documents: Documents | None
    examples: Examples
    held_out: ExampleSet | None
    mixing_rates: dict[str, float]


def prepare_pretraining(
    arguments: PretrainingArguments,
    loop_arguments: LoopArguments,
    extensions: PretrainingExtensions = PretrainingExtensions(),
) -> PretrainingRun:
    """Load tokenizer, model and data of a run."""
    check_run_directory(loop_arguments, arguments.tokenizer_source)
    accelerator, seed = make_accelerator(loop_arguments), loop_arguments.seed
    add_adapter, embedding_training = extensions.add_adapter, extensions.embedding_training

    # tokenizer, objective, model
    tokenizer = load_tokenizer(require_tokenizer_source(arguments))
    prepared = arguments.open_prepared()
    if prepared is not None and arguments.model is None and arguments.family is None:
        arguments = replace(arguments, family=prepared.family)
    family = resolve_family(arguments)
    config = None if arguments.model is None else model_config(family, tokenizer, arguments)
    documents = held_out_documents = None
    if prepared is None:
        if config is not None:  # before the objective compares the length with the limit of its tokenizer
            check_positions(config, arguments.max_length)
        objective_name, objective = make_objective(family, tokenizer, arguments, seed)
        documents, held_out_documents = arguments.load()  # raises for a missing file before the model is built
    else:
        objective_name, objective = prepared_objective(prepared, family, tokenizer, arguments, seed)
        fetch_examples(arguments.dataset[0], prepared)
        arguments = replace(arguments, max_length=objective.max_length)
    if config is None and (add_adapter is not None or embedding_training is not None):
        raise CtxError(
            "An adapter or new embeddings are trained in a pretrained model, but no model is given.",
            location="--adapter" if embedding_training is None else "--train_only",
            hint="pass --model.",
        )
    if config is None:  # after the objective, which may add control codes to the tokenizer
        config = model_config(family, tokenizer, arguments)
    if any((add_adapter, embedding_training, extensions.make_setup)):
        load_weights_in_all_processes(accelerator)
    files = objective_files(objective)
    options = {name: value for name, value in objective.options.items() if name not in files}  # compared by content
    identity: dict[str, Any] = {"objective": objective_name, "objective_options": options}
    if embedding_training is not None:
        model_tokenizer = load_tokenizer(str(arguments.model))
        model = make_model(config, objective, model_tokenizer, arguments)
        model = embedding_training.apply(model, model_tokenizer, tokenizer, seed)
        check_tokenizer_matches_model(tokenizer, model.config, arguments.max_length, location=str(arguments.tokenizer))
        identity |= asdict(embedding_training)
    else:
        model = make_model(config, objective, tokenizer, arguments, receives_weights(accelerator))
        if add_adapter is not None:
            identity |= add_adapter(model)

    # data and evaluation
    if prepared is not None:
        examples, held_out = open_examples(prepared, objective)
        identity |= {"prepared": prepared.digest, "max_length": arguments.max_length}
    else:
        assert documents is not None
        identity = {**flags_identity(arguments, _UNCOMPARED_FIELDS, files=FILE_FLAGS), **identity}
        identity |= {f"objective_files.{name}": content for name, content in files.items()}
        examples, held_out = make_examples(
            documents,
            held_out_documents,
            arguments,
            objective,
            cache=not arguments.no_cache,
            show_progress=accelerator.is_main_process,
        )
    if excluded := excluded_text(examples):
        print_status(f"training text: {excluded}", accelerator.is_main_process)
    evaluate: Evaluate | None = None
    if held_out is not None:
        evaluate = LossEvaluation(held_out, objective.collate, loop_arguments.per_device_batch_size)

    setup, loss_function = TrainingSetup(model, objective.collate), objective.loss_function
    if extensions.make_setup is not None:
        setup, loss_function = extensions.make_setup(model, objective), None
    training_examples, collate, mixing_rates = examples, setup.collate, dict[str, float]()
    if extensions.make_mixture is not None:
        mixture = extensions.make_mixture(objective, examples, model, evaluate)
        training_examples, collate, evaluate = mixture.examples, mixture.collate, mixture.evaluate
        identity |= mixture.identity
        mixing_rates |= mixture.rates
    loop = TrainingLoop(
        setup.model,
        training_examples,
        collate,
        loop_arguments,
        accelerator,
        tokenizer=tokenizer,
        evaluate=evaluate,
        loss_function=loss_function,
        callbacks=[loss_function] if isinstance(loss_function, TrainerCallback) else [],
        identity={**identity, **setup.identity},
        contiguous=objective.sampling.contiguous,
    )
    return PretrainingRun(loop, objective_name, objective, model, documents, examples, held_out, mixing_rates)


@restore_determinism()
def pretrain(
    arguments: PretrainingArguments,
    loop_arguments: LoopArguments,
    extensions: PretrainingExtensions = PretrainingExtensions(),
) -> TrainingSummary:
    """Pretrain a model, an adapter (MAD-X's language adapters), or token embeddings; save model, tokenizer, log, loss
    curve and summary, with frequency baselines, in `output_dir`."""
    run = prepare_pretraining(arguments, loop_arguments, extensions)
    objective, examples, batch_size = run.objective, run.examples, loop_arguments.per_device_batch_size
    accelerator, result = run.loop.accelerator, run.loop.run()

    # baselines, summary and plot
    baselines: dict[str, float] = {}
    if run.held_out is not None and accelerator.is_main_process:
        print_status("computing the frequency baselines")
        result.metrics |= frequency_baselines(objective, examples, run.held_out, run.model, result.metrics, batch_size)
    elif extensions.make_setup is None and objective.has_heldout_loss and accelerator.is_main_process:
        losses = [record for record in result.curve if "loss" in record]
        baselines = training_baselines(objective, examples, run.model, losses[-1], batch_size) if losses else {}
    counts: Counter[str] = Counter()
    for batch in sample_batches(examples, _BATCHES_FOR_RATES * batch_size, batch_size):
        counts.update(objective.count_batch(objective.collate(batch)))
    summary = result.summary(
        task="pretraining",
        dataset=", ".join(arguments.dataset),
        max_length=objective.max_length,
        objective=run.objective_name,
        objective_options=objective.options,
        rates=objective.rates(counts) | run.mixing_rates,
        warnings=unlearned_losses(baselines or result.metrics),
    )
    if accelerator.is_main_process:
        output_dir = Path(loop_arguments.output_dir)
        summary.save(output_dir)
        plot_losses(summary.curve, output_dir / "training_curve.png", summary.baselines)
    accelerator.wait_for_everyone()
    return summary


def require_tokenizer_source(arguments: PretrainingArguments) -> str:
    """`arguments.tokenizer_source`; raises CtxError if it is None."""
    if arguments.tokenizer_source is None:
        raise CtxError(
            "No tokenizer is given.", location="--tokenizer", hint="train one with `hf-ctxmodels data tokenizer`."
        )
    return arguments.tokenizer_source


def resolve_family(arguments: PretrainingArguments) -> FamilySpec:
    """The family of the flags or of the model to continue from; raises CtxError if neither is given, the two differ, or
    the model has several tasks or belongs to no family."""
    family = None if arguments.family is None else FAMILIES[arguments.family]
    if arguments.model is None:
        if family is None:
            raise CtxError("No model family is given.", location="--family", hint=f"use one of: {', '.join(FAMILIES)}.")
        return family
    config = load_config(arguments.model)
    require_single_task(config, arguments.model)
    if family is not None and all(type(config) is not spec.config for spec in FAMILIES.values()):
        return family  # a reference checkpoint, which several families may open
    model_family = get_family(config)
    if family not in (None, model_family):
        raise CtxError(
            f"The model belongs to the family {model_family.name}, not {arguments.family}.",
            location=f"--model {arguments.model} --family {arguments.family}",
            hint="remove --family.",
        )
    return model_family


def model_config(
    family: FamilySpec, tokenizer: PreTrainedTokenizerBase, arguments: PretrainingArguments
) -> PreTrainedConfig:
    """The configuration of `--model`, or of a new model, with `--config_options`; raises CtxError if there is no such
    checkpoint or size."""
    if arguments.model is None:
        return new_config(family, tokenizer, arguments.config, arguments.config_options)
    if arguments.config is not None:  # for example from the recipe that the model was started with
        print_status(f"--config {arguments.config} is ignored: --model {arguments.model} has a configuration")
    return load_config(arguments.model, family.config, parse_config_options(arguments.config_options))


def make_model(
    config: PreTrainedConfig,
    objective: Objective,
    tokenizer: PreTrainedTokenizerBase,
    arguments: PretrainingArguments,
    without_memory: bool = False,
) -> PreTrainedModel:
    """The model to train, new or from a checkpoint, with its `model_config` and the objective's `config_fields`;
    `without_memory` in a process that receives the weights. Raises CtxError if the weights cannot be opened or are
    quantized, or tokenizer, length or objective do not fit."""
    source = str(arguments.model or arguments.config or arguments.family)
    check_tokenizer_matches_model(tokenizer, config, arguments.max_length, location=source)
    for name, value in objective.config_fields.items():
        if value is False and not hasattr(config, name):
            continue
        if not hasattr(config, name):
            raise CtxError(
                f"The objective needs the configuration field {name}, which {type(config).__name__} lacks.",
                location=source,
                hint="use another family, or other options of the objective.",
            )
        if arguments.model is not None and name in objective.immutable_config_fields and getattr(config, name) != value:
            raise CtxError(
                f"The model was trained with {name}={getattr(config, name)}, but the objective has {value}.",
                location=source,
                hint=f"pass --objective NAME:{name}={str(getattr(config, name)).lower()}."
                if name in objective.option_help()
                else "use the tokenizer that the model was trained with, or start a new model.",
            )
        setattr(config, name, value)
    if without_memory:
        config.dtype = torch.float32  # as of the weights that are received, see `prepare_for_training`
        return new_model_without_memory(objective.auto_class, config)
    if arguments.model is not None:
        model = load_model(arguments.model, objective.auto_class, config)
        prepare_for_training(model)
        return model
    return new_model(objective.auto_class, config)
