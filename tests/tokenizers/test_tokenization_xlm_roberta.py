"""XLM-R's tokenizer: ids in fairseq's order, training, saving and errors."""

import pytest
from tokenizer_texts import EDGE_CASE_TEXTS, TEXTS, assert_same_encodings, read_lines, train_sentencepiece
from tokenizers import AddedToken
from transformers import XLMRobertaTokenizer

from hf_ctxmodels import CtxXLMRobertaTokenizer
from hf_ctxmodels.core.errors import CtxError

EDGE_CASE_TEXTS = [*EDGE_CASE_TEXTS, "<s> literal </s> specials </s></s> <pad> <unk>, <mask> a<mask>, b"]
FIRST_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]


def write_model(folder, **changes):
    """Train a sentencepiece.bpe.model with the options of the release."""
    train_sentencepiece(folder / "sentencepiece.bpe.model", **changes)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same vocabulary as a SentencePiece file, and as saved by transformers."""
    source, saved = (tmp_path_factory.mktemp(name) for name in ("model", "json"))
    XLMRobertaTokenizer.from_pretrained(
        write_model(source), mask_token=AddedToken("<mask>", lstrip=True)
    ).save_pretrained(saved)
    return {"sentencepiece.bpe.model": source, "tokenizer.json": saved}


def load_reference(folder):
    """transformers' tokenizer, where <mask> includes the space before it, as in the released tokenizer.json."""
    return XLMRobertaTokenizer.from_pretrained(folder, mask_token=AddedToken("<mask>", lstrip=True))


@pytest.mark.parametrize("form", ["sentencepiece.bpe.model", "tokenizer.json"])
def test_ids_equal_transformers(folders, form):
    tokenizer, reference = CtxXLMRobertaTokenizer.from_pretrained(folders[form]), load_reference(folders[form])
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, len(tokenizer) - 1]) == [*FIRST_TOKENS, "<mask>"]
    for texts in (TEXTS[:20], EDGE_CASE_TEXTS):
        assert_same_encodings(tokenizer, reference, texts, padding=True)


def test_ids_equal_transformers_on_real_text(folders, shared_data):
    folder = folders["tokenizer.json"]
    tokenizer, reference = CtxXLMRobertaTokenizer.from_pretrained(folder), load_reference(folder)
    for language in ("en", "de", "fr", "es"):
        file = shared_data / f"multilingual/bible/{language}.tsv.gz"
        lines = [line.split("\t")[-1] for line in read_lines(file)[::400]]
        assert tokenizer(lines).input_ids == reference(lines).input_ids


def test_user_defined_symbols(tmp_path):
    tokenizer = CtxXLMRobertaTokenizer.from_pretrained(write_model(tmp_path, user_defined_symbols=["(", ")"]))
    symbol = tokenizer.convert_tokens_to_ids("(")
    assert symbol in tokenizer("a (boat)").input_ids
    assert symbol not in tokenizer.all_special_ids
    assert tokenizer.get_added_vocab()["("] == symbol


def test_train(tmp_path):
    trained = CtxXLMRobertaTokenizer.train(TEXTS, 100)
    assert trained.convert_ids_to_tokens([0, 1, 2, 3, len(trained) - 1]) == [*FIRST_TOKENS, "<mask>"]
    assert trained.tokenize("bridge letter") == ["▁bridge", "▁letter"]
    assert trained.tokenize("``") != trained.tokenize('"'), "quotes are not normalized"
    trained.save_pretrained(tmp_path)
    assert load_reference(tmp_path)(EDGE_CASE_TEXTS).input_ids == trained(EDGE_CASE_TEXTS).input_ids


def test_model_of_another_family_raises(tmp_path):
    write_model(tmp_path, pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]"])
    with pytest.raises(CtxError, match=r"starts with <pad>, <unk>, \[CLS\]"):
        CtxXLMRobertaTokenizer.from_pretrained(tmp_path)
