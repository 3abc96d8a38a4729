"""Distillation losses of predictions, hidden states, attention and sentence vectors.

Each loss is a sum over its targets (real tokens, labeled tokens or examples) divided by their number in the whole
optimizer step, so that it depends neither on micro-batches and processes nor on padding.
"""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ctxmodels.compression.distillation.attention_relations import relation_divergence
from hf_ctxmodels.compression.distillation.forward_pass import (
    ForwardPass,
    get_prediction_level,
    list_layers,
    require_attention,
    require_bidirectional_attention,
)
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.lm_loss.kl_divergence import chunked_kl_divergence, kl_divergence

TOKENS, EXAMPLES, LABELS = "distilled_tokens", "distilled_examples", "labels"
"""Entries of a batch whose targets (other than -100) are counted; `DistillationCollator` adds the first two."""

LossInputs = Literal["predictions", "hidden_states", "attention_scores", "last_hidden_state"]
SentencePooling = Literal["mean", "first", "max"]
Distance = Literal["cosine", "mse"]
_MASKED_SCORE = -100.0  # scores up to this are masks (TinyBERT, the released code)
_LAYER_MAP_HELP = "Layer map: uniform, skip, last, or student:teacher pairs such as 1:2,2:4."


@dataclass(frozen=True)
class DistillationLoss(ABC):
    """One weighted loss of a student that learns from a teacher.

    Attributes:
        name: Name on the command line; the output field is `<name>_loss`.
        inputs: Outputs of both models that the loss uses.
        targets: The entry of a batch that holds the loss's targets, see `target_name`.
        requires_shared_tokenizer: Whether it compares tokens, so that both models must read the same ids.
    """

    name: ClassVar[str]
    inputs: ClassVar[LossInputs]
    targets: ClassVar[str] = TOKENS
    requires_shared_tokenizer: ClassVar[bool] = True

    weight: float = flag(1.0, "Factor of the loss.")

    @property
    def output_name(self) -> str:
        """The field of `DistillationOutput`."""
        return f"{self.name.replace('-', '_')}_loss"

    @abstractmethod
    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if a model lacks what the loss reads, or the models do not match."""

    def target_name(self, student: PreTrainedModel) -> str:
        """The entry of a batch that holds the targets for a student."""
        return self.targets

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """A learned projection of the student's states to the teacher's width, or None."""
        return None

    @abstractmethod
    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets; `projection` is the module of `build_projection`."""


@dataclass(frozen=True)
class PredictionLoss(DistillationLoss):
    """A loss of the predictions of both models' heads."""

    inputs: ClassVar[LossInputs] = "predictions"
    requires_shared_tokenizer: ClassVar[bool] = False  # of sequence predictions; token predictions are checked
    supports_masked_lm: ClassVar[bool] = False
    requires_classes: ClassVar[bool] = True

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match."""
        level = get_prediction_level(student)
        if level is None or (level == "tokens" and not self.supports_masked_lm):
            raise CtxError(
                f"{type(student).__name__} has no predictions for the loss {self.name}.",
                hint="use a classifier" + (" or a masked language model." if self.supports_masked_lm else "."),
            )
        new_modules: tuple[str, ...] = getattr(teacher, "newly_initialized_modules", ())
        if get_prediction_level(teacher) != level or new_modules:
            raise CtxError(
                f"The teacher has no trained head for the loss {self.name} "
                f"({', '.join(new_modules) or type(teacher).__name__}).",
                location=teacher.config.name_or_path or None,
                hint="use a teacher that was trained on the task: fine-tune a pretrained teacher first.",
            )
        field = "vocab_size" if level == "tokens" else "num_labels"
        student_size, teacher_size = getattr(student.config, field), getattr(teacher.config, field)
        if student_size != teacher_size:
            raise CtxError(
                f"The student predicts {student_size} classes, the teacher {teacher_size} ({field}).",
                hint="use the teacher's tokenizer." if level == "tokens" else "use the teacher's labels.",
            )
        if self.requires_classes and level != "tokens" and student.config.num_labels == 1:
            raise CtxError(
                f"A regression has no classes for the loss {self.name}.",
                hint="use logits, or hard-targets as TinyBERT does for regression.",
            )
        problem_types = {model.config.problem_type for model in (student, teacher)}
        if self.requires_classes and "multi_label_classification" in problem_types:
            raise CtxError(
                f"The labels of a text with several labels are not classes, which the loss {self.name} compares.",
                hint="use logits or hard-targets.",
            )

    def target_name(self, student: PreTrainedModel) -> str:
        """Tokens, labels or examples, by the student's head."""
        names = {"tokens": TOKENS, "labeled_tokens": LABELS, "sequences": EXAMPLES}
        return names[get_prediction_level(student) or "sequences"]


