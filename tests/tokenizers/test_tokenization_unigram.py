"""The SentencePiece-unigram tokenizers: upstream's ids, training, saving, and what they refuse."""

import gzip
import json
import pickle
import random
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from forked import run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from transformers import AlbertTokenizer, XLNetTokenizer
from transformers.convert_slow_tokenizer import AlbertConverter, XLNetConverter

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.albert.tokenization_albert import CtxAlbertTokenizer
from hf_ctxmodels.models.xlnet.tokenization_xlnet import CtxXLNetTokenizer
from hf_ctxmodels.objectives.components.non_special_tokens import NonSpecialTokens

TRICKY = [
    "",
    "Don't stop -- it's 3.14% of Café Zoë's naïve résumé (2,000 pages, £9,50)!",
    "``quotes'' and \"quotes\"  two   spaces a(b)c",
    "中文和English混排，日本語のテキスト。한국어 문장입니다.",
    "İstanbul ŞEHİR ǅ ﬁne Ⅷ ½ ﷺ",
    "a\u0301 e\u0300 \u200b zero\u00adwidth \ufeff \x00 null\tTab\nline\u3000wide",
    "[CLS] [MASK] literal [SEP] <mask> specials<mask> <eop> <eod> <sep> <pad>",
    "🙂👩‍👩‍👧 emoji; математика Ελληνικά עִבְרִית हिन्दी ▁mark",
]
WORDS = ["boat", "bridge", "garden", "letter", "sailor", "small", "story", "window", "Café", "2,000", "(old)", "red."]
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=12)) for number in range(200)]


@dataclass(frozen=True)
class Kind:
    """One tokenizer beside its peer, and how its released vocabulary was trained."""

    ours: type
    theirs: type
    converter: type
    released: dict
    lower_case: bool

    def vocabulary(self, folder, **changes):
        """A spiece.model as the released ones are."""
        arguments = {"vocab_size": 120, "hard_vocab_limit": False, "character_coverage": 1.0, "minloglevel": 2}
        with (folder / "spiece.model").open("wb") as file:
            sentences = iter([*TEXTS, *TRICKY[1:6]])
            arguments |= self.released | changes
            SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=file, **arguments)
        return folder

    def legacy_file(self, source, folder):
        """The tokenizer.json that older releases of transformers made of a spiece.model."""
        slow = self.theirs.from_pretrained(source)
        slow = SimpleNamespace(
            vocab_file=str(source / "spiece.model"),
            keep_accents=False,
            do_lower_case=self.lower_case,
            convert_tokens_to_ids=slow.convert_tokens_to_ids,
        )
        self.converter(slow).converted().save(str(folder / "tokenizer.json"))
        return folder


