"""A tokenizer whose tokens are numbered words, so that a test can tell from an id where a token comes from."""

import pytest
from numbered_text import WORDS, word

from hf_ctxmodels.models.bert.tokenization_bert import SPECIAL_TOKENS, CtxBertTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> CtxBertTokenizer:
    """Words w0 ... w2999 of one token each, and the continuation pieces ##x0 ... ##x9."""
    tokens = [*SPECIAL_TOKENS, *(word(number) for number in range(WORDS)), *(f"##x{c}" for c in "abcdefghij")]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CtxBertTokenizer(vocab=vocab, model_max_length=512)
