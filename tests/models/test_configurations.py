"""Invalid fields of configurations."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from hf_ctxmodels.registry import FAMILIES

GROUPS = "num_hidden_groups={}.*num_hidden_layers=12.*1, 2, 3, 4, 6, 12"
INVALID: list[tuple[str, dict[str, Any], str]] = [
    *(("albert", {"num_hidden_groups": groups}, GROUPS.format(groups)) for groups in (0, 5, 24)),
    ("albert", {"parameter_sharing": "heads"}, "(?s)parameter_sharing.*attention"),
    ("albert", {"inner_group_num": 0}, "inner_group_num=0"),
    ("albert", {"num_attention_heads": 7}, "num_attention_heads=7"),
    *((name, {"num_hidden_layers": 0}, "num_hidden_layers=0") for name in ("bert", "gpt2", "xlnet")),
    ("bert", {"num_hidden_layers": 10_001}, "num_hidden_layers=10001 must be between 1 and 10,000"),
    ("cvt", {"views": ["sideways"]}, "sideways"),
    ("cvt", {"view_weight": -1.0}, "view_weight"),
    ("cvt", {"tasks": {"pos": ["a"]}}, "two or more labels"),
    *(
        (family, {"vocab_size": 9, "pad_token_id": pad}, rf"pad_token_id={pad} must be None, .* below vocab_size=9")
        for family in ("bert", "bart", "xlm", "glove", "gensen")
        for pad in (9, -1)
    ),
    ("cvt", {"target_vocab_size": 9, "pad_token_id": 9}, "below target_vocab_size=9"),
    ("cvt", {"hard_target_beams": 0}, "hard_target_beams=0"),
    ("cvt", {"pretrained_embeddings": "x", "pretrained_embedding_size": 64, "hidden_size": 64}, "must be below"),
    ("elmo", {"num_characters": 262, "num_languages": 261}, "num_languages=261 must be less than"),
    ("ernie", {"pretraining_tasks": {"spelling": 2}}, "unknown task 'spelling'"),
    ("ernie", {"pretraining_tasks": {"query_title": 1}}, "1 classes for"),
    ("gensen", {"hidden_size": 7}, "must be even"),
    ("gensen", {"classifier_size": 0}, "classifier_size=0"),
    ("gensen", {"relations": ["a", "a"]}, "relations"),
    ("gpt", {"lm_loss_weight": -1}, "lm_loss_weight=-1"),
    ("grover", {"lm_loss_weight": -1}, "lm_loss_weight=-1"),
    ("infersent", {"hidden_size": 7}, "must be even"),
    ("infersent", {"classifier_size": 0}, "classifier_size=0"),
    ("lmseq2seq", {"pretrained_layers": 4}, "pretrained_layers"),
    ("lmseq2seq", {"pretrained_parts": ["attention"]}, "pretrained_parts"),
    ("lmseq2seq", {"hidden_size": 0}, "hidden_size"),
    ("roberta", {"max_position_embeddings": 2}, r"pad_token_id \+ 1 = 2"),
    ("roberta", {"answer_steps": 3}, "compares two segments"),
    ("seqae", {"label_gain": "linear", "classifier_pooling": "mean"}, "label_gain"),
    ("seqae", {"word_dropout_prob": 1.0}, "word_dropout_prob"),
    ("seqae", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("seqae", {"bptt": 0}, "bptt"),
    ("t5", {"relative_attention_num_buckets": 6}, "relative_attention_num_buckets=6"),
    ("t5", {"relative_attention_max_distance": 16}, "relative_attention_max_distance=16"),
    ("ulmfit", {"input_dropout_prob": 0.6, "dropout_scale": 2.0}, "input_dropout_prob"),
    ("unilm", {"type_vocab_size": 3}, "UniLM has 6 segments"),
    *(("xlm", {"n_langs": 3, **fields}, "n_langs") for fields in ({"default_lang": 3}, {"lang2id": {"de": 0}})),
    ("xlm", {"n_langs": 0}, "n_langs"),
    *(
        ("xlnet", {"hidden_size": 36, "num_attention_heads": 3, field: value}, f"{field}={value!r}")
        for field, value in (("attn_type", "both"), ("summary_type", "attn"), ("mem_len", -1), ("hidden_size", 32))
    ),
]


@pytest.mark.parametrize(("family", "fields", "message"), INVALID, ids=str)
def test_invalid_fields(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        FAMILIES[family].config(**fields)
