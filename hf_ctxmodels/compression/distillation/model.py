"""A student that learns from a teacher, as one model with a loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_ctxmodels.compression.distillation.forward_pass import Run, hard_loss, predictions_of, run
from hf_ctxmodels.compression.distillation.prediction_losses import (
    ROWS,
    TOKENS,
    HardTargets,
    LogitsError,
    SoftClasses,
    SoftTargets,
    Term,
)
from hf_ctxmodels.compression.distillation.state_losses import (
    Attention,
    Cosine,
    Embeddings,
    Hidden,
    Patient,
    Sentences,
)
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads import ItemCounts

TERMS: dict[str, type[Term]] = {
    term.name: term
    for term in (
        *(SoftTargets, HardTargets, LogitsError, SoftClasses),
        *(Cosine, Patient, Attention, Hidden, Embeddings, Sentences),
    )
}
"""Name -> term."""

PROJECTIONS_FILE = "distillation.safetensors"
"""Beside a student's weights: the learned maps of its states to the teacher's width, which no student needs."""

TEACHER = "teacher_"
"""Prefix of the teacher's inputs in a batch, where it has a tokenizer of its own."""

_STUDENT = "student."

DistillationOutput: Any = make_dataclass(
    "DistillationOutput",
    [
        (name, Tensor | None, field(default=None))
        for name in ("loss", "logits", *(f"{name.replace('-', '_')}_loss" for name in TERMS))
    ],
    bases=(ModelOutput,),
    namespace={
        "__module__": __name__,
        "__doc__": "Output of `CtxDistillationModel`: the weighted sum of the terms, a task head's logits, and each term "
        "before its weight, detached.",
    },
)


