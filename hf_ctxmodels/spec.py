"""What a family says of itself: its classes, sizes and published counts, and what the test suite has to know of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.objectives import Objective


class PublishedCount(NamedTuple):
    """Parameter counts of a published model.

    Attributes:
        fields: The configuration's fields that differ from their defaults.
        counts: Auto class, or a class without one -> number of parameters, tied weights once.
    """

    fields: Mapping[str, Any]
    counts: Mapping[str, int]


class Target(Enum):
    """What a target of a head is made of."""

    POSITION = auto()  # the column of a token in each row
    TOKEN_ID = auto()  # a vocabulary id at some tokens
    NEXT_WORD = auto()  # at some tokens of a text that is read, the id of the one after it
    WRITTEN = auto()  # an id of the target vocabulary at some steps of the decoder
    ORIGINAL = auto()  # each token's id before those with `labels` were replaced
    TOKEN_CLASS = auto()  # one of `num_labels` classes at some tokens
    REPLACED = auto()  # at each token, whether it is a wrong one
    AGREEMENT = auto()  # where two predictions of the model are compared with each other
    ROW_CLASS = auto()  # one of `num_labels` classes, or the right choice, for each row
    PAIR_CLASS = auto()  # one of two classes for each row


@dataclass(frozen=True)
class Learning:
    """The short pretraining run on news in which the family must beat guessing by frequency.

    The model has one layer of width 64 without dropout; a step has 16 rows of at most 32 tokens.

    Attributes:
        steps: Steps at a constant rate.
        learning_rate: That rate.
        vocab_size: Of the tokenizer.
        config_options: Fields of the configuration in this run, as key=value.
        text: Files of the corpus that the whole recipe of the card is trained on.
    """

    steps: int = 400
    learning_rate: float = 5e-3
    vocab_size: int = 300
    config_options: tuple[str, ...] = ()
    text: str = "[!t]*.txt.gz"


@dataclass(frozen=True)
class Traits:
    """What the test suite cannot read from the classes.

    Attributes:
        tiny: Fields of the tiny configuration that tests use, in addition to those that are common to all families.
        learning: The short pretraining run.
        targets: What a target of `loss_targets` is made of, where its name and head do not tell; see tests/zoo.
        loss_weights: Component of a head's loss in its output -> the configuration's field that weighs it.
        selects_extremes: Auto classes whose head passes on the largest or smallest of several values, of which rounding
            may choose another; a configuration with `pooling="max"` says so by itself.
    """

    tiny: Mapping[str, Any] = field(default_factory=dict)
    learning: Learning = field(default_factory=Learning)
    targets: Mapping[str, Target] = field(default_factory=dict)
    loss_weights: Mapping[str, str] = field(default_factory=dict)
    selects_extremes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FamilySpec:
    """One family of the zoo.

    Attributes:
        name: What scripts call it, and its folder in `models`; its card is `model_cards/<name>.md`.
        paper: Where it was published.
        config: Its configuration class; `config.model_type` is what checkpoints carry.
        tokenizer: Its tokenizer class.
        models: Auto class name -> model class.
        sizes: Name -> configuration fields; "tiny" for tests and "base", the paper's, are among them.
        published: Name -> parameter counts of that published model.
        objectives: Name -> objective; the first is the family's own.
        conversion: Weight names and shapes, reference layout -> native layout.
        peers: Where the class that `models` has for an Auto class has no peer in transformers, because the class there
            is another one's: Auto class name -> that other one, which no Auto class opens.
        parent: Name of the one family that this one's modules may import.
        traits: What the test suite has to know.
    """

    name: str
    paper: str
    config: type[PreTrainedConfig]
    tokenizer: type[PreTrainedTokenizerBase]
    models: dict[str, type[CtxPreTrainedModel]]
    sizes: dict[str, dict[str, Any]]
    published: dict[str, PublishedCount]
    objectives: dict[str, type[Objective]] = field(default_factory=dict)
    conversion: list[WeightTransform] = field(default_factory=list)
    peers: dict[str, type[CtxPreTrainedModel]] = field(default_factory=dict)
    parent: str | None = None
    traits: Traits = field(default_factory=Traits)

    @property
    def reference(self) -> str | None:
        """`model_type` of the peer in transformers, loaded from and exported to; None where there is none."""
        return self.models["AutoModel"].reference_model_type

    @property
    def card(self) -> str:
        """The card, from the repository's root."""
        return f"model_cards/{self.name}.md"


def encoder_size(width: int, layers: int, heads: int) -> dict[str, int]:
    """Shape of a Transformer whose feed-forward layer is four times as wide as its residual stream."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
