"""The tokenizer of whole words: counting, order, options, saving."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_ctxmodels import CtxError, CtxWord2VecConfig, CtxWord2VecTokenizer
from hf_ctxmodels.tokenizers.word_level import CtxReversibleWordTokenizer, CtxWordTokenizer

TEXTS = ["The cat sat on the mat, and the cat slept.", "A mat; a cat!"]


def test_training_counts_and_orders() -> None:
    tokenizer = CtxWordTokenizer.train(TEXTS, vocab_size=100, min_count=2)
    assert tokenizer.words == ["[PAD]", "[UNK]", "cat", "the", "a", "mat"]
    assert tokenizer.counts == [0, 0, 3, 3, 2, 2]
    assert tokenizer.tokenize("THE dog") == ["the", "[UNK]"]
    assert tokenizer("the cat").input_ids == [3, 2]


def test_vocabulary_size_and_case() -> None:
    tokenizer = CtxWordTokenizer.train(TEXTS, vocab_size=4, min_count=1, do_lower_case=False)
    assert tokenizer.words[2:] == ["cat", "mat"]  # "the", "The" and "a" are rarer or behind in the alphabet
    whole = CtxWordTokenizer.train(TEXTS, vocab_size=100, min_count=1, split_punctuation=False)
    assert "mat," in whole.words


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([" "], {}, "No text"),
        (TEXTS, {"min_count": 50}, "vocabulary would be empty"),
        (TEXTS, {"vocab_size": 2}, "vocabulary would be empty"),
    ],
)
def test_nothing_to_keep(texts: list[str], options: dict, message: str) -> None:
    with pytest.raises(CtxError, match=message):
        CtxWordTokenizer.train(texts, **{"vocab_size": 100, **options})


def test_saving_keeps_counts_and_options(tmp_path: Path) -> None:
    tokenizer = CtxWord2VecTokenizer.train(TEXTS, vocab_size=100, min_count=1, do_lower_case=False)
    tokenizer.save_pretrained(tmp_path)
    CtxWord2VecConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is CtxWord2VecTokenizer
    assert again.counts == tokenizer.counts
    assert again.words == tokenizer.words
    assert again("The Cat sat; on").input_ids == tokenizer("The Cat sat; on").input_ids
    assert not again.do_lower_case


def test_words_of_one_kind() -> None:
    with pytest.raises(CtxError, match="'a' occurs twice"):
        CtxWordTokenizer.from_words(["a", "b", "a"])
    with pytest.raises(CtxError, match="3 counts for 4 words"):
        CtxWordTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, counts=[1, 2, 3])


def test_written_words_are_put_together_again(tmp_path: Path) -> None:
    """With the white space that stood before each, offsets without it, and an end."""
    text = "The T-shirt, it's (torn)!"
    CtxReversibleWordTokenizer.train([text], 50, min_count=1, do_lower_case=False).save_pretrained(tmp_path)
    tokenizer = CtxReversibleWordTokenizer.from_pretrained(tmp_path)
    given = f"  {text.replace(' ', '  ')}\t"
    encoded = tokenizer(given, return_offsets_mapping=True)
    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == text
    assert encoded.input_ids[-1] == tokenizer.eos_token_id
    words = tokenizer.convert_ids_to_tokens(encoded.input_ids[:-1])
    places = encoded.offset_mapping[:-1]
    assert [given[start:end] for start, end in places] == [word.removeprefix("\u2581") for word in words]
    assert tokenizer(["torn", "shirt"], is_split_into_words=True).word_ids()[-1] is None
    assert tokenizer("(torn").input_ids != tokenizer("( torn").input_ids
