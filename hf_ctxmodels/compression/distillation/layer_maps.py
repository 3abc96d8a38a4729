"""Layer maps: which layer of the student learns from which of the teacher.

Hidden states are numbered as in `output_hidden_states`: 0 is the output of the embeddings, i that of layer i. Attention
scores are numbered by the layer that computes them, from 1. For a student of n layers and a teacher of m = kn:

| name | pairs (student, teacher) | used by |
|---|---|---|
| `uniform` | states (i, ki), i = 0 ... n; scores (i, ki), i = 1 ... n | TinyBERT (Jiao et al. 2020, section 4.1) |
| `skip` | (i, ki) for i = 1 ... n-1 | BERT-PKD-skip (Sun et al. 2019, section 3.2) |
| `last` | (i, m - n + i) for i = 1 ... n-1 | BERT-PKD-last |

Anything else is written out: `1:2,2:4`.
"""

import re

from hf_ctxmodels.core.errors import CtxError

LayerPairs = tuple[tuple[int, int], ...]

_WRITTEN = re.compile(r"\d+:\d+(,\d+:\d+)*")


def layer_pairs(text: str, student_layers: int, teacher_layers: int, *, first: int = 0) -> LayerPairs:
    """The pairs of a map between two models.

    Args:
        text: A name of the table above, or `STUDENT:TEACHER` pairs separated by commas.
        student_layers, teacher_layers: n and m.
        first: Number of the first thing that is mapped: 0 for states, 1 for attention scores.

    Raises:
        CtxError: The text is no map, a name needs a teacher of kn layers, or a layer does not exist.
    """
    if text in ("uniform", "skip", "last"):
        return _named(text, student_layers, teacher_layers, first)
    if not _WRITTEN.fullmatch(text):
        raise CtxError(
            f"{text!r} is no layer map.", hint="use uniform, skip or last, or pairs of student and teacher: 1:2,2:4."
        )
    pairs = tuple((int(own), int(other)) for own, other in (pair.split(":") for pair in text.split(",")))
    for own, other in pairs:
        for layer, layers, whose in ((own, student_layers, "student"), (other, teacher_layers, "teacher")):
            if not first <= layer <= layers:
                raise CtxError(
                    f"The layer map {text} names layer {layer} of the {whose}, which has layers {first} to {layers}.",
                    hint="correct the pair; student first.",
                )
    return pairs


def _named(name: str, student: int, teacher: int, first: int) -> LayerPairs:
    if name == "last":
        if student > teacher:
            raise CtxError(
                f"The student has {student} layers, the teacher {teacher}.", hint="write the pairs out: 1:1,2:1."
            )
        return tuple((layer, teacher - student + layer) for layer in range(1, student))
    if teacher % student:
        raise CtxError(
            f"The layer map {name!r} needs a teacher with a multiple of the student's {student} layers; it has "
            f"{teacher}.",
            hint="write the pairs of student and teacher out: 1:2,2:5.",
        )
    step = teacher // student
    layers = range(1, student) if name == "skip" else range(first, student + 1)
    return tuple((layer, step * layer) for layer in layers)
