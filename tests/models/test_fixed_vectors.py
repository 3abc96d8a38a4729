"""Every family that reads the fixed vectors of another model: they come from there, stay as they are, and are saved."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, PreTrainedModel
from zoo import tiny_config

from hf_ctxmodels import CtxError, CtxGloveTokenizer
from hf_ctxmodels.models._shared.pretrained_embeddings import PretrainedEmbeddingEncoder
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

READERS = [family for family in FAMILIES.values() if issubclass(family.models["AutoModel"], PretrainedEmbeddingEncoder)]


@pytest.fixture(params=READERS, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> FamilySpec:
    return request.param


def save_glove(folder: Path) -> tuple[PreTrainedModel, CtxGloveTokenizer]:
    """A random model of vectors of width 6, and its tokenizer."""
    tokenizer = CtxGloveTokenizer.train(["a cat sat on a mat"] * 5, vocab_size=20)
    family = FAMILIES["glove"]
    glove = family.models["AutoModel"](family.config(vocab_size=len(tokenizer), hidden_size=6))
    for part in (glove, tokenizer):
        part.save_pretrained(folder)
    return glove, tokenizer


@pytest.mark.parametrize("trainable", [False, True])
def test_of_another_model_fixed_and_saved(family: FamilySpec, tmp_path: Path, trainable: bool) -> None:
    glove, tokenizer = save_glove(tmp_path / "glove")
    own = family.tokenizer.train(["a cat\teine Katze"], 9, pretrained_embeddings=str(tmp_path / "glove"))
    assert own("a cat on a mat").input_ids == tokenizer("a cat on a mat").input_ids
    fields = {"vocab_size": len(own), "embedding_size": 6, "hidden_size": 8, "unk_token_id": own.unk_token_id}
    fields |= {"pretrained_embeddings": str(tmp_path / "glove"), "train_vectors": trainable}
    model = family.models["AutoModel"](tiny_config(family, **fields))
    assert torch.equal(model.word_embeddings.weight[2:], glove.vectors().detach()[2:])
    assert not model.word_embeddings.weight[:2].any(), "padding and unknown words are zero"
    assert model.word_embeddings.weight.requires_grad is trainable
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "glove" / "model.safetensors").unlink()
    again = AutoModel.from_pretrained(tmp_path / "model")
    assert torch.equal(again.word_embeddings.weight, model.word_embeddings.weight)
    assert again.word_embeddings.weight.requires_grad is trainable


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 8), ("embedding_size", 7)])
def test_that_do_not_fit_are_refused(family: FamilySpec, tmp_path: Path, field: str, value: int) -> None:
    _, tokenizer = save_glove(tmp_path)
    fields = {"vocab_size": len(tokenizer), "embedding_size": 6, "pretrained_embeddings": str(tmp_path), field: value}
    with pytest.raises(CtxError, match="The vectors are"):
        family.models["AutoModel"](tiny_config(family, **fields))


def test_of_what_has_none(family: FamilySpec, tmp_path: Path) -> None:
    with pytest.raises(CtxError, match="Cannot open the tokenizer"):
        family.tokenizer.train(["a cat"], 9, pretrained_embeddings=str(tmp_path / "nowhere"))
    with pytest.raises(CtxError, match="Cannot open the model of the fixed vectors"):
        family.models["AutoModel"](tiny_config(family, pretrained_embeddings=str(tmp_path / "nowhere")))
    bert = FAMILIES["bert"].tokenizer.train(["a cat sat"] * 5, vocab_size=40)
    for part in (bert, FAMILIES["bert"].models["AutoModel"](tiny_config(FAMILIES["bert"]))):
        part.save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="no tokenizer of whole words"):
        family.tokenizer.train(["a cat"], 9, pretrained_embeddings=str(tmp_path))
    with pytest.raises(CtxError, match="no fixed vector for each word"):
        family.models["AutoModel"](tiny_config(family, pretrained_embeddings=str(tmp_path)))
