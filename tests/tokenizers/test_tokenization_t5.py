"""T5's tokenizer: upstream's ids, the sentinels at the top, training, and saving."""

import random
from pathlib import Path

import pytest
from sentencepiece import SentencePieceTrainer
from transformers import T5Tokenizer

from hf_ctxmodels.models.t5.tokenization_t5 import CtxT5Tokenizer

TRICKY = [
    "",
    "Don't stop -- it's 3.14% of Café Zoë's naïve résumé (2,000 pages, £9,50)!",
    "``quotes'' and \"quotes\"  two   spaces a(b)c",
    "中文和English混排。 İstanbul ǅ ﬁne Ⅷ ½ a\u0301 \u200b \u3000wide\ttab\nline 🙂",
    "A <extra_id_0> boat<extra_id_1>, <extra_id_99> </s> <pad> <unk> <extra_id_100>",
]
WORDS = ["boat", "Brücke", "garden", "lettre", "small", "story", "Fenster", "Café", "2,000", "(old)", "red."]
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=12)) for number in range(200)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One vocabulary as SentencePiece's file, with the ids of the released one, and as transformers saves it."""
    source, saved = (tmp_path_factory.mktemp(name) for name in ("model", "json"))
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    arguments = {"vocab_size": 160, "hard_vocab_limit": False, "character_coverage": 1.0, "minloglevel": 2}
    with (source / "spiece.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter([*TEXTS, *TRICKY[1:3]]), model_writer=file, **arguments, **ids
        )
    T5Tokenizer.from_pretrained(source).save_pretrained(saved)
    return {"spiece.model": source, "tokenizer.json": saved}


@pytest.mark.parametrize("form", ["spiece.model", "tokenizer.json"])
def test_ids_are_upstreams(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    ours, theirs = CtxT5Tokenizer.from_pretrained(folders[form]), T5Tokenizer.from_pretrained(folders[form])
    ours.save_pretrained(tmp_path)
    for opened in (ours, CtxT5Tokenizer.from_pretrained(tmp_path), T5Tokenizer.from_pretrained(tmp_path)):
        assert opened.get_vocab() == theirs.get_vocab()
        assert set(opened.all_special_ids) == set(theirs.all_special_ids)
        for texts in (TEXTS[:20], TRICKY):
            assert opened(texts).data == theirs(texts).data
            pairs = {"text": texts[:-1], "text_pair": texts[1:], "truncation": True, "max_length": 24, "padding": True}
            assert opened(**pairs).data == theirs(**pairs).data
    ids = ours(TRICKY[4]).input_ids
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.convert_tokens_to_ids("<extra_id_0>") == len(ours) - 1
    assert ours.convert_tokens_to_ids("<extra_id_99>") == len(ours) - 100


def test_a_trained_vocabulary_ends_with_the_sentinels() -> None:
    tokenizer, again = (CtxT5Tokenizer.train(texts, vocab_size=150) for texts in (TEXTS, reversed(TEXTS)))
    assert tokenizer.get_vocab() == again.get_vocab()
    assert 130 < len(tokenizer) <= 150
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[:3] == ["<pad>", "</s>", "<unk>"]
    assert tokens[-100:] == [f"<extra_id_{number}>" for number in range(99, -1, -1)]
    ids = tokenizer("a small boat <extra_id_1>").input_ids
    assert ids[-2:] == [len(tokenizer) - 2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["a", "small", "boat"]
