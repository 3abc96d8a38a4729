"""Terms of hidden states, attention scores and sentence vectors."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ctxmodels.compression.distillation.attention_scores import require_attention
from hf_ctxmodels.compression.distillation.forward_pass import Run, number_of_layers
from hf_ctxmodels.compression.distillation.layer_maps import LayerPairs, layer_pairs
from hf_ctxmodels.compression.distillation.prediction_losses import ROWS, Reads, Term
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag

_MASKED_SCORE = -100.0  # what is at most this is a mask, not a score (TinyBERT, the released code)


def width_of(model: PreTrainedModel) -> int:
    """Width of a model's hidden states."""
    return model.config.hidden_size


def require_one_width(term: Term, student: PreTrainedModel, teacher: PreTrainedModel, hint: str) -> None:
    """Raise CtxError if the two models have states of different width."""
    if width_of(student) != width_of(teacher):
        raise CtxError(
            f"The term {term.name} compares states of the student, {width_of(student)} wide, with the teacher's, "
            f"{width_of(teacher)} wide.",
            hint=hint,
        )


@dataclass(frozen=True)
class Cosine(Term):
    """1 - cosine of both models' last hidden states at every real token (DistilBERT, Sanh et al. 2019, section 3, the
    released code)."""

    name: ClassVar[str] = "cosine"
    reads: ClassVar[Reads] = "last state"

    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """See `Term`."""
        require_one_width(self, student, teacher, "use a student of the teacher's width, or the term hidden.")

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        own, other = student.last_state[student.tokens], teacher.last_state[teacher.tokens]
        return (1 - F.cosine_similarity(own.float(), other.float(), dim=-1)).sum()


@dataclass(frozen=True)
class MappedTerm(Term):
    """A term over a layer map.

    Attributes:
        layers: See `layer_maps`.
    """

    reads: ClassVar[Reads] = "states"
    first: ClassVar[int] = 0

    layers: str = flag("uniform", "Layer map: uniform, skip, last, or student:teacher pairs such as 1:2,2:4.")

    def pairs(self, student: PreTrainedModel, teacher: PreTrainedModel) -> LayerPairs:
        """(student, teacher) layers; raises CtxError for those that do not exist."""
        return layer_pairs(self.layers, number_of_layers(student), number_of_layers(teacher), first=self.first)


@dataclass(frozen=True)
class Patient(MappedTerm):
    """Squared error of both models' L2-normalised states of the first token, averaged over mapped layers and width
    (BERT-PKD, Sun et al. 2019, arXiv 1908.09355, equation 7, the released code; hence its weights of 10 to 1000)."""

    name: ClassVar[str] = "patient"
    needs_one_tokenizer: ClassVar[bool] = False

    layers: str = flag("skip", "Layer map: uniform, skip, last, or student:teacher pairs such as 1:2,2:4.")

    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """See `Term`."""
        require_one_width(self, student, teacher, "use a student of the teacher's width.")
        if not self.pairs(student, teacher):
            raise CtxError(
                f"The layer map {self.layers!r} is empty for a student of one layer.", hint="write it out: 1:2."
            )

    def counted_by(self, student: PreTrainedModel) -> str:
        """See `Term`."""
        return ROWS

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        pairs = self.pairs(student.model, teacher.model)
        own = torch.stack([student.first_tokens(layer) for layer, _ in pairs], 1).float()
        other = torch.stack([teacher.first_tokens(layer) for _, layer in pairs], 1).float()
        return (F.normalize(own, dim=-1) - F.normalize(other, dim=-1)).square().mean((1, 2)).sum()


