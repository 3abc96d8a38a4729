"""The base class of pretraining objectives: documents -> examples -> batches."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import PaddingCollator
from hf_ctxmodels.data.seeding import Purpose
from hf_ctxmodels.data.training_set import ExampleSampling
from hf_ctxmodels.objectives.tokenized_documents import (
    TokenizedDocument,
    document_batches,
    encode_ids,
    tokenized_batches,
)


@dataclass(frozen=True)
class BaselineOptions:
    """Configuration of the frequency baseline for an objective's targets.

    Attributes:
        num_tokens: Size of the target vocabulary.
        excluded_ids: Tokens that are never targets.
        column: Column of an example whose tokens are counted.
        targets: The head's targets that are tokens of `column` or classes of a sequence; None for all.
        scores: (num_tokens,) counts -> (num_tokens,) logits for the head's `loss_by_scores`, if the loss is not the
            cross-entropy over the vocabulary.
        token_classes: The head's targets that are classes of tokens, counted in collated batches.
    """

    num_tokens: int
    excluded_ids: Sequence[int]
    column: str = "input_ids"
    targets: tuple[str, ...] | None = None
    scores: Callable[[np.ndarray], np.ndarray] | None = None
    token_classes: tuple[str, ...] = ()


@dataclass
class Objective(PaddingCollator):
    """Base class of pretraining objectives: a collator that also makes the examples it collates.

    `examples` tokenizes documents, once for a set in memory and once per epoch for a stream. `collate` samples
    corruptions and targets of a batch, in any worker. Both are deterministic in the seed (see `data.seeding`).

    A new objective `<Name>` is two dataclasses in one file: `DataCollatorFor<Name>` with the arguments of `collate`,
    usable with any dataset, and `<Name>(DataCollatorFor<Name>, Objective)` with the arguments of `examples`. A field
    declared with `core.flags.flag` is an option, `--objective NAME:OPTION=VALUE`.

    Args:
        max_length: Maximum length of an example in tokens, including special tokens.
        seed: Seed of all sampling.

    Example:
        >>> objective = MaskedLM(tokenizer, max_length=128, seed=0)
        >>> examples = ExampleSet.build(objective.examples([["One sentence.", "Another one."], ["A document."]]))
        >>> batch = objective.collate([examples[0], examples[1]])
        >>> model(**batch).loss
    """

    auto_class: ClassVar[str]
    """The Auto class whose head this objective trains, for example "AutoModelForMaskedLM"."""

    has_heldout_loss: ClassVar[bool] = True
    """Whether the loss on held-out text is meaningful."""

    predicts_special_tokens: ClassVar[bool] = False
    """Whether special tokens other than padding may be targets."""

    is_divisible: ClassVar[bool] = True
    """Whether the examples of separate parts of a text are examples of the text."""

    requires_translations: ClassVar[bool] = False
    """Whether every document must be a `TranslatedText`."""

    requires_language_tags: ClassVar[bool] = False
    """Whether every translation must begin with the tag of its language."""

    max_length: int = field(kw_only=True)
    seed: int = field(default=0, kw_only=True)
    baseline: BaselineOptions = field(init=False, repr=False)
    """The baseline of the held-out loss; by default the frequency of each token."""

    sampling: ExampleSampling = field(init=False, repr=False)
    """The order of the examples in training; by default shuffled."""

    config_fields: dict[str, Any] = field(init=False, repr=False)
    """Required fields of the model's configuration; False is also satisfied by a missing field."""

    immutable_config_fields: tuple[str, ...] = field(default=(), init=False, repr=False)
    """Names of `config_fields` that cannot be changed in a trained model."""

    loss_function: Any = field(default=None, init=False, repr=False)
    """The training loss, a `LossFunction` of the training loop; None for the loss of the model's forward."""

    statistics: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """Counts of `examples` in this process: documents, sentences, tokens, truncated_tokens and others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "seed", at_least=0)
        if self.max_length > self.tokenizer.model_max_length:
            raise CtxError(
                f"max_length={self.max_length} exceeds the tokenizer's limit of {self.tokenizer.model_max_length} "
                "tokens (model_max_length in tokenizer_config.json).",
                hint="lower max_length, or raise model_max_length if the model has more positions.",
            )
        excluded = list(self.tokenizer.all_special_ids)
        if self.predicts_special_tokens:  # the padding token may also be the end token
            excluded = sorted({int(self.tokenizer.pad_token_id)} - {self.tokenizer.eos_token_id})
        self.baseline = BaselineOptions(len(self.tokenizer), excluded)
        self.sampling = ExampleSampling()
        self.config_fields = {}

    @classmethod
    def option_help(cls) -> dict[str, str]:
        """Option name -> one sentence of help with the default."""
        options = (option for option in fields(cls) if option.init and "help" in option.metadata)
        return {option.name: f"{option.metadata['help']} Default: {option.default}." for option in options}

    @property
    def options(self) -> dict[str, Any]:
        """Option name -> value."""
        return {name: getattr(self, name) for name in self.option_help()}

    @abstractmethod
    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Tokenized examples of the documents, deterministic in (seed, epoch, position of the document)."""

    def for_part(self, number: int) -> Self:
        """The objective for part `number` of the text, which has a separate sequence of random numbers; the first part
        has the sequence of a text in one part."""
        if number == 0:
            return self
        entropy = np.random.SeedSequence((self.seed, number), spawn_key=(int(Purpose.PART),))
        return replace(self, seed=int(entropy.generate_state(1)[0]))

    def tokenized(self, documents: Iterable[list[str]], with_word_ids: bool = False) -> Iterator[TokenizedDocument]:
        """Tokenize documents sentence by sentence, and count them in `statistics`."""
        for batch in tokenized_batches(self.tokenizer, documents, with_word_ids):
            for document in batch:
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                yield document

    def joined_batches(self, documents: Iterable[list[str]], size: int | None = None) -> Iterator[list[np.ndarray]]:
        """(tokens,) ids of documents, each tokenized as one text without special tokens, in batches of `size`."""
        for batch in document_batches(documents, size):
            texts = [" ".join(document) for document in batch]
            ids = encode_ids(self.tokenizer, texts)
            self.statistics.update(
                documents=len(batch),
                sentences=sum(map(len, batch)),
                tokens=sum(map(len, ids)),
                words=sum(len(text.split()) for text in texts),
            )
            yield ids

    def check(self, examples: ExampleSet) -> None:  # not abstract: most objectives accept any examples
        """Raise CtxError if the examples of all training text do not suit the objective."""

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of a collated batch, to be summed over batches and processes; by default tokens and targets."""
        return batch_statistics(batch, self.tokenizer.unk_token_id)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Realized rates from the summed counts, for example the share of selected tokens."""
        return target_rates(counts)


def batch_statistics(batch: Mapping[str, torch.Tensor], unknown_id: int, mask_id: int | None = None) -> dict[str, int]:
    """Number of examples, tokens and targets, of the positions of both including padding, of unknown targets, and with
    `mask_id` of mask tokens in the inputs (`masks`)."""
    labels, mask = batch["labels"], batch["attention_mask"]
    counts = {
        "examples": len(labels),
        "tokens": int(mask.sum()),
        "positions": mask.numel(),
        "targets": int((labels != IGNORE_INDEX).sum()),
        "target_positions": labels.numel(),
        "unknown_targets": int((labels == unknown_id).sum()),
    }
    return counts if mask_id is None else counts | {"masks": int((batch["input_ids"] == mask_id).sum())}


def target_rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Rates from summed `batch_statistics`; a fill share is the share of positions that are not padding."""
    return {
        "fill_share": counts["tokens"] / max(1, counts["positions"]),
        "target_fill_share": counts["targets"] / max(1, counts["target_positions"]),
        "targets_per_token": counts["targets"] / max(1, counts["tokens"]),
        "unknown_target_share": counts["unknown_targets"] / max(1, counts["targets"]),
    }
