"""What fastai's rules keep of a text in lower case, and where it stood."""

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
        ("McDonald. A, I", "mcdonald . a , i"),
        ("U.S. W7", "xxup u . s . xxup w7"),
        ("good!!!!", "good xxrep 4 !"),
        ("!!!", "xxrep 3 !"),
        ("film!!", "film !!"),
        ("1000", "1 xxrep 3 0"),
        ("so no no no, so no", "so xxwrep 3 no , so no"),
        ("very very very good", "xxwrep 3 very good"),
        ("no no. no no", "no no . no no"),
        ("men &amp; films<br />good", "men & films good"),
        ("", ""),
    ],
)
def test_rules(tokenizer: CtxUlmfitTokenizer, text: str, tokens: str) -> None:
    known = set(tokenizer.get_vocab())
    expected = [token if token in known else "xxunk" for token in tokens.split()]
    assert tokenizer.tokenize(text) == expected
    assert tokenizer(text).input_ids == [tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(expected)]


def test_repetitions_of_every_number(tokenizer: CtxUlmfitTokenizer) -> None:
    """Up to twenty; more count as twenty."""
    normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
    for number in range(1, 30):
        shown = min(number, 20)
        expected = "!" * number if number < 3 else f"xxrep {shown} !"
        assert normalize("so " + "!" * number + " so").split() == ["so", *expected.split(), "so"], number
        words = " ".join(["so"] * number)
        expected = words if number < 3 else f"xxwrep {shown} so"
        assert normalize(f"no {words} no").split() == ["no", *expected.split(), "no"], number


def test_offsets_are_those_of_the_text(tokenizer: CtxUlmfitTokenizer) -> None:
    encoding = tokenizer(TEXT, return_offsets_mapping=True)
    tokens = tokenizer.convert_ids_to_tokens(encoding.input_ids)
    words = {token: TEXT[start:stop] for token, (start, stop) in zip(tokens, encoding.offset_mapping, strict=True)}
    assert (words["the"], words["cat"], words["mcdonald"], words["w7"]) == ("The", "CAT", "McDonald", "W7")
    place = TEXT.index("good film")
    assert encoding.char_to_token(place) == tokens.index("good")


def test_words_that_are_given(tokenizer: CtxUlmfitTokenizer) -> None:
    """Marks belong to the word they stand before."""
    encoding = tokenizer(["The", "good", "CAT!!!!"], is_split_into_words=True)
    assert tokenizer.convert_ids_to_tokens(encoding.input_ids) == [
        *("xxbos", "xxmaj", "the", "good", "xxup", "cat", "xxrep", "4", "!")
    ]
    assert encoding.word_ids() == [None, 0, 0, 1, 2, 2, 2, 2, 2]


def test_text_comes_back_with_its_capitals(tokenizer: CtxUlmfitTokenizer) -> None:
    ids = tokenizer("The CAT sat very very very good !!!!").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The CAT sat very very very good !!!!"


def test_case_may_be_kept(tmp_path) -> None:
    kept = CtxUlmfitTokenizer.train([TEXT], vocab_size=80, min_count=1, do_lower_case=False)
    kept.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.tokenize("The CAT !!!!") == kept.tokenize("The CAT !!!!") == ["The", "CAT", "xxrep", "4", "!"]


def test_marks_come_first_and_are_counted_as_words_nowhere(tokenizer: CtxUlmfitTokenizer) -> None:
    assert tokenizer.words[:9] == list(CtxUlmfitTokenizer.special_tokens)
    assert tokenizer.counts[:9] == [0] * 9
