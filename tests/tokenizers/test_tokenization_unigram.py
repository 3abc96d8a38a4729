"""SentencePiece unigram tokenizers: ids, training, saving and errors."""

import itertools
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizer_texts import EDGE_CASE_TEXTS, TEXTS, train_sentencepiece
from transformers import AlbertTokenizer, XLNetTokenizer
from transformers.convert_slow_tokenizer import AlbertConverter, XLNetConverter

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.albert.tokenization_albert import CtxAlbertTokenizer
from hf_ctxmodels.models.xlnet.tokenization_xlnet import CtxXLNetTokenizer
from hf_ctxmodels.objectives.features import NonSpecialTokens
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers import unigram

EDGE_CASE_TEXTS = [*EDGE_CASE_TEXTS, "[CLS] [MASK] literal [SEP] <mask> specials<mask> <eop> <eod> <sep> <pad>"]


@dataclass(frozen=True)
class TokenizerCase:
    """A tokenizer class with its reference in transformers, and the training options of its released vocabulary."""

    tokenizer_class: type
    reference_class: type
    converter: type
    released: dict
    lower_case: bool

    def vocabulary(self, folder, **changes):
        """Train a spiece.model with the options of the release."""
        train_sentencepiece(folder / "spiece.model", **{"vocab_size": 120} | self.released | changes)
        return folder

    def legacy_file(self, source, folder):
        """Write the tokenizer.json that older releases of transformers create from a spiece.model."""
        slow = self.reference_class.from_pretrained(source)
        slow = SimpleNamespace(
            vocab_file=str(source / "spiece.model"),
            keep_accents=False,
            do_lower_case=self.lower_case,
            convert_tokens_to_ids=slow.convert_tokens_to_ids,
        )
        self.converter(slow).converted().save(str(folder / "tokenizer.json"))
        return folder


