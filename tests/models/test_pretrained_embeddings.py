"""Families with pretrained embeddings: loading, training and saving of the vectors."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, PreTrainedModel
from zoo import assert_same_weights, tiny_config

from hf_ctxmodels import CtxError, CtxGloveTokenizer
from hf_ctxmodels.architectures.pretrained_word_vectors import PretrainedEmbeddingEncoder
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.model_loading import load_config, load_model, new_config, new_model, set_embedding_fields

FAMILIES_WITH_EMBEDDINGS = [
    family for family in FAMILIES.values() if issubclass(family.models["AutoModel"], PretrainedEmbeddingEncoder)
]


@pytest.fixture(params=FAMILIES_WITH_EMBEDDINGS, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> FamilySpec:
    return request.param


def save_glove(folder: Path) -> tuple[PreTrainedModel, CtxGloveTokenizer]:
    """Save a random GloVe model of width 6 and its tokenizer."""
    tokenizer = CtxGloveTokenizer.train(["a cat sat on a mat"] * 5, vocab_size=20)
    family = FAMILIES["glove"]
    glove = family.models["AutoModel"](family.config(vocab_size=len(tokenizer), hidden_size=6))
    glove.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return glove, tokenizer


@pytest.mark.parametrize("trainable", [False, True])
def test_vectors_are_copied_saved_and_loaded(family: FamilySpec, tmp_path: Path, trainable: bool) -> None:
    glove, tokenizer = save_glove(tmp_path / "glove")
    family_tokenizer = family.tokenizer.train(["a cat\teine Katze"], 9, pretrained_embeddings=str(tmp_path / "glove"))
    assert family_tokenizer("a cat on a mat").input_ids == tokenizer("a cat on a mat").input_ids
    fields = {"vocab_size": len(family_tokenizer), "unk_token_id": family_tokenizer.unk_token_id}
    fields |= {"embedding_size": 6, "hidden_size": 8}
    fields |= {"pretrained_embeddings": str(tmp_path / "glove"), "train_pretrained_embeddings": trainable}
    model = family.models["AutoModel"](tiny_config(family, **fields))
    assert not model.word_embeddings.weight.any(), "construction must not load the vectors"
    model.load_pretrained_embeddings()
    assert torch.equal(model.word_embeddings.weight[2:], glove.vectors().detach()[2:])
    assert not model.word_embeddings.weight[:2].any(), "vectors of padding and unknown words are zero"
    assert model.word_embeddings.weight.requires_grad is trainable
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "glove" / "model.safetensors").unlink()
    loaded = AutoModel.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.word_embeddings.weight, model.word_embeddings.weight)
    assert loaded.word_embeddings.weight.requires_grad is trainable


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 8), ("embedding_size", 7)])
def test_mismatched_vectors_raise(family: FamilySpec, tmp_path: Path, field: str, value: int) -> None:
    _, tokenizer = save_glove(tmp_path)
    fields = {"vocab_size": len(tokenizer), "embedding_size": 6, "pretrained_embeddings": str(tmp_path), field: value}
    model = family.models["AutoModel"](tiny_config(family, **fields))
    with pytest.raises(CtxError, match="The vectors are"):
        model.load_pretrained_embeddings()


def test_invalid_vector_sources(family: FamilySpec, tmp_path: Path) -> None:
    with pytest.raises(CtxError, match="the tokenizer of"):
        family.tokenizer.train(["a cat"], 9, pretrained_embeddings=str(tmp_path / "missing"))
    model = family.models["AutoModel"](tiny_config(family))
    with pytest.raises(CtxError, match="pretrained_embeddings is None"):
        model.load_pretrained_embeddings()
    with pytest.raises(CtxError, match="the model of the word vectors"):
        model.load_pretrained_embeddings(str(tmp_path / "missing"))
    bert_tokenizer = FAMILIES["bert"].tokenizer.train(["a cat sat"] * 5, vocab_size=40)
    bert_tokenizer.save_pretrained(tmp_path)
    FAMILIES["bert"].models["AutoModel"](tiny_config(FAMILIES["bert"])).save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="not a word tokenizer"):
        family.tokenizer.train(["a cat"], 9, pretrained_embeddings=str(tmp_path))
    with pytest.raises(CtxError, match="no static word embedding"):
        model.load_pretrained_embeddings(str(tmp_path))
    assert model.config.pretrained_embeddings is None


def test_new_model_copies_vectors(family: FamilySpec, tmp_path: Path) -> None:
    glove, tokenizer = save_glove(tmp_path)
    options = [f"pretrained_embeddings={tmp_path}", "embedding_size=6"]
    model = new_model("AutoModel", new_config(family, tokenizer, "tiny", options))
    assert torch.equal(model.word_embeddings.weight[2:], glove.vectors().detach()[2:])


@pytest.mark.parametrize("name", ["cvt", "elmo"])
def test_vectors_in_character_based_families(name: str, tmp_path: Path) -> None:
    """In a new model, and in a new head on a pretrained encoder without vectors."""
    glove, tokenizer = save_glove(tmp_path / "glove")
    family, head = FAMILIES[name], "AutoModelForTokenClassification"
    family_tokenizer = family.tokenizer.from_words([])
    ids = family_tokenizer(" ".join(tokenizer.words[2:]), return_tensors="pt").input_ids
    expected = glove.vectors().detach()[2:]
    options = [f"pretrained_embeddings={tmp_path / 'glove'}"]
    model = new_model(head, new_config(family, family_tokenizer, "tiny", options))
    vectors = model.vectors if name == "elmo" else model.cvt.vectors
    assert torch.equal(vectors(ids)[0, 1:-1], expected)
    assert not vectors(ids)[0, [0, -1]].any()
    if name == "elmo":
        model.elmo.save_pretrained(tmp_path / "encoder")
        config = load_config(tmp_path / "encoder")
        config.pretrained_embedding_size = 0  # as in an encoder without vectors
        set_embedding_fields(config)
        loaded = load_model(tmp_path / "encoder", head, config)
        assert torch.equal(loaded.vectors(ids), model.vectors(ids))
        assert_same_weights(loaded.elmo, model.elmo)
