"""Byte-level BPE tokenizers: ids, training, saving and errors."""

import json
from itertools import groupby
from operator import itemgetter

import pytest
from tokenizer_texts import EDGE_CASE_TEXTS, TEXTS, assert_same_encodings, write_bpe_files
from tokenizers import AddedToken
from transformers import GPT2Tokenizer, RobertaTokenizer

from hf_ctxmodels import CtxGpt2Tokenizer, CtxRobertaTokenizer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives import FullSentences

EDGE_CASE_TEXTS = [
    *EDGE_CASE_TEXTS,
    "<s> literal </s> specials </s></s> <pad> <unk>",
    "<mask> a <mask>, b<mask>c  <mask>",
    "Ġ Ċ",
]


TOKENIZER_CLASSES = {"roberta": (CtxRobertaTokenizer, RobertaTokenizer), "gpt2": (CtxGpt2Tokenizer, GPT2Tokenizer)}


@pytest.fixture(scope="module", params=TOKENIZER_CLASSES)
def classes(request):
    """A tokenizer class and its reference in transformers."""
    return TOKENIZER_CLASSES[request.param]


@pytest.fixture(scope="module")
def folders(classes, tmp_path_factory):
    """The same vocabulary as vocab.json with merges.txt, and as saved by transformers."""
    plain, saved = (tmp_path_factory.mktemp(name) for name in ("vocab and merges", "tokenizer.json"))
    model = json.loads(classes[0].train([*TEXTS, *EDGE_CASE_TEXTS] * 2, 420).backend_tokenizer.to_str())["model"]
    write_bpe_files(plain, model)
    released = {"mask_token": AddedToken("<mask>", lstrip=True)} if classes[1] is RobertaTokenizer else {}
    classes[1].from_pretrained(plain, **released).save_pretrained(saved)
    return {"vocab and merges": plain, "tokenizer.json": saved}


@pytest.mark.parametrize("form", ["vocab and merges", "tokenizer.json"])
@pytest.mark.parametrize("options", [{}, {"add_prefix_space": True}, {"trim_offsets": False}], ids=str)
def test_ids_equal_transformers(classes, folders, form, options):
    if "trim_offsets" in options and classes[1] is GPT2Tokenizer:
        options = {}
    offsets = {"trim_offsets": False} if classes[1] is GPT2Tokenizer else {}  # not trimmed by transformers
    tokenizer = classes[0].from_pretrained(folders[form], **options, **offsets)
    if classes[1] is RobertaTokenizer and form == "vocab and merges":  # as in the released tokenizer.json
        options = {**options, "mask_token": AddedToken("<mask>", lstrip=True)}
    reference = classes[1].from_pretrained(folders[form], **options)
    assert tokenizer.get_vocab() == reference.get_vocab()
    for texts in (TEXTS[:20], EDGE_CASE_TEXTS):
        assert_same_encodings(tokenizer, reference, texts)
    assert [tokenizer(text).word_ids() for text in EDGE_CASE_TEXTS] == [
        reference(text).word_ids() for text in EDGE_CASE_TEXTS
    ]


def test_ids_of_special_tokens():
    tokenizer = CtxRobertaTokenizer.train(TEXTS, 320)
    first_tokens = ["<s>", "<pad>", "</s>", "<unk>"]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, len(tokenizer) - 1]) == [*first_tokens, "<mask>"]
    assert tokenizer.tokenize(" bridge") == ["Ġbridge"]
    assert tokenizer("a", "b").input_ids == [0, *tokenizer("a").input_ids[1:-1], 2, 2, tokenizer("b").input_ids[1], 2]


def test_is_split_into_words():
    tokenizer = CtxRobertaTokenizer.train(TEXTS, 320)
    words = TEXTS[0].split()
    split = tokenizer(words, is_split_into_words=True, return_offsets_mapping=True)
    assert split.input_ids == tokenizer(" " + TEXTS[0]).input_ids
    assert [word for word in split.word_ids() if word is not None] == sorted(
        number for number, word in enumerate(words) for _ in tokenizer.tokenize(" " + word)
    )
    ends = {word: end for word, (_, end) in zip(split.word_ids(), split.offset_mapping) if word is not None}
    assert ends == {number: len(word) for number, word in enumerate(words)}
    assert tokenizer("bridge").input_ids != tokenizer(" bridge").input_ids, "the tokenizer's state is restored"


@pytest.mark.parametrize("tokenizer_class", [CtxGpt2Tokenizer, CtxRobertaTokenizer])
def test_template_with_split_words(tokenizer_class):
    """A template holds for words and afterwards, and offsets do not include the space before a word."""
    tokenizer = tokenizer_class.train(TEXTS, 320)
    tokenizer.set_template("$A:0 {eos}:0", "$A:0 $B:1 {eos}:1")
    text, end = TEXTS[0], tokenizer.eos_token_id
    text_ids = tokenizer(" " + text, add_special_tokens=False).input_ids
    for _ in range(2):
        assert tokenizer(text.split(), is_split_into_words=True).input_ids == [*text_ids, end]
        encoding = tokenizer(f" {text} x", return_offsets_mapping=True)
        assert encoding.input_ids[: len(text_ids)] == text_ids
        assert encoding.input_ids[-1] == end
        assert encoding.offset_mapping[-2] == (len(text) + 2, len(text) + 3)


def test_whole_word_masking_of_byte_level_tokens():
    objective = FullSentences(CtxRobertaTokenizer.train(TEXTS, 300), max_length=24, seed=0, whole_word=True)
    (example,) = objective.examples([["boat gardens"], ["it's"]])
    tokens = objective.tokenizer.convert_ids_to_tokens(example["input_ids"])
    groups = groupby(zip(tokens, example["word_ids"].tolist(), strict=True), key=itemgetter(1))
    words = ["".join(token for token, _ in group) for word, group in groups if word >= 0]
    assert words == ["boat", "Ġgardens", "it", "'s"]


def write_vocab_and_merges(folder, tokens=None, merges="#version: 0.2\na b\n"):
    tokens = tokens or ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "ab", "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    if merges is not None:
        (folder / "merges.txt").write_text(merges)
    return folder


def test_bytes_outside_the_vocabulary_are_unknown(tmp_path):
    tokenizer = CtxRobertaTokenizer.from_pretrained(write_vocab_and_merges(tmp_path))
    assert tokenizer.tokenize("abcb") == ["ab", "<unk>", "b"]


@pytest.mark.parametrize(
    ("changes", "content", "message"),
    [
        ({"merges": None}, None, "merges are missing"),
        ({"merges": "a b c\n"}, None, r"'a b c', which is not two tokens(.|\n)*merges.txt"),
        ({"merges": "a x\n"}, None, r"do not belong to the vocabulary(.|\n)*vocab.json"),
        ({"tokens": ["<s>", "<pad>", "</s>", "<unk>", "a", "b"]}, None, r"6 tokens lacks <mask>(.|\n)*vocab.json"),
        ({}, b'{"a": 0', r"Invalid JSON(.|\n)*vocab.json"),
        ({}, b"[1]", "does not map tokens"),
        ({}, b'{"\xff": 1}', "byte 0xff in position 2"),
    ],
    ids=str,
)
def test_invalid_files(tmp_path, changes, content, message):
    write_vocab_and_merges(tmp_path, **changes)
    if content is not None:
        (tmp_path / "vocab.json").write_bytes(content)
    with pytest.raises(CtxError, match=message):
        CtxRobertaTokenizer.from_pretrained(tmp_path)
