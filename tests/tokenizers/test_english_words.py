"""Words of the Penn Treebank, compared with NLTK, and in converted vectors."""

from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from transformers import AutoTokenizer

from hf_ctxmodels import CtxGloveTokenizer, CtxInferSentTokenizer

TEXTS = {
    "The cat sat. ": "The cat sat .",
    "It's what I'd see; they've don't won't": "It 's what I 'd see ; they 've do n't wo n't",
    "cannot gonna wanna": "can not gon na wan na",
    "O'Clock rock'n'roll dogs'": "O'Clock rock'n'roll dogs '",
    "Mr. Smith of the U.S. army and St. Mary's": "Mr. Smith of the U.S. army and St. Mary 's",
    "well-known and/or 24-hour 5km 1,234.5 10:30": "well-known and/or 24-hour 5km 1,234.5 10:30",
    "$5 5% (x) -- end...": "$ 5 5 % ( x ) -- end ...",
}


@pytest.mark.parametrize("text", TEXTS)
def test_treebank_words(text: str) -> None:
    words = TEXTS[text].split()
    tokenizer = CtxInferSentTokenizer.from_words(sorted({*words}), do_lower_case=False, treebank_words=True)
    assert tokenizer.tokenize(text) == words


@pytest.mark.parametrize("text", [*TEXTS, "He said we can't, so (maybe) she'll come.", "Is it? Yes!"])
def test_words_equal_nltk(text: str) -> None:
    nltk: Any = pytest.importorskip("nltk.tokenize", reason="needs the extra `generation`")
    words = nltk.NLTKWordTokenizer().tokenize(text.strip())
    tokenizer = CtxGloveTokenizer.from_words(sorted({*words}), do_lower_case=False, treebank_words=True)
    assert tokenizer.tokenize(text) == words


def test_training() -> None:
    """The words of the vocabulary are split by the same rules as later texts."""
    tokenizer = CtxGloveTokenizer.train(["I don't."], vocab_size=20, min_count=1, treebank_words=True)
    assert tokenizer.tokenize("I don't.") == ["i", "do", "n't", "."]


def test_converted_vectors(tmp_path: Path) -> None:
    """The word "n't" tells that the text of the vectors was split in this way."""
    words = ["do", "sat", ".", "don't"]
    for clitics, expected in ((["n't"], ["do", "n't", "sat", "."]), ([], ["don't", "[UNK]"])):
        file, output = tmp_path / f"{len(clitics)}.txt", tmp_path / f"glove-{len(clitics)}"
        file.write_text("".join(f"{word} 0.5 1.5\n" for word in [*words, *clitics]))
        flags = {"input": file, "input_format": "glove", "output": output, "family": "glove"}
        assert run_command("convert", "word-vectors", **flags) == 0
        assert AutoTokenizer.from_pretrained(output).tokenize("don't sat.") == expected
