"""Subword overlap and scripts of examples."""

from collections import Counter

import pytest
from commands import tiny_pair

from hf_ctxmodels.data.table_files import TaggedSentence
from hf_ctxmodels.downstream.tasks.question_answering import Question
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceExample
from hf_ctxmodels.evaluation.languages import SubwordOverlap, count_subwords, example_texts, main_script
from hf_ctxmodels.registry import FAMILIES


def test_subword_overlap() -> None:
    training, test = Counter([5, 5, 6, 7, 1]), Counter([6, 6, 6, 8, 1, 1])
    overlap = SubwordOverlap.between(training, test, unknown_token=1)
    assert overlap.types == pytest.approx(1 / 5), "6 of 1, 5, 6, 7, 8"
    assert overlap.tokens == pytest.approx(3 / 6)
    assert SubwordOverlap.between(training, training).tokens == 1
    assert SubwordOverlap.between(training, Counter()) == SubwordOverlap(0, 0)


def test_subword_counts_of_examples() -> None:
    """Counts equal those of the tokenizer on the distinct texts."""
    _, tokenizer = tiny_pair("bert", "AutoModel", ["the cat saw a dog"], vocab_size=60)
    tagged = [TaggedSentence(["the", "cat"], ["X", "X"], "")] * 2
    pairs = [SequenceExample(("the cat", "a dog"), "x", ""), SequenceExample(("the cat", "saw"), "y", "")]
    questions = [Question(name, name, "the dog", (), "") for name in ("cat", "saw")]
    for examples, texts in (
        (tagged, ["the cat"]),
        (pairs, ["the cat", "a dog", "saw"]),
        (questions, ["cat", "the dog", "saw"]),
    ):
        expected = Counter(tokenizer(" ".join(texts), add_special_tokens=False)["input_ids"])
        assert count_subwords(tokenizer, example_texts(examples)) == expected
    unknown_counts = count_subwords(tokenizer, ["кот"])
    assert unknown_counts is not None
    assert set(unknown_counts) == {tokenizer.unk_token_id}, "unknown tokens are counted"
    xlm = FAMILIES["xlm"].tokenizer
    separate = xlm.train(["<de> Hund", "<en> Hund"] * 9, vocab_size=60, separate_vocabularies=True)
    german, english = (count_subwords(separate, ["Hund"], language) for language in ("de", "en"))
    assert german is not None
    assert english is not None
    assert SubwordOverlap.between(german, english).tokens == 0, "vocabularies are separate"
    _, character_tokenizer = tiny_pair("elmo", "AutoModel", ["the cat"], vocab_size=9)
    assert count_subwords(character_tokenizer, ["the cat"]) is None
    with pytest.raises(TypeError, match="no texts in dict"):
        example_texts([{}])


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Das ist ein Test, 2019!", "Latin"),
        ("Это тест Test", "Cyrillic"),
        ("这是一个测试", "Han"),
        ("これは test です", "Hiragana"),
        ("यह परीक्षण है", "Devanagari"),
        ("12 + 3", "None"),
    ],
)
def test_main_script(text: str, script: str) -> None:
    assert main_script([text]) == main_script([text.split()]) == script
