"""A student that learns from a teacher, as one model with a loss, and its collator."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_ctxmodels.compression.distillation.forward_pass import ForwardPass, get_prediction_level, run_forward
from hf_ctxmodels.compression.distillation.losses import (
    DISTILLATION_LOSSES,
    EXAMPLES,
    LABELS,
    TOKENS,
    DistillationLoss,
    HardTargetLoss,
)
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import write_tensors
from hf_ctxmodels.heads import ForMaskedLM, ItemCounts
from hf_ctxmodels.layers.pooling import build_token_mask

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Tensor]]

TEACHER_PREFIX = "teacher_"
"""Prefix of the teacher's inputs in a batch, if it has its own tokenizer."""

PROJECTIONS_FILE = "distillation.safetensors"
"""File next to a student's weights with the learned projections to the teacher's width, which no student needs."""

_STUDENT_PREFIX = "student."


class DistillationCollator:
    """A collator that adds to a batch the inputs of `CtxDistillationModel`.

    Returns: the batch of `collate`, and
        distilled_tokens, distilled_examples: Targets that are counted in a step: (batch, length) int64, 0 at real
            tokens and -100 at padding; and (batch,) int64, 0.
        teacher_...: The batch of `collate_teacher`, with this prefix.

    Args:
        collate: The student's collator.
        collate_teacher: The teacher's collator, for the columns of the features with the prefix `teacher_`, which is
            removed; None for a teacher that reads the student's inputs.

    Example:
        >>> import torch
        >>> collate = DistillationCollator(lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])})
        >>> sorted(collate([{"input_ids": [1, 2]}]))
        ['distilled_examples', 'distilled_tokens', 'input_ids']
    """

    def __init__(self, collate: Collate, collate_teacher: Collate | None = None) -> None:
        self._collate, self._collate_teacher = collate, collate_teacher

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The batch of `features`."""
        batch = dict(self._collate([_without_prefix(feature, TEACHER_PREFIX) for feature in features]))
        mask = build_token_mask(batch["input_ids"], batch.get("attention_mask"), batch.get("sequence_ids"))
        batch[TOKENS] = torch.where(mask, 0, IGNORE_INDEX)
        batch[EXAMPLES] = torch.zeros(len(mask), dtype=torch.int64)
        if self._collate_teacher is not None:
            teacher_batch = self._collate_teacher([_select_prefix(feature, TEACHER_PREFIX) for feature in features])
            batch |= {f"{TEACHER_PREFIX}{name}": value for name, value in teacher_batch.items()}
        return batch


def _select_prefix(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries with a prefix, which is removed."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def _without_prefix(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if not name.startswith(prefix)}


@dataclass
class DistillationOutput(ModelOutput):
    """The weighted sum of the losses, the logits of a student with a task head, and each loss without its weight,
    detached; None if not used."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    soft_targets_loss: Tensor | None = None
    hard_targets_loss: Tensor | None = None
    logits_loss: Tensor | None = None
    soft_classes_loss: Tensor | None = None
    cosine_loss: Tensor | None = None
    patient_loss: Tensor | None = None
    attention_loss: Tensor | None = None
    minilm_loss: Tensor | None = None
    minilmv2_loss: Tensor | None = None
    hidden_loss: Tensor | None = None
    embeddings_loss: Tensor | None = None
    sentences_loss: Tensor | None = None


