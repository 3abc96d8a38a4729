"""`TokenizerTesterMixin` and `TokenizersBackendTesterMixin` of transformers for the tokenizers of all families."""

import tempfile
from functools import cache
from itertools import islice
from typing import Any
from unittest import TestCase

from suite import import_test_module
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

COMMON = import_test_module("test_tokenization_common")
BACKEND = import_test_module("test_tokenizers_backend_mixin")
STORIES, VOCABULARY = 150, 1000


@cache
def _train_tokenizer(tokenizer_class: type[PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    stories = [" ".join(paragraphs) for paragraphs in islice(demo_documents(), STORIES)]
    return tokenizer_class.train(stories, VOCABULARY)


class _TokenizerTests(BACKEND.TokenizersBackendTesterMixin, COMMON.TokenizerTesterMixin):
    """The mixins with a trained tokenizer instead of one from the Hub."""

    family: FamilySpec

    @classmethod
    def setUpClass(cls) -> None:
        cls.tmpdirname = tempfile.mkdtemp()  # the mixin removes it
        _train_tokenizer(cls.tokenizer_class).save_pretrained(cls.tmpdirname)
        cls.from_pretrained_id = [cls.tmpdirname]
        cls.tokenizers_list = [(cls.tokenizer_class, cls.tmpdirname, {})]


def _tokenizer_test(family: FamilySpec) -> type[TestCase]:
    content: dict[str, Any] = {"family": family, "__module__": __name__}
    content |= {"tokenizer_class": family.tokenizer, "rust_tokenizer_class": family.tokenizer}
    return type(f"{family.name}-tokenizer", (_TokenizerTests, TestCase), content)


globals().update({f"{family.name}-tokenizer": _tokenizer_test(family) for family in FAMILIES.values()})
