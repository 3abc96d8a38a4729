"""The base class of distillation losses, and losses of the models' predictions.

Each loss is a sum over its targets divided by their number in the whole optimizer step. Targets are real tokens,
labelled tokens or examples. The gradient thus depends neither on how a step is divided into micro-batches and
processes, nor on padding, which is never computed. Released code that averages over padding differs in this.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ctxmodels.compression.distillation.forward_pass import ForwardPass, get_prediction_level
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.layers.lm_loss.kl_divergence import chunked_kl_divergence, kl_divergence

TOKENS, EXAMPLES, LABELS = "distilled_tokens", "distilled_examples", "labels"
"""Entries of a batch whose targets (other than -100) are counted; `DistillationCollator` adds the first two."""

LossInputs = Literal["predictions", "hidden_states", "attention_scores", "last_hidden_state"]


@dataclass(frozen=True)
class DistillationLoss(ABC):
    """One weighted loss of a student that learns from a teacher.

    Attributes:
        name: Name on the command line; the output field is `<name>_loss`.
        inputs: Outputs of both models that the loss uses.
        requires_shared_tokenizer: Whether it compares tokens, so that both models must read the same ids.
        weight: Factor in the total loss.
    """

    name: ClassVar[str]
    inputs: ClassVar[LossInputs]
    requires_shared_tokenizer: ClassVar[bool] = True

    weight: float = flag(1.0, "Factor of the loss.")

    @classmethod
    def option_help(cls) -> dict[str, str]:
        """Option -> one sentence of help with the default."""
        options = [option for option in fields(cls) if option.name != "weight"]
        return {option.name: f"{option.metadata['help']} Default: {option.default}." for option in options}

    @property
    def output_name(self) -> str:
        """The field of `DistillationOutput`."""
        return f"{self.name.replace('-', '_')}_loss"

    @abstractmethod
    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if a model lacks what the loss reads, or the models do not match."""

    def target_name(self, student: PreTrainedModel) -> str:
        """The entry of a batch that holds the loss's targets."""
        return TOKENS

    def build_projection(self, student: PreTrainedModel, teacher: PreTrainedModel) -> nn.Module | None:
        """A learned projection of the student's states to the teacher's width, or None."""
        return None

    @abstractmethod
    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets.

        Args:
            student, teacher: Forward passes; the teacher's tensors have no gradient.
            projection: The module of `build_projection`.
        """


@dataclass(frozen=True)
class PredictionLoss(DistillationLoss):
    """A loss of the predictions of both models' heads."""

    inputs: ClassVar[LossInputs] = "predictions"
    requires_shared_tokenizer: ClassVar[bool] = False  # of sequence predictions; token predictions are checked
    supports_masked_lm: ClassVar[bool] = False
    requires_classes: ClassVar[bool] = True

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match the loss."""
        level = get_prediction_level(student)
        levels = (
            ("tokens", "labelled_tokens", "sequences") if self.supports_masked_lm else ("labelled_tokens", "sequences")
        )
        if level not in levels:
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

    def target_name(self, student: PreTrainedModel) -> str:
        """The entry of a batch with the targets."""
        names = {"tokens": TOKENS, "labelled_tokens": LABELS, "sequences": EXAMPLES}
        return names[get_prediction_level(student) or "sequences"]


@dataclass(frozen=True)
class SoftTargetLoss(PredictionLoss):
    """KL(teacher || student) of predictions at temperature T, times T^2 (Hinton et al. 2015, section 2).

    At every real token of a masked language model, masked or not (DistilBERT, Sanh et al. 2019, section 3, the released
    code); for each example or labelled token of a classifier (BERT-PKD, Sun et al. 2019, equation 4).
    """

    name: ClassVar[str] = "soft-targets"
    supports_masked_lm: ClassVar[bool] = True

    temperature: float = flag(2.0, "Divisor of both models' logits.")
    masked_only: bool = flag(False, "With a masked language model, use the labelled tokens only.")

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise CtxError(
                f"temperature={self.temperature} is out of range.", hint="use a temperature above 0, for example 2."
            )

    def target_name(self, student: PreTrainedModel) -> str:
        """The entry of a batch with the targets."""
        name = super().target_name(student)
        return LABELS if self.masked_only and name == TOKENS else name

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        if get_prediction_level(student.model) != "tokens":
            return kl_divergence(student.logits(student.labels), teacher.logits(student.labels), self.temperature)
        token_mask = student.token_mask
        if self.masked_only:
            assert student.labels is not None
            token_mask = student.labels != IGNORE_INDEX
        return chunked_kl_divergence(
            student.deferred_logits(token_mask), teacher.deferred_logits(token_mask), self.temperature
        )


@dataclass(frozen=True)
class HardTargetLoss(DistillationLoss):
    """The student's own loss for the labels of the data.

    It is the loss of the student's head, with all its terms, and already a mean over targets.
    """

    name: ClassVar[str] = "hard-targets"
    inputs: ClassVar[LossInputs] = "predictions"
    requires_shared_tokenizer: ClassVar[bool] = False

    def check_models(self, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Raise CtxError if the models do not match the loss."""
        if get_prediction_level(student) is None:
            raise CtxError(f"{type(student).__name__} has no loss.", hint="remove hard-targets.")

    def target_name(self, student: PreTrainedModel) -> str:
        """The entry of a batch with the targets."""
        return LABELS

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """Not called: `CtxDistillationModel` uses the mean of `hard_target_loss`."""
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

    def compute(self, student: ForwardPass, teacher: ForwardPass, projection: Any) -> Tensor:
        """The sum over targets."""
        logits, teacher_logits = student.logits(student.labels).float(), teacher.logits(student.labels).float()
        targets = (teacher_logits / self.temperature).softmax(-1)
        return -(targets * (logits / self.temperature).log_softmax(-1)).sum() / logits.shape[-1]
