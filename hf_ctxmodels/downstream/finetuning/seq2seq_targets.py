"""Training batches of sources and targets as the model's family was fine-tuned on them (`FamilySpec.seq2seq_finetuning`)."""

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
    """How the family of a configuration is fine-tuned; None for another task, or on plain labels."""
    if not isinstance(task, Seq2Seq):
        return None
    return next((family.seq2seq_finetuning for family in FAMILIES.values() if type(config) is family.config), None)


def set_generation_tokens(task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the tokens by which the family's head writes, those of the tokenizer; before `task.configure`.

    Raises:
        CtxError: The tokenizer lacks one.
    """
    seq2seq_finetuning = family_seq2seq_finetuning(task, config)
    if seq2seq_finetuning is not None:
        for name, value in seq2seq_finetuning.objective.head_fields(tokenizer).items():
            setattr(config, name, value)


def training_collator(
    task: Task[Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int, shown: bool = True
) -> Collator:
    """The collator of training batches: the family's own for sources and targets, else the task's.

    Called after `task.configure` and before `task.encode`, which is told whether words are needed. The draws depend on
    seed, epoch and example. Evaluation is on plain targets, by the task's collator.

    Args:
        task, config, tokenizer: Which fit.
        seed: Seed of the draws.
        shown: Whether to say on stderr what is done.

    Raises:
        CtxError: An option is unknown or has a wrong value, or the family trains on plain targets and takes none.
    """
    arguments = task.arguments
    seq2seq_finetuning = None if arguments.plain_targets else family_seq2seq_finetuning(task, config)
    if seq2seq_finetuning is None:
        if arguments.target_options:
            raise CtxError(
                f"{type(config).__name__} is trained on plain targets.",
                location=f"--target_options {' '.join(arguments.target_options)}",
                hint="leave the options out" + (", or --plain_targets." if arguments.plain_targets else "."),
            )
        return task.collator(tokenizer)
    assert isinstance(task, Seq2Seq)
    kind = seq2seq_finetuning.objective
    texts = dict(text.partition("=")[::2] for text in arguments.target_options)
    options = typed_options(kind, texts, location="--target_options", names=kind.option_help())
    if "max_target_length" in options:
        raise CtxError(
            "The length of targets is a flag.", location="--target_options", hint="give it by --max_target_length."
        )
    length = arguments.max_target_length
    longest = min(arguments.max_length + length, tokenizer.model_max_length)
    objective = kind(tokenizer, max_length=longest, seed=seed, max_target_length=length, **options)
    task.uses_target_word_ids = objective.with_words
    given = "".join(f", {text}" for text in arguments.target_options)
    print_status(
        f"targets of training are those of {kind.__name__}{given}; --plain_targets leaves them as they are", shown
    )
    return TargetCollator(objective.collate)


def resolve_label_smoothing(task: Task[Any], config: PreTrainedConfig) -> float:
    """The label smoothing that is asked for; else the configuration's; else, unless targets are plain, the family's."""
    given = task.arguments.label_smoothing
    if given is not None:
        return given
    seq2seq_finetuning = family_seq2seq_finetuning(task, config)
    if seq2seq_finetuning is None:
        return 0.0
    return config.label_smoothing or (0.0 if task.arguments.plain_targets else seq2seq_finetuning.label_smoothing)


class TargetCollator:
    """Batches of a task's features, `labels` the targets, by an objective's collator.

    Args:
        collate: A `DataCollatorForSourceTarget`.
    """

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """The batch; see the collator."""
        return self._collate([{**feature, "target_ids": feature["labels"]} for feature in features])