class CtxDistillationModel(CtxPreTrainedModel):
    """A student with distillation losses, for the training loop and for transformers' Trainer.

    The loss is the weighted sum of `losses`. Each is a sum over its targets divided by their number: in the whole
    optimizer step with the package's loop and with `CtxTrainer`, in the micro-batch with Trainer. The teacher is in
    evaluation mode, has no gradient, and is not a submodule: it is neither trained nor saved, counted or sharded.

    `save_pretrained` saves the student as a plain model, and learned projections to a file next to it. In evaluation
    mode, a batch without the entries of `DistillationCollator` gives the student's own output.

    Args:
        student: A masked LM, or a model of any family with a task head.
        teacher: As `student`. Losses of tokens need the student's tokenizer.
        losses: The distillation losses; see `losses`.

    Raises:
        CtxError: There is no loss, a loss occurs twice or has a weight that is not above 0, or a model lacks what a
            loss needs.

    Example:
        >>> import torch
        >>> from hf_ctxmodels import CtxBertConfig, CtxBertForMaskedLM
        >>> from hf_ctxmodels.compression.distillation import HiddenStateLoss, SoftTargetLoss
        >>> sizes = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        >>> teacher = CtxBertForMaskedLM(CtxBertConfig(num_hidden_layers=4, **sizes))
        >>> student = CtxBertForMaskedLM(CtxBertConfig(num_hidden_layers=2, **sizes))
        >>> model = CtxDistillationModel(student, teacher, [SoftTargetLoss(weight=5.0), HiddenStateLoss()])
        >>> model(input_ids=torch.tensor([[1, 2, 3]])).loss.backward()
    """

    accepts_loss_kwargs = False

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, losses: Sequence[DistillationLoss]) -> None:
        super().__init__(student.config)
        if isinstance(losses, DistillationLoss) or not all(isinstance(loss, DistillationLoss) for loss in losses):
            raise CtxError(
                f"{losses!r} is not a list of losses.", hint="use a list such as [SoftTargetLoss(), HiddenStateLoss()]."
            )
        names = [loss.name for loss in losses]
        if not names or len(set(names)) < len(names):
            raise CtxError(
                f"A loss occurs twice: {', '.join(names)}." if names else "There is no loss.",
                hint=f"list each loss once: {', '.join(DISTILLATION_LOSSES)}.",
            )
        if student is teacher:
            raise CtxError("Student and teacher are the same model.", hint="create or load another student.")
        for loss in losses:
            if not 0 < loss.weight < math.inf:
                raise CtxError(
                    f"The loss {loss.name} has the weight {loss.weight:g}.",
                    hint="use a weight above 0, or remove the loss.",
                )
            loss.check_models(student, teacher)
        self.losses = tuple(losses)
        self.student = student
        head = "" if student.base_model is student else f".{student.base_model_prefix}"
        self.base_model_prefix = f"student{head}"  # names parameters by layer, for layer-wise learning rates
        self._teacher = (teacher.eval().requires_grad_(False),)  # a tuple, so that it is not a submodule
        projections = {loss.name: loss.build_projection(student, teacher) for loss in losses}
        self.projections = nn.ModuleDict({name: module for name, module in projections.items() if module is not None})
        target_names = [*getattr(student, "loss_targets", ()), *(loss.target_name(student) for loss in losses)]
        self.loss_targets = tuple(dict.fromkeys(target_names))  # type: ignore[misc]  # a class attribute elsewhere
        self._needs_hidden_states = any(loss.inputs in ("hidden_states", "attention_scores") for loss in losses) or (
            get_prediction_level(student) != "tokens" and any(loss.inputs == "last_hidden_state" for loss in losses)
        )
        self._needs_student_loss = any(isinstance(loss, HardTargetLoss) for loss in losses)

    @property
    def teacher(self) -> PreTrainedModel:
        """The teacher."""
        return self._teacher[0]

    @property
    def base_model(self) -> nn.Module:
        """The student's encoder."""
        return self.student.base_model

    @property
    def checkpoint_class(self) -> type:
        """The class that `save_pretrained` saves."""
        return type(self.student)

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """Number of the student's parameters."""
        return self.student.num_parameters(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """The student's input embeddings."""
        return self.student.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        distilled_tokens: Tensor | None = None,
        distilled_examples: Tensor | None = None,
        teacher_input_ids: Tensor | None = None,
        teacher_attention_mask: Tensor | None = None,
        teacher_token_type_ids: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the losses of a batch.

        Args:
            input_ids, attention_mask, token_type_ids: (batch, length) inputs of the student.
            labels: The student's targets, for hard targets and for losses of labeled tokens.
            distilled_tokens, distilled_examples: From `DistillationCollator`.
            teacher_input_ids, teacher_attention_mask, teacher_token_type_ids: (batch, teacher's length) the same texts
                by the teacher's tokenizer; without them the teacher reads the student's inputs.
            num_items_in_batch: Number of targets in a larger batch by name, see `heads.base.number_of_targets`.
            return_logits: Passed to the student if its own output is returned.
            kwargs: Further inputs of the student; with the prefix `teacher_`, of the teacher.

        Returns:
            A `DistillationOutput`; in evaluation mode without `distilled_examples`, the student's output.

        Raises:
            CtxError: A loss compares tokens and the teacher has its own inputs, or ids or labels are missing.
        """
        if input_ids is None:
            raise CtxError("Distillation needs input_ids.", hint="pass input_ids instead of inputs_embeds.")
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        arguments |= {"token_type_ids": token_type_ids, "teacher_token_type_ids": teacher_token_type_ids}
        arguments |= {"teacher_input_ids": teacher_input_ids, "teacher_attention_mask": teacher_attention_mask}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        inputs = _without_prefix(arguments, TEACHER_PREFIX)
        if not self.training and distilled_examples is None and not torch.is_grad_enabled():
            options = {} if return_logits is None else {"return_logits": return_logits}
            return self.student(**inputs, labels=labels, num_items_in_batch=num_items_in_batch, **options)
        targets = {"labels": labels, TOKENS: distilled_tokens, EXAMPLES: distilled_examples}
        counts = num_items_in_batch if isinstance(num_items_in_batch, Mapping) else {}
        needs = {"output_hidden_states": self._needs_hidden_states, "compute_loss": self._needs_student_loss}
        student = run_forward(self.student, inputs, labels=labels, counts=counts, **needs)
        values = self._compute_losses(student, self._run_teacher(arguments), targets, counts)
        total = torch.stack([loss.weight * value.float() for loss, value in values.items()]).sum()
        # zero gradients of unused parameters, for distributed training
        add_unused = getattr(self.student, "with_unused_parameters", None)
        return DistillationOutput(
            loss=total if add_unused is None else add_unused(total),
            logits=None if get_prediction_level(self.student) == "tokens" else student.output.logits,
            **{loss.output_name: value.detach() for loss, value in values.items()},
        )

    def _run_teacher(self, arguments: Mapping[str, Tensor]) -> ForwardPass:
        inputs = _select_prefix(arguments, TEACHER_PREFIX)
        predicts_tokens = get_prediction_level(self.student) != "sequences"
        token_losses = [
            loss.name
            for loss in self.losses
            if loss.requires_shared_tokenizer
            or (predicts_tokens and loss.inputs == "predictions" and not isinstance(loss, HardTargetLoss))
        ]
        if inputs and token_losses:
            raise CtxError(
                f"The teacher has its own tokenizer, but the losses {', '.join(token_losses)} compare tokens.",
                hint="use losses of examples (logits, soft-classes, sentences), or the teacher's tokenizer.",
            )
        teacher, inputs = self.teacher, inputs or dict(arguments)
        if teacher.device != (device := inputs["input_ids"].device):
            teacher.to(device)  # type: ignore[arg-type]
        with torch.no_grad():
            return run_forward(teacher, inputs, output_hidden_states=self._needs_hidden_states)

    def _compute_losses(
        self,
        student: ForwardPass,
        teacher: ForwardPass,
        targets: Mapping[str, Tensor | None],
        counts: Mapping[str, Any],
    ) -> dict[DistillationLoss, Tensor]:
        """Each loss as a mean over its targets."""
        values: dict[DistillationLoss, Tensor] = {}
        for loss in self.losses:
            name = loss.target_name(self.student)
            if name == LABELS and student.labels is None:
                raise CtxError(f"The loss {loss.name} needs labels.", hint="pass labels, or remove the loss.")
            if isinstance(loss, HardTargetLoss):
                assert student.labels is not None
                if isinstance(self.student, ForMaskedLM):  # its encoder ran alone
                    states = student.last_hidden_state[student.labels != IGNORE_INDEX]
                    values[loss] = self.student.token_loss(states, student.labels, counts)
                else:
                    values[loss] = student.output.loss
                continue
            total = loss.compute(student, teacher, dict(self.projections.items()).get(loss.name))
            count = counts.get(name) if targets.get(name) is not None else None
            if count is None:  # in this batch
                labels = student.labels if name == LABELS else None
                is_target: Tensor = student.token_mask if labels is None else labels != IGNORE_INDEX
                count = len(is_target) if name == EXAMPLES else is_target.sum().clamp(min=1)
            values[loss] = total / count
        return values

    def save_pretrained(self, save_directory: str | Path, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        """Save the student alone, and the projections, if any, to a file next to it; `state_dict` may hold gathered
        weights of this model."""
        student_weights = None if state_dict is None else _select_prefix(state_dict, _STUDENT_PREFIX)
        self.student.save_pretrained(save_directory, *args, state_dict=student_weights, **kwargs)
        weights = self.state_dict() if state_dict is None else state_dict
        if projections := _select_prefix(weights, "projections."):
            write_tensors(Path(save_directory) / PROJECTIONS_FILE, projections)

    def load_saved_weights(self, directory: str | Path) -> None:
        """Load the student and the projections on resume; raises CtxError if the projections do not fit."""
        self.load_state_dict(load_file(Path(directory) / "model.safetensors"))
        if self.projections and not self.load_projections(directory):
            raise CtxError(
                "The learned projections are missing or have other shapes.",
                location=str(Path(directory) / PROJECTIONS_FILE),
                hint="resume with the losses and the teacher of that run.",
            )

    def load_projections(self, directory: str | Path) -> bool:
        """Load the projections of an earlier distillation, if they exist and fit; returns whether they were loaded.

        Trainer does not restore them: call this method before `trainer.train(resume_from_checkpoint=...)`.
        """
        file = Path(directory) / PROJECTIONS_FILE
        weights = self.projections.state_dict()
        saved = load_file(file) if weights and file.is_file() else {}
        if not saved or {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in saved.items()}:
            return False
        self.projections.load_state_dict(saved)
        return True

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`; also accepts the names of a plain student, as Trainer reads them from a checkpoint."""
        if any(name.startswith(_STUDENT_PREFIX) for name in state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)
        weights = dict(state_dict)
        for tied, source in self.student.all_tied_weights_keys.items():  # files contain tied weights once
            if source in weights:
                weights.setdefault(tied, weights[source])
        return self.student.load_state_dict(weights, *args, **kwargs)
