"""A tokenizer whose tokens are numbered words, so that a test can tell from an id where a token comes from."""

import pytest
from numbered_text import WORDS, word
from transformers import XLNetTokenizer

from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.tokenizers.wordpiece import SPECIAL_TOKENS


@pytest.fixture(scope="session")
def tokenizer() -> CtxBertTokenizer:
    """Words w0 ... w2999 of one token each, and the continuation pieces ##x0 ... ##x9."""
    tokens = [*SPECIAL_TOKENS, *(word(number) for number in range(WORDS)), *(f"##x{c}" for c in "abcdefghij")]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CtxBertTokenizer(vocab=vocab, model_max_length=512)


@pytest.fixture(scope="session")
def trailing_tokenizer() -> XLNetTokenizer:
    """The same words, with the special tokens behind the segments and padding on the left: A <sep> B <sep> <cls>."""
    special = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
    pieces = [*special, *(f"▁{word(number)}" for number in range(WORDS)), *(f"x{c}" for c in "abcdefghij")]
    tokenizer = XLNetTokenizer(vocab=[(piece, -1.0) for piece in pieces], model_max_length=512)
    tokenizer._pad_token_type_id = 3
    return tokenizer


@pytest.fixture(scope="session")
def separated(tokenizer):
    """The numbered words' tokenizer, with a separator of documents."""
    return CtxBertTokenizer(vocab=tokenizer.get_vocab(), model_max_length=512, eos_token="[SEP]")