@dataclass(frozen=True)
class SoftTargetLoss(PredictionLoss):
    """KL(teacher || student) of predictions at temperature T, times T^2 (Hinton et al. 2015, section 2): at every real
    token of a masked language model (DistilBERT, Sanh et al. 2019, section 3, the released code); for each example or
    labeled token of a classifier (BERT-PKD, Sun et al. 2019, equation 4)."""

    name: ClassVar[str] = "soft-targets"
    supports_masked_lm: ClassVar[bool] = True

    temperature: float = flag(2.0, "Divisor of both models' logits.")
    masked_only: bool = flag(False, "With a masked language model, use the labeled tokens only.")

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0)

    def target_name(self, student: PreTrainedModel) -> str:
        """As in `PredictionLoss`, or labels for `masked_only`."""
        name = super().target_name(student)
        return LABELS if self.masked_only and name == TOKENS else name

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        if get_prediction_level(student.model) != "tokens":
            return kl_divergence(student.logits(student.labels), teacher.logits(student.labels), self.temperature)
        mask = student.token_mask
        if self.masked_only:
            assert student.labels is not None
            mask = student.labels != IGNORE_INDEX
        return chunked_kl_divergence(student.deferred_logits(mask), teacher.deferred_logits(mask), self.temperature)


@dataclass(frozen=True)
class HardTargetLoss(DistillationLoss):
    """The loss of the student's head for the labels of the data, with all its terms, already a mean over targets."""

    name: ClassVar[str] = "hard-targets"
    inputs: ClassVar[LossInputs] = "predictions"
    targets: ClassVar[str] = LABELS
    requires_shared_tokenizer: ClassVar[bool] = False

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the student has no loss."""
        if get_prediction_level(student) is None:
            raise CtxError(f"{type(student).__name__} has no loss.", hint="remove hard-targets.")

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """Not called: `CtxDistillationModel` uses the mean that the student's head computes."""
        raise NotImplementedError


@dataclass(frozen=True)
class LogitLoss(PredictionLoss):
    """Mean squared error of logits, averaged over classes (Tang et al. 2019, arXiv 1903.12136, equation 1)."""

    name: ClassVar[str] = "logits"
    requires_classes: ClassVar[bool] = False

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        logits, targets = student.logits(student.labels).float(), teacher.logits(student.labels).float()
        return F.mse_loss(logits, targets, reduction="sum") / logits.shape[-1]


@dataclass(frozen=True)
class SoftClassLoss(PredictionLoss):
    """Cross-entropy of the student's classes with the teacher's, averaged over targets AND classes (TinyBERT, Jiao et
    al. 2020, equation 10, the released code)."""

    name: ClassVar[str] = "soft-classes"

    temperature: float = flag(1.0, "Divisor of both models' logits.")

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0)

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        logits, teacher_logits = student.logits(student.labels).float(), teacher.logits(student.labels).float()
        targets = (teacher_logits / self.temperature).softmax(-1)
        return -(targets * (logits / self.temperature).log_softmax(-1)).sum() / logits.shape[-1]


