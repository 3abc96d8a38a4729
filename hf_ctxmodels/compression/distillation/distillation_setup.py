"""Teachers, flags, and the setup of distillation on raw text and on a task: model, collator and features."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.distillation.losses import DISTILLATION_LOSSES, DistillationLoss
from hf_ctxmodels.compression.distillation.model import TEACHER_PREFIX, CtxDistillationModel, DistillationCollator
from hf_ctxmodels.core.adapter_support import ADAPTERS_FOLDER, STACK_FILE, is_adapter_parameter
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag, parse_choice, split_choice
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_with_adapters
from hf_ctxmodels.downstream.tasks import Encoded, Task
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model, tokenizer_digest
from hf_ctxmodels.training.model_loading import (
    load_config,
    load_family_config,
    load_model,
    load_tokenizer,
    require_single_task,
)
from hf_ctxmodels.training.pretraining import TrainingSetup
from hf_ctxmodels.training.training_step import EpochIndexed


@dataclass(kw_only=True)
class DistillationArguments:
    """Teacher and losses."""

    teacher: str = flag(REQUIRED, "Directory or Hub id of the teacher, with its tokenizer.")
    losses: list[str] = flag(
        REQUIRED, "Losses, such as soft-targets:weight=5,temperature=2 cosine; an unknown name lists all.", nested=True
    )
    student_layers: list[int] = flag(
        (), "Make the student of these layers of --model or the teacher, from 0; DistilBERT: 0 2 4 7 9 11."
    )


@dataclass(frozen=True)
class Teacher:
    """A teacher whose weights are not loaded yet; `source` is its directory or Hub id."""

    source: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def open(cls, source: str, *, split_words: bool = False) -> "Teacher":
        """Load configuration and tokenizer; the corresponding family opens a checkpoint of transformers. Raises
        CtxError if the model has several tasks or belongs to no family, or its tokenizer does not match it."""
        require_single_task(load_config(source), source)
        config = load_family_config(source)
        tokenizer = load_tokenizer(source, split_words=split_words)
        check_tokenizer_matches_model(tokenizer, config, location=f"--teacher {source}")
        return cls(source, config, tokenizer)

    def load(self, auto_class: str) -> PreTrainedModel:
        """The model with the head of an Auto class and its saved adapters, in evaluation mode."""
        return load_model_with_adapters(self.source, auto_class, self.config).eval()

    def has_same_tokens(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether a tokenizer has the teacher's tokens, ids, normalization and pre-tokenization."""
        descriptions = []
        for candidate in (tokenizer, self.tokenizer):
            backend = getattr(candidate, "backend_tokenizer", None)
            steps = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "post_processor")]
            descriptions.append((tokenizer_digest(candidate), *map(repr, steps)))
        return descriptions[0] == descriptions[1]

    @property
    def digest(self) -> str:
        """Identifies the weights: SHA-256 of the files of a directory, otherwise the name."""
        patterns = ("*.safetensors", f"{ADAPTERS_FOLDER}/*/*.safetensors", f"{ADAPTERS_FOLDER}/{STACK_FILE}")
        files = [path for pattern in patterns for path in sorted(Path(self.source).glob(pattern))]
        if not files:
            return self.source
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class DistillationSetup:
    """Teacher, losses and source of a student.

    Attributes:
        student: Directory or Hub id that the student was loaded from, with its projections, if any; None for a new
            student.
        layers: Layers of `student`, from 0, that are copied to the student; empty for none.
    """

    teacher: Teacher
    losses: Sequence[DistillationLoss]
    student: str | None = None
    layers: Sequence[int] = ()

    def prepare_pretraining(self, model: PreTrainedModel, objective: Objective) -> TrainingSetup:
        """The setup of distillation on raw text; raises CtxError if the tokenizers or the models do not match."""
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
            CtxError: The teacher has other labels, or other tokens although the labels belong to tokens.
        """
        labels = [config.id2label for config in (setup.model.config, self.teacher.config)]
        have_names = not any(name == f"LABEL_{index}" for names in labels for index, name in names.items())
        if have_names and labels[0] != labels[1] and any(loss.inputs == "predictions" for loss in self.losses):
            raise CtxError(
                f"The teacher's labels are {', '.join(labels[1].values())}, the student's "
                f"{', '.join(labels[0].values())}.",
                location=f"--teacher {self.teacher.source}",
                hint="use a teacher that was fine-tuned on the same labels.",
            )
        distillation_model = self._build_model(setup.model, task.auto_class)
        features, collate = encoded.features, DistillationCollator(setup.collate)
        if not self.teacher.has_same_tokens(tokenizer):
            if task.has_token_outputs:
                raise CtxError(
                    "Teacher and student have different tokens, but the task's labels belong to tokens.",
                    location=f"--teacher {self.teacher.source}",
                    hint="use a student with the teacher's tokenizer.",
                )
            features = [
                feature | {f"{TEACHER_PREFIX}{name}": value for name, value in inputs.items() if name != "labels"}
                for feature, inputs in zip(
                    features, task.encode(training, self.teacher.tokenizer).features, strict=True
                )
            ]
            collate = DistillationCollator(setup.collate, task.collator(self.teacher.tokenizer))
        return TrainingSetup(distillation_model, collate, self.identity), EpochIndexed(features)

    @property
    def identity(self) -> dict[str, Any]:
        """Values that must be equal on resume: the teacher's weights, and the losses with all options."""
        return {
            "teacher": self.teacher.digest,
            "losses": {loss.name: vars(loss) for loss in self.losses},
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


def copy_layers(student: PreTrainedModel, source: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copy the weights of the source's layer `layers[i]` to the student's layer i; raises CtxError if they differ."""
    student_layers: Any = getattr(student.base_model, "layers", None)
    source_layers: Any = getattr(source.base_model, "layers", None)
    are_lists = isinstance(student_layers, nn.ModuleList) and isinstance(source_layers, nn.ModuleList)
    location = f"--student_layers {' '.join(map(str, layers))}"
    if not are_lists or len(student_layers) != len(layers):
        raise CtxError(
            f"{len(layers)} layers cannot be copied to {type(student).__name__}.",
            location=location,
            hint="use one layer of the teacher for each layer of the student; models that share layers have none.",
        )
    for student_layer, index in zip(student_layers, layers, strict=True):
        weights = {
            name: tensor for name, tensor in source_layers[index].state_dict().items() if not is_adapter_parameter(name)
        }
        try:
            student_layer.load_state_dict(weights)
        except RuntimeError as error:
            raise CtxError(
                "The layers of teacher and student have different shapes.",
                location=location,
                hint="remove --config_options that change the width.",
            ) from error


def parse_losses(texts: Sequence[str]) -> list[DistillationLoss]:
    """Losses from `["soft-targets:weight=5,temperature=2", "cosine:weight=1"]`.

    Raises:
        CtxError: There is no loss, a loss is unknown or occurs twice, or an option is unknown or has the wrong type.
    """
    if not texts:
        summaries = {
            name: " ".join((loss.__doc__ or "").partition("\n\n")[0].split())
            for name, loss in DISTILLATION_LOSSES.items()
        }
        listed = "".join(f"\n    {name}: {summary}" for name, summary in summaries.items())
        raise CtxError("Expected one or more losses.", location="--losses", hint=f"use NAME:weight=W of: {listed}")
    names = [split_choice(text)[0] for text in texts]
    if len(set(names)) < len(names):
        raise CtxError("A loss occurs twice.", location=f"--losses {' '.join(texts)}", hint="remove one of them.")
    return [parse_choice(text, DISTILLATION_LOSSES, "--losses") for text in texts]
