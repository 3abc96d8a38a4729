"""Setup of distillation on raw text and on a task: model, collator and features for the training loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.distillation.collator import TEACHER_PREFIX, DistillationCollator
from hf_ctxmodels.compression.distillation.model import CtxDistillationModel
from hf_ctxmodels.compression.distillation.prediction_losses import DistillationLoss
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
    """Teacher, losses and source of a student.

    Attributes:
        teacher: The teacher.
        losses: The distillation losses.
        student: Directory or Hub id that the student was loaded from, which may hold learned projections; None for a
            new student.
        layers: Layers of `student`, from 0, that are copied to the student; empty for none.
    """

    teacher: Teacher
    losses: Sequence[DistillationLoss]
    student: str | None = None
    layers: Sequence[int] = ()

    def prepare_pretraining(self, model: PreTrainedModel, objective: Objective) -> TrainingSetup:
        """The setup of distillation on raw text, which replaces pretraining of the student.

        Raises:
            CtxError: The models have different tokenizers, or do not match the losses.
        """
        if not self.teacher.has_same_tokens(objective.tokenizer):
            raise CtxError(
                "Teacher and student have different tokens.",
                location=f"--teacher {self.teacher.source}",
                hint="remove --tokenizer, and use a new student (--family) or one with the teacher's vocabulary.",
            )
        distillation_model = self._build_model(model, objective.auto_class)
        return TrainingSetup(distillation_model, DistillationCollator(objective.collate), self.identity)

    def prepare_finetuning(
        self,
        task: Task[Any],
        training: list[Any],
        encoded: Encoded,
        setup: TrainingSetup,
        tokenizer: PreTrainedTokenizerBase,
    ) -> tuple[TrainingSetup, EpochIndexed]:
        """The setup and the features of distillation on a task's examples.

        Args:
            task: The task, after `configure`.
            training, encoded: The training examples, and their features by the student's `tokenizer`.
            setup: The student and its collator.

        Raises:
            CtxError: The teacher has other labels, or other tokens although the labels belong to tokens, or the models
                do not match the losses.
        """
        self._check_labels(setup.model)
        distillation_model = self._build_model(setup.model, task.auto_class)
        if self.teacher.has_same_tokens(tokenizer):
            collate = DistillationCollator(setup.collate)
            return TrainingSetup(distillation_model, collate, self.identity), EpochIndexed(encoded.features)
        if task.has_token_outputs:
            raise CtxError(
                "Teacher and student have different tokens, but the task's labels belong to tokens.",
                location=f"--teacher {self.teacher.source}",
                hint="use a student with the teacher's tokenizer.",
            )
        teacher_features = task.encode(training, self.teacher.tokenizer).features
        features = [
            {
                **student_feature,
                **{f"{TEACHER_PREFIX}{name}": value for name, value in teacher_feature.items() if name != "labels"},
            }
            for student_feature, teacher_feature in zip(encoded.features, teacher_features, strict=True)
        ]
        collate = DistillationCollator(setup.collate, task.collator(self.teacher.tokenizer))
        return TrainingSetup(distillation_model, collate, self.identity), EpochIndexed(features)

    @property
    def identity(self) -> dict[str, Any]:
        """Values that must be equal on resume: the teacher's weights, and the losses with all options."""
        return {
            "teacher": self.teacher.digest,
            "terms": {loss.name: vars(loss) for loss in self.losses},
            "student_layers": list(self.layers),
        }

    def _build_model(self, student: PreTrainedModel, auto_class: str) -> CtxDistillationModel:
        teacher = self.teacher.load(auto_class)
        if self.layers:
            source = teacher
            if self.student not in (None, self.teacher.source):
                source = load_model(str(self.student), auto_class, load_family_config(str(self.student)))
            copy_layers(student, source, self.layers)
        model = CtxDistillationModel(student, teacher, self.losses)
        is_main_process = PartialState().is_main_process
        if self.student is not None and model.load_projections(self.student):
            print_status(f"continuing with the learned projections of {self.student}", is_main_process)
        num_parameters = teacher.num_parameters()
        ratio = num_parameters / student.num_parameters()
        print_status(f"teacher: {num_parameters:,} parameters, {ratio:.1f} times the student's", is_main_process)
        return model

    def _check_labels(self, student: PreTrainedModel) -> None:
        """Raise CtxError if both models have label names, and these differ."""
        student_labels, teacher_labels = student.config.id2label, self.teacher.config.id2label
        for labels in (student_labels, teacher_labels):
            if any(name == f"LABEL_{index}" for index, name in labels.items()):
                return
        if student_labels != teacher_labels and any(loss.inputs == "predictions" for loss in self.losses):
            raise CtxError(
                f"The teacher's labels are {', '.join(teacher_labels.values())}, the student's "
                f"{', '.join(student_labels.values())}.",
                location=f"--teacher {self.teacher.source}",
                hint="use a teacher that was fine-tuned on the same labels.",
            )
