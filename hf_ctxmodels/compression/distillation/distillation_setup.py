"""How a student learns from a teacher, on raw text and on a task: what the loop trains in the student's place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.distillation.collator import DistillationCollator
from hf_ctxmodels.compression.distillation.model import TEACHER, CtxDistillationModel
from hf_ctxmodels.compression.distillation.prediction_losses import Term
from hf_ctxmodels.compression.distillation.teacher import Teacher, copy_layers
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.tasks import Encoded, Task
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.training.batches import EpochIndexed
from hf_ctxmodels.training.model_loading import load_family_config, load_model
from hf_ctxmodels.training.pretraining import TrainingSetup


@dataclass(frozen=True)
class DistillationSetup:
    """What is learned from whom.

    Attributes:
        teacher: The teacher.
        terms: What the student learns.
        student: Directory or Hub id that the student was opened from, which may hold learned projections; None for a
            new one.
        layers: The layers of `student` that the student is made of, counted from 0; none for those it has.
    """

    teacher: Teacher
    terms: Sequence[Term]
    student: str | None = None
    layers: Sequence[int] = ()

    def prepare_pretraining(self, model: PreTrainedModel, objective: Objective) -> TrainingSetup:
        """What learns from raw text, in the place of a model that is pretrained.

        Raises:
            CtxError: The two models have different tokenizers, or do not fit the terms.
        """
        if not self.teacher.shares_tokens(objective.tokenizer):
            raise CtxError(
                "The teacher reads other tokens than the student.",
                location=f"--teacher {self.teacher.source}",
                hint="leave out --tokenizer, and give a new student (--family) or one with the teacher's vocabulary.",
            )
        taught = self._taught(model, objective.auto_class)
        return TrainingSetup(taught, DistillationCollator(objective.collate), self.identity)

    def prepare_finetuning(
        self,
        task: Task[Any],
        training: list[Any],
        encoded: Encoded,
        learner: TrainingSetup,
        tokenizer: PreTrainedTokenizerBase,
    ) -> tuple[TrainingSetup, EpochIndexed]:
        """What learns from a file of examples, and their features with those of the teacher's tokenizer.

        Args:
            task: After `configure`.
            training, encoded: The examples, and their features by the student's `tokenizer`.
            learner: The student and its collator.

        Raises:
            CtxError: The teacher has other labels, reads other tokens where the task's labels are of tokens, or the
                models do not fit the terms.
        """
        self._check_labels(learner.model)
        taught = self._taught(learner.model, task.auto_class)
        if self.teacher.shares_tokens(tokenizer):
            collate = DistillationCollator(learner.collate)
            return TrainingSetup(taught, collate, self.identity), EpochIndexed(encoded.features)
        if task.has_token_outputs:
            raise CtxError(
                "The teacher reads other tokens than the student, and the task's labels are of tokens.",
                location=f"--teacher {self.teacher.source}",
                hint="give a student with the teacher's tokenizer.",
            )
        others = task.encode(training, self.teacher.tokenizer).features
        features = [
            {**own, **{f"{TEACHER}{name}": value for name, value in other.items() if name != "labels"}}
            for own, other in zip(encoded.features, others, strict=True)
        ]
        collate = DistillationCollator(learner.collate, task.collator(self.teacher.tokenizer))
        return TrainingSetup(taught, collate, self.identity), EpochIndexed(features)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal when the run is resumed: the teacher's weights and the terms with all their options."""
        return {
            "teacher": self.teacher.digest,
            "terms": {term.name: vars(term) for term in self.terms},
            "student_layers": list(self.layers),
        }

    def _taught(self, student: PreTrainedModel, auto_class: str) -> CtxDistillationModel:
        teacher = self.teacher.load(auto_class)
        if self.layers:
            source = teacher
            if self.student not in (None, self.teacher.source):
                source = load_model(str(self.student), auto_class, load_family_config(str(self.student)))
            copy_layers(student, source, self.layers)
        taught, shown = CtxDistillationModel(student, teacher, self.terms), PartialState().is_main_process
        if self.student is not None and taught.load_projections(self.student):
            print_status(f"projections of {self.student} are learned on", shown)
        ratio = teacher.num_parameters() / student.num_parameters()
        print_status(f"a teacher of {teacher.num_parameters():,} parameters, {ratio:.1f} times the student's", shown)
        return taught

    def _check_labels(self, student: PreTrainedModel) -> None:
        """Raise CtxError if both models name their labels, differently."""
        named = [model.id2label for model in (student.config, self.teacher.config)]
        if any(name == f"LABEL_{number}" for labels in named for number, name in labels.items()):
            return
        if named[0] != named[1] and any(term.reads == "predictions" for term in self.terms):
            raise CtxError(
                f"The teacher's labels are {', '.join(named[1].values())}, "
                f"the student's {', '.join(named[0].values())}.",
                location=f"--teacher {self.teacher.source}",
                hint="give a teacher that was fine-tuned on the same labels.",
            )
