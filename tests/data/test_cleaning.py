"""Cleaning of raw text and the command `data clean`."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
from commands import command_output
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.cleaning import RULES, CleaningRules, HashSet, LanguageFilter, TextCleaner

GOOD = ["The cat sat on the mat. It slept.", "Then it woke up again."]


def clean(*documents, **rules):
    cleaner = TextCleaner(CleaningRules(**rules))
    return list(cleaner.clean(documents)), +cleaner.removed


@pytest.mark.parametrize(
    ("rule", "line", "expected"),
    [
        ("long_words", f"This word is long: {'x' * 1001}.", GOOD),
        ("end_marks", "Menu and search and home page", GOOD),
        ("end_marks", "Read more about this here...", GOOD),
        ("short_lines", "Click here for more.", GOOD),
        ("javascript", "Please turn on JavaScript for this page.", GOOD),
        ("policy", "By reading this you accept our Terms of Use.", GOOD),
        ("lorem_ipsum", "Lorem ipsum dolor sit amet, and so on.", None),
        ("brackets", "The function f() { is open.", None),
        ("bad_words", "Here is a DARN word, alas.", None),
        ("citations", "A fact[3] that is known[citation needed] well.", [*GOOD, "A fact that is known well."]),
    ],
)
def test_line_rules(rule, line, expected):
    for lines in ([*GOOD, line], [*GOOD, "", f"  {line} "]):
        texts, removed = clean(lines, bad_words=["darn", "(x"])
        assert texts == ([] if expected is None else [expected])
        assert removed == {rule: 2 if rule == "citations" else 1}
        texts, removed = clean(lines, bad_words=["darn", "(x"], skip=[rule])
        assert texts == [[*GOOD, line]]
        assert not removed


def test_long_words_are_counted_with_citation_marks():
    """As in the released code; whitespace-only lines count as well."""
    line = f"A fact that is known{'[1]' * 340} well."
    assert clean([*GOOD, line, " " * 1001]) == ([GOOD], {"long_words": 1})


def test_document_rules():
    assert clean(GOOD[:1]) == ([], {"sentences": 1})
    assert clean(GOOD[:1], min_sentences=2) == ([GOOD[:1]], {})
    assert clean(GOOD, ["Menu"], skip=["sentences"]) == ([GOOD], {"end_marks": 1})
    assert clean(["Scunthorpe darning is a fine word."] * 3, bad_words=["darn"])[0]  # no matches within words
    assert clean(GOOD, [*GOOD, "Und jetzt?"], is_in_language=lambda text: "\n" in text and "Und" not in text)[0] == [
        GOOD
    ]
    with pytest.raises(CtxError, match="Unknown rule 'x'"):
        CleaningRules(skip=["x"])


def sentence(name):
    return f"The word {name} stands here."


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (["abcd", "xabcy"], ["abcd", "xy"]),
        (["abcd", "XABCY"], ["abcd", "XY"]),
        (["abxabyab"], ["abxabyab"]),
        (["abcxabcy"], ["abcxy"]),
        (["aaaaaaa"], ["aaa"]),
        (["abcd", "zabcd", "zabc"], ["abcd", "z", "z"]),  # the span "zab" is not in the output
        (["ab", "ab"], ["ab", "ab"]),
    ],
)
def test_duplicate_spans(documents, expected):
    texts, _ = clean(*(list(map(sentence, words)) for words in documents), skip=["sentences"])
    assert texts == [list(map(sentence, words)) for words in expected]


def test_duplicates_within_lines_and_short_remainders():
    document = ["One is here now. Two is here now.", "Three is here now. Four is here now."]
    texts, removed = clean(document, document, ["Zero is here now. " + document[0], document[1]], min_sentences=1)
    assert texts == [document, ["Zero is here now."]]
    assert removed == {"duplicates": 8, "sentences": 1}
    assert clean(document, document[:1] + document[1:], skip=["duplicates"])[0] == [document, document]
    extended = [" ".join(document), "Five is here now. Six is here now."]
    assert clean(document, extended)[0] == [document]  # the second document would keep only two sentences


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6))
def test_deduplication_keeps_all_distinct_sentences(documents):
    texts = [[sentence(f"w{number}") for number in document] for document in documents]
    results, removed = clean(*texts, skip=["sentences"])
    assert {line for lines in results for line in lines} == {line for lines in texts for line in lines}
    assert sum(map(len, results)) + removed["duplicates"] == sum(map(len, texts))


def test_hash_set():
    rng = np.random.default_rng(0)
    hashes, expected = HashSet(), set()
    for size in (0, 1, 500, 3000, 20):
        values = rng.integers(2**63, size=size, dtype=np.uint64) >> np.uint64(rng.integers(40))
        new = np.unique(values[~np.isin(values, list(expected))]) if expected else np.unique(values)
        assert hashes.contains(values).tolist() == [value in expected for value in values.tolist()]
        hashes.add(new)
        expected |= set(new.tolist())
        assert len(hashes) == len(expected)
        assert hashes.contains(np.array(sorted(expected), dtype=np.uint64)).all()
    assert hashes._table.nbytes <= 24 * len(hashes)


@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl", ".jsonl.zst"])
def test_clean_command(tmp_path, suffix):
    pages = [GOOD, [*GOOD, "A { here is code."], ["One word.", *GOOD, "A final sentence is here."]]
    rows = "".join(json.dumps({"text": "\n".join(lines)}) + "\n" for lines in pages)
    (tmp_path / "pages.jsonl").write_text(rows)
    (tmp_path / "bad.txt").write_text("darn\n\n")
    files = {"output": tmp_path / f"clean{suffix}", "report": tmp_path / "report.json"}
    flags = {"dataset": tmp_path / "pages.jsonl", "bad_words": tmp_path / "bad.txt", "min_sentences": 1, **files}
    output = command_output("data clean", **flags)
    assert "written                  2" in output
    expected = [GOOD, ["A final sentence is here."]]
    assert list(load_documents(str(files["output"])).paragraphs()) == expected
    report = json.loads(files["report"].read_text())
    assert set(report["removed"]) == set(RULES)
    assert +Counter(report["removed"]) == {"brackets": 1, "short_lines": 1, "duplicates": 3}
    assert report["read"] == {"documents": 3, "lines": 9, "characters": len("".join(map("".join, pages)))}
    content = files["output"].read_bytes()
    assert "The file exists" in command_output("data clean", fails=True, **flags)
    command_output("data clean", "--overwrite", **flags)
    assert files["output"].read_bytes() == content
    command_output("data clean", "--overwrite", "--skip_rules", "brackets", "duplicates", **flags)
    assert len(list(load_documents(str(files["output"])))) == 3
    link = tmp_path / f"link{suffix}"
    link.symlink_to(files["output"])
    same_files = flags | {"report": link}
    assert "report would replace" in command_output("data clean", "--overwrite", fails=True, **same_files)
    flags["output"] = tmp_path / "clean.csv"
    assert "use .txt or .jsonl" in command_output("data clean", fails=True, **flags)


def test_language_filter(tmp_path):
    pytest.importorskip("py3langid")
    german = ["Der Hund lief über die Straße und bellte. Er war müde.", "Dann schlief er auf dem Sofa ein."]
    english = ["The dog ran over the street and barked loudly. It was tired.", "Then it fell asleep on the sofa."]
    assert clean(english, german, is_in_language=LanguageFilter("de")) == ([german], {"language": 1})
    with pytest.raises(CtxError, match="Unknown language 'xx'"):
        LanguageFilter("xx")


def test_language_filter_without_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(CtxError, match=r"hf_ctxmodels\[language\]"):
        LanguageFilter("en")


@pytest.mark.slow
def test_cleaning_of_real_data(shared_data):
    """Lines without a full stop are removed, and so is a second copy of the text."""
    documents = list(load_documents(str(shared_data / "corpus" / "wikipedia_articles.txt.gz")).paragraphs())[:30]
    cleaned, removed = clean(*documents)
    cleaned_twice, removed_twice = clean(*documents, *documents)
    assert cleaned_twice == cleaned
    assert removed_twice["duplicates"] > 0.9 * sum(len(lines) for lines in cleaned)
    assert removed["end_marks"] > 0