CASES = {
    "albert": TokenizerCase(
        CtxAlbertTokenizer,
        AlbertTokenizer,
        AlbertConverter,
        {
            "pad_id": 0,
            "unk_id": 1,
            "bos_id": -1,
            "eos_id": -1,
            "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
            "user_defined_symbols": list('(),"-.–£€'),
        },
        lower_case=True,
    ),
    "xlnet": TokenizerCase(
        CtxXLNetTokenizer,
        XLNetTokenizer,
        XLNetConverter,
        {
            "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
            "user_defined_symbols": ["<eop>", *'.(),"-–£€'],
        },
        lower_case=False,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def folders(case, tmp_path_factory):
    """The same vocabulary in three file formats."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("spiece.model", "saved by 5.23", "legacy")}
    source = case.vocabulary(folders["spiece.model"])
    case.reference_class.from_pretrained(source).save_pretrained(folders["saved by 5.23"])
    case.legacy_file(source, folders["legacy"])
    return folders


@pytest.fixture(scope="module")
def trained(case):
    return case.tokenizer_class.train(TEXTS, 100)


@pytest.mark.parametrize("form", ["spiece.model", "saved by 5.23", "legacy"])
@pytest.mark.parametrize("options", [{}, {"do_lower_case": True}, {"do_lower_case": False}], ids=str)
def test_ids_equal_transformers(case, folders, form, options):
    tokenizer, reference = (
        tokenizer_class.from_pretrained(folders[form], **options)
        for tokenizer_class in (case.tokenizer_class, case.reference_class)
    )
    assert tokenizer.get_vocab() == reference.get_vocab()
    for texts in (TEXTS[:20], EDGE_CASE_TEXTS):
        single = tokenizer(texts, return_offsets_mapping=True)
        expected = reference(texts, return_offsets_mapping=True)
        assert (single.input_ids, single.offset_mapping) == (expected.input_ids, expected.offset_mapping)
        pairs = {"text": texts[:-1], "text_pair": texts[1:], "truncation": True, "max_length": 48}
        encoded_pairs = tokenizer(**pairs)
        assert encoded_pairs.data == reference(**pairs, return_token_type_ids=True).data
        assert any(encoded_pairs.token_type_ids[0])
        assert tokenizer(**pairs, padding=True).input_ids == reference(**pairs, padding=True).input_ids
    ids = tokenizer(EDGE_CASE_TEXTS[1]).input_ids
    assert tokenizer.decode(ids) == reference.decode(ids)


def test_keep_accents(case, folders):
    with_accents, without_accents = (
        case.tokenizer_class.from_pretrained(folders["legacy"], keep_accents=keep) for keep in (True, False)
    )
    assert without_accents.tokenize("café") == without_accents.tokenize("cafe")
    assert with_accents.tokenize("café") != with_accents.tokenize("cafe")


def test_user_defined_symbols_are_not_special(case, folders):
    tokenizer = case.tokenizer_class.from_pretrained(folders["spiece.model"])
    symbol = tokenizer.convert_tokens_to_ids("(")
    assert symbol in tokenizer("a (boat)").input_ids
    assert symbol not in tokenizer.all_special_ids
    assert "(" in tokenizer.decode(tokenizer("a (boat)").input_ids, skip_special_tokens=True)
    assert NonSpecialTokens(tokenizer).candidates(np.array([symbol])).all()
    assert set(case.tokenizer_class.first_tokens) == set(tokenizer.all_special_tokens)


def test_xlnet_padding_and_segments():
    tokenizer = CtxXLNetTokenizer.train(TEXTS, 100)
    batch = tokenizer(["boat", "boat bridge garden"], ["red.", "red."], padding=True)
    short = tokenizer("boat", "red.")
    padding = len(batch.input_ids[0]) - len(short.input_ids)
    assert padding > 0
    assert batch.input_ids[0] == [tokenizer.pad_token_id] * padding + short.input_ids
    assert batch.token_type_ids[0] == [3] * padding + short.token_type_ids
    assert batch.attention_mask[0] == [0] * padding + [1] * len(short.input_ids)
    assert tokenizer.convert_ids_to_tokens(short.input_ids[-2:]) == ["<sep>", "<cls>"]
    assert sorted(set(short.token_type_ids)) == [0, 1, 2]
    assert short.token_type_ids[-1] == 2


def test_ids_of_special_tokens(case, trained, folders):
    released = case.tokenizer_class.from_pretrained(folders["spiece.model"])
    for name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"):
        assert getattr(trained, f"{name}_token_id") == getattr(released, f"{name}_token_id")
    first_tokens = case.tokenizer_class.first_tokens
    assert trained.convert_ids_to_tokens(range(len(first_tokens))) == list(first_tokens)


def test_training_options(case):
    default = case.tokenizer_class.train(TEXTS, 100)
    assert default.tokenize("bridge") == ["▁bridge"]
    assert default.do_lower_case is case.lower_case
    assert default.unk_token_id not in default(TEXTS[0]).input_ids
    cased = case.tokenizer_class.train(TEXTS, 100, do_lower_case=False, keep_accents=True)
    assert cased.tokenize("Café") == ["▁Café"]
    assert case.tokenizer_class.train(TEXTS, 100, do_lower_case=True).tokenize("Café") == ["▁cafe"]


def test_training_on_long_documents(case):
    tokenizer = case.tokenizer_class.train([" ".join(TEXTS), "window " * 10_000], 100)
    assert tokenizer.tokenize("window") == ["▁window"]


def test_missing_sentencepiece(case, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CtxError, match=r"Reading (.|\n)*sentencepiece(.|\n)*pip install"):
        case.tokenizer_class.from_pretrained(folders["spiece.model"])
    with pytest.raises(CtxError, match=r"Training (.|\n)*sentencepiece(.|\n)*pip install"):
        case.tokenizer_class.train(TEXTS, 100)
    assert case.tokenizer_class.from_pretrained(folders["legacy"])("boat").input_ids


def test_invalid_model_files(case, folders, tmp_path):
    """A damaged file, a model type other than unigram, and the vocabulary of another family."""
    content = (folders["spiece.model"] / "spiece.model").read_bytes()
    (tmp_path / "spiece.model").write_bytes(content[: len(content) // 3])
    with pytest.raises(CtxError, match=r"spiece.model is damaged(.|\n)*" + tmp_path.name):
        case.tokenizer_class.from_pretrained(tmp_path)
    other_case = next(candidate for candidate in CASES.values() if candidate is not case)
    for training_case, options, message in (
        (case, {"model_type": "bpe"}, "not a unigram model"),
        (other_case, {}, r"lacks .*(\[MASK\]|<mask>)"),
    ):
        training_case.vocabulary(tmp_path, **options)
        with pytest.raises(CtxError, match=message):
            case.tokenizer_class.from_pretrained(tmp_path)


def test_rarest_words_of_large_texts_are_ignored(case, monkeypatch):
    monkeypatch.setattr(unigram, "_MAX_WORDS", 40)
    rare = [" ".join(f"rare{number}" for number in range(start, start + 30)) for start in range(0, 600, 30)]
    texts = [text for pair in zip(rare, itertools.cycle(TEXTS)) for text in pair]
    assert len(unigram._count_words(text.split() for text in texts)) == 40
    assert case.tokenizer_class.train(texts, 100).tokenize("bridge") == ["▁bridge"]


@pytest.mark.parametrize("family", ["albert", "xlnet", "t5", "xlm_roberta"])
def test_training_text_has_no_unknown_characters(family):
    """In the normalization of the encoder: without accents, Korean syllables are decomposed into letters."""
    texts = [
        "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
        "\u1106\u116e\u11ab",
        "\u30ac\u30ae",
        "na\u00efve",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
    ]
    tokenizer = FAMILIES[family].tokenizer.train(texts * 9, 300)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        expected = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
        assert tokenizer.decode(ids).strip() == expected
