"""Multi-task pretraining (Raffel et al. 2020, "T5", section 3.5.3): the objective on raw text is a member of a mixture
of tasks as text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag, make_options, split_choice
from hf_ctxmodels.core.generation import check_can_generate
from hf_ctxmodels.data import ExampleSet, SampledMixture
from hf_ctxmodels.downstream.finetuning.task_evaluation import SeveralTasksEvaluation
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.downstream.text2text.mixture import MixtureArguments, TaskMixture, describe_rates, summarize_rates
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.training.evaluation import Examples
from hf_ctxmodels.training.loop import Evaluate
from hf_ctxmodels.training.pretraining import TrainingMixture
from hf_ctxmodels.training.training_step import Collate

TEXT = "text"  # name of the objective's member
IS_TASK = "is_task"  # key of the features of tasks


@dataclass(kw_only=True)
class PretrainingMixtureOptions(MixtureArguments):
    """Options of `--mixture`."""

    text_size: float | None = flag(
        None,
        "Artificial number of examples of the text, for its rate, which may exceed mixing_limit; by default the real "
        "number, up to mixing_limit.",
    )
    batch_size: int = flag(32, "Examples per batch in the evaluation of the tasks.")
    max_target_length: int = flag(64, "Longest target in tokens; longer targets are an error.")
    cut_sources: bool = flag(False, "Truncate inputs to --max_length; by default longer inputs are an error.")


@dataclass
class PretrainingMixtureArguments:
    """Mixture of tasks."""

    mixture: str | None = flag(
        None,
        "Also train on tasks as text (T5): FILE:tasks_folder=DIR,text_size=N,..., or names such as glue,snli for "
        "FILE; an unknown option raises an error that lists the options.",
        nested=True,
    )

    def add_tasks(
        self, objective: Objective, examples: Examples, model: PreTrainedModel, evaluate: Evaluate | None
    ) -> TrainingMixture:
        """The mixture of the text and the tasks of `mixture`.

        Args:
            objective, examples, evaluate: The objective, its examples, and its evaluation or None.
            model: The model, of a class that generates.

        Raises:
            CtxError: The examples have an order, are streamed, or are a mixture; an option is unknown; or the tasks do
                not fit the model or the objective.
        """
        location = f"--mixture {self.mixture}"
        names, option_texts = split_choice(str(self.mixture))
        options: PretrainingMixtureOptions = make_options(PretrainingMixtureOptions, names, option_texts, location)
        check_range(options, "text_size", above=0, location=location)
        if not isinstance(examples, ExampleSet) or objective.sampling.contiguous:
            raise CtxError(
                "The text is streamed, contiguous, or sampled by language or task, so it cannot be mixed with tasks.",
                location=location,
                hint="remove --streaming and --sampling_alpha, or use an objective such as span-corruption.",
            )
        check_can_generate(model)
        task_arguments = TaskArguments(
            max_length=objective.max_length,
            max_target_length=options.max_target_length,
            cut_sources=options.cut_sources,
        )
        tokenizer: Any = objective.tokenizer
        tasks = TaskMixture(names.split(","), options, task_arguments, model.config, tokenizer, "--mixture")
        tasks.encode(tokenizer)
        features = {
            name: [{**feature, IS_TASK: True} for feature in run.training_features]
            for name, run in tasks.trained.items()
        }
        sizes: dict[str, float] = {TEXT: options.text_size or len(examples)}
        sizes |= {name: len(task_features) for name, task_features in features.items()}
        rates = options.rates(sizes, unlimited=() if options.text_size is None else (TEXT,))
        members = describe_rates(sizes, rates)
        print_status(f"mixing the text and the tasks at the rates: {members}", PartialState().is_main_process)
        return TrainingMixture(
            SampledMixture([examples, *features.values()], probabilities=rates, is_per_example=True),
            TextAndTaskCollator(objective, tasks.tasks[0].collator(tokenizer), model.config.is_encoder_decoder),
            TextAndTaskEvaluation(evaluate, tasks.evaluation(tokenizer, options.batch_size)),
            {"mixture": {**tasks.identity, "text_size": options.text_size}},
            summarize_rates(sizes, rates),
        )


@dataclass(frozen=True)
class TextAndTaskCollator:
    """Collates examples of an objective and features of tasks, which have the key `IS_TASK`, in one batch.

    Args:
        objective: Collates the examples of the text.
        collate_tasks: Collates the features of tasks.
        is_encoder_decoder: Whether labels and inputs have different lengths.
    """

    objective: Objective
    collate_tasks: Collate
    is_encoder_decoder: bool

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A padded batch with the examples in their order; raises CtxError if the objective's batches have other
        columns than the batches of tasks."""
        text = [index for index, example in enumerate(examples) if IS_TASK not in example]
        tasks = [index for index, example in enumerate(examples) if IS_TASK in example]
        batches: list[Mapping[str, torch.Tensor]] = []
        if text:
            batches.append(self.objective.collate([examples[index] for index in text]))
        if tasks:
            features = [{name: value for name, value in examples[i].items() if name != IS_TASK} for i in tasks]
            batches.append(self.collate_tasks(features))
        if len(batches) == 1:
            return dict(batches[0])
        if batches[0].keys() != batches[1].keys():
            raise CtxError(
                f"Batches of the objective have {', '.join(batches[0])}, batches of tasks {', '.join(batches[1])}.",
                location="--mixture",
                hint="use an objective such as span-corruption, denoising or clm, without packing.",
            )
        order = torch.argsort(torch.tensor([*text, *tasks]))
        width = max(batch["input_ids"].shape[1] for batch in batches)
        label_width = max(batch["labels"].shape[1] for batch in batches)
        if not self.is_encoder_decoder:  # the labels may include the token that follows a row
            label_width = width + max(batch["labels"].shape[1] - batch["input_ids"].shape[1] for batch in batches)
        padding = {"input_ids": int(self.objective.tokenizer.pad_token_id), "labels": IGNORE_INDEX}
        is_left = self.objective.tokenizer.padding_side == "left"
        merged = {}
        for name in batches[0]:
            is_label = name == "labels"
            columns = []
            for batch in batches:
                missing = (label_width if is_label else width) - batch[name].shape[1]
                sides = (missing, 0) if is_left and not is_label else (0, missing)
                columns.append(F.pad(batch[name], sides, value=padding.get(name, 0)))
            merged[name] = torch.cat(columns)[order]
        return merged


@dataclass
class TextAndTaskEvaluation:
    """The losses on held-out text, and the metrics of the tasks without their losses."""

    text: Evaluate | None
    tasks: SeveralTasksEvaluation

    def __call__(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate; a collective call."""
        losses = {} if self.text is None else self.text(model, accelerator)
        metrics = self.tasks(model, accelerator)
        return losses | {name: value for name, value in metrics.items() if not name.endswith("loss")}