def _require_equal_width(loss: DistillationLoss, student: PreTrainedModel, teacher: PreTrainedModel, hint: str) -> None:
    """Raise CtxError if the hidden states of the models differ in width."""
    if student.config.hidden_size != teacher.config.hidden_size:
        raise CtxError(
            f"The loss {loss.name} compares hidden states, but the student has width {student.config.hidden_size} and "
            f"the teacher width {teacher.config.hidden_size}.",
            hint=hint,
        )


def _require_equal_heads(student: SelfAttention, teacher: SelfAttention, alternative: str) -> None:
    """Raise CtxError if the numbers of attention heads differ."""
    if student.num_heads != teacher.num_heads:
        raise CtxError(
            f"The student has {student.num_heads} attention heads, the teacher {teacher.num_heads}.",
            hint=f"use a student with as many heads (num_attention_heads), or {alternative}.",
        )


def _new_projection(student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Linear:
    """A linear projection to the teacher's width, initialized like the student's linear layers."""
    projection = nn.Linear(student.config.hidden_size, teacher.config.hidden_size)
    nn.init.normal_(projection.weight, std=getattr(student.config, "initializer_range", 0.02))
    nn.init.zeros_(projection.bias)
    return projection


@dataclass(frozen=True)
class CosineLoss(DistillationLoss):
    """1 - cosine of both models' last hidden states at every real token (DistilBERT, Sanh et al. 2019, section 3, the
    released code)."""

    name: ClassVar[str] = "cosine"
    inputs: ClassVar[LossInputs] = "last_hidden_state"

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the widths differ."""
        _require_equal_width(self, student, teacher, "use a student of the teacher's width, or the loss hidden.")

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        states = student.last_hidden_state[student.token_mask].float()
        targets = teacher.last_hidden_state[teacher.token_mask].float()
        return (1 - F.cosine_similarity(states, targets, dim=-1)).sum()


LayerPairs = tuple[tuple[int, int], ...]
"""(student, teacher) pairs of layers."""


def parse_layer_map(text: str, student_layers: int, teacher_layers: int, *, first_layer: int = 0) -> LayerPairs:
    """The pairs of a layer map.

    Hidden states are numbered from 0, the output of the embeddings; attention scores from 1. For a student of n layers
    and a teacher of m = kn layers:

    | name | pairs (student, teacher) | used by |
    |---|---|---|
    | `uniform` | states (i, ki), i = 0 ... n; scores (i, ki), i = 1 ... n | TinyBERT (Jiao et al. 2020, section 4.2) |
    | `skip` | (i, ki) for i = 1 ... n-1 | BERT-PKD-skip (Sun et al. 2019, section 3.2) |
    | `last` | (i, m - n + i) for i = 1 ... n-1 | BERT-PKD-last |

    Args:
        text: A name of the table, or `STUDENT:TEACHER` pairs separated by commas.
        student_layers, teacher_layers: n and m.
        first_layer: Smallest layer number: 0 for hidden states, 1 for attention scores.

    Raises:
        CtxError: The text is not a layer map, a named map does not fit the models, or a layer does not exist.
    """
    if text == "last":
        if student_layers > teacher_layers:
            raise CtxError(
                f"The student has {student_layers} layers, the teacher {teacher_layers}.",
                hint="list the pairs, for example 1:1,2:1.",
            )
        return tuple((layer, teacher_layers - student_layers + layer) for layer in range(1, student_layers))
    if text in ("uniform", "skip"):
        if teacher_layers % student_layers:
            raise CtxError(
                f"The layer map {text!r} needs a teacher with a multiple of the student's {student_layers} layers; the "
                f"teacher has {teacher_layers}.",
                hint="list the pairs, for example 1:2,2:5.",
            )
        step = teacher_layers // student_layers
        layers = range(1, student_layers) if text == "skip" else range(first_layer, student_layers + 1)
        return tuple((layer, step * layer) for layer in layers)
    if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        raise CtxError(f"{text!r} is not a layer map.", hint="use uniform, skip or last, or pairs such as 1:2,2:4.")
    pairs = tuple((int(student), int(teacher)) for student, teacher in (pair.split(":") for pair in text.split(",")))
    num_layers = {"student": student_layers, "teacher": teacher_layers}
    for pair in pairs:
        for (model, last_layer), layer in zip(num_layers.items(), pair, strict=True):
            if not first_layer <= layer <= last_layer:
                raise CtxError(
                    f"The layer map {text} contains layer {layer} of the {model}, which has layers {first_layer} to "
                    f"{last_layer}.",
                    hint="correct the pair; the student's layer is first.",
                )
    return pairs


@dataclass(frozen=True)
class LayerMapLoss(DistillationLoss):
    """A loss over pairs of layers, which `parse_layer_map` reads."""

    inputs: ClassVar[LossInputs] = "hidden_states"
    first_layer: ClassVar[int] = 0

    layers: str = flag("uniform", _LAYER_MAP_HELP)

    def layer_pairs(self, student: PreTrainedModel, teacher: PreTrainedModel) -> LayerPairs:
        """(student, teacher) pairs of layers; raises CtxError for layers that do not exist."""
        counts = []
        for model in (student, teacher):
            sizes = getattr(model.config, "layer_sizes", None)
            counts.append(model.config.num_hidden_layers if sizes is None else len(sizes) - 1)
        return parse_layer_map(self.layers, *counts, first_layer=self.first_layer)


@dataclass(frozen=True)
class PatientLoss(LayerMapLoss):
    """Squared error of both models' L2-normalized states of the first token, averaged over mapped layers and width
    (BERT-PKD, Sun et al. 2019, arXiv 1908.09355, equation 7, the released code; hence its weights of 10 to 1000)."""

    name: ClassVar[str] = "patient"
    targets: ClassVar[str] = EXAMPLES
    requires_shared_tokenizer: ClassVar[bool] = False

    layers: str = flag("skip", _LAYER_MAP_HELP)

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the widths differ, or the layer map does not fit."""
        _require_equal_width(self, student, teacher, "use a student of the teacher's width.")
        if not self.layer_pairs(student, teacher):
            raise CtxError(
                f"The layer map {self.layers!r} is empty for a student with one layer.",
                hint="list the pairs, for example 1:2.",
            )

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        pairs = self.layer_pairs(student.model, teacher.model)
        states = torch.stack([student.first_token_states(layer) for layer, _ in pairs], 1).float()
        targets = torch.stack([teacher.first_token_states(layer) for _, layer in pairs], 1).float()
        return (F.normalize(states, dim=-1) - F.normalize(targets, dim=-1)).square().mean((1, 2)).sum()


@dataclass(frozen=True)
class AttentionScoreLoss(LayerMapLoss):
    """Squared error of attention scores before the softmax, summed over mapped layers (TinyBERT, Jiao et al. 2020,
    equation 7), averaged over heads and over the real tokens of a sequence. Scores of at most -100 count as 0, as
    released."""

    name: ClassVar[str] = "attention"
    inputs: ClassVar[LossInputs] = "attention_scores"
    first_layer: ClassVar[int] = 1

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if a model has no attention scores, or the numbers of heads differ."""
        for student_layer, teacher_layer in self.layer_pairs(student, teacher):
            _require_equal_heads(
                require_attention(student, student_layer, self.name),
                require_attention(teacher, teacher_layer, self.name),
                f"remove the loss {self.name}",
            )

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        total = student.last_hidden_state.new_zeros((), dtype=torch.float32)
        pair_mask = student.pair_mask[:, None]
        num_keys = pair_mask.sum(-1).clamp(min=1)
        for student_layer, teacher_layer in self.layer_pairs(student.model, teacher.model):
            scores, targets = (
                scores.float().masked_fill((scores <= _MASKED_SCORE) | ~pair_mask, 0.0)
                for scores in (student.attention_scores(student_layer), teacher.attention_scores(teacher_layer))
            )
            total = total + ((scores - targets).square().sum(-1) / num_keys).mean(1).sum()
        return total


@dataclass(frozen=True)
class RelationLoss(DistillationLoss):
    """A loss of relations between the tokens of a sequence in the student's last layer, see `relation_divergence`."""

    inputs: ClassVar[LossInputs] = "attention_scores"
    relations: ClassVar[tuple[tuple[int, int], ...]]
    """Pairs of queries (0), keys (1) and values (2)."""

    teacher_layer: int | None = flag(None, "Layer of the teacher, from 1; by default the last one.")

    def __post_init__(self) -> None:
        check_range(self, "teacher_layer", at_least=1)

    def layer_pair(self, student: PreTrainedModel, teacher: PreTrainedModel) -> tuple[int, int]:
        """The layers of student and teacher, from 1; raises CtxError for a layer that does not exist."""
        student_layer, last_layer = (len(list_layers(model, self.name)) for model in (student, teacher))
        if self.teacher_layer is not None and self.teacher_layer > last_layer:
            raise CtxError(
                f"The loss {self.name} has teacher_layer={self.teacher_layer}, but the teacher has layers 1 to "
                f"{last_layer}.",
                hint="correct teacher_layer.",
            )
        return student_layer, self.teacher_layer or last_layer

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if a model has no bidirectional attention, or the layer or the heads do not fit."""
        self.count_heads(*self.attention_modules(student, teacher))
        for model in (student, teacher):
            require_bidirectional_attention(model, self.name)

    def attention_modules(self, student: PreTrainedModel, teacher: PreTrainedModel) -> tuple[SelfAttention, ...]:
        """The self-attention of the layers of student and teacher; raises CtxError for another kind of layer."""
        layers = zip((student, teacher), self.layer_pair(student, teacher), strict=True)
        return tuple(require_attention(model, layer, self.name) for model, layer in layers)

    @abstractmethod
    def count_heads(self, student: SelfAttention, teacher: SelfAttention) -> int:
        """The number of relation heads; raises CtxError if the vectors of a layer cannot be split into them."""

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        student_layer, teacher_layer = self.layer_pair(student.model, teacher.model)
        vectors = student.attention_projections(student_layer)
        targets = teacher.attention_projections(teacher_layer)
        num_heads = self.count_heads(*self.attention_modules(student.model, teacher.model))
        divergences = [
            relation_divergence((vectors[a], vectors[b]), (targets[a], targets[b]), num_heads, student.pair_mask)
            for a, b in self.relations
        ]
        return torch.stack(divergences).sum()


@dataclass(frozen=True)
class MiniLMLoss(RelationLoss):
    """KL(teacher || student) of the attention distributions and of the relations between values in the last layers,
    averaged over heads (MiniLM, Wang et al. 2020, arXiv 2002.10957, sections 3.1 and 3.2)."""

    name: ClassVar[str] = "minilm"
    relations: ClassVar[tuple[tuple[int, int], ...]] = ((0, 1), (2, 2))

    def count_heads(self, student: SelfAttention, teacher: SelfAttention) -> int:
        """The number of attention heads; raises CtxError if it differs."""
        _require_equal_heads(student, teacher, "use the loss minilmv2")
        return student.num_heads


@dataclass(frozen=True)
class MiniLMv2Loss(RelationLoss):
    """KL(teacher || student) of the relations between queries, between keys and between values in the student's last
    layer, averaged over `relation_heads`, into which the vectors of all attention heads together are split (MiniLMv2,
    Wang et al. 2021, arXiv 2012.15828, section 3.1)."""

    name: ClassVar[str] = "minilmv2"
    relations: ClassVar[tuple[tuple[int, int], ...]] = ((0, 0), (1, 1), (2, 2))

    relation_heads: int = flag(48, "Number of relation heads; 48 for a base-size teacher, 64 for a large one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "relation_heads", at_least=1)

    def count_heads(self, student: SelfAttention, teacher: SelfAttention) -> int:
        """The option; raises CtxError if it does not divide a width."""
        widths = student.inner_size, teacher.inner_size
        if any(width % self.relation_heads for width in widths):
            raise CtxError(
                f"relation_heads={self.relation_heads} of the loss {self.name} does not divide the width of the "
                f"queries, which is {widths[0]} in the student and {widths[1]} in the teacher.",
                hint=f"set relation_heads to a divisor of {math.gcd(*widths)}.",
            )
        return self.relation_heads


@dataclass(frozen=True)
class HiddenStateLoss(LayerMapLoss):
    """Squared error of hidden states at every real token, averaged over width and summed over mapped layers, with a
    linear projection of the student's states that all layers share (TinyBERT, Jiao et al. 2020, equations 8 and 9)."""

    name: ClassVar[str] = "hidden"

    projection: bool = flag(True, "Learn a linear projection of the student's states to the teacher's width.")

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the layer map does not fit, or the widths differ without a projection."""
        self.layer_pairs(student, teacher)
        if not self.projection:
            _require_equal_width(self, student, teacher, f"remove projection=false of {self.name}.")

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """The learned projection of the student, or None."""
        return _new_projection(student, teacher) if self.projection else None

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        total = student.last_hidden_state.new_zeros((), dtype=torch.float32)
        for student_layer, teacher_layer in self.layer_pairs(student.model, teacher.model):
            states = student.hidden_states(student_layer)[student.token_mask]
            targets = teacher.hidden_states(teacher_layer)[teacher.token_mask]
            states = states if projection is None else projection(states)
            total = total + (states.float() - targets.float()).square().mean(-1).sum()
        return total


@dataclass(frozen=True)
class EmbeddingLoss(HiddenStateLoss):
    """`HiddenStateLoss` of the embeddings' output alone, with its own projection (TinyBERT, Jiao et al. 2020, equation
    9)."""

    name: ClassVar[str] = "embeddings"

    layers: str = flag("0:0", "Layer map; 0 is the output of the embeddings.")


@dataclass(frozen=True)
class SentenceVectorLoss(DistillationLoss):
    """Distance of both models' sentence vectors, pooled from the last states of the tokens (Reimers & Gurevych 2020,
    arXiv 2004.09813, equation 1, in one language)."""

    name: ClassVar[str] = "sentences"
    inputs: ClassVar[LossInputs] = "last_hidden_state"
    targets: ClassVar[str] = EXAMPLES
    requires_shared_tokenizer: ClassVar[bool] = False

    pooling: SentencePooling = flag("mean", "Pooling of the tokens' states.")
    distance: Distance = flag("cosine", "1 - cosine, or the squared error averaged over the width.")
    projection: bool = flag(True, "Learn a linear projection of the student's vector if its width differs.")

    def __post_init__(self) -> None:
        check_choice(get_args(SentencePooling), pooling=self.pooling)
        check_choice(get_args(Distance), distance=self.distance)

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the widths differ without a projection."""
        if not self.projection:
            _require_equal_width(self, student, teacher, f"remove projection=false of {self.name}.")

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """The learned projection of the student, or None."""
        has_equal_width = student.config.hidden_size == teacher.config.hidden_size
        return None if has_equal_width or not self.projection else _new_projection(student, teacher)

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        vectors = student.sentence_vectors(self.pooling).float()
        targets = teacher.sentence_vectors(self.pooling).float()
        vectors = vectors if projection is None else projection(vectors)
        if self.distance == "mse":
            return (vectors - targets).square().mean(-1).sum()
        return (1 - F.cosine_similarity(vectors, targets, dim=-1)).sum()


_LOSSES: tuple[type[DistillationLoss], ...] = (
    *(SoftTargetLoss, HardTargetLoss, LogitLoss, SoftClassLoss),
    *(CosineLoss, PatientLoss, AttentionScoreLoss, MiniLMLoss, MiniLMv2Loss),
    *(HiddenStateLoss, EmbeddingLoss, SentenceVectorLoss),
)
DISTILLATION_LOSSES = {loss.name: loss for loss in _LOSSES}
"""Name -> class of a loss."""
