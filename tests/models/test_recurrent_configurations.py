"""Invalid fields of the configurations of recurrent families."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from hf_ctxmodels.registry import FAMILIES

INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("cvt", {"views": ["sideways"]}, "sideways"),
    ("cvt", {"view_weight": -1.0}, "view_weight"),
    ("cvt", {"tasks": {"pos": ["a"]}}, "two or more labels"),
    ("cvt", {"pretrained_embeddings": "x", "pretrained_embedding_size": 64, "hidden_size": 64}, "must be below"),
    ("gensen", {"hidden_size": 7}, "must be even"),
    ("gensen", {"classifier_size": 0}, "classifier_size=0"),
    ("gensen", {"relations": ["a", "a"]}, "relations"),
    ("infersent", {"hidden_size": 7}, "must be even"),
    ("infersent", {"classifier_size": 0}, "classifier_size=0"),
    ("lmseq2seq", {"pretrained_layers": 4}, "pretrained_layers"),
    ("lmseq2seq", {"pretrained_parts": ["attention"]}, "pretrained_parts"),
    ("lmseq2seq", {"hidden_size": 0}, "hidden_size"),
    ("seqae", {"label_gain": "linear", "classifier_pooling": "mean"}, "label_gain"),
    ("seqae", {"word_dropout_prob": 1.0}, "word_dropout_prob"),
    ("seqae", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("seqae", {"bptt": 0}, "bptt"),
    ("ulmfit", {"input_dropout_prob": 0.6, "dropout_scale": 2.0}, "input_dropout_prob"),
]


@pytest.mark.parametrize(("family", "fields", "message"), INVALID, ids=str)
def test_invalid_fields(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        FAMILIES[family].config(**fields)
