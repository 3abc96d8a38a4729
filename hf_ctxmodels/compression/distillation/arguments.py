"""The flags of distillation beside those of pretraining and fine-tuning."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from hf_ctxmodels.core.flags import flag

Kind = TypeVar("Kind")


@dataclass(kw_only=True)
class DistillationArguments:
    """Who teaches, and what is learned."""

    teacher: str = flag("", "Directory or Hub id of the teacher, with its tokenizer; for a task, a fine-tuned model.")
    terms: list[str] = flag(
        (), "What the student learns, as NAME=WEIGHT: soft-targets=5 hard-targets=2 cosine=1; a wrong one lists all."
    )
    term_options: list[str] = flag(
        (), "Options of terms as NAME.OPTION=VALUE: soft-targets.temperature=2 patient.layers=skip."
    )
    student_layers: list[int] = flag(
        (),
        "Make the student of these layers, counted from 0, of --model or else of the teacher, with its embeddings and "
        "head; DistilBERT: 0 2 4 7 9 11.",
    )


def select_fields(kind: type[Kind], arguments: Any) -> Kind:
    """The fields of one dataclass among those of `arguments`, as that dataclass."""
    return kind(**{each.name: getattr(arguments, each.name) for each in fields(kind)})  # type: ignore[arg-type]
