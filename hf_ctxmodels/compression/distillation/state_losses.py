"""Distillation losses of hidden states, attention scores and sentence vectors."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ctxmodels.compression.distillation.attention_scores import require_attention
from hf_ctxmodels.compression.distillation.forward_pass import ForwardPass, count_layers
from hf_ctxmodels.compression.distillation.layer_maps import LayerPairs, parse_layer_map
from hf_ctxmodels.compression.distillation.prediction_losses import EXAMPLES, DistillationLoss, LossInputs
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag

_MASKED_SCORE = -100.0  # scores up to this are masks (TinyBERT, the released code)
_LAYER_MAP_HELP = "Layer map: uniform, skip, last, or student:teacher pairs such as 1:2,2:4."


def _hidden_size(model: PreTrainedModel) -> int:
    return model.config.hidden_size


def _require_equal_width(loss: DistillationLoss, student: PreTrainedModel, teacher: PreTrainedModel, hint: str) -> None:
    """Raise CtxError if the hidden states of the models differ in width."""
    if _hidden_size(student) != _hidden_size(teacher):
        raise CtxError(
            f"The loss {loss.name} compares hidden states, but the student has width {_hidden_size(student)} and the "
            f"teacher width {_hidden_size(teacher)}.",
            hint=hint,
        )


@dataclass(frozen=True)
class CosineLoss(DistillationLoss):
    """1 - cosine of both models' last hidden states at every real token (DistilBERT, Sanh et al. 2019, section 3, the
    released code)."""

    name: ClassVar[str] = "cosine"
    inputs: ClassVar[LossInputs] = "last_hidden_state"

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match the loss."""
        _require_equal_width(self, student, teacher, "use a student of the teacher's width, or the loss hidden.")

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        states = student.last_hidden_state[student.token_mask].float()
        targets = teacher.last_hidden_state[teacher.token_mask].float()
        return (1 - F.cosine_similarity(states, targets, dim=-1)).sum()


@dataclass(frozen=True)
class LayerMapLoss(DistillationLoss):
    """A loss over pairs of layers.

    Attributes:
        layers: The layer map, see `layer_maps`.
    """

    inputs: ClassVar[LossInputs] = "hidden_states"
    first_layer: ClassVar[int] = 0

    layers: str = flag("uniform", _LAYER_MAP_HELP)

    def layer_pairs(self, student: PreTrainedModel, teacher: PreTrainedModel) -> LayerPairs:
        """(student, teacher) pairs of layers; raises CtxError for layers that do not exist."""
        return parse_layer_map(self.layers, count_layers(student), count_layers(teacher), first_layer=self.first_layer)


@dataclass(frozen=True)
class PatientLoss(LayerMapLoss):
    """Squared error of both models' L2-normalised states of the first token, averaged over mapped layers and width
    (BERT-PKD, Sun et al. 2019, arXiv 1908.09355, equation 7, the released code; hence its weights of 10 to 1000)."""

    name: ClassVar[str] = "patient"
    requires_shared_tokenizer: ClassVar[bool] = False

    layers: str = flag("skip", _LAYER_MAP_HELP)

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match the loss."""
        _require_equal_width(self, student, teacher, "use a student of the teacher's width.")
        if not self.layer_pairs(student, teacher):
            raise CtxError(
                f"The layer map {self.layers!r} is empty for a student with one layer.",
                hint="list the pairs, for example 1:2.",
            )

    def target_name(self, student: PreTrainedModel) -> str:
        """The entry of a batch with the targets."""
        return EXAMPLES

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        pairs = self.layer_pairs(student.model, teacher.model)
        states = torch.stack([student.first_token_states(layer) for layer, _ in pairs], 1).float()
        targets = torch.stack([teacher.first_token_states(layer) for _, layer in pairs], 1).float()
        return (F.normalize(states, dim=-1) - F.normalize(targets, dim=-1)).square().mean((1, 2)).sum()


@dataclass(frozen=True)
class AttentionScoreLoss(LayerMapLoss):
    """Squared error of attention scores before the softmax, summed over mapped layers (TinyBERT, Jiao et al. 2020,
    equation 7).

    The error of a real token is averaged over heads and over the real tokens of its sequence. Scores of at most -100
    count as 0 in both models, as in the released code.
    """

    name: ClassVar[str] = "attention"
    inputs: ClassVar[LossInputs] = "attention_scores"
    first_layer: ClassVar[int] = 1

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match the loss."""
        for student_layer, teacher_layer in self.layer_pairs(student, teacher):
            student_heads = require_attention(_get_block(student, student_layer)).num_heads
            teacher_heads = require_attention(_get_block(teacher, teacher_layer)).num_heads
            if student_heads != teacher_heads:
                raise CtxError(
                    f"The student has {student_heads} attention heads, the teacher {teacher_heads}.",
                    hint="use a student with as many heads (num_attention_heads), or remove the loss attention.",
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


def _get_block(model: PreTrainedModel, layer: int) -> nn.Module:
    layers: Any = getattr(model.base_model, "layers", None)
    if layers is None:
        raise CtxError(f"{type(model).__name__} has no Transformer layers.", hint="remove the loss attention.")
    return layers[layer - 1]


@dataclass(frozen=True)
class HiddenStateLoss(LayerMapLoss):
    """Squared error of hidden states at every real token, averaged over width and summed over mapped layers, with a
    linear projection of the student's states that all layers share (TinyBERT, Jiao et al. 2020, equations 8 and 9).

    The map `uniform` includes the embeddings, as in the released code.
    """

    name: ClassVar[str] = "hidden"

    projection: bool = flag(True, "Learn a linear projection of the student's states to the teacher's width.")

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match the loss."""
        self.layer_pairs(student, teacher)
        if not self.projection:
            hint = f"remove projection=false of {self.name}."
            _require_equal_width(self, student, teacher, hint)

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """The learned projection of the student, or None."""
        return _new_projection(student, _hidden_size(teacher)) if self.projection else None

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
    requires_shared_tokenizer: ClassVar[bool] = False

    pooling: Literal["mean", "first", "max"] = flag("mean", "Pooling of the tokens' states.")
    distance: Literal["cosine", "mse"] = flag("cosine", "1 - cosine, or the squared error averaged over the width.")
    projection: bool = flag(True, "Learn a linear projection of the student's vector if its width differs.")

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match the loss."""
        if not self.projection:
            hint = f"remove projection=false of {self.name}."
            _require_equal_width(self, student, teacher, hint)

    def target_name(self, student: PreTrainedModel) -> str:
        """The entry of a batch with the targets."""
        return EXAMPLES

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """The learned projection of the student, or None."""
        has_equal_width = _hidden_size(student) == _hidden_size(teacher)
        return None if has_equal_width or not self.projection else _new_projection(student, _hidden_size(teacher))

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        vectors = student.sentence_vectors(self.pooling).float()
        targets = teacher.sentence_vectors(self.pooling).float()
        vectors = vectors if projection is None else projection(vectors)
        if self.distance == "mse":
            return (vectors - targets).square().mean(-1).sum()
        return (1 - F.cosine_similarity(vectors, targets, dim=-1)).sum()


def _new_projection(student: PreTrainedModel, width: int) -> nn.Linear:
    """A linear projection of the student's states, initialised like the student's linear layers."""
    projection = nn.Linear(_hidden_size(student), width)
    nn.init.normal_(projection.weight, std=getattr(student.config, "initializer_range", 0.02))
    nn.init.zeros_(projection.bias)
    return projection
