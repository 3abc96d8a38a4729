"""Tests of all tokenizers: ids, training, saving and errors."""

import json
import pickle
import random

import pytest
import transformers
from forked import run_forked
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_texts import EDGE_CASE_TEXTS, TEXTS, read_lines
from transformers import AutoTokenizer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.tokenized_documents import encode_ids
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.bpe import CtxByteBPETokenizer
from hf_ctxmodels.tokenizers.composed_offsets import ComposingTokenizer

pytestmark = pytest.mark.all_families

REFERENCES = {
    "bert": transformers.BertTokenizer,
    "roberta": transformers.RobertaTokenizer,
    "gpt2": transformers.GPT2Tokenizer,
    "gpt": transformers.OpenAIGPTTokenizer,
    "albert": transformers.AlbertTokenizer,
    "xlnet": transformers.XLNetTokenizer,
    "xlm_roberta": transformers.XLMRobertaTokenizer,
    "t5": transformers.T5Tokenizer,
}
# one family of each tokenizer class
FAMILY_NAMES = list({family.tokenizer: name for name, family in reversed(FAMILIES.items())}.values())


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def trained(request):
    return FAMILIES[request.param].tokenizer.train(TEXTS, 400, model_max_length=77)


def test_save_load_and_pickle(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    for copy in (AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(trained))):
        assert type(copy) is type(trained)
        assert (copy.get_vocab(), copy.all_special_ids) == (trained.get_vocab(), trained.all_special_ids)
        assert copy.model_max_length == 77
        assert copy([*TEXTS[:20], *EDGE_CASE_TEXTS]).data == trained([*TEXTS[:20], *EDGE_CASE_TEXTS]).data
    assert sorted(trained.get_vocab().values()) == list(range(len(trained))), "ids without gaps"
    assert len(trained) <= 400


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].config.reference_model_types])
def test_export_opens_without_this_package(family, tmp_path):
    """As a class of transformers 4 and 5, with equal ids; XLM's needs its preparation of texts in Python."""
    tokenizer = FAMILIES[family].tokenizer.train(TEXTS, 400, model_max_length=77)
    tokenizer.export_reference(tmp_path)
    if not tokenizer.reads_unchanged_text:
        assert isinstance(AutoTokenizer.from_pretrained(tmp_path), type(tokenizer))
        return
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"auto_map", "extra_special_tokens"} & {*config}  # a list in transformers 5, a dictionary in 4
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": FAMILIES[family].config.reference_model_types[0]}))
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert type(exported) is transformers.PreTrainedTokenizerFast
    texts = [*TEXTS[:20], *EDGE_CASE_TEXTS]
    assert exported(texts).data == tokenizer(texts).data
    assert exported(texts, texts[::-1], truncation=True).data == tokenizer(texts, texts[::-1], truncation=True).data
    assert exported.special_tokens_map == tokenizer.special_tokens_map
    assert (exported.all_special_ids, exported.model_max_length) == (tokenizer.all_special_ids, 77)
    assert (exported.padding_side, exported.model_input_names) == (tokenizer.padding_side, tokenizer.model_input_names)


def test_encode_ids_equals_tokenizer_call(trained):
    texts = [*TEXTS[:20], *EDGE_CASE_TEXTS, "", trained.unk_token or "a", " ".join(TEXTS)]
    expected = trained(texts, add_special_tokens=False)["input_ids"]
    trained(texts, truncation=True, max_length=9, padding="max_length" if trained.pad_token else False)
    assert [ids.tolist() for ids in encode_ids(trained, texts)] == expected


@pytest.mark.parametrize("family", ["gensen", "laser"])
def test_target_words_of_joint_vocabulary(family):
    tokenizer = FAMILIES[family].tokenizer.train(TEXTS, 400)
    assert [tokenizer.convert_tokens_to_ids(word) for word in tokenizer.target_words] == list(range(len(tokenizer)))


@pytest.mark.parametrize("texts", [[], [" \n", ""]], ids=["empty", "white space"])
def test_training_without_text_raises(trained, texts):
    with pytest.raises(CtxError, match="No text to learn"):
        type(trained).train(texts, 400)


@pytest.mark.parametrize(
    ("family", "text", "size", "message"),
    [
        ("bert", "abcdefgh", 20, "ask for at least 21"),
        ("roberta", "ab", 260, "ask for at least 261"),
        ("gpt", "abc é", 9, "ask for at least 10 tokens"),
        ("albert", "abcdefgh", 12, r"cannot learn 12 tokens(.|\n)*required_chars. 12 vs"),
        ("xlnet", "abcdefgh", 12, r"cannot learn 12 tokens(.|\n)*required_chars. 12 vs"),
        ("albert", "ab", -1, "vocab_size=-1 is too small for 5 special tokens"),
    ],
)
def test_vocabulary_size_below_alphabet_raises(family, text, size, message):
    with pytest.raises(CtxError, match=message):
        FAMILIES[family].tokenizer.train([text], size)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("bert", "min_frequency", -1),
        ("bert", "limit_alphabet", 0),
        ("roberta", "min_frequency", -1),
        ("gpt", "min_frequency", -1),
        ("laser", "min_frequency", -1),
        ("word2vec", "min_count", 0),
        ("cvt", "target_vocab_size", -1),
        ("cvt", "min_target_count", 0),
        ("albert", "character_coverage", 1.5),
        ("xlnet", "character_coverage", 0.9),
        *((family, "model_max_length", 0) for family in FAMILY_NAMES),
    ],
)
def test_training_options_out_of_range_raise(family, name, value):
    with pytest.raises(CtxError, match=f"{name}={value} is out of range"):
        FAMILIES[family].tokenizer.train(TEXTS, 400, **{name: value})


