"""Pretraining of any family from raw text, for `hf-ctxmodels pretrain`."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag, split_choice, typed_options
from hf_ctxmodels.data import DataArguments, ExampleSet, build_training_set
from hf_ctxmodels.data.examples import Example, ExampleBuilder
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.batches import Collate
from hf_ctxmodels.training.checkpoint.identity import flags_identity
from hf_ctxmodels.training.loop import make_accelerator, train
from hf_ctxmodels.training.metrics.baselines import Examples, frequency_baselines, sample_batches
from hf_ctxmodels.training.metrics.loss_evaluation import LossEvaluation
from hf_ctxmodels.training.metrics.summary import TrainingSummary
from hf_ctxmodels.training.metrics.training_log import plot_losses
from hf_ctxmodels.training.model_loading import (
    load_config,
    load_model,
    load_tokenizer,
    new_config,
    new_model,
    parse_config_options,
    require_single_task,
    require_trainable,
)
from hf_ctxmodels.training.token_embeddings import EmbeddingTrainingArguments

_BATCHES_FOR_RATES = 50
# Flags of which a resumed run may have others, if the model's class, configuration and tokenizer and the objective with
# its options are the same.
_UNCOMPARED_FIELDS = ("family", "config", "config_options", "model", "tokenizer")


@dataclass(kw_only=True)
class PretrainingArguments(DataArguments):
    """Model, objective and data of pretraining."""

    tokenizer: str | None = flag(
        None, "Tokenizer directory, from `hf-ctxmodels train-tokenizer`, or Hub id; by default that of --model."
    )
    family: str | None = field(
        default=None,
        metadata={"help": "Model family; by default the one that --model belongs to.", "choices": list(FAMILIES)},
    )
    config: str | None = flag(
        None, "Of a new model: a size (tiny, the default, mini, small, base, large) or a JSON file of its fields."
    )
    model: str | None = flag(
        None, "Continue from this checkpoint (directory or Hub id), of this package or the reference."
    )
    config_options: list[str] = flag((), "Configuration fields to change, as key=value.")
    objective: str | None = flag(
        None, "Pretraining objective, by default that of the family; an unknown option lists its options.", nested=True
    )
    max_length: int = flag(128, "Longest input in tokens.")
    validation_fraction: float = flag(0.0, "Share of the documents held out for evaluation; 0 for none.")


@dataclass(frozen=True)
class TrainingSetup:
    """What the loop trains: a model, or one that learns by another loss and saves this model.

    Attributes:
        model: It; in evaluation mode it gives the model's own output for `objective.collate`'s batches.
        collate: Makes its batches of training.
        identity: What must be equal when the run is resumed, beside the flags.
    """

    model: PreTrainedModel
    collate: Collate
    identity: Mapping[str, Any] = field(default_factory=dict)


class AdapterOptions(Protocol):
    """Options of the adapters trained in a pretrained model, see `hf_ctxmodels.downstream.adapters.arguments`."""

    adapter: Any

    def apply_for_pretraining(self, model: PreTrainedModel) -> None:
        """Add the adapters to the model and freeze its other weights."""

    def identity(self, model: PreTrainedModel) -> dict[str, Any]:
        """Values that must be equal when the run is resumed."""


def pretrain(
    arguments: PretrainingArguments,
    loop_arguments: LoopArguments,
    adapters: AdapterOptions | None = None,
    learn: Callable[[PreTrainedModel, Objective], TrainingSetup] | None = None,
    part: EmbeddingTrainingArguments | None = None,
) -> TrainingSummary:
    """Pretrain a model, or an adapter in one (MAD-X: of a language), and save model, tokenizer, log, loss curve and
    summary in `output_dir`.

    With held-out documents the summary also has frequency baselines.

    Args:
        arguments, loop_arguments: The flags.
        learn: Puts something else in the model's place in the loop, as distillation does; None trains the model.
        part: Which part of a pretrained model is trained; None for all of it.

    Raises:
        CtxError: An argument or file is unusable.
    """
    accelerator = make_accelerator(loop_arguments)
    tokenizer = load_tokenizer(tokenizer_source(arguments))
    family = resolve_family(arguments)
    name, objective = make_objective(family, tokenizer, arguments, loop_arguments.seed)
    model = make_trained_model(family, objective, tokenizer, arguments, adapters, part, loop_arguments.seed)
    examples, held_out = make_examples(arguments, objective, accelerator.is_main_process)
    batch_size = loop_arguments.per_device_batch_size
    evaluate = None if held_out is None else LossEvaluation(held_out, objective.collate, batch_size)
    learner = TrainingSetup(model, objective.collate) if learn is None else learn(model, objective)
    result = train(
        learner.model,
        examples,
        learner.collate,
        loop_arguments,
        accelerator,
        tokenizer=tokenizer,
        evaluate=evaluate,
        identity={
            **flags_identity(arguments, _UNCOMPARED_FIELDS, files=("dataset", "translations")),
            "objective": name,
            "objective_options": objective.options,
            **({} if adapters is None else adapters.identity(model)),
            **({} if part is None or part.train_only is None else asdict(part)),
            **learner.identity,
        },
        contiguous=objective.sampling.contiguous,
    )
    if held_out is not None and accelerator.is_main_process:
        print_status("computing the frequency baselines")
        result.metrics |= frequency_baselines(objective, examples, held_out, model, result.metrics, batch_size)
    summary = result.summary(
        task="pretraining",
        dataset=", ".join(arguments.dataset),
        max_length=arguments.max_length,
        objective=name,
        objective_options=objective.options,
        rates=realised_rates(objective, examples, batch_size),
    )
    _leave_records(accelerator, summary, Path(loop_arguments.output_dir))
    return summary


def make_trained_model(
    family: FamilySpec,
    objective: Objective,
    tokenizer: PreTrainedTokenizerBase,
    arguments: PretrainingArguments,
    adapters: AdapterOptions | None,
    part: EmbeddingTrainingArguments | None,
    seed: int,
) -> PreTrainedModel:
    """`make_model`, of which an adapter or one part is to be trained, if any; the part with the tokenizer's vocabulary.

    Raises:
        CtxError: There is no pretrained model for it, or both are to be trained, or as `make_model`.
    """
    source = arguments.model
    part = None if part is None or part.train_only is None else part
    trains_adapter = adapters is not None and adapters.adapter is not None
    if source is None and (part is not None or trains_adapter):
        raise CtxError(
            "Expected a pretrained model, of which an adapter or the embeddings are trained.",
            location="--train_only" if part is not None else "--adapter",
            hint="give --model.",
        )
    if part is None:
        model = make_model(family, objective, tokenizer, arguments)
        if adapters is not None:
            adapters.apply_for_pretraining(model)
        return model
    own = load_tokenizer(str(source))
    model = part.apply(make_model(family, objective, own, arguments), own, tokenizer, seed)
    check_tokenizer_matches_model(tokenizer, model.config, arguments.max_length, location=str(arguments.tokenizer))
    return model


def tokenizer_source(arguments: PretrainingArguments) -> str:
    """The given tokenizer, or that of the model to continue from.

    Raises:
        CtxError: Neither is given.
    """
    source = arguments.tokenizer or arguments.model
    if source is None:
        raise CtxError(
            "No tokenizer is given.", location="--tokenizer", hint="train one with `hf-ctxmodels train-tokenizer`."
        )
    return source


def resolve_family(arguments: PretrainingArguments) -> FamilySpec:
    """The given family, or that of the model to continue from.

    Raises:
        CtxError: Neither is given, the two differ, or the model has several tasks or belongs to no family.
    """
    named = None if arguments.family is None else get_family(arguments.family)
    if arguments.model is None:
        if named is None:
            raise CtxError(
                "No model family is given.", location="--family", hint=f"give one of: {', '.join(FAMILIES)}."
            )
        return named
    config = load_config(arguments.model)
    require_single_task(config, arguments.model)
    if named is not None and not any(type(config) is family.config for family in FAMILIES.values()):
        return named  # a reference checkpoint, which several families may open
    own = get_family(config)
    if named not in (None, own):
        raise CtxError(
            f"The model belongs to the family {own.name}, not {arguments.family}.",
            location=f"--model {arguments.model} --family {arguments.family}",
            hint="leave --family out.",
        )
    return own


def make_objective(
    family: FamilySpec, tokenizer: PreTrainedTokenizerBase, arguments: PretrainingArguments, seed: int
) -> tuple[str, Objective]:
    """The chosen objective, and its name.

    Raises:
        CtxError: The family has no such objective, or the objective no such option.
    """
    name, option_texts = split_choice(arguments.objective or next(iter(family.objectives)))
    if name not in family.objectives:
        raise CtxError(
            f"The family {family.name} has no objective {name!r}.",
            location="--objective",
            hint=f"use one of: {', '.join(family.objectives)}.",
        )
    objective_class = family.objectives[name]
    names = objective_class.option_help()
    options = typed_options(objective_class, option_texts, location=f"--objective {name}", names=names)
    return name, objective_class(tokenizer, max_length=arguments.max_length, seed=seed, **options)


def make_model(
    family: FamilySpec, objective: Objective, tokenizer: PreTrainedTokenizerBase, arguments: PretrainingArguments
) -> PreTrainedModel:
    """The model to train, new or from a checkpoint, with the objective's `config_fields`.

    Raises:
        CtxError: The size is unknown, the checkpoint cannot be opened or is quantized, or tokenizer, length or
            objective do not fit.
    """
    source = arguments.model or arguments.config or family.name
    if arguments.model is None:
        config = new_config(family, tokenizer, arguments.config, arguments.config_options)
    else:
        if arguments.config is not None:  # such as that of the recipe by which the model was begun
            print_status(f"--config {arguments.config} is not read: the configuration is that of {arguments.model}")
        config = load_config(arguments.model, family.config, parse_config_options(arguments.config_options))
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
                hint=f"give --objective NAME:{name}={str(getattr(config, name)).lower()}."
                if name in objective.option_help()
                else "give the tokenizer that the model was trained with, or start a new model.",
            )
        setattr(config, name, value)
    if arguments.model is not None:
        model = load_model(arguments.model, objective.auto_class, config)
        require_trainable(model)
        return model
    return new_model(objective.auto_class, config)


@dataclass(frozen=True)
class ExamplesWithProgress(ExampleBuilder):
    """An objective whose examples are shown while they are made.

    Attributes:
        objective: Makes the examples.
        what: What is shown of them.
        shown: False for nothing, as on all processes but the main one.
    """

    objective: Objective
    what: str
    shown: bool

    @property
    def statistics(self) -> Counter[str]:  # type: ignore[override]  # never set
        """The objective's."""
        return self.objective.statistics

    def check(self, examples: ExampleSet) -> None:
        """See `Objective.check`."""
        self.objective.check(examples)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """See `Objective.examples`."""
        start, number = time.perf_counter(), 0
        made = self.objective.examples(documents, pass_index)
        for example in progress_bar(made, f"making {self.what}", unit="rows", enabled=self.shown):
            number += 1
            yield example
        print_status(f"{self.what}: {number:,} rows in {time.perf_counter() - start:.1f} s", self.shown)


