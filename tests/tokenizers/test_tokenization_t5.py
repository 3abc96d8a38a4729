"""T5's tokenizer: ids, sentinel tokens, training and saving."""

from pathlib import Path

import pytest
from tokenizer_texts import EDGE_CASE_TEXTS, TEXTS, assert_same_encodings, train_sentencepiece
from transformers import T5Tokenizer

from hf_ctxmodels.models.t5.tokenization_t5 import CtxT5Tokenizer

EDGE_CASE_TEXTS = [*EDGE_CASE_TEXTS, "A <extra_id_0> boat<extra_id_1>, <extra_id_99> </s> <pad> <unk> <extra_id_100>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same vocabulary as a SentencePiece file with the ids of the release, and as saved by transformers."""
    source, saved = (tmp_path_factory.mktemp(name) for name in ("model", "json"))
    train_sentencepiece(source / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    T5Tokenizer.from_pretrained(source).save_pretrained(saved)
    return {"spiece.model": source, "tokenizer.json": saved}


@pytest.mark.parametrize("form", ["spiece.model", "tokenizer.json"])
def test_ids_equal_transformers(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    tokenizer, reference = CtxT5Tokenizer.from_pretrained(folders[form]), T5Tokenizer.from_pretrained(folders[form])
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, CtxT5Tokenizer.from_pretrained(tmp_path), T5Tokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == reference.get_vocab()
        assert set(loaded.all_special_ids) == set(reference.all_special_ids)
        for texts in (TEXTS[:20], EDGE_CASE_TEXTS):
            assert_same_encodings(loaded, reference, texts, padding=True)
    assert tokenizer.convert_tokens_to_ids("<extra_id_0>") == len(tokenizer) - 1
    assert tokenizer.convert_tokens_to_ids("<extra_id_99>") == len(tokenizer) - 100


def test_trained_vocabulary_ends_with_sentinel_tokens() -> None:
    tokenizer, reordered = (CtxT5Tokenizer.train(texts, vocab_size=150) for texts in (TEXTS, reversed(TEXTS)))
    assert tokenizer.get_vocab() == reordered.get_vocab()
    assert 130 < len(tokenizer) <= 150
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[:3] == ["<pad>", "</s>", "<unk>"]
    assert tokens[-100:] == [f"<extra_id_{number}>" for number in range(99, -1, -1)]
    ids = tokenizer("a small boat <extra_id_1>").input_ids
    assert ids[-2:] == [len(tokenizer) - 2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["a", "small", "boat"]
