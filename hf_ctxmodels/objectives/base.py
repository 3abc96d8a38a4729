"""The interface of pretraining objectives: documents -> examples -> batches."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.objectives.components.rates import count_targets, target_rates

Batch = dict[str, torch.Tensor]


class Objective(ABC):
    """Documents -> examples -> batches for one pretraining head.

    `examples` runs once per pass over the text, in one process, and makes the rows. `collate` runs for every batch, in
    any worker, and draws corruptions and targets. Both are deterministic in the seed, see `data.seeding`. The docstring
    of each subclass describes its rows and targets.

    Args:
        tokenizer: Gives ids, special tokens, the padding side and, where an objective needs them, word ids.
        max_length: Longest row in tokens, special tokens included.
        seed: Seed of all random draws.
        **options: The fields of the objective's `Options`; an unknown one raises.

    Example:
        >>> objective = MaskedLM(tokenizer, max_length=128, seed=0)
        >>> rows = ExampleSet.build(objective.examples([["One sentence.", "Another one."], ["A second document."]]))
        >>> batch = objective.collate([rows[0], rows[1]])
        >>> model(**batch).loss
    """

    auto_class: ClassVar[str]
    """The Auto class whose head this objective trains, for example "AutoModelForMaskedLM"."""

    has_heldout_loss: ClassVar[bool] = True
    """Whether the loss on held-out text is meaningful."""

    requires_translations: ClassVar[bool] = False
    """Whether every document must be a `TranslatedText`."""

    requires_language_tags: ClassVar[bool] = False
    """Whether every translation must begin with the tag of its language."""

    Options: ClassVar[type]
    """A frozen dataclass: name, type, default and `metadata["help"]` of every option. HfArgumentParser reads it."""

    collate: Callable[[list[dict[str, Any]]], Batch]
    """A `DataCollatorFor...`: returns exactly what the head's `forward` names."""

    baseline: BaselinePolicy
    """The baseline of the held-out loss; by default each non-special token is predicted by its frequency."""

    sampling: SamplingPolicy
    """The order of the examples in training; shuffled by default."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        known = self.option_help()
        for name in options:
            if name not in known:
                raise CtxError(
                    f"{type(self).__name__} has no option {name!r}.",
                    hint=f"use some of: {', '.join(known)}.",
                )
        if seed < 0:
            raise CtxError(f"seed={seed} is negative.", hint="use 0 or a positive integer.")
        if max_length > tokenizer.model_max_length:
            raise CtxError(
                f"max_length={max_length} is over the tokenizer's limit of {tokenizer.model_max_length} tokens "
                "(model_max_length in tokenizer_config.json).",
                hint="lower max_length, or train the tokenizer for longer input.",
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.seed = seed
        self.options = self.Options(**options)
        self.baseline = BaselinePolicy(len(tokenizer), tokenizer.all_special_ids)
        self.sampling = SamplingPolicy()
        self.statistics: Counter[str] = Counter()
        """Counts of `examples` in this process: documents, sentences, tokens, truncated_tokens."""

    @classmethod
    def option_help(cls) -> dict[str, str]:
        """Option name -> one sentence of help with the default."""
        return {field.name: f"{field.metadata['help']} Default: {field.default}." for field in fields(cls.Options)}

    @property
    def config_fields(self) -> dict[str, Any]:
        """Required fields of the model's configuration; a configuration without a field meets the value False."""
        return {}

    @property
    def immutable_config_fields(self) -> tuple[str, ...]:
        """Names of `config_fields` that cannot be changed in a trained model."""
        return ()

    @abstractmethod
    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Tokenised examples of the documents, deterministic in (seed, pass_index, position of the document)."""

    def check(self, examples: ExampleSet) -> None:  # noqa: B027  # most objectives take any
        """Raise CtxError if the examples of all training text are not what the objective is made for."""

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of a collated batch, to be summed over batches and processes; by default tokens and targets."""
        return count_targets(batch, self.tokenizer.unk_token_id)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Realised rates from the summed counts, for example the share of tokens selected."""
        return target_rates(counts)


def collator_options(collator: type, options: Any) -> dict[str, Any]:
    """Those of an objective's options that are fields of its collator."""
    return {each.name: getattr(options, each.name) for each in fields(collator) if hasattr(options, each.name)}


def check_at_least(minimum: float, **values: float) -> None:
    """Raise CtxError if one of the values is below `minimum`."""
    for name, value in values.items():
        if value < minimum:
            raise CtxError(f"{name}={value} is too small.", hint=f"use {minimum} or more.")
