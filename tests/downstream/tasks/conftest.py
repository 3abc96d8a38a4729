"""A small trained tokenizer."""

import pytest

from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer

SUBJECTS = ["The cat", "A dog", "Her brother", "The old sailor", "Nobody", "My neighbour", "The committee"]
VERBS = ["saw", "carried", "painted", "forgot", "praised", "followed", "counted", "mended"]
OBJECTS = ["the red boat", "seven letters", "a small garden", "the bridge", "every window", "this story"]


@pytest.fixture(scope="session")
def tokenizer() -> CtxBertTokenizer:
    numbers = [[37 * index + 11 * position for position in range(1 + index % 9)] for index in range(40)]
    documents = [
        " ".join(f"{SUBJECTS[n % 7]} {VERBS[n // 7 % 8]} {OBJECTS[n // 56 % 6]}." for n in document)
        for document in numbers
    ]
    return CtxBertTokenizer.train(documents, vocab_size=150)
