"""What every pretraining objective offers to the scripts: documents -> examples -> batches."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.examples import Example

Batch = dict[str, torch.Tensor]


class Objective(ABC):
    """Documents -> examples -> batches for one pretraining head.

    `examples` runs once per pass over the text, in one process, and decides which tokens stand in a row. `collate`
    runs for every batch, in any worker, and draws the corruption. Both are deterministic in the seed; see `seeding`.

    Args:
        tokenizer: gives ids, special tokens, padding side and, where an objective asks for it, word ids.
        max_length: longest row in tokens, special tokens included.
        seed: of everything drawn.
        **options: the fields of the objective's `Options`; an unknown one raises.
    """

    auto_class: ClassVar[str]
    """The Auto class whose head this objective trains, for example "AutoModelForMaskedLM"."""

    contiguous: bool = False
    """Whether each example continues the text of the one before it, so that a model with a memory is to be trained on
    contiguous lanes of them, not on a shuffle."""

    evaluates: ClassVar[bool] = True
    """Whether the loss on held-out text means anything."""

    reads_translations: ClassVar[bool] = False
    """Whether every document must be a `TranslatedText`."""

    task_column: ClassVar[str | None] = None
    """The column of an example that says of which kind it is, a number: every step then trains on one kind alone, drawn
    anew (`data.SampledMixture`). None where all examples are of one kind."""

    marks_languages: ClassVar[bool] = False
    """Whether every translation must begin with the mark of its language."""

    predicted_column: ClassVar[str] = "input_ids"
    """The column of an example that holds the tokens a prediction by frequency counts."""

    guessed_targets: ClassVar[tuple[str, ...] | None] = None
    """The head's targets that a prediction by frequency is compared with; None for all. Others are not tokens of
    `predicted_column`."""

    Options: ClassVar[type]
    """A frozen dataclass: name, type, default and `metadata["help"]` of every option. HfArgumentParser reads it."""

    collate: Callable[[list[dict[str, Any]]], Batch]
    """A `DataCollatorFor...`: returns exactly what the head's `forward` names."""

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

    @property
    def task_periods(self) -> dict[int, int]:
        """Kind of example -> one in how many steps it has, where it is not drawn like the others."""
        return {}

    @property
    def num_predicted(self) -> int:
        """Number of tokens from which one is predicted."""
        return len(self.tokenizer)

    @property
    def never_predicted(self) -> list[int]:
        """Tokens that are no target: all special ones, unless an objective says otherwise."""
        return self.tokenizer.all_special_ids

    def frequency_scores(self, counts: np.ndarray) -> np.ndarray | None:
        """The logits of a prediction by frequency, (vocabulary,), for words seen as often as (vocabulary,) `counts`.

        For objectives whose loss is not the cross-entropy of one word among all; None for the others. The head takes
        them in `loss_by_scores`.
        """
        return None

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