def test_training_options_of_separate_vocabularies_out_of_range_raise():
    with pytest.raises(CtxError, match="min_frequency=-1 is out of range"):
        FAMILIES["xlm"].tokenizer.train(["<en> a cat"], 60, separate_vocabularies=True, min_frequency=-1)


@pytest.mark.parametrize(("family", "options"), [("bert", {}), ("roberta", {"merges": []})])
def test_missing_vocabulary_file_raises(family, options, tmp_path):
    with pytest.raises(CtxError, match="cannot be read: No such file"):
        FAMILIES[family].tokenizer(vocab=str(tmp_path / "vocabulary"), **options)


@pytest.fixture(scope="module", params=REFERENCES)
def tokenizer_and_reference(request, tmp_path_factory):
    """A trained tokenizer, and transformers' tokenizer with its files."""
    folder, tokenizer = tmp_path_factory.mktemp("tokenizer"), FAMILIES[request.param].tokenizer.train(TEXTS, 400)
    tokenizer.save_pretrained(folder)
    return tokenizer, REFERENCES[request.param].from_pretrained(folder)


@given(text=st.text(max_size=80))
def test_ids_equal_transformers_on_any_text(tokenizer_and_reference, text):
    """A byte-level tokenizer's `decode` restores the text."""
    tokenizer, reference = tokenizer_and_reference
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == reference(text, add_special_tokens=False).input_ids
    if isinstance(tokenizer, CtxByteBPETokenizer) and not set(ids) & set(tokenizer.all_special_ids):
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_ids_equal_transformers_on_real_text(tokenizer_and_reference, shared_data, tmp_path):
    """Also with a vocabulary learned from real text, whose merges have several characters."""
    lines = read_lines(shared_data / "corpus/wikipedia_articles.txt.gz")
    test_lines = lines[5::100]
    tokenizer, reference = tokenizer_and_reference
    assert tokenizer(test_lines).input_ids == reference(test_lines).input_ids
    tokenizer = type(tokenizer).train(lines[::10], 2000)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer(test_lines).input_ids == type(reference).from_pretrained(tmp_path)(test_lines).input_ids
    assert 1 < len(tokenizer.tokenize(" ".join(test_lines))) / len(" ".join(test_lines).split()) < 2.5


