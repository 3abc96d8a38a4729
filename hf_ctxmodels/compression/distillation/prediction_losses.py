"""Terms of a distillation loss: what of the teacher the student learns. This module has those of predictions.

Every term is a sum over its targets divided by their number in the whole step: real tokens, labelled tokens or rows.
The gradient thus does not depend on how a step is divided into micro-batches and processes, nor on padding, which is
never computed. Where the original code averages over padding too, this differs from it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ctxmodels.compression.distillation.forward_pass import Run, predictions_of
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.layers.lm_loss.kl_divergence import chunked_kl_divergence, kl_divergence

TOKENS, ROWS, LABELS = "distilled_tokens", "distilled_examples", "labels"
"""The entries of a batch whose targets (other than -100) are counted; `DistillationCollator` adds the first two."""

Reads = Literal["predictions", "states", "scores", "last state"]


@dataclass(frozen=True)
class Term(ABC):
    """One term of the loss.

    Attributes:
        name: Its name on the command line; the output has `<name>_loss`.
        reads: What it reads of both models.
        needs_one_tokenizer: Whether it compares tokens, so that both models must read the same ids.
        weight: Its factor in the loss.
    """

    name: ClassVar[str]
    reads: ClassVar[Reads]
    needs_one_tokenizer: ClassVar[bool] = True

    weight: float = flag(1.0, "Factor of the term.")

    @classmethod
    def option_help(cls) -> dict[str, str]:
        """Option name -> one sentence of help with the default."""
        options = [each for each in fields(cls) if each.name != "weight"]
        return {each.name: f"{each.metadata['help']} Default: {each.default}." for each in options}

    @property
    def loss_name(self) -> str:
        """Its field of the output."""
        return f"{self.name.replace('-', '_')}_loss"

    @abstractmethod
    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if one of the models lacks what the term needs, or the two do not fit."""

    def counted_by(self, student: PreTrainedModel) -> str:
        """The entry of a batch with the term's targets."""
        return TOKENS

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """A learned map of the student's states to the teacher's width, or None."""
        return None

    @abstractmethod
    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """The sum over targets.

        Args:
            student, teacher: Forward passes; the teacher's tensors have no gradient.
            projection: What `build_projection` made.
        """


@dataclass(frozen=True)
class PredictionTerm(Term):
    """A term of the predictions of both models' heads."""

    reads: ClassVar[Reads] = "predictions"
    needs_one_tokenizer: ClassVar[bool] = False  # of rows; `check` asks where tokens are predicted
    of_vocabulary: ClassVar[bool] = False
    of_classes: ClassVar[bool] = True  # between which probability is divided

    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """See `Term`."""
        where = predictions_of(student)
        kinds = ("tokens", "labels", "rows") if self.of_vocabulary else ("labels", "rows")
        if where not in kinds:
            raise CtxError(
                f"{type(student).__name__} has no predictions for the term {self.name}.",
                hint="use a classifier" + (" or a masked language model." if self.of_vocabulary else "."),
            )
        new: tuple[str, ...] = getattr(teacher, "newly_initialized_modules", ())
        if predictions_of(teacher) != where or new:
            lacks = ", ".join(new) or type(teacher).__name__
            raise CtxError(
                f"The teacher has no trained head for the term {self.name} ({lacks}).",
                location=teacher.config.name_or_path or None,
                hint="give a teacher that was trained on the task: a pretrained one must be fine-tuned first.",
            )
        field = "vocab_size" if where == "tokens" else "num_labels"
        sizes = [getattr(model.config, field) for model in (student, teacher)]
        if sizes[0] != sizes[1]:
            raise CtxError(
                f"The student predicts {sizes[0]} classes, the teacher {sizes[1]} ({field}).",
                hint="use the teacher's tokenizer." if where == "tokens" else "use the labels of the teacher.",
            )
        if self.of_classes and where != "tokens" and student.config.num_labels == 1:
            raise CtxError(
                f"A regression has no classes for the term {self.name}.",
                hint="use logits, or hard-targets as TinyBERT does for regression.",
            )

    def counted_by(self, student: PreTrainedModel) -> str:
        """See `Term`."""
        return {"tokens": TOKENS, "labels": LABELS, "rows": ROWS}[predictions_of(student) or "rows"]


@dataclass(frozen=True)
class SoftTargets(PredictionTerm):
    """KL(teacher || student) of predictions at temperature T, times T^2 (Hinton et al. 2015, section 2).

    Of a masked language model at every real token, masked or not (DistilBERT, Sanh et al. 2019, section 3, the released
    code); of a classifier for each row or labelled token (BERT-PKD, Sun et al. 2019, equation 4).
    """

    name: ClassVar[str] = "soft-targets"
    of_vocabulary: ClassVar[bool] = True

    temperature: float = flag(2.0, "Both models' logits are divided by it.")
    masked_only: bool = flag(False, "Of a masked language model at the labelled tokens only.")

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise CtxError(f"A temperature of {self.temperature} is out of range.", hint="use more than 0; often 2.")

    def counted_by(self, student: PreTrainedModel) -> str:
        """See `Term`."""
        entry = super().counted_by(student)
        return LABELS if self.masked_only and entry == TOKENS else entry

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        if predictions_of(student.model) != "tokens":
            return kl_divergence(student.logits(student.labels), teacher.logits(student.labels), self.temperature)
        where = student.tokens
        if self.masked_only:
            assert student.labels is not None
            where = student.labels != IGNORE_INDEX
        return chunked_kl_divergence(student.vocabulary(where), teacher.vocabulary(where), self.temperature)


@dataclass(frozen=True)
class HardTargets(Term):
    """The student's own loss for the labels of the data.

    It is the head's, with all of its terms, and already a mean over targets.
    """

    name: ClassVar[str] = "hard-targets"
    reads: ClassVar[Reads] = "predictions"
    needs_one_tokenizer: ClassVar[bool] = False

    def check(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """See `Term`."""
        if predictions_of(student) is None:
            raise CtxError(f"{type(student).__name__} has no loss of its own.", hint="leave out hard-targets.")

    def counted_by(self, student: PreTrainedModel) -> str:
        """See `Term`."""
        return LABELS

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """Not used: `CtxDistillationModel` takes the head's own mean."""
        raise NotImplementedError


@dataclass(frozen=True)
class LogitsError(PredictionTerm):
    """Mean squared error of logits, averaged over classes (Tang et al. 2019, arXiv 1903.12136, equation 1)."""

    name: ClassVar[str] = "logits"
    of_classes: ClassVar[bool] = False

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        own, other = student.logits(student.labels).float(), teacher.logits(student.labels).float()
        return F.mse_loss(own, other, reduction="sum") / own.shape[-1]


@dataclass(frozen=True)
class SoftClasses(PredictionTerm):
    """Cross-entropy of the student's classes with the teacher's, averaged over targets AND classes (TinyBERT, Jiao et
    al. 2020, equation 10, the released code)."""

    name: ClassVar[str] = "soft-classes"

    temperature: float = flag(1.0, "Both models' logits are divided by it.")

    def summed(self, student: Run, teacher: Run, projection: Any) -> Tensor:
        """See `Term`."""
        own, other = student.logits(student.labels).float(), teacher.logits(student.labels).float()
        targets = (other / self.temperature).softmax(-1)
        return -(targets * (own / self.temperature).log_softmax(-1)).sum() / own.shape[-1]
