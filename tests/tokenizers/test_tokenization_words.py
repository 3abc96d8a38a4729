"""Word-level tokenizers: counts, options, saving and errors."""

from pathlib import Path

import pytest

from hf_ctxmodels import CtxError, CtxWord2VecTokenizer
from hf_ctxmodels.tokenizers.word_level import CtxReversibleWordTokenizer, CtxWordTokenizer

TEXTS = ["The cat sat on the mat, and the cat slept.", "A mat; a cat!"]


def test_training() -> None:
    tokenizer = CtxWordTokenizer.train(TEXTS, vocab_size=100, min_count=2)
    assert tokenizer.words == ["[PAD]", "[UNK]", "cat", "the", "a", "mat"]
    assert tokenizer.counts == [0, 0, 3, 3, 2, 2]
    assert tokenizer.tokenize("THE dog") == ["the", "[UNK]"]
    assert tokenizer("the cat").input_ids == [3, 2]


def test_vocabulary_size_and_case() -> None:
    tokenizer = CtxWordTokenizer.train(TEXTS, vocab_size=4, min_count=1, do_lower_case=False)
    assert tokenizer.words[2:] == ["cat", "mat"]  # "the", "The" and "a" are rarer or later in the alphabet
    unsplit = CtxWordTokenizer.train(TEXTS, vocab_size=100, min_count=1, split_punctuation=False)
    assert "mat," in unsplit.words


def test_training_errors() -> None:
    for options in ({"min_count": 50}, {"vocab_size": 2}):
        with pytest.raises(CtxError, match="vocabulary would be empty"):
            CtxWordTokenizer.train(TEXTS, **{"vocab_size": 100, **options})


def test_counts_and_rules_are_saved(tmp_path: Path) -> None:
    tokenizer = CtxWord2VecTokenizer.train(TEXTS, vocab_size=100, min_count=1, do_lower_case=False)
    tokenizer.save_pretrained(tmp_path)
    loaded = CtxWord2VecTokenizer.from_pretrained(tmp_path)
    assert (loaded.counts, loaded.words, loaded.do_lower_case) == (tokenizer.counts, tokenizer.words, False)


def test_invalid_vocabularies() -> None:
    with pytest.raises(CtxError, match="'a' occurs twice"):
        CtxWordTokenizer.from_words(["a", "b", "a"])
    with pytest.raises(CtxError, match="3 counts for 4 words"):
        CtxWordTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, counts=[1, 2, 3])


def test_reversible_tokenizer_rejects_other_words(tmp_path: Path) -> None:
    """Words of the Penn Treebank, and those of other word embeddings, have no mark of white space."""
    with pytest.raises(CtxError, match="treebank_words=True"):
        CtxReversibleWordTokenizer.train(["a cat"], 20, min_count=1, treebank_words=True)
    CtxWord2VecTokenizer.train(["a cat"], 20, min_count=1).save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="split text differently"):
        CtxReversibleWordTokenizer.train(["a cat"], 20, pretrained_embeddings=str(tmp_path))


def test_reversible_tokenizer(tmp_path: Path) -> None:
    """`decode` restores white space, offsets exclude it, and texts end with [EOS]."""
    text = "The T-shirt, it's (torn)!"
    CtxReversibleWordTokenizer.train([text], 50, min_count=1, do_lower_case=False).save_pretrained(tmp_path)
    tokenizer = CtxReversibleWordTokenizer.from_pretrained(tmp_path)
    spaced_text = f"  {text.replace(' ', '  ')}\t"
    encoded = tokenizer(spaced_text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == text
    assert encoded.input_ids[-1] == tokenizer.eos_token_id
    words = tokenizer.convert_ids_to_tokens(encoded.input_ids[:-1])
    offsets = encoded.offset_mapping[:-1]
    assert [spaced_text[start:end] for start, end in offsets] == [word.removeprefix("\u2581") for word in words]
    assert tokenizer(["torn", "shirt"], is_split_into_words=True).word_ids()[-1] is None
    assert tokenizer("(torn").input_ids != tokenizer("( torn").input_ids
