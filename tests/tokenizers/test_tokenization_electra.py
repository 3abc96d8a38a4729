"""ELECTRA's tokenizer, which equals BERT's except for its class."""

import pytest
from transformers import AutoTokenizer, ElectraTokenizer

from hf_ctxmodels import CtxElectraTokenizer, CtxError

TEXTS = ["A cat sat on the mat.", "The unaffable dog ran; Zürich's café!"]


def test_save_and_load(tmp_path) -> None:
    tokenizer = CtxElectraTokenizer.train(TEXTS, vocab_size=80, min_frequency=1)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is CtxElectraTokenizer
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded(TEXTS).data == tokenizer(TEXTS).data


def test_ids_equal_transformers(tmp_path) -> None:
    vocabulary = CtxElectraTokenizer.train(TEXTS, vocab_size=80, min_frequency=1).get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    tokenizer, reference = CtxElectraTokenizer.from_pretrained(tmp_path), ElectraTokenizer.from_pretrained(tmp_path)
    assert tokenizer(TEXTS).data == reference(TEXTS).data
    assert tokenizer(TEXTS, TEXTS[::-1]).data == reference(TEXTS, TEXTS[::-1]).data


def test_missing_vocabulary() -> None:
    with pytest.raises(CtxError, match=r"CtxElectraTokenizer\.train"):
        CtxElectraTokenizer()
