"""ELMo's tokenizer: characters, offsets, padding, saving, languages and errors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_ctxmodels import CtxElmoConfig, CtxElmoTokenizer, CtxError
from hf_ctxmodels.tokenizers.character_level import WORD_END, WORD_PADDING, WORD_START

TEXTS = ["The na\u00efve cat, it sat.", "Zw\u00f6lf!", "A   mat"]


@pytest.fixture
def tokenizer() -> CtxElmoTokenizer:
    return CtxElmoTokenizer.train(["the cat sat on the mat .", "The cat"], vocab_size=20, min_count=1)


def expected_characters(word: str) -> list[int]:
    characters = [byte + 1 for byte in word.encode()][:48]
    return [WORD_START, *characters, WORD_END] + [WORD_PADDING] * (48 - len(characters))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("tensors", ["pt", "np"])
def test_characters_and_offsets(tokenizer: CtxElmoTokenizer, side: str, tensors: str) -> None:
    batch = tokenizer(
        TEXTS, padding=True, padding_side=side, return_offsets_mapping=True, return_tensors=tensors, truncation=True
    )
    width = len(batch["attention_mask"][0])
    assert batch["input_ids"].shape == (3, width, 50)
    for row, text in enumerate(TEXTS):
        is_token = np.asarray(batch["attention_mask"][row]) == 1
        assert (np.asarray(batch["input_ids"][row])[~is_token] == 0).all()
        words = [text[start:stop] for start, stop in np.asarray(batch["offset_mapping"][row])[is_token][1:-1].tolist()]
        assert words == text.replace(",", " ,").replace(".", " .").replace("!", " !").split()
        assert np.asarray(batch["input_ids"][row])[is_token][1:-1].tolist() == [
            expected_characters(word) for word in words
        ]
        for position in np.flatnonzero(is_token)[1:-1]:
            span = batch.token_to_chars(row, int(position))
            assert text[span.start : span.end] == words[batch.word_ids(row)[position]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_is_split_into_words(tokenizer: CtxElmoTokenizer, side: str) -> None:
    """Words are not split at punctuation."""
    texts = [["don't", "stop", "e.g.", "na\u00efve"], ["x"]]
    batch = tokenizer(texts, is_split_into_words=True, padding=True, padding_side=side, return_offsets_mapping=True)
    for row, words in enumerate(texts):
        numbers = batch.word_ids(row)
        assert [number for number in numbers if number is not None] == list(range(len(words)))
        for position, number in enumerate(numbers):
            if number is not None:
                assert batch["input_ids"][row][position] == expected_characters(words[number])
                assert batch["offset_mapping"][row][position] == (0, len(words[number]))


def test_texts_and_pairs(tokenizer: CtxElmoTokenizer) -> None:
    single = tokenizer("The cat")
    assert tokenizer.character_ids_to_words(single.input_ids) == ["<S>", "The", "cat", "</S>"]
    pair = tokenizer("The cat", "it sat")
    assert tokenizer.character_ids_to_words(pair.input_ids) == ["<S>", "The", "cat", "</S>", "<S>", "it", "sat", "</S>"]
    pair_arguments = (([["The cat", "it sat"]],), ([("The cat", "it sat")],), (["The cat"], ["it sat"]))
    for arguments in pair_arguments:
        assert tokenizer(*arguments).input_ids == [pair.input_ids]
        assert torch.equal(tokenizer(*arguments, return_tensors="pt").input_ids[0], torch.tensor(pair.input_ids))
    words = [[["The", "cat"], ["it", "sat"]]]
    assert tokenizer(words, is_split_into_words=True).input_ids == [pair.input_ids]


def test_pad_and_long_words(tokenizer: CtxElmoTokenizer) -> None:
    """Words are truncated to 48 bytes."""
    assert tokenizer("x" * 99).input_ids[1] == expected_characters("x" * 48)
    padded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    padded_later = tokenizer.pad([tokenizer(text) for text in TEXTS], return_tensors="pt")
    torch.testing.assert_close(padded.data, padded_later.data)
    assert tokenizer.pad([tokenizer("The cat")]).input_ids == [tokenizer("The cat").input_ids]
    longer = tokenizer.pad(tokenizer("The cat"), padding="max_length", max_length=7)
    assert [len(longer[name]) for name in ("input_ids", "attention_mask")] == [7, 7]
    assert longer["input_ids"][-1] == [0] * 50
    empty_first = tokenizer.pad(tokenizer(["", "The cat"], add_special_tokens=False))
    assert empty_first.input_ids == [[[0] * 50] * 2, tokenizer("The cat", add_special_tokens=False).input_ids]


def test_vocabulary_ids_and_unknown_words(tokenizer: CtxElmoTokenizer) -> None:
    texts = ["the cat", "Zw\u00f6lf mat , the dog"]
    (first_ids, no_words), (second_ids, unknown_words) = tokenizer.vocabulary_ids(texts)
    assert tokenizer.convert_ids_to_tokens(first_ids.tolist()) == ["<S>", "the", "cat", "</S>"]
    tokens = ["<S>", tokenizer.unk_token, "mat", tokenizer.unk_token, "the", tokenizer.unk_token, "</S>"]
    assert tokenizer.convert_ids_to_tokens(second_ids.tolist()) == tokens
    assert (no_words, unknown_words) == ([], ["Zw\u00f6lf", ",", "dog"])


def test_truncation_and_windows(tokenizer: CtxElmoTokenizer) -> None:
    text = "the cat sat on the mat ."
    ids = tokenizer(text, truncation=True, max_length=4).input_ids
    assert tokenizer.character_ids_to_words(ids) == ["<S>", "the", "cat", "</S>"]
    windows = tokenizer([text], truncation=True, max_length=5, stride=1, return_overflowing_tokens=True)
    words = [tokenizer.character_ids_to_words(window)[1:-1] for window in windows["input_ids"]]
    assert words == [["the", "cat", "sat"], ["sat", "on", "the"], ["the", "mat", "."]]


def test_decoding(tokenizer: CtxElmoTokenizer) -> None:
    ids = tokenizer(TEXTS, padding=True, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[2]) == "<S> A mat </S>"
    texts = ["The na\u00efve cat , it sat .", "Zw\u00f6lf !", "A mat"]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["the", "cat"])) == "the cat"
    assert tokenizer.batch_decode(tokenizer(["", "A mat"], add_special_tokens=False).input_ids) == ["", "A mat"]
    assert tokenizer.batch_decode([[], []]) == ["", ""]


class TestLanguages:
    @pytest.fixture
    def multilingual(self, tmp_path: Path) -> CtxElmoTokenizer:
        texts = ["<en> the die is cast", "<de> die Katze", "<en> the cat"]
        tokenizer = CtxElmoTokenizer.train(texts, vocab_size=30, min_count=1, languages=["en", "de"])
        tokenizer.save_pretrained(tmp_path)
        return CtxElmoTokenizer.from_pretrained(tmp_path)

    def test_first_character_is_language(self, multilingual: CtxElmoTokenizer) -> None:
        assert {"en", "de", "<"} & set(multilingual.words) == set()
        assert multilingual.num_characters == CtxElmoConfig().num_characters + 2
        english, german = WORD_PADDING + 1, WORD_PADDING + 2
        rows = multilingual(["<en> the die", "<de> die", "die"]).input_ids
        first_characters = [[word[0] for word in row[1:-1]] for row in rows]
        assert first_characters == [[WORD_START, english, english], [WORD_START, german], [WORD_START]]
        assert rows[0][3][1:] == rows[1][2][1:] == rows[2][1][1:], "the other characters do not depend on the language"
        assert multilingual.character_ids_to_words(rows[0]) == ["<S>", "<en>", "the", "die", "</S>"]
        assert rows[0][0] == rows[1][0]
        assert rows[0][-1] == rows[2][-1]

    @pytest.mark.parametrize("language", ["en", "de"])
    def test_language_of_untagged_texts(self, multilingual: CtxElmoTokenizer, language: str) -> None:
        multilingual.language = language
        untagged, tagged = multilingual(["die", "<de> die"]).input_ids
        assert untagged[1] == multilingual(f"<{language}> die").input_ids[2]
        assert (untagged[1][0], tagged[2][0]) == (WORD_PADDING + ["en", "de"].index(language) + 1, WORD_PADDING + 2)

    def test_is_split_into_words(self, multilingual: CtxElmoTokenizer) -> None:
        ids = multilingual(["<de>", "die"], is_split_into_words=True).input_ids
        assert ids == multilingual("<de> die").input_ids

    def test_added_tokens_are_words(self, multilingual: CtxElmoTokenizer, tmp_path: Path) -> None:
        multilingual.add_tokens(["cats"])
        ids = multilingual("<de> die cats").input_ids
        assert ids[3][0] == WORD_PADDING + 2
        multilingual.save_pretrained(tmp_path)
        assert CtxElmoTokenizer.from_pretrained(tmp_path)("<de> die cats").input_ids == ids

    @pytest.mark.parametrize("names", [["en", "en"], [""], ["a b"]])
    def test_invalid_language_names(self, names: list[str]) -> None:
        with pytest.raises(CtxError, match="not distinct names"):
            CtxElmoTokenizer.from_words([], languages=names)


def test_invalid_vocabularies() -> None:
    with pytest.raises(CtxError, match=r"lacks \[UNK\]"):
        CtxElmoTokenizer(vocab={"[PAD]": 0, "<S>": 1, "</S>": 2})
    with pytest.raises(CtxError, match="'a' occurs twice"):
        CtxElmoTokenizer.from_words(["a", "a"])
    with pytest.raises(CtxError, match="max_characters=2"):
        CtxElmoTokenizer.from_words([], max_characters=2)


def test_characters_of_decomposed_words(tokenizer: CtxElmoTokenizer) -> None:
    words = ["cafe\u0301", "cafe\u0301s", "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165"]
    for batch in (tokenizer(" ".join(words)), tokenizer(words, is_split_into_words=True)):
        assert batch["input_ids"][1:-1] == [expected_characters(word) for word in words]
    [(_, unknown_words)] = tokenizer.vocabulary_ids([" ".join(words)])
    assert unknown_words == words
