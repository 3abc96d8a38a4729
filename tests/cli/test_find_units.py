"""`hf-ctxmodels data units` and `data phrases`: mined phrases, entities and gazetteers."""

import random
from collections import Counter
from math import log
from pathlib import Path

import pytest
from commands import command_output

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.phrase_mining import extract_entities, find_phrases, join_phrases, score_phrases
from hf_ctxmodels.data.table_files import TaggedSentence

SENTENCES = [
    *["We saw New York City in May ."] * 6,
    *["New York is big , and we saw a City ."] * 5,
    *["In May a big City is in a May ."] * 30,
    *["The New House is big ."] * 3,
]


def pmi(sentences: list[str], first: str, second: str) -> float:
    """Pointwise mutual information ln p(first second) / (p(first) p(second)), by counting."""
    rows = [sentence.split() for sentence in sentences]
    words = Counter(word for row in rows for word in row)
    pairs = Counter((row[index], row[index + 1]) for row in rows for index in range(len(row) - 1))
    independent = words[first] * words[second] / words.total() ** 2
    return log(pairs[first, second] / pairs.total() / independent)


def test_phrases_by_mutual_information() -> None:
    bigram_pmi = pmi(SENTENCES, "New", "York")
    assert bigram_pmi > 2
    phrases = find_phrases([SENTENCES], min_count=5, min_information=bigram_pmi - 1e-9, max_words=2)
    assert phrases["New York"] == 11
    assert "New York" not in find_phrases([SENTENCES], min_count=5, min_information=bigram_pmi + 1e-9, max_words=2)
    assert "New York" not in find_phrases([SENTENCES], min_count=12, min_information=0.0, max_words=2)
    joined = [sentence.replace("New York", "New_York") for sentence in SENTENCES]
    trigram_pmi = pmi(joined, "New_York", "City")
    limits = {"min_count": 5, "min_information": min(trigram_pmi, bigram_pmi) - 1e-9}
    phrases = find_phrases([SENTENCES], max_words=3, **limits)
    assert phrases["New York City"] == 6
    assert "New York City" not in find_phrases([SENTENCES], max_words=2, **limits)
    assert not {",", "."} & set("".join(find_phrases([SENTENCES], min_count=1, min_information=0)))
    with pytest.raises(CtxError, match="max_words=1"):
        find_phrases([SENTENCES], max_words=1)


def test_words_with_vowel_marks() -> None:
    """In Hindi, a vowel is a mark, which is not a letter in the module `re`."""
    text = "नई दिल्ली"
    sentences = [*[f"{text} {number}" for number in range(25)], *[str(number) for number in range(900)]]
    assert find_phrases([sentences], min_count=20) == {text: 25}
    assert join_phrases(f"वह {text} में", {("नई", "दिल्ली")}) == "वह नई_दिल्ली में"


def test_extract_entities() -> None:
    tags = ["B-LOC", "I-LOC", "O", "B-PER", "B-PER", "I-PER", "I-PER"]
    entities = extract_entities([TaggedSentence(["New", "York", "saw", "Ann", "Bo", "Ek", "Li"], tags, "x:1")] * 2)
    assert entities == {"New York": 2, "Bo Ek Li": 2}
    with pytest.raises(CtxError, match="not B-, I- and O"):
        extract_entities([TaggedSentence(["a"], ["NN"], "x:1")])


def test_units_command(tmp_path: Path) -> None:
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


def correlated_sentences(num_sentences: int = 1000) -> list[str]:
    """Random sentences in which some words follow others more often than by chance."""
    rng, words = random.Random(0), [f"w{chr(97 + number)}" for number in range(20)]
    following = {"wa": "wb", "wb": "wc", "wd": "we", "wab": "wc"}
    sentences = []
    for _ in range(num_sentences):
        sentence = [rng.choice(words)]
        for _ in range(rng.randrange(12)):
            likely_next = following.get(sentence[-1])
            sentence.append(likely_next if likely_next and rng.random() < 0.5 else rng.choice(words))
        sentences.append(" ".join(sentence))
    return sentences


@pytest.mark.parametrize(("min_count", "thresholds"), [(5, (0.3,)), (40, (0.3, 0.1)), (1, (0.3, 0.2, 0.1))])
def test_phrase_scores_match_gensim(min_count: int, thresholds: tuple[float, ...]) -> None:
    gensim_phrases = pytest.importorskip("gensim.models.phrases")
    texts = correlated_sentences()
    expected = [text.split() for text in texts]
    for threshold in thresholds:
        scores = score_phrases(texts, min_count=min_count, threshold=threshold)
        model = gensim_phrases.Phrases(expected, min_count=min_count, threshold=threshold)
        gold = model.find_phrases(expected)
        assert gold
        assert gold == {phrase: pytest.approx(scores[pair]) for pair in scores if (phrase := "_".join(pair)) in gold}
        texts = [join_phrases(text, scores) for text in texts]
        expected = [model[sentence] for sentence in expected]
        assert [text.split() for text in texts] == expected


def test_phrase_score_formula() -> None:
    texts = ["New York, new york!", "a new York"]  # no bigram across the comma
    size = len({"new", "york", "a"}) + len({("new", "york"), ("a", "new")})
    score = (3 - 1) / (3 * 3) * size
    assert score_phrases(texts, min_count=1, threshold=0) == {("new", "york"): pytest.approx(score)}
    assert not score_phrases(texts, min_count=3, threshold=0)
    assert not score_phrases(texts, min_count=1, threshold=score)


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("In New  York, new york.", "In New_York, new_york."),
        ("new, york new-york", "new, york new-york"),
        ("new york city hall", "new_york city_hall"),
        ("york city city hall new", "york_city city_hall new"),
        ("", ""),
    ],
)
def test_join_phrases(text: str, joined: str) -> None:
    assert join_phrases(text, {("new", "york"), ("york", "city"), ("city", "hall")}) == joined


def test_phrases_command(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES[:14]) + "\n\n" + "\n".join(SENTENCES[14:]))
    flags = {"dataset": tmp_path / "text.txt", "output": tmp_path / "joined.txt", "min_count": 2}
    printed = command_output("data phrases", **flags, thresholds=[0.9, 0.5])
    assert "pass 1: 3 phrases with a score above 0.9, such as: we_saw, new_york, and_we" in printed
    assert "we_saw_new_york" in printed
    lines = (tmp_path / "joined.txt").read_text().split("\n")
    assert lines[:7] == [*["We_saw_New_York City in May ."] * 6, "New_York is big , and_we_saw a City ."]
    assert lines[14] == "", "documents stay separate"
    assert "There is no phrase" in command_output("data phrases", "--overwrite", **flags, thresholds=99, fails=True)
    assert "decrease" in command_output("data phrases", "--overwrite", **flags, thresholds=[1, 2], fails=True)
