"""Layer maps: pairs of a student's and a teacher's layers.

Hidden states are numbered as in `output_hidden_states`: 0 is the output of the embeddings, i the output of layer i.
Attention scores are numbered by the layer that computes them, from 1. For a student of n layers and a teacher of
m = kn layers:

| name | pairs (student, teacher) | used by |
|---|---|---|
| `uniform` | states (i, ki), i = 0 ... n; scores (i, ki), i = 1 ... n | TinyBERT (Jiao et al. 2020, section 4.1) |
| `skip` | (i, ki) for i = 1 ... n-1 | BERT-PKD-skip (Sun et al. 2019, section 3.2) |
| `last` | (i, m - n + i) for i = 1 ... n-1 | BERT-PKD-last |

Other maps are lists of pairs: `1:2,2:4`.
"""

import re

from hf_ctxmodels.core.errors import CtxError

LayerPairs = tuple[tuple[int, int], ...]

_PAIRS = re.compile(r"\d+:\d+(,\d+:\d+)*")


def parse_layer_map(text: str, student_layers: int, teacher_layers: int, *, first_layer: int = 0) -> LayerPairs:
    """The pairs of a layer map.

    Args:
        text: A name of the table above, or `STUDENT:TEACHER` pairs separated by commas.
        student_layers, teacher_layers: n and m.
        first_layer: Smallest layer number: 0 for hidden states, 1 for attention scores.

    Raises:
        CtxError: The text is not a layer map, a named map does not fit the models, or a layer does not exist.
    """
    if text in ("uniform", "skip", "last"):
        return _named_map(text, student_layers, teacher_layers, first_layer)
    if not _PAIRS.fullmatch(text):
        raise CtxError(
            f"{text!r} is not a layer map.",
            hint="use uniform, skip or last, or pairs of student and teacher: 1:2,2:4.",
        )
    pairs = tuple((int(student), int(teacher)) for student, teacher in (pair.split(":") for pair in text.split(",")))
    for student_layer, teacher_layer in pairs:
        for model, layer, num_layers in (
            ("student", student_layer, student_layers),
            ("teacher", teacher_layer, teacher_layers),
        ):
            if not first_layer <= layer <= num_layers:
                raise CtxError(
                    f"The layer map {text} contains layer {layer} of the {model}, which has layers {first_layer} to "
                    f"{num_layers}.",
                    hint="correct the pair; the student's layer is first.",
                )
    return pairs


def _named_map(name: str, student_layers: int, teacher_layers: int, first_layer: int) -> LayerPairs:
    if name == "last":
        if student_layers > teacher_layers:
            raise CtxError(
                f"The student has {student_layers} layers, the teacher {teacher_layers}.",
                hint="list the pairs, for example 1:1,2:1.",
            )
        return tuple((layer, teacher_layers - student_layers + layer) for layer in range(1, student_layers))
    if teacher_layers % student_layers:
        raise CtxError(
            f"The layer map {name!r} needs a teacher with a multiple of the student's {student_layers} layers; the "
            f"teacher has {teacher_layers}.",
            hint="list the pairs, for example 1:2,2:5.",
        )
    step = teacher_layers // student_layers
    layers = range(1, student_layers) if name == "skip" else range(first_layer, student_layers + 1)
    return tuple((layer, step * layer) for layer in layers)
