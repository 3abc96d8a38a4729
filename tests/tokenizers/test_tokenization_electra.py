"""ELECTRA's tokenizer: its own name, BERT's pieces."""

import pytest
from transformers import AutoTokenizer, ElectraTokenizer

from hf_ctxmodels import CtxElectraTokenizer, CtxError

TEXTS = ["A cat sat on the mat.", "The unaffable dog ran; Zürich's café!"]


def test_saved_and_opened_by_its_own_class(tmp_path) -> None:
    tokenizer = CtxElectraTokenizer.train(TEXTS, vocab_size=80, min_frequency=1)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is CtxElectraTokenizer
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again(TEXTS).data == tokenizer(TEXTS).data


def test_ids_are_those_of_the_reference(tmp_path) -> None:
    vocabulary = CtxElectraTokenizer.train(TEXTS, vocab_size=80, min_frequency=1).get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    ours, reference = CtxElectraTokenizer.from_pretrained(tmp_path), ElectraTokenizer.from_pretrained(tmp_path)
    assert ours(TEXTS).data == reference(TEXTS).data
    assert ours(TEXTS, TEXTS[::-1]).data == reference(TEXTS, TEXTS[::-1]).data


def test_a_missing_vocabulary_names_the_class() -> None:
    with pytest.raises(CtxError, match=r"CtxElectraTokenizer\.train"):
        CtxElectraTokenizer()