def test_damaged_and_missing_files_raise(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CtxError, match=r"tokenizer.json or tokenizer_config.json is damaged(.|\n)*" + tmp_path.name):
        AutoTokenizer.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(CtxError, match=r"without a vocabulary(.|\n)*" + tmp_path.name):
        type(trained).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "size"),
    [("bert", 500), ("roberta", 600), ("gpt", 300), ("xlm", 300), ("laser", 120), ("albert", 300), ("xlnet", 300)],
)
def test_vocabulary_does_not_depend_on_process_and_order(tmp_path, family, size):
    """Ties between merges must not depend on the seed of the trainer's hash maps; only BERT's depend on the order."""
    rng = random.Random(0)
    texts = [" ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(200)) for _ in range(20)]
    program = (
        "import json, sys; from hf_ctxmodels.registry import FAMILIES;"
        f"tokenizer = FAMILIES[{family!r}].tokenizer.train(json.load(open(sys.argv[1])), {size});"
        "print(tokenizer.backend_tokenizer.to_str())"
    )
    (tmp_path / "texts.json").write_text(json.dumps(texts if family == "bert" else texts[::-1]))
    # with several threads; this process has one (see tests/conftest.py)
    process = run_forked("-c", program, tmp_path / "texts.json", TOKENIZERS_PARALLELISM="true")
    assert process.returncode == 0, process.stderr
    trained = FAMILIES[family].tokenizer.train(iter(texts), size)
    assert json.loads(process.stdout)["model"] == json.loads(trained.backend_tokenizer.to_str())["model"]
    assert len(trained) == size


SENTENCES = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge"]


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    """Folder of a trained tokenizer, and the tokenizer."""
    tokenizer = FAMILIES[request.param].tokenizer.train(SENTENCES * 5, vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", tokenizer


def decoded(tokenizer, text):
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True).strip()


def test_new_special_token_is_added(saved, tmp_path):
    """A new token is appended, except for the unknown token, which must be in the vocabulary."""
    directory, base = saved
    names = {"pad_token", *(name for name in base.SPECIAL_TOKENS_ATTRIBUTES if base.special_tokens_map.get(name))}
    for name in names - {"unk_token"}:
        loaded = AutoTokenizer.from_pretrained(directory, **{name: "[FILL]"})
        loaded.save_pretrained(tmp_path / name)
        reloaded = AutoTokenizer.from_pretrained(tmp_path / name)
        for tokenizer in (loaded, reloaded):
            assert (len(tokenizer), getattr(tokenizer, f"{name}_id")) == (len(base) + 1, len(base)), name
            assert decoded(tokenizer, "the cat") == "the cat"
        assert loaded(SENTENCES, padding=True) == reloaded(SENTENCES, padding=True)
    with pytest.raises(CtxError, match=r"lacks \[FILL\]"):
        AutoTokenizer.from_pretrained(directory, unk_token="[FILL]")


def test_special_token_of_none_is_omitted(saved):
    directory, base = saved
    template = base.templates[0] if base.templates else "{cls} {sep}"
    names = [name for name in base.SPECIAL_TOKENS_ATTRIBUTES if base.special_tokens_map.get(name)]
    names = [name for name in names if name == "mask_token" or f"{{{name.removesuffix('_token')}}}" in template]
    if not names:
        pytest.skip("no special token in the template")
    for name in names:
        loaded = AutoTokenizer.from_pretrained(directory, **{name: None})
        assert getattr(loaded, name) is None
        for texts in (["the cat"], ["the cat", "a dog"]):
            # another special token may be the same token, as in RoBERTa, where <s> is `bos_token` and `cls_token`
            assert loaded(*texts).tokens() == [t for t in base(*texts).tokens() if t != getattr(base, name)]
        assert decoded(loaded, "the cat") == "the cat"


def test_unknown_token_is_required(saved):
    """Except by byte-level tokenizers, to which no character is unknown."""
    directory, base = saved
    if isinstance(base, CtxByteBPETokenizer):
        assert AutoTokenizer.from_pretrained(directory, unk_token=None)("the \u0416").input_ids
        return
    with pytest.raises(CtxError, match="unk_token is None"):
        AutoTokenizer.from_pretrained(directory, unk_token=None)


def test_train_new_from_iterator(saved, tmp_path):
    """The new tokenizer has other words and the same special tokens."""
    _, base = saved
    retrained = base.train_new_from_iterator(["seven old sailors sang"] * 9, 290, show_progress=False)
    retrained.save_pretrained(tmp_path)
    for tokenizer in (retrained, AutoTokenizer.from_pretrained(tmp_path)):
        assert type(tokenizer) is type(base)
        assert tokenizer.special_tokens_map == base.special_tokens_map
        assert decoded(tokenizer, "seven sailors sang") == "seven sailors sang"
        assert tokenizer.get_vocab() != base.get_vocab()


DECOMPOSED_WORDS = ["cafe\u0301", "cafe\u0301s", "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165", "a\u0323\u0307"]


@pytest.mark.parametrize(
    "family", [name for name in FAMILY_NAMES if issubclass(FAMILIES[name].tokenizer, ComposingTokenizer)]
)
@pytest.mark.parametrize("tensors", [None, "np", "pt"])
def test_offsets_in_decomposed_text(family, tensors):
    """Offsets of composed words include their last marks: also with tensors, pairs, lists of words and windows."""
    text = " ".join(DECOMPOSED_WORDS)
    tokenizer = FAMILIES[family].tokenizer.train([text] * 20, 400)

    def spans(encoded, row, sequences):
        return [
            sequence[start:stop]
            for (start, stop), sequence in zip(
                [(int(start), int(stop)) for start, stop in encoded["offset_mapping"][row]],
                [None if index is None else sequences[index] for index in encoded.sequence_ids(row)],
                strict=True,
            )
            if sequence is not None and start < stop
        ]

    options = {"return_offsets_mapping": True, "return_tensors": tensors, "padding": tensors is not None}
    encoded = tokenizer([text, "cafe\u0301"], **options)
    assert "".join(spans(encoded, 0, [text])) == "".join(DECOMPOSED_WORDS)
    assert spans(encoded, 1, ["cafe\u0301"])[-1].endswith("e\u0301")
    pair = tokenizer(["a cafe\u0301"], [text], **options)
    assert "".join(spans(pair, 0, ["a cafe\u0301", text])) == "".join(["acafe\u0301", *DECOMPOSED_WORDS])
    windows = tokenizer([text], truncation=True, max_length=6, stride=0, return_overflowing_tokens=True, **options)
    joined = "".join("".join(spans(windows, row, [text])) for row in range(len(windows["input_ids"])))
    assert joined == "".join(DECOMPOSED_WORDS)
    if tensors is None:
        single = tokenizer(text, return_offsets_mapping=True)
        assert single["offset_mapping"] == encoded["offset_mapping"][0]
        split = tokenizer(DECOMPOSED_WORDS, is_split_into_words=True, return_offsets_mapping=True)
        last_stops = {word: stop for word, (_, stop) in zip(split.word_ids(), split["offset_mapping"], strict=True)}
        assert [last_stops[index] for index in range(4)] == [len(word) for word in DECOMPOSED_WORDS]
