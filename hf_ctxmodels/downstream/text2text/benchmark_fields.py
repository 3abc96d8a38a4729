"""Fields of records of benchmarks in the form of prompts, as in lm-evaluation-harness."""

from collections.abc import Callable, Mapping
from typing import Any

from hf_ctxmodels.core.errors import wrap_errors
from hf_ctxmodels.data.table_files import Row
from hf_ctxmodels.data.text_files import read_lines

_POSSESSIVES = ("my", "his", "her", "our", "their")
_SENTENCE_BEGINNINGS = ("A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their")
_BLANK = "XXXXX"

Values = Mapping[str, Any]


def lambada_fields(values: Values) -> dict[str, Any]:
    """LAMBADA (Paperno et al. 2016): the last word of `text`, split at its last space, as `word`, and the `context`."""
    context, _, word = values["text"].rpartition(" ")
    if not context or not word:
        raise ValueError(f"no word after a space in {values['text'][-60:]!r}")
    return {"context": context, "word": word}


def copa_fields(values: Values) -> dict[str, Any]:
    """COPA and XCOPA: `premise` without its full stop, and the alternatives with a small first letter."""
    alternatives = {name: values[name][0].lower() + values[name][1:] for name in ("choice1", "choice2")}
    return {**alternatives, "premise": values["premise"].strip()[:-1]}


def wic_fields(values: Values) -> dict[str, Any]:
    """WiC: the word in its form in the first sentence, as `form`."""
    return {"form": values["sentence1"][values["start1"] : values["end1"]]}


def wsc273_fields(values: Values) -> dict[str, Any]:
    """Winograd schemas for partial scoring (Trinh & Le 2018, arXiv 1806.02847, section 3.1): the text `before` and
    `after` the pronoun, and the candidates that replace it, as `substitutes`."""
    text, pronoun, start = values["text"], values["pronoun"], int(values["pronoun_start"])
    if text[start : start + len(pronoun)] != pronoun:
        raise ValueError(f"{pronoun!r} is not at character {start}")
    begins_sentence = start == 0 or text[max(0, start - 2) : start - 1] == "."
    substitutes = []
    for candidate in values["candidates"]:
        first_word, *next_words = candidate.split(" ")
        if not begins_sentence and first_word in _SENTENCE_BEGINNINGS:
            candidate = " ".join([first_word.lower(), *next_words])
        substitutes.append(f"{candidate}'s" if pronoun.lower() in _POSSESSIVES else candidate)
    return {"before": text[:start], "after": text[start + len(pronoun) :], "substitutes": substitutes}


def read_children_books(file: str) -> list[Row]:
    """Children's Book Test (Hill et al. 2016, arXiv 1511.02301): blocks of 20 numbered sentences and a 21st with a
    blank, the answer and the candidates, separated by tabs.

    The fields are `before` (20 sentences and the question up to the blank), `after`, `candidates` and `answer`.
    """
    rows, sentences = [], list[str]()
    for number, line in enumerate(read_lines(file), 1):
        _, _, text = line.strip("\n").partition(" ")
        if "\t" not in text:
            sentences += [text.strip()] if text.strip() else []
            continue
        location = f"{file}:{number}"
        hint = "write number, question, answer and candidates as in the Children's Book Test."
        with wrap_errors("Not a question with candidates", location=location, hint=hint):
            question, answer, *_, candidate_text = text.split("\t")
            before, after = question.split(_BLANK, 1)
            candidates = [candidate for candidate in candidate_text.split("|") if candidate]
            candidates.index(answer)
        values = {"before": " ".join([*sentences, before]).rstrip(), "after": after.rstrip()}
        rows.append(Row({**values, "candidates": candidates, "answer": answer}, location))
        sentences = []
    return rows


BENCHMARK_FIELDS: dict[str, Callable[[Values], dict[str, Any]]] = {
    "lambada": lambada_fields,
    "copa": copa_fields,
    "wic": wic_fields,
    "wsc273": wsc273_fields,
}
"""Format of JSON lines -> function that returns additional or changed fields of a record."""
