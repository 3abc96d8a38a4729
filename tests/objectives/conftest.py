"""Tokenizers of numbered words: the id of a token determines its position in the text."""

import pytest
from numbered_text import NUM_WORDS, word
from transformers import XLNetTokenizer

from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.tokenizers.wordpiece import SPECIAL_TOKENS


@pytest.fixture(scope="session")
def tokenizer() -> CtxBertTokenizer:
    """One token for each of 3000 words, and the continuation pieces ##xa ... ##xj."""
    tokens = [*SPECIAL_TOKENS, *(word(number) for number in range(NUM_WORDS)), *(f"##x{c}" for c in "abcdefghij")]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CtxBertTokenizer(vocab=vocab, model_max_length=512)


@pytest.fixture(scope="session")
def trailing_tokenizer() -> XLNetTokenizer:
    """The same words, with trailing special tokens and left padding: A <sep> B <sep> <cls>."""
    special_tokens = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
    pieces = [*special_tokens, *(f"▁{word(number)}" for number in range(NUM_WORDS)), *(f"x{c}" for c in "abcdefghij")]
    tokenizer = XLNetTokenizer(vocab=[(piece, -1.0) for piece in pieces], model_max_length=512)
    tokenizer._pad_token_type_id = 3
    return tokenizer


@pytest.fixture(scope="session")
def eos_tokenizer(tokenizer):
    """The tokenizer of numbered words with an end-of-text token, which separates documents."""
    return CtxBertTokenizer(vocab=tokenizer.get_vocab(), model_max_length=512, eos_token="[SEP]")
