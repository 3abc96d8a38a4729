"""What every pretraining objective offers: documents -> examples -> batches."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.baseline import BaselinePolicy

Batch = dict[str, torch.Tensor]


class Objective(ABC):
    """Documents -> examples -> batches for one pretraining head.

    `examples` runs once per pass over the text, in one process, and decides which tokens a row holds. `collate` runs
    for every batch, in any worker, and draws what is corrupted and predicted. Both are deterministic in the seed; see
    `data.seeding`. Each subclass says in its docstring what a row holds and what is predicted in it.

    Args:
        tokenizer: gives ids, special tokens, padding side and, where an objective asks for it, word ids.
        max_length: longest row in tokens, special tokens included.
        seed: of all random draws.
        **options: the fields of the objective's `Options`; an unknown one raises.

    Example:
        >>> objective = MaskedLM(tokenizer, max_length=128, seed=0)
        >>> rows = ExampleSet.build(objective.examples([["One sentence.", "Another one."], ["A second document."]]))
        >>> batch = objective.collate([rows[0], rows[1]])
        >>> model(**batch).loss
    """

    auto_class: ClassVar[str]
    """The Auto class whose head this objective trains, for example "AutoModelForMaskedLM"."""

    evaluates: ClassVar[bool] = True
    """Whether the loss on held-out text means anything."""

    reads_translations: ClassVar[bool] = False
    """Whether every document must be a `TranslatedText`."""

    reads_language_tags: ClassVar[bool] = False
    """Whether every translation must begin with the tag of its language."""

    Options: ClassVar[type]
    """A frozen dataclass: name, type, default and `metadata["help"]` of every option. HfArgumentParser reads it."""

    collate: Callable[[list[dict[str, Any]]], Batch]
    """A `DataCollatorFor...`: returns exactly what the head's `forward` names."""

    baseline: BaselinePolicy
    """What the loss on held-out text is compared with: by default each non-special token by its frequency."""

    sampling: SamplingPolicy
    """In which order training draws the examples: by default shuffled."""

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
        """What `examples` met: documents, sentences, tokens, truncated_tokens. Kept in the process that called it."""

    @classmethod
    def option_help(cls) -> dict[str, str]:
        """Option name -> one sentence of help with the default."""
        return {field.name: f"{field.metadata['help']} Default: {field.default}." for field in fields(cls.Options)}

    @property
    def config_fields(self) -> dict[str, Any]:
        """Fields that the model's configuration must have, and their values; most objectives ask for none. A field
        that is False may be missing: what has no such thing does not do it."""
        return {}

    @property
    def immutable_config_fields(self) -> tuple[str, ...]:
        """Names of those among them that cannot be changed in a model that has been trained."""
        return ()

    @abstractmethod
    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Tokenised examples of the documents, deterministic in (seed, pass_index, position of the document)."""

    @abstractmethod
    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """What a collated batch holds, as counts that may be added up over batches and processes.

        It reads the batch alone, so it works whatever process made it.
        """

    @abstractmethod
    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Realised rates from the added-up counts of `count`, for example the share of tokens selected."""
