"""ULMFiT's tokenizer: fastai's rules, offsets and decoding."""

import pytest
from transformers import AutoTokenizer

from hf_ctxmodels import CtxUlmfitTokenizer

TEXT = (
    "The CAT sat on McDonald. A Soooooo good film!!!! No no no, very very very good U.S. films of 1000 men & W7 "
    "I &amp; X"
)


@pytest.fixture(scope="module")
def tokenizer() -> CtxUlmfitTokenizer:
    return CtxUlmfitTokenizer.train([TEXT, TEXT.lower(), "3 4 6 no so"], vocab_size=80, min_count=1)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The cat", "xxmaj the cat"),
        ("the CAT sat", "the xxup cat sat"),
        ("McDonald. A, I", "mcdonald . xxup a , i"),
        ("U.S. W7", "xxup u.s . xxup w7"),
        ("good!!!!", "good xxrep 4 !"),
        ("!!!", "xxrep 3 !"),
        ("film!!", "film ! !"),
        ("1000", "1 xxrep 3 0"),
        ("so no no no, so no", "so xxwrep 3 no , so no"),
        ("very very very good", "xxwrep 3 very good"),
        ("no no. no no", "no no . no no"),
        ("men &amp; films<br />good", "men & films \n good"),
        ("a good... <unk> 3 @.@ 4", "a good … xxunk 3.4"),
        ("", ""),
    ],
)
def test_normalization_rules(tokenizer: CtxUlmfitTokenizer, text: str, tokens: str) -> None:
    vocabulary = set(tokenizer.get_vocab())
    expected = [token if token in vocabulary else "xxunk" for token in tokens.split(" ")] if tokens else []
    assert tokenizer.tokenize(text) == expected
    assert tokenizer(text).input_ids == [tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(expected)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's what I'd see; they've don't won't", "it 's what i 'd see ; they 've do n't wo n't"),
        ("we’ll ’s do n't", "we ’ll ’s do n't"),
        ("cannot gonna wanna", "can not gon na wanna"),
        ("O'Clock rock'n'roll 'quoted' dogs'", "o'clock rock'n'roll ' quoted ' dogs '"),
        ("k-19 24-hour well-known 3-4 high- -lrb-", "k-19 24 - hour well - known 3 - 4 high- -lrb-"),
        ("5km 9pm 1990s 1,234.5 10:30 $5 5%", "5 km 9 pm 1990s 1,234.5 10:30 $ 5 5 %"),
        ("p.m. e.g. x.com a/b c#d a_b", "p.m. e.g. x.com a / b c # d a_b"),
        ('end." -- (end)', 'end . " -- ( end )'),
    ],
)
def test_words_are_split_as_in_fastai(text: str, words: str) -> None:
    tokenizer = CtxUlmfitTokenizer.from_words(sorted({*words.split()}))
    tokens = tokenizer.tokenize(text)
    assert [token for token in tokens if token not in ("xxmaj", "xxup")] == words.split()


def test_repetitions(tokenizer: CtxUlmfitTokenizer) -> None:
    """More than twenty repetitions count as twenty."""
    normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
    for number in range(1, 30):
        count = min(number, 20)
        expected = "!" * number if number < 3 else f"xxrep {count} !"
        assert normalize("so " + "!" * number + " so").split() == ["so", *expected.split(), "so"], number
        words = " ".join(["so"] * number)
        expected = words if number < 3 else f"xxwrep {count} so"
        assert normalize(f"no {words} no").split() == ["no", *expected.split(), "no"], number


def test_offsets_refer_to_the_original_text(tokenizer: CtxUlmfitTokenizer) -> None:
    encoding = tokenizer(TEXT, return_offsets_mapping=True)
    tokens = tokenizer.convert_ids_to_tokens(encoding.input_ids)
    words = {token: TEXT[start:stop] for token, (start, stop) in zip(tokens, encoding.offset_mapping, strict=True)}
    assert (words["the"], words["cat"], words["mcdonald"], words["w7"]) == ("The", "CAT", "McDonald", "W7")
    assert encoding.char_to_token(TEXT.index("good film")) == tokens.index("good")


def test_is_split_into_words(tokenizer: CtxUlmfitTokenizer) -> None:
    """Special tokens belong to the following word."""
    encoding = tokenizer(["The", "good", "CAT!!!!"], is_split_into_words=True)
    tokens = tokenizer.convert_ids_to_tokens(encoding.input_ids)
    assert tokens == ["xxbos", "xxmaj", "the", "good", "xxup", "cat", "xxrep", "4", "!"]
    assert encoding.word_ids() == [None, 0, 0, 1, 2, 2, 2, 2, 2]


def test_decode_restores_capitals(tokenizer: CtxUlmfitTokenizer) -> None:
    ids = tokenizer("The CAT sat very very very good !!!!").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The CAT sat very very very good !!!!"


def test_added_tokens(tmp_path) -> None:
    """They are found wherever words are, and `tokenize` returns them without a space."""
    tokenizer = CtxUlmfitTokenizer.train([TEXT], vocab_size=80, min_count=1)
    tokenizer.add_tokens(["<new>", "covid"])
    for text, tokens in (
        ("<new> film", "<new> film"),
        ("film.<new> Covid, COVID", "film . <new> xxmaj covid , xxup covid"),
        ("film\tcovid", "film covid"),
    ):
        assert tokenizer.tokenize(text) == tokens.split()
        assert tokenizer(text).input_ids[1:] == tokenizer.convert_tokens_to_ids(tokens.split())
    assert tokenizer.decode(tokenizer("a Covid film").input_ids, skip_special_tokens=False) == "xxbos a Covid film"
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("film.<new>") == ["film", ".", "<new>"]


def test_do_lower_case_false(tmp_path) -> None:
    tokenizer = CtxUlmfitTokenizer.train([TEXT], vocab_size=80, min_count=1, do_lower_case=False)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.tokenize("The CAT !!!!") == tokenizer.tokenize("The CAT !!!!") == ["The", "CAT", "xxrep", "4", "!"]


def test_special_tokens_come_first_with_zero_counts(tokenizer: CtxUlmfitTokenizer) -> None:
    assert tokenizer.words[:9] == list(CtxUlmfitTokenizer.special_tokens)
    assert tokenizer.counts[:9] == [0] * 9
