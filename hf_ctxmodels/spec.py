"""Specification of a family: classes, objectives, sizes, published parameter counts, and traits for the tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.remote_code import RemoteCodeStub

if TYPE_CHECKING:
    from hf_ctxmodels.objectives import Objective
    from hf_ctxmodels.objectives.source_target import SourceTargetObjective


class PublishedCount(NamedTuple):
    """Parameter counts of a published model.

    Attributes:
        fields: Configuration fields that differ from the defaults.
        counts: Name of an Auto class or another class -> number of parameters, counting tied weights once.
    """

    fields: Mapping[str, Any]
    counts: Mapping[str, int]


class Target(Enum):
    """Type of the targets of a loss term; the tests create random targets of this type."""

    POSITION = auto()  # a position in the sequence
    TOKEN_ID = auto()  # token ids at some positions
    SPAN_TOKEN = auto()  # `labels` of a span with an unmasked token before and after it
    NEXT_WORD = auto()  # id of the next token at some source positions
    DECODER_TOKEN = auto()  # target token ids at some decoder steps
    ORIGINAL = auto()  # original ids of all tokens, including the tokens with `labels`
    TOKEN_CLASS = auto()  # one of `num_labels` classes at some positions
    TOKEN_PAIR_CLASS = auto()  # one of two classes at some positions
    REPLACED = auto()  # whether each token was replaced
    CONSISTENCY = auto()  # positions where two predictions of the model are compared
    SEQUENCE_CLASS = auto()  # one of `num_labels` classes, or the index of the correct choice
    PAIR_CLASS = auto()  # one of two classes for each sequence or pair


@dataclass(frozen=True)
class ShortTraining:
    """The short pretraining run of the tests, whose final loss must be lower than the loss of a unigram model.

    The model has one layer of width 64 without dropout, the learning rate is constant, and a batch has 16 sequences of
    at most 32 tokens; `text` is the glob pattern of the corpus files.
    """

    steps: int = 120
    learning_rate: float = 5e-3
    vocab_size: int = 300
    config_options: tuple[str, ...] = ()
    text: str = "[!t]*.txt.gz"


@dataclass(frozen=True)
class Traits:
    """Traits of a family that the tests cannot derive from its classes.

    Attributes:
        tiny: Further fields of the tiny test configuration.
        targets: Name in `loss_targets` -> type, if it does not follow from the name and the head; see tests/zoo.
        loss_weights: Name of a loss in the output of a head -> configuration field of its weight.
        uses_max_pooling: Auto classes whose head uses max-pooling, where rounding can select another value; not needed
            with `pooling="max"` in the configuration.
        uses_batch_norm: Auto classes whose head uses batch normalization.
        infers_padding: Whether padding is recognized by the id if there is no `attention_mask`, as in the reference.
        has_different_initialization: Whether weights are initialized as in the released code of the family, where the
            reference in transformers differs from it.
    """

    tiny: Mapping[str, Any] = field(default_factory=dict)
    short_training: ShortTraining = field(default_factory=ShortTraining)
    targets: Mapping[str, Target] = field(default_factory=dict)
    loss_weights: Mapping[str, str] = field(default_factory=dict)
    uses_max_pooling: tuple[str, ...] = ()
    uses_batch_norm: tuple[str, ...] = ()
    is_recurrent: bool = False
    infers_padding: bool = False
    has_different_initialization: bool = False


@dataclass(frozen=True)
class Seq2SeqFinetuning:
    """Fine-tuning of a sequence-to-sequence family with a family-specific objective.

    Attributes:
        objective_class: Name of the class in `hf_ctxmodels.objectives` that creates the training batches.
        label_smoothing: The default of `--label_smoothing`, as in the released commands.
    """

    objective_class: str
    label_smoothing: float

    @property
    def objective(self) -> "type[SourceTargetObjective]":
        """The class that creates the training batches."""
        return getattr(import_module("hf_ctxmodels.objectives"), self.objective_class)


@dataclass(frozen=True)
class TrainingDefaults:
    """Defaults of training that differ from family to family; see `training.defaults` for the others.

    Attributes:
        optimizer: Optimizer of pretraining, as on the command line.
        learning_rate: Its peak learning rate; None for the rule by size.
        architecture_rates: Values of the configuration's `architecture` with another learning rate -> this rate.
        num_train_epochs: Passes over the data; None for a number of tokens by size.
        finetuning_optimizer: Optimizer of fine-tuning.
    """

    optimizer: str = "adamw"
    learning_rate: float | None = None
    architecture_rates: Mapping[str, float] = field(default_factory=dict)
    num_train_epochs: float | None = None
    finetuning_optimizer: str = "adamw"


@dataclass(frozen=True)
class FamilySpec:
    """A family of models.

    Attributes:
        name: Name of the family in commands, of its directory in `models`, and of its card `model_cards/<name>.md`.
        config: Configuration class, with the `model_type` of checkpoints.
        models: Auto class name -> model class.
        sizes: Name -> configuration fields; includes "tiny" for tests and "base" of the paper.
        published: Name of a published model -> its parameter counts.
        objective_classes: Name of an objective -> name of its class in `hf_ctxmodels.objectives`, which is imported
            when it is needed; the first is the default.
        seq2seq_finetuning: Fine-tuning by `finetune seq2seq`; None for the targets as `labels`.
        conversion: Conversion of weights from the reference layout to the native layout.
        reference_heads: Auto class name -> class with the layout of the reference, if it is not the class in `models`.
        alternative_heads: Auto class name -> another class for its task, used if the configuration's `architectures`
            names it.
        parent: Name of the only other family whose modules this one may import.
        training: Defaults of training.
    """

    name: str
    paper: str
    config: type[PreTrainedConfig]
    tokenizer: type[PreTrainedTokenizerBase]
    models: dict[str, type[CtxPreTrainedModel]]
    sizes: dict[str, dict[str, Any]]
    published: dict[str, PublishedCount]
    objective_classes: dict[str, str] = field(default_factory=dict)
    seq2seq_finetuning: Seq2SeqFinetuning | None = None
    conversion: list[WeightTransform] = field(default_factory=list)
    reference_heads: dict[str, type[CtxPreTrainedModel]] = field(default_factory=dict)
    alternative_heads: dict[str, type[CtxPreTrainedModel]] = field(default_factory=dict)
    parent: str | None = None
    training: TrainingDefaults = field(default_factory=TrainingDefaults)
    traits: Traits = field(default_factory=Traits)

    @cached_property
    def objectives(self) -> "dict[str, type[Objective]]":
        """Name -> objective; the first is the default."""
        module = import_module("hf_ctxmodels.objectives")
        return {name: getattr(module, class_name) for name, class_name in self.objective_classes.items()}

    @property
    def reference(self) -> str | None:
        """The `model_type` of the reference in transformers; None if there is none."""
        return self.models["AutoModel"].reference_model_type

    @property
    def stub(self) -> RemoteCodeStub:
        """The module that loads checkpoints of the family with `trust_remote_code=True`."""
        return RemoteCodeStub(self.config, self.tokenizer, self.models, self.alternative_heads)

    @property
    def card(self) -> str:
        """Path of the model card in the repository."""
        return f"model_cards/{self.name}.md"


def encoder_size(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the configuration fields of a Transformer with a feed-forward layer of four times the hidden size."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "initializer_range": initializer_range_for_width(width),
    }


def initializer_range_for_width(width: int) -> float:
    """The default standard deviation of the initialization of a Transformer.

    The published value, 0.02, is for a width of 768 and more. In narrower models it is proportional to width ** -0.5,
    so that the variance of a linear layer's outputs does not depend on the width (as in Glorot & Bengio 2010, section
    4.2); `model_cards/experiments/defaults.md` compares both.
    """
    return max(0.02, round(0.02 * (768 / width) ** 0.5, 3))


SMALL_SIZES: dict[str, dict[str, Any]] = {
    "tiny": encoder_size(128, 2, 2),
    "mini": encoder_size(256, 4, 4),
    "small": encoder_size(512, 4, 8),
}
"""Small Transformers (Turc et al. 2019, arXiv 1908.08962, table 1)."""


def seq2seq_size(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the configuration fields of an encoder-decoder, see `encoder_size`."""
    decoder = {"decoder_layers": layers, "decoder_attention_heads": heads, "decoder_ffn_dim": 4 * width}
    return encoder_size(width, layers, heads) | decoder


SMALL_SEQ2SEQ_SIZES: dict[str, dict[str, Any]] = {
    "tiny": seq2seq_size(128, 2, 2),
    "mini": seq2seq_size(256, 3, 4),
    "small": seq2seq_size(512, 4, 8),
}
