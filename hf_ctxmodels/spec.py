"""Family specifications: classes, objectives, sizes, published parameter counts, and traits for the test suite."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.remote_code import RemoteCodeStub
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.objectives.seq2seq.source_target import SourceTarget


class PublishedCount(NamedTuple):
    """Parameter counts of a published model.

    Attributes:
        fields: Configuration fields other than the defaults.
        counts: Name of an Auto class or another class -> number of parameters, tied weights once.
    """

    fields: Mapping[str, Any]
    counts: Mapping[str, int]


class Target(Enum):
    """The kind of a head's target."""

    POSITION = auto()  # a column index for each row
    TOKEN_ID = auto()  # vocabulary ids at some tokens
    SPAN_TOKEN = auto()  # some of the ids of `labels`, in runs of these between two tokens
    NEXT_WORD = auto()  # the next token's ids at some source tokens
    DECODER_TOKEN = auto()  # ids of the target vocabulary at some decoder steps
    ORIGINAL = auto()  # all tokens' ids before the replacement of those with `labels`
    TOKEN_CLASS = auto()  # one of `num_labels` classes at some tokens
    TOKEN_PAIR_CLASS = auto()  # one of two classes at some tokens
    REPLACED = auto()  # whether each token was replaced
    CONSISTENCY = auto()  # positions where two predictions of the model are compared
    ROW_CLASS = auto()  # one of `num_labels` classes, or the index of the right choice, for each row
    PAIR_CLASS = auto()  # one of two classes for each row


@dataclass(frozen=True)
class ShortTraining:
    """The short pretraining run on news text, in which the family must beat the frequency baseline.

    The model has one layer of width 64, without dropout; a step has 16 rows of at most 32 tokens.

    Attributes:
        steps: Number of steps.
        learning_rate: The constant short_training rate.
        vocab_size: Size of the tokenizer's vocabulary.
        config_options: Values of `--config_options`.
        text: Files of the corpus of the card's full recipe.
    """

    steps: int = 400
    learning_rate: float = 5e-3
    vocab_size: int = 300
    config_options: tuple[str, ...] = ()
    text: str = "[!t]*.txt.gz"


@dataclass(frozen=True)
class Traits:
    """Traits that the test suite cannot derive from the classes.

    Attributes:
        tiny: Additional fields of the tiny test configuration.
        short_training: The short pretraining run.
        targets: Kinds of `loss_targets` that do not follow from name and head; see tests/zoo.
        loss_weights: Loss component in a head's output -> the configuration's field of its weight.
        uses_max_pooling: Auto classes whose head selects extreme values, which rounding may change; not needed with
            `pooling="max"` in the configuration.
        infers_padding: Whether, without an `attention_mask`, padding tokens at the end of a row are padding, as in the
            peer.
        has_different_initialization: Whether new weights are drawn otherwise than by the peer in transformers: as in the
            family's released code, where the two differ.
    """

    tiny: Mapping[str, Any] = field(default_factory=dict)
    short_training: ShortTraining = field(default_factory=ShortTraining)
    targets: Mapping[str, Target] = field(default_factory=dict)
    loss_weights: Mapping[str, str] = field(default_factory=dict)
    uses_max_pooling: tuple[str, ...] = ()
    infers_padding: bool = False
    has_different_initialization: bool = False


@dataclass(frozen=True)
class Seq2SeqFinetuning:
    """How a family is fine-tuned on sources and targets, if it does not train on the targets as they are.

    Attributes:
        objective: What makes the batches of training.
        label_smoothing: As in the released commands; the default of `--label_smoothing`.
    """

    objective: type[SourceTarget]
    label_smoothing: float


@dataclass(frozen=True)
class FamilySpec:
    """A family of models.

    Attributes:
        name: Its name in scripts, and its folder in `models`; its card is `model_cards/<name>.md`.
        paper: The publication.
        config: Configuration class; checkpoints carry `config.model_type`.
        tokenizer: Tokenizer class.
        models: Auto class name -> model class.
        sizes: Name -> configuration fields, among them "tiny" for tests and "base", the paper's.
        published: Name of a published model -> parameter counts.
        objectives: Name -> objective; the first is the family's own.
        seq2seq_finetuning: How `finetune seq2seq` trains it; None for plain `labels`.
        conversion: Weight conversion from the reference layout to the native layout.
        reference_heads: Auto class name -> peer of the reference's class, if it is not the class in `models`.
        parent: Name of the only family that this one's modules may import.
        traits: Traits for the test suite.
    """

    name: str
    paper: str
    config: type[PreTrainedConfig]
    tokenizer: type[PreTrainedTokenizerBase]
    models: dict[str, type[CtxPreTrainedModel]]
    sizes: dict[str, dict[str, Any]]
    published: dict[str, PublishedCount]
    objectives: dict[str, type[Objective]] = field(default_factory=dict)
    seq2seq_finetuning: Seq2SeqFinetuning | None = None
    conversion: list[WeightTransform] = field(default_factory=list)
    reference_heads: dict[str, type[CtxPreTrainedModel]] = field(default_factory=dict)
    parent: str | None = None
    traits: Traits = field(default_factory=Traits)

    @property
    def reference(self) -> str | None:
        """`model_type` of the peer in transformers; None without one."""
        return self.models["AutoModel"].reference_model_type

    @property
    def stub(self) -> RemoteCodeStub:
        """What opens its directories by `trust_remote_code=True`."""
        return RemoteCodeStub(self.config.model_type, self.config, self.tokenizer, self.models)

    @property
    def card(self) -> str:
        """Path of the card in the repository."""
        return f"model_cards/{self.name}.md"


def encoder_size(width: int, layers: int, heads: int) -> dict[str, int]:
    """Configuration fields of a Transformer with a feed-forward layer of four times the hidden size."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
