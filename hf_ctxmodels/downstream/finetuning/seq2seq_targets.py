"""Training targets of sequence-to-sequence tasks, as defined by the model's family (`seq2seq_finetuning`)."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import typed_options
from hf_ctxmodels.downstream.tasks import Task
from hf_ctxmodels.downstream.tasks.base import Collator, Feature
from hf_ctxmodels.downstream.tasks.seq2seq import Seq2Seq
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import Seq2SeqFinetuning


def family_seq2seq_finetuning(task: Task[Any], config: PreTrainedConfig) -> Seq2SeqFinetuning | None:
    """The sequence-to-sequence fine-tuning of a configuration's family; None for other tasks and plain targets."""
    if not isinstance(task, Seq2Seq):
        return None
    return next((family.seq2seq_finetuning for family in FAMILIES.values() if type(config) is family.config), None)


def set_generation_tokens(task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the configuration's ids of the tokens that the family's head generates with; before `task.configure`.

    Raises:
        CtxError: The tokenizer lacks one of the tokens.
    """
    seq2seq_finetuning = family_seq2seq_finetuning(task, config)
    if seq2seq_finetuning is not None:
        for name, value in seq2seq_finetuning.objective.head_fields(tokenizer).items():
            setattr(config, name, value)


def training_collator(
    task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int, verbose: bool = True
) -> Collator:
    """The collator of training batches: the collator of the family's objective, else the task's.

    It is called after `task.configure` and before `task.encode`, since it sets `task.uses_target_word_ids`. Random
    numbers depend on seed, epoch and example. Evaluation uses plain targets and the task's collator.

    Args:
        task, config, tokenizer: The task, and the model's configuration and tokenizer.
        seed: Seed of random targets.
        verbose: Whether to print the objective.

    Raises:
        CtxError: An option is unknown or has a wrong value, or the family trains on plain targets and has no options.
    """
    arguments = task.arguments
    seq2seq_finetuning = None if arguments.plain_targets else family_seq2seq_finetuning(task, config)
    if seq2seq_finetuning is None:
        if arguments.target_options:
            raise CtxError(
                f"{type(config).__name__} is trained on plain targets.",
                location=f"--target_options {' '.join(arguments.target_options)}",
                hint="remove the options" + (", or --plain_targets." if arguments.plain_targets else "."),
            )
        return task.collator(tokenizer)
    assert isinstance(task, Seq2Seq)
    objective_class = seq2seq_finetuning.objective
    texts = dict(text.partition("=")[::2] for text in arguments.target_options)
    options = typed_options(objective_class, texts, location="--target_options", names=objective_class.option_help())
    if "max_target_length" in options:
        raise CtxError("max_target_length is a flag.", location="--target_options", hint="use --max_target_length.")
    length = arguments.max_target_length
    longest = min(arguments.max_length + length, tokenizer.model_max_length)
    objective = objective_class(tokenizer, max_length=longest, seed=seed, max_target_length=length, **options)
    task.uses_target_word_ids = objective.needs_target_words
    options_text = "".join(f", {text}" for text in arguments.target_options)
    print_status(
        f"training on the targets of {objective_class.__name__}{options_text}; --plain_targets disables this", verbose
    )
    return TargetCollator(objective.collate)


def resolve_label_smoothing(task: Task[Any], config: PreTrainedConfig) -> float:
    """The label smoothing of the flag; else of the configuration; else, unless targets are plain, of the family."""
    if task.arguments.label_smoothing is not None:
        return task.arguments.label_smoothing
    seq2seq_finetuning = family_seq2seq_finetuning(task, config)
    if seq2seq_finetuning is None:
        return 0.0
    return config.label_smoothing or (0.0 if task.arguments.plain_targets else seq2seq_finetuning.label_smoothing)


class TargetCollator:
    """Collates a task's features, whose `labels` are the targets, with an objective's collator.

    Args:
        collate: A `DataCollatorForSourceTarget`.
    """

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A batch of arguments of the model's forward."""
        return self._collate([{**feature, "target_ids": feature["labels"]} for feature in features])
