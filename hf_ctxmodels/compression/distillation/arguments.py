"""Flags of distillation, in addition to those of pretraining or fine-tuning."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from hf_ctxmodels.core.flags import REQUIRED, flag

Options = TypeVar("Options")


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


def select_fields(options: type[Options], arguments: Any) -> Options:
    """Create an instance of a dataclass from the fields of `arguments` with the same names."""
    values = {entry.name: getattr(arguments, entry.name) for entry in fields(options)}  # type: ignore[arg-type]
    return options(**values)
