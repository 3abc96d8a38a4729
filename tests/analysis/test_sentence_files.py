"""Sentences read from files."""

import pytest

from hf_ctxmodels import CtxError
from hf_ctxmodels.analysis.senses import find_occurrences
from hf_ctxmodels.analysis.sentences import read_sentences


def test_read_sentences_keeps_spacing(tmp_path):
    """Lines of text stay strings, treebank sentences are lists of words."""
    (tmp_path / "a.txt").write_text("It's here, isn't it?\n\n  \nYes.\n")
    (tmp_path / "b.conllu").write_text("1\tYes\t_\tINTJ\t_\t_\t0\troot\t_\t_\n\n")
    sentences = read_sentences([tmp_path / "a.txt", tmp_path / "b.conllu"])
    assert sentences == ["It's here, isn't it?", "Yes.", ["Yes"]]
    assert [tuple(occurrence[:3]) for occurrence in find_occurrences(sentences, "yes")] == [(1, 0, 1), (2, 0, 1)]
    with pytest.raises(CtxError, match="is a directory, expected a file"):
        read_sentences([tmp_path])
