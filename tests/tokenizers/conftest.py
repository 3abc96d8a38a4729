"""A small trained tokenizer and some documents."""

import pytest

from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer

SUBJECTS = ["The cat", "A dog", "Her brother", "The old sailor", "Nobody", "My neighbour", "The committee"]
VERBS = ["saw", "carried", "painted", "forgot", "praised", "followed", "counted", "mended"]
OBJECTS = ["the red boat", "seven letters", "a small garden", "the bridge", "every window", "this story"]


def sentence(number):
    """One of 336 sentences."""
    subject, verb, thing = number % 7, number // 7 % 8, number // 56 % 6
    return f"{SUBJECTS[subject]} {VERBS[verb]} {OBJECTS[thing]}."


@pytest.fixture(scope="session")
def documents():
    """Forty documents of one to nine sentences."""
    return [[sentence(37 * index + 11 * number) for number in range(1 + index % 9)] for index in range(40)]


@pytest.fixture(scope="session")
def tokenizer(documents):
    return CtxBertTokenizer.train([" ".join(document) for document in documents], vocab_size=150)
