"""`hf-ctxmodels data units`: phrases by mutual information, entities, and lists."""

from collections import Counter
from math import log
from pathlib import Path

import pytest
from commands import command_output

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.phrase_mining import extract_entities, find_phrases
from hf_ctxmodels.data.table_files import TaggedSentence

SENTENCES = [
    *["We saw New York City in May ."] * 6,
    *["New York is big , and we saw a City ."] * 5,
    *["In May a big City is in a May ."] * 30,
    *["The New House is big ."] * 3,
]


def information(sentences: list[str], first: str, second: str) -> float:
    """ln p(first second) / (p(first) p(second)), by counting."""
    rows = [sentence.split() for sentence in sentences]
    words = Counter(word for row in rows for word in row)
    pairs = Counter((row[k], row[k + 1]) for row in rows for k in range(len(row) - 1))
    apart = words[first] * words[second] / words.total() ** 2
    return log(pairs[first, second] / pairs.total() / apart)


def test_phrases() -> None:
    bound = information(SENTENCES, "New", "York")
    assert bound > 2
    phrases = find_phrases([SENTENCES], min_count=5, min_information=bound - 1e-9, max_words=2)
    assert phrases["New York"] == 11
    assert "New York" not in find_phrases([SENTENCES], min_count=5, min_information=bound + 1e-9, max_words=2)
    assert "New York" not in find_phrases([SENTENCES], min_count=12, min_information=0.0, max_words=2)
    joined = [sentence.replace("New York", "New_York") for sentence in SENTENCES]
    grown = information(joined, "New_York", "City")
    limits = {"min_count": 5, "min_information": min(grown, bound) - 1e-9}
    phrases = find_phrases([SENTENCES], max_words=3, **limits)
    assert phrases["New York City"] == 6
    assert "New York City" not in find_phrases([SENTENCES], max_words=2, **limits)
    assert not {",", "."} & set("".join(find_phrases([SENTENCES], min_count=1, min_information=0)))
    with pytest.raises(CtxError, match="max_words=1"):
        find_phrases([SENTENCES], max_words=1)


def test_entities() -> None:
    tags = ["B-LOC", "I-LOC", "O", "B-PER", "B-PER", "I-PER", "I-PER"]
    entities = extract_entities([TaggedSentence(["New", "York", "saw", "Ann", "Bo", "Ek", "Li"], tags, "x:1")] * 2)
    assert entities == {"New York": 2, "Bo Ek Li": 2}
    with pytest.raises(CtxError, match="not B-, I- and O"):
        extract_entities([TaggedSentence(["a"], ["NN"], "x:1")])


def test_command(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES))
    (tmp_path / "names.txt").write_text("White  House\nword\n\nNew York\n")
    (tmp_path / "tags.conll").write_text("Los B-LOC\nAngeles I-LOC\nwon O\n")
    sources = {
        "gazetteers": tmp_path / "names.txt",
        "entities": tmp_path / "tags.conll",
        "dataset": tmp_path / "text.txt",
    }
    output = tmp_path / "units.txt"
    printed = command_output("data units", output=output, **sources, min_count=5)
    units = output.read_text().splitlines()
    assert {"White House", "New York", "Los Angeles"} <= set(units)
    assert "word" not in units
    assert f"{len(units)} units" in printed
    assert "no unit of two or more words" in command_output("data units", "--overwrite", output=output, fails=True)