@dataclass(frozen=True)
class Attention(MappedTerm):
    """Squared error of attention scores before the softmax, summed over mapped layers (TinyBERT, Jiao et al. 2020,
    equation 7).

    For each real token it is averaged over heads and over the real tokens of its sequence. Scores of at most -100 count
    as 0 on both sides, as in the released code.
    """

    name: ClassVar[str] = "attention"
    reads: ClassVar[Reads] = "scores"
    first: ClassVar[int] = 1

    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """See `Term`."""
        for own, other in self.pairs(student, teacher):
            blocks = [(student, own), (teacher, other)]
            heads = [require_attention(_block(model, layer)).num_heads for model, layer in blocks]
            if heads[0] != heads[1]:
                raise CtxError(
                    f"The student has {heads[0]} attention heads, the teacher {heads[1]}.",
                    hint="use a student with as many heads (num_attention_heads), or leave out the term attention.",
                )

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        total = student.last_state.new_zeros((), dtype=torch.float32)
        pairs = student.pairs[:, None]
        keys = pairs.sum(-1).clamp(min=1)
        for own, other in self.pairs(student.model, teacher.model):
            scores, targets = (
                each.float().masked_fill((each <= _MASKED_SCORE) | ~pairs, 0.0)
                for each in (student.scores(own), teacher.scores(other))
            )
            total = total + ((scores - targets).square().sum(-1) / keys).mean(1).sum()
        return total


def _block(model: PreTrainedModel, layer: int) -> nn.Module:
    layers: Any = getattr(model.base_model, "layers", None)
    if layers is None:
        raise CtxError(f"{type(model).__name__} has no Transformer layers.", hint="leave out the term attention.")
    return layers[layer - 1]


@dataclass(frozen=True)
class Hidden(MappedTerm):
    """Squared error of hidden states at every real token, averaged over width and summed over mapped layers, with a
    linear map of the student's states that all layers share (TinyBERT, Jiao et al. 2020, equations 8 and 9).

    The map `uniform` begins with the embeddings, as in the released code.
    """

    name: ClassVar[str] = "hidden"

    projection: bool = flag(True, "Map the student's states linearly to the teacher's width; learned.")

    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """See `Term`."""
        self.pairs(student, teacher)
        if not self.projection:
            require_one_width(self, student, teacher, f"leave out --term_options {self.name}.projection=false.")

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """See `Term`."""
        return new_projection(student, width_of(teacher)) if self.projection else None

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        total = student.last_state.new_zeros((), dtype=torch.float32)
        for own, other in self.pairs(student.model, teacher.model):
            states, targets = student.state(own)[student.tokens], teacher.state(other)[teacher.tokens]
            states = states if projection is None else projection(states)
            total = total + (states.float() - targets.float()).square().mean(-1).sum()
        return total


@dataclass(frozen=True)
class Embeddings(Hidden):
    """`Hidden` of the embeddings' output alone, with a map of its own (TinyBERT, Jiao et al. 2020, equation 9)."""

    name: ClassVar[str] = "embeddings"

    layers: str = flag("0:0", "Layer map; 0 is the output of the embeddings.")


@dataclass(frozen=True)
class Sentences(Term):
    """Distance of both models' sentence vectors, pooled from the last states of each row's tokens (Reimers & Gurevych
    2020, arXiv 2004.09813, equation 1, in one language)."""

    name: ClassVar[str] = "sentences"
    reads: ClassVar[Reads] = "last state"
    needs_one_tokenizer: ClassVar[bool] = False

    pooling: Literal["mean", "first", "max"] = flag("mean", "Pooling of the tokens' states.")
    distance: Literal["cosine", "mse"] = flag("cosine", "1 - cosine, or the squared error averaged over the width.")
    projection: bool = flag(True, "Map the student's vector linearly where its width is not the teacher's; learned.")

    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """See `Term`."""
        if not self.projection:
            require_one_width(self, student, teacher, f"leave out --term_options {self.name}.projection=false.")

    def counted_by(self, student: PreTrainedModel) -> str:
        """See `Term`."""
        return ROWS

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """See `Term`."""
        fits = width_of(student) == width_of(teacher)
        return None if fits or not self.projection else new_projection(student, width_of(teacher))

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        own, other = (each.sentence_vectors(self.pooling).float() for each in (student, teacher))
        own = own if projection is None else projection(own)
        if self.distance == "mse":
            return (own - other).square().mean(-1).sum()
        return (1 - F.cosine_similarity(own, other, dim=-1)).sum()


def new_projection(student: PreTrainedModel, width: int) -> nn.Linear:
    """A linear map of the student's states to a width, drawn like the student's own maps."""
    projection = nn.Linear(width_of(student), width)
    nn.init.normal_(projection.weight, std=getattr(student.config, "initializer_range", 0.02))
    nn.init.zeros_(projection.bias)
    return projection