def make_examples(
    arguments: PretrainingArguments, objective: Objective, shown: bool = False
) -> tuple[Examples, ExampleSet | None]:
    """Training examples, and held-out examples or None; `shown` on stderr while they are made."""
    documents, others = arguments.load()
    held_out = None
    if others is not None and objective.has_heldout_loss:
        held_out = ExampleSet.build(ExamplesWithProgress(objective, "held-out text", shown).examples(others))
    examples = build_training_set(
        documents,
        objective if arguments.streaming else ExamplesWithProgress(objective, "training text", shown),
        objective.sampling,
        streaming=arguments.streaming,
        alpha=arguments.sampling_alpha,
        seed=objective.seed,
    )
    return examples, held_out


def realised_rates(objective: Objective, examples: Examples, batch_size: int) -> dict[str, float]:
    """The objective's realised rates, such as the share of masked tokens, on a sample of epoch 0."""
    counts: Counter[str] = Counter()
    for rows in sample_batches(examples, _BATCHES_FOR_RATES * batch_size, batch_size):
        counts.update(objective.count(objective.collate(rows)))
    return objective.rates(counts)


def _leave_records(accelerator: Accelerator, summary: TrainingSummary, output_dir: Path) -> None:
    if accelerator.is_main_process:
        summary.save(output_dir)
        plot_losses(summary.curve, output_dir / "training_curve.png", summary.baselines)
    accelerator.wait_for_everyone()