class CtxDistillationModel(CtxPreTrainedModel):
    """A student with the loss of learning from a teacher, for the training loop and for transformers' Trainer.

    The loss is the weighted sum of the terms. Each is a sum over its targets divided by their number: in the whole step
    with the package's loop and with `CtxTrainer`, in the micro-batch with plain Trainer. The teacher is in evaluation
    mode, has no gradient, and is no part of this module: it is neither trained nor saved, counted or sharded.

    `save_pretrained` saves the student alone, as a plain model; learned projections lie beside it in a file of their
    own. In evaluation mode a batch that `DistillationCollator` has not prepared gives the student's own output.

    Args:
        student: A masked LM or a task's head of any family here.
        teacher: Likewise. Terms of tokens need the student's tokenizer.
        terms: What is learned; see `hf_ctxmodels.compression.distillation.prediction_losses` and `state_terms`.

    Raises:
        CtxError: No term, one of them twice or with a weight that is not above 0, or a model lacks what a term needs.

    Example:
        >>> import torch
        >>> from hf_ctxmodels import CtxBertConfig, CtxBertForMaskedLM
        >>> sizes = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        >>> teacher = CtxBertForMaskedLM(CtxBertConfig(num_hidden_layers=4, **sizes))
        >>> student = CtxBertForMaskedLM(CtxBertConfig(num_hidden_layers=2, **sizes))
        >>> model = CtxDistillationModel(student, teacher, [SoftTargets(weight=5.0), Hidden()])
        >>> model(input_ids=torch.tensor([[1, 2, 3]])).loss.backward()
    """

    accepts_loss_kwargs = False

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, terms: Sequence[Term]) -> None:
        super().__init__(student.config)
        _check(student, teacher, terms)
        self.terms = tuple(terms)
        self.student = student
        head = "" if student.base_model is student else f".{student.base_model_prefix}"
        self.base_model_prefix = f"student{head}"  # of parameters, for rates by layer
        self._held = (teacher.eval().requires_grad_(False),)  # in a tuple: not a module of this one
        made = {term.name: term.build_projection(student, teacher) for term in terms}
        self.projections = nn.ModuleDict({name: each for name, each in made.items() if each is not None})
        own = getattr(student, "loss_targets", ())
        self.loss_targets = tuple(dict.fromkeys([*own, *(term.counted_by(student) for term in terms)]))  # type: ignore[misc]
        self._states = any(term.reads in ("states", "scores") for term in terms) or (
            predictions_of(student) != "tokens" and any(term.reads == "last state" for term in terms)
        )
        self._hard = any(isinstance(term, HardTargets) for term in terms)

    @property
    def teacher(self) -> PreTrainedModel:
        """The teacher."""
        return self._held[0]

    @property
    def base_model(self) -> nn.Module:
        """The student's encoder."""
        return self.student.base_model

    @property
    def checkpoint_class(self) -> type:
        """The class of what is saved."""
        return type(self.student)

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """Of the student."""
        return self.student.num_parameters(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Of the student."""
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
        """The loss of a batch.

        Args:
            input_ids, attention_mask, token_type_ids: (batch, length), as of the student.
            labels: The student's targets, for hard targets, and for terms of labelled tokens.
            distilled_tokens: (batch, length), 0 at real tokens and -100 at padding, from `DistillationCollator`.
            distilled_examples: (batch,), 0, from there.
            teacher_input_ids, teacher_attention_mask, teacher_token_type_ids: (batch, teacher's length), the same texts
                by the teacher's tokenizer; without them the teacher reads the student's inputs.
            num_items_in_batch: Number of targets in a larger batch by name, see `heads.base.mean_over_targets`.
            return_logits: Passed on to the student where its own output is returned.
            kwargs: Other inputs of the student; with the prefix `teacher_`, of the teacher.

        Raises:
            CtxError: A term compares tokens and the teacher has inputs of its own, or ids or labels are missing.
        """
        if input_ids is None:
            raise CtxError("A student and its teacher read input_ids.", hint="give them, in place of inputs_embeds.")
        own = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids, **kwargs}
        others = {
            "teacher_input_ids": teacher_input_ids,
            "teacher_attention_mask": teacher_attention_mask,
            "teacher_token_type_ids": teacher_token_type_ids,
        }
        given = {name: value for name, value in {**own, **others}.items() if value is not None}
        inputs = {name: value for name, value in given.items() if not name.startswith(TEACHER)}
        if not self.training and distilled_examples is None and not torch.is_grad_enabled():
            asked = {} if return_logits is None else {"return_logits": return_logits}
            return self.student(**inputs, labels=labels, num_items_in_batch=num_items_in_batch, **asked)
        targets = {"labels": labels, TOKENS: distilled_tokens, ROWS: distilled_examples}
        counts = num_items_in_batch if isinstance(num_items_in_batch, Mapping) else {}
        student = run(self.student, inputs, labels=labels, states=self._states, counts=counts, hard=self._hard)
        losses = self._losses(student, self._teach(given), targets, counts)
        return DistillationOutput(
            loss=self._sum(losses),
            logits=None if predictions_of(self.student) == "tokens" else student.output.logits,
            **{term.loss_name: losses[term].detach() for term in self.terms},
        )

    def _teach(self, given: Mapping[str, Tensor]) -> Run:
        """The teacher's forward pass."""
        inputs = {name.removeprefix(TEACHER): value for name, value in given.items() if name.startswith(TEACHER)}
        if inputs and (tokenwise := [term.name for term in self.terms if self._compares_tokens(term)]):
            raise CtxError(
                f"The teacher has a tokenizer of its own, but {', '.join(tokenwise)} compare tokens.",
                hint="use terms of rows (logits, soft-classes, sentences), or a student with the teacher's tokenizer.",
            )
        teacher, inputs = self.teacher, inputs or dict(given)
        if teacher.device != (device := inputs["input_ids"].device):
            teacher.to(device)  # type: ignore[arg-type]
        with torch.no_grad():
            return run(teacher, inputs, states=self._states)

    def _compares_tokens(self, term: Term) -> bool:
        of_tokens = term.reads == "predictions" and predictions_of(self.student) != "rows"
        return term.needs_one_tokenizer or (of_tokens and not isinstance(term, HardTargets))

    def _losses(
        self, student: Run, teacher: Run, targets: Mapping[str, Tensor | None], counts: Mapping[str, Any]
    ) -> dict[Term, Tensor]:
        """Each term's mean over its targets."""
        losses: dict[Term, Tensor] = {}
        for term in self.terms:
            entry = term.counted_by(self.student)
            if entry == "labels" and student.labels is None:
                raise CtxError(f"The term {term.name} needs labels.", hint="give labels, or leave the term out.")
            if isinstance(term, HardTargets):
                assert student.labels is not None
                losses[term] = hard_loss(student, student.labels, counts)
                continue
            total = term.summed(student, teacher, dict(self.projections.items()).get(term.name))
            number = counts.get(entry) if targets.get(entry) is not None else None
            losses[term] = total / (_count(entry, student) if number is None else number)
        return losses

    def _sum(self, losses: Mapping[Term, Tensor]) -> Tensor:
        """The weighted sum; distributed training gets a gradient for parameters that no term uses."""
        loss = torch.stack([term.weight * value.float() for term, value in losses.items()]).sum()
        unused = getattr(self.student, "with_unused_parameters", None)
        return loss if unused is None else unused(loss)

    def save_pretrained(self, save_directory: str | Path, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        """Save the student alone, and beside it the projections, if there are any.

        Args:
            save_directory: Where to.
            state_dict: Of this model, gathered; None for its weights as they are.
            args, kwargs: As of every model.
        """
        weights = None if state_dict is None else _without_prefix(state_dict, _STUDENT)
        self.student.save_pretrained(save_directory, *args, state_dict=weights, **kwargs)
        maps = self.state_dict() if state_dict is None else state_dict
        if projections := _without_prefix(maps, "projections."):
            whole = {name: each.detach().cpu().contiguous() for name, each in projections.items()}
            save_file(whole, Path(save_directory) / PROJECTIONS_FILE)

    def load_saved_weights(self, directory: str | Path) -> None:
        """Load what `save_pretrained` saved, of the student and of the projections; the loop's resume calls it.

        Raises:
            CtxError: The projections are missing, or of another shape.
        """
        self.load_state_dict(load_file(Path(directory) / "model.safetensors"))
        if self.projections and not self.load_projections(directory):
            raise CtxError(
                "The learned projections are missing or have another shape.",
                location=str(Path(directory) / PROJECTIONS_FILE),
                hint="resume with the terms and the teacher of that run.",
            )

    def load_projections(self, directory: str | Path) -> bool:
        """Take the projections that an earlier distillation left beside its student; whether they are there and fit.

        Trainer's resume does not know of them: call this before `trainer.train(resume_from_checkpoint=...)`.
        """
        file = Path(directory) / PROJECTIONS_FILE
        own = self.projections.state_dict()
        found = load_file(file) if own and file.is_file() else {}
        shapes = [{name: each.shape for name, each in maps.items()} for maps in (own, found)]
        if not found or shapes[0] != shapes[1]:
            return False
        self.projections.load_state_dict(found)
        return True

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As of every module; also from a student's plain names, as Trainer reads a checkpoint."""
        if any(name.startswith(_STUDENT) for name in state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)
        found = dict(state_dict)
        for tied, source in self.student.all_tied_weights_keys.items():  # files hold tied weights once
            if source in found:
                found.setdefault(tied, found[source])
        return self.student.load_state_dict(found, *args, **kwargs)


def _check(student: PreTrainedModel, teacher: PreTrainedModel, terms: Sequence[Term]) -> None:
    if isinstance(terms, Term) or not all(isinstance(term, Term) for term in terms):
        raise CtxError(f"{terms!r} is no list of terms.", hint="give [SoftTargets(), HardTargets(weight=0.5)], say.")
    names = [term.name for term in terms]
    if not names or len(set(names)) < len(names):
        raise CtxError(
            f"{'No term is given' if not names else 'A term is given twice'}: {', '.join(names)}.",
            hint=f"give each once: {', '.join(TERMS)}.",
        )
    if student is teacher:
        raise CtxError("The student is the teacher itself.", hint="make or open a model of its own.")
    for term in terms:
        if not 0 < term.weight < math.inf:
            raise CtxError(
                f"The term {term.name} has the weight {term.weight:g}.",
                hint="give a number above 0, or leave the term out.",
            )
        term.check(student, teacher)


def _count(entry: str, student: Run) -> Tensor:
    """The number of targets in this batch, at least 1."""
    if entry == TOKENS:
        number = student.tokens.sum()
    elif entry == ROWS:
        number = torch.tensor(len(student.tokens), device=student.tokens.device)
    else:
        assert student.labels is not None
        number = (student.labels != IGNORE_INDEX).sum()
    return number.clamp(min=1)


def _without_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