KINDS = {
    "albert": Kind(
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
    "xlnet": Kind(
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


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folders(kind, tmp_path_factory):
    """One vocabulary in the three forms it comes in."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("spiece.model", "saved by 5.23", "legacy")}
    source = kind.vocabulary(folders["spiece.model"])
    kind.theirs.from_pretrained(source).save_pretrained(folders["saved by 5.23"])
    kind.legacy_file(source, folders["legacy"])
    return folders


@pytest.fixture(scope="module")
def trained(kind):
    return kind.ours.train(TEXTS, 100, model_max_length=77)


@pytest.mark.parametrize("form", ["spiece.model", "saved by 5.23", "legacy"])
@pytest.mark.parametrize("options", [{}, {"do_lower_case": True}, {"do_lower_case": False}], ids=str)
def test_ids_are_upstreams(kind, folders, form, options):
    ours, theirs = (each.from_pretrained(folders[form], **options) for each in (kind.ours, kind.theirs))
    assert ours.get_vocab() == theirs.get_vocab()
    for texts in (TEXTS[:20], TRICKY):
        single = ours(texts, return_offsets_mapping=True)
        expected = theirs(texts, return_offsets_mapping=True)
        assert (single.input_ids, single.offset_mapping) == (expected.input_ids, expected.offset_mapping)
        pairs = {"text": texts[:-1], "text_pair": texts[1:], "truncation": True, "max_length": 48}
        ours_pairs = ours(**pairs)
        assert ours_pairs.data == theirs(**pairs, return_token_type_ids=True).data
        assert any(ours_pairs.token_type_ids[0])
        assert ours(**pairs, padding=True).input_ids == theirs(**pairs, padding=True).input_ids
    ids = ours(TRICKY[1]).input_ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_ids_are_upstreams_on_real_text(kind, folders, shared_data):
    ours, theirs = (each.from_pretrained(folders["legacy"]) for each in (kind.ours, kind.theirs))
    with gzip.open(shared_data / "corpus/wikipedia_articles.txt.gz", "rt", encoding="utf-8") as file:
        lines = [line for line in file if len(line) > 20][::20]
    assert ours(lines).input_ids == theirs(lines).input_ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_are_upstreams_on_any_text(kind, folders, text):
    ours, theirs = (each.from_pretrained(folders["legacy"]) for each in (kind.ours, kind.theirs))
    assert ours(text).input_ids == theirs(text).input_ids


def test_accents_are_kept_when_asked(kind, folders):
    kept, removed = (kind.ours.from_pretrained(folders["legacy"], keep_accents=keep) for keep in (True, False))
    assert removed.tokenize("café") == removed.tokenize("cafe")
    assert kept.tokenize("café") != kept.tokenize("cafe")


def test_symbols_that_are_no_control_tokens_are_not_special(kind, folders):
    tokenizer = kind.ours.from_pretrained(folders["spiece.model"])
    symbol = tokenizer.convert_tokens_to_ids("(")
    assert symbol in tokenizer("a (boat)").input_ids
    assert symbol not in tokenizer.all_special_ids
    assert "(" in tokenizer.decode(tokenizer("a (boat)").input_ids, skip_special_tokens=True)
    assert NonSpecialTokens(tokenizer).candidates(np.array([symbol])).all()
    assert set(kind.ours.first_tokens) == set(tokenizer.all_special_tokens)


def test_xlnet_pads_on_the_left_with_its_own_segments():
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


def test_saved_and_opened(kind, trained, tmp_path):
    trained.save_pretrained(tmp_path)
    opened = kind.ours.from_pretrained(tmp_path)
    assert opened.model_max_length == 77
    assert opened.all_special_ids == trained.all_special_ids
    assert opened.get_vocab() == trained.get_vocab()
    for copy in (opened, pickle.loads(pickle.dumps(trained))):
        assert copy(TRICKY, padding=True).data == trained(TRICKY, padding=True).data
    assert kind.theirs.from_pretrained(tmp_path)(TRICKY).input_ids == trained(TRICKY).input_ids


def test_training_puts_the_special_tokens_where_upstream_has_them(kind, trained, folders):
    released = kind.ours.from_pretrained(folders["spiece.model"])
    for name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"):
        assert getattr(trained, f"{name}_token_id") == getattr(released, f"{name}_token_id")
    assert trained.convert_ids_to_tokens(range(len(kind.ours.first_tokens))) == list(kind.ours.first_tokens)
    assert sorted(trained.get_vocab().values()) == list(range(len(trained)))
    assert len(trained) <= 100


def test_training_learns_words_and_keeps_case_and_accents_when_asked(kind):
    by_default = kind.ours.train(TEXTS, 100)
    assert by_default.tokenize("bridge") == ["▁bridge"]
    assert by_default.do_lower_case is kind.lower_case
    assert by_default.unk_token_id not in by_default(TEXTS[0]).input_ids
    kept = kind.ours.train(TEXTS, 100, do_lower_case=False, keep_accents=True)
    assert kept.tokenize("Café") == ["▁Café"]
    assert kind.ours.train(TEXTS, 100, do_lower_case=True).tokenize("Café") == ["▁cafe"]


def test_training_gives_the_same_vocabulary_in_every_process_and_order(kind, tmp_path):
    rng = random.Random(0)
    texts = [" ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(200)) for _ in range(20)]
    program = (
        f"import json, sys; from {kind.ours.__module__} import {kind.ours.__name__} as kind;"
        "print(kind.train(json.load(open(sys.argv[1])), 300).backend_tokenizer.to_str())"
    )
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    done = run_forked("-c", program, tmp_path / "texts.json")
    assert done.returncode == 0, done.stderr
    tokenizer = kind.ours.train(reversed(texts), 300)
    assert done.stdout.rstrip("\n") == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 300


def test_a_document_of_any_length_is_learned_from(kind):
    tokenizer = kind.ours.train([" ".join(TEXTS), "window " * 10_000], 100)
    assert tokenizer.tokenize("window") == ["▁window"]


def test_training_anew_from_a_trained_tokenizer(kind, trained):
    other = trained.train_new_from_iterator(["entirely different words"] * 50, 60)
    assert type(other) is kind.ours
    assert other.decode(other("different words").input_ids, skip_special_tokens=True) == "different words"
    assert trained.tokenize("different") != other.tokenize("different")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 100), "No text to learn"),
        (([" \n"], 100), "No text to learn"),
        ((["abcdefgh"], 12), r"cannot learn 12 tokens(.|\n)*required_chars. 12 vs"),
    ],
    ids=["empty", "white space", "too small"],
)
def test_training_that_cannot_work_says_why(kind, arguments, message):
    with pytest.raises(CtxError, match=message):
        kind.ours.train(*arguments)


def test_an_impossible_coverage_is_refused(kind):
    with pytest.raises(CtxError, match=r"0.98 to 1"):
        kind.ours.train(TEXTS, 100, character_coverage=1.5)


def test_the_missing_package_is_named_and_not_needed_for_a_tokenizer_file(kind, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CtxError, match=r"Reading (.|\n)*sentencepiece(.|\n)*pip install"):
        kind.ours.from_pretrained(folders["spiece.model"])
    with pytest.raises(CtxError, match=r"Training (.|\n)*sentencepiece(.|\n)*pip install"):
        kind.ours.train(TEXTS, 100)
    assert kind.ours.from_pretrained(folders["legacy"])("boat").input_ids


def test_a_damaged_model_file_is_refused(kind, folders, tmp_path):
    content = (folders["spiece.model"] / "spiece.model").read_bytes()
    (tmp_path / "spiece.model").write_bytes(content[: len(content) // 3])
    with pytest.raises(CtxError, match=r"spiece.model is damaged(.|\n)*" + tmp_path.name):
        kind.ours.from_pretrained(tmp_path)


def test_a_model_of_another_kind_is_refused(kind, tmp_path):
    kind.vocabulary(tmp_path, model_type="bpe")
    with pytest.raises(CtxError, match="not a unigram model"):
        kind.ours.from_pretrained(tmp_path)


def test_a_vocabulary_of_the_other_family_is_refused(kind, tmp_path):
    other = next(each for each in KINDS.values() if each is not kind)
    other.vocabulary(tmp_path)
    with pytest.raises(CtxError, match=r"lacks .*(\[MASK\]|<mask>)"):
        kind.ours.from_pretrained(tmp_path)


def test_a_directory_without_tokenizer_files_is_refused(kind, trained, tmp_path):
    trained.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CtxError, match=r"without a vocabulary(.|\n)*" + tmp_path.name):
        kind.ours.from_pretrained(tmp_path)


def test_a_truncated_tokenizer_file_is_refused(kind, trained, tmp_path):
    trained.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CtxError, match=r"tokenizer.json or tokenizer_config.json is damaged(.|\n)*" + tmp_path.name):
        kind.ours.from_pretrained(tmp_path)
