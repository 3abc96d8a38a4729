"""Vectors of sentences by every family, alone and as a module of sentence-transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from zoo import ARCHETYPE_FAMILIES, tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.sentence_encoder import RecurrentSentenceEncoder, encode_sentences
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge", "the old sailor"]
ENCODERS = [family for family in FAMILIES.values() if issubclass(family.models["AutoModel"], RecurrentSentenceEncoder)]
some_families = pytest.mark.parametrize("opened", ARCHETYPE_FAMILIES, indirect=True, ids=lambda family: family.name)
Opened = tuple[PreTrainedModel, PreTrainedTokenizerBase, str]


def save(family: FamilySpec, folder: Path) -> Opened:
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=300)  # 256 bytes among them, for some
    torch.manual_seed(0)
    model = family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer))).eval()
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return model, tokenizer, str(folder)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return save(request.param, tmp_path_factory.mktemp(request.param.name))


@torch.no_grad()
def one_by_one(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """(texts, width) means of states, without padding."""
    states = [model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    return torch.stack([state.mean(0) for state in states])


def test_means_and_own_vectors_in_order_whatever_the_batches(opened: Opened) -> None:
    """Means of states, and what the model pools itself, if anything."""
    model, tokenizer, _ = opened
    got = encode_sentences(model.train(), tokenizer, TEXTS, pooling="mean", batch_size=3)
    assert model.training, "the model is left as it was"
    torch.testing.assert_close(got, one_by_one(model.eval(), tokenizer), atol=1e-5, rtol=1e-5)
    unit = encode_sentences(model, tokenizer, TEXTS, pooling="mean", normalize=True)
    torch.testing.assert_close(unit, got / got.norm(dim=1, keepdim=True), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        pooled = getattr(model(**tokenizer(TEXTS[:1], return_tensors="pt")), "pooler_output", None)
    if pooled is None:
        with pytest.raises(CtxError, match='pooling="mean"'):
            encode_sentences(model, tokenizer, TEXTS)
    else:
        torch.testing.assert_close(encode_sentences(model, tokenizer, TEXTS)[:1], pooled, atol=1e-5, rtol=1e-5)


@some_families
def test_no_sentence(opened: Opened) -> None:
    model, tokenizer, _ = opened
    some = encode_sentences(model, tokenizer, TEXTS[:1], pooling="mean+max")
    assert encode_sentences(model, tokenizer, [], pooling="mean+max").shape == (0, some.shape[1])


@some_families
def test_bad_input(opened: Opened) -> None:
    model, tokenizer, folder = opened
    with pytest.raises(CtxError, match="single string"):
        encode_sentences(model, tokenizer, TEXTS[0], pooling="mean")
    with pytest.raises(CtxError, match=r"sentences\[1\] is a int"):
        encode_sentences(model, tokenizer, ["a", 3], pooling="mean")
    with pytest.raises(CtxError, match="batch_size=0"):
        encode_sentences(model, tokenizer, TEXTS, pooling="mean", batch_size=0)
    if not len(tokenizer("").input_ids):
        with pytest.raises(CtxError, match="Sentence 1 "):
            encode_sentences(model, tokenizer, ["a cat", " "], pooling="mean")
    other = AutoTokenizer.from_pretrained(folder)
    other.add_tokens([f"new{number}" for number in range(200)])
    if len(other) > getattr(model.config, "vocab_size", len(other)):
        with pytest.raises(CtxError, match="does not fit the model"):
            encode_sentences(model, other, TEXTS, pooling="mean")


@pytest.mark.parametrize("family", ENCODERS, ids=lambda family: family.name)
def test_sentence_encoders_encode(family: FamilySpec, tmp_path: Path) -> None:
    model, tokenizer, folder = save(family, tmp_path)
    got = model.encode(TEXTS, tokenizer)
    assert got.shape == (len(TEXTS), model.config.pooler_size)
    assert model.encode([], tokenizer).shape == (0, model.config.pooler_size)
    again = AutoModel.from_pretrained(folder)
    torch.testing.assert_close(again.encode(TEXTS, batch_size=3), got, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again.encode(TEXTS, normalize=True).norm(dim=1), torch.ones(len(TEXTS)))
    with pytest.raises(CtxError, match="the model's tokenizer"):
        model.encode(TEXTS)


def test_as_a_module_of_sentence_transformers(opened: Opened, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra `sentences`")
    from hf_ctxmodels.hub.sentence_module import CtxSentenceEncoder

    model, tokenizer, folder = opened
    expected = encode_sentences(model, tokenizer, TEXTS, pooling="mean", normalize=True)
    module = CtxSentenceEncoder.from_pretrained(folder, pooling="mean", normalize=True)
    whole = sentence_transformers.SentenceTransformer(modules=[module], device="cpu")
    assert whole.get_embedding_dimension() == expected.shape[1]
    got = whole.encode(TEXTS, convert_to_tensor=True, batch_size=3)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    whole.save(str(tmp_path))
    again = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    assert type(again[0]) is CtxSentenceEncoder
    assert again[0].get_config_dict() == {"pooling": "mean", "normalize": True, "max_seq_length": None}
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), got, atol=1e-6, rtol=1e-6)
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model), "AutoModel opens the directory too"


def test_a_module_learns(tmp_path: Path) -> None:
    """sentence-transformers' losses reach the model's weights."""
    pytest.importorskip("sentence_transformers", reason="needs the extra `sentences`")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    from hf_ctxmodels.hub.sentence_module import CtxSentenceEncoder

    model, tokenizer, _ = save(FAMILIES["word2vec"], tmp_path)
    whole = SentenceTransformer(modules=[CtxSentenceEncoder(model, tokenizer)], device="cpu").train()
    loss = CosineSimilarityLoss(whole)([whole.preprocess(TEXTS[:2]), whole.preprocess(TEXTS[2:])], torch.zeros(2))
    loss.backward()
    assert model.word_embeddings.weight.grad.abs().sum() > 0
