"""Sentence embeddings of all families, with `encode_sentences` and as a module of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from zoo import ARCHETYPE_FAMILIES, tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.sentence_encoder import (
    RecurrentSentenceEncoder,
    encode_in_windows,
    encode_sentences,
    saved_pooling,
)
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge", "the old sailor"]
ENCODERS = [family for family in FAMILIES.values() if issubclass(family.models["AutoModel"], RecurrentSentenceEncoder)]
TOLERANCES = {"atol": 1e-5, "rtol": 1e-5}
Checkpoint = tuple[PreTrainedModel, PreTrainedTokenizerBase, str]
archetypes = pytest.mark.parametrize("checkpoint", ARCHETYPE_FAMILIES, indirect=True, ids=lambda family: family.name)


def save(family: FamilySpec, folder: Path) -> Checkpoint:
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=300)  # includes 256 bytes for some families
    torch.manual_seed(0)
    model = family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer))).eval()
    for component in (model, tokenizer):
        component.save_pretrained(folder)
    return model, tokenizer, str(folder)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model, its tokenizer and their folder."""
    return save(request.param, tmp_path_factory.mktemp(request.param.name))


@torch.no_grad()
def test_pooling(checkpoint: Checkpoint) -> None:
    """Mean pooling equals the mean over each text encoded alone; the default is the pooler output, if there is one."""
    model, tokenizer, _ = checkpoint
    means = encode_sentences(model.train(), tokenizer, TEXTS, pooling="mean", batch_size=3)
    assert model.training, "the mode of the model must be restored"
    outputs = [model.eval()(**tokenizer([text], return_tensors="pt")) for text in TEXTS]
    states = [getattr(output, "encoder_last_hidden_state", output.last_hidden_state)[0] for output in outputs]
    torch.testing.assert_close(means, torch.stack([state.mean(0) for state in states]), **TOLERANCES)
    normalized = encode_sentences(model, tokenizer, TEXTS, pooling="mean", normalize=True)
    torch.testing.assert_close(normalized, means / means.norm(dim=1, keepdim=True), **TOLERANCES)
    if getattr(outputs[0], "pooler_output", None) is None:
        with pytest.raises(CtxError, match='pooling="mean"'):
            encode_sentences(model, tokenizer, TEXTS)
    else:
        pooled = torch.cat([output.pooler_output for output in outputs])
        torch.testing.assert_close(encode_sentences(model, tokenizer, TEXTS), pooled, **TOLERANCES)


@archetypes
def test_empty_and_invalid_inputs(checkpoint: Checkpoint) -> None:
    model, tokenizer, folder = checkpoint
    embedding_size = encode_sentences(model, tokenizer, TEXTS[:1], pooling="mean+max").shape[1]
    assert encode_sentences(model, tokenizer, [], pooling="mean+max").shape == (0, embedding_size)
    vectors = encode_sentences(model, tokenizer, TEXTS[:1], pooling="mean", normalize=True)
    assert torch.equal(encode_sentences(model, tokenizer, TEXTS[0], pooling="mean", normalize=True), vectors[0])
    with pytest.raises(CtxError, match=r"sentences\[1\] is a int"):
        encode_sentences(model, tokenizer, ["a", 3], pooling="mean")
    with pytest.raises(CtxError, match="batch_size=0"):
        encode_sentences(model, tokenizer, TEXTS, pooling="mean", batch_size=0)
    with pytest.raises(CtxError, match=r"pooling='cls' is unknown\.(.|\n)*use one of: first, last"):
        encode_sentences(model, tokenizer, TEXTS, pooling="cls")  # type: ignore[arg-type]
    if not len(tokenizer("").input_ids):
        with pytest.raises(CtxError, match="Sentence 1 "):
            encode_sentences(model, tokenizer, ["a cat", " "], pooling="mean")
    larger_tokenizer = AutoTokenizer.from_pretrained(folder)
    larger_tokenizer.add_tokens([f"new{number}" for number in range(200)])
    if len(larger_tokenizer) > getattr(model.config, "vocab_size", len(larger_tokenizer)):
        with pytest.raises(CtxError, match="does not fit the model"):
            encode_sentences(model, larger_tokenizer, TEXTS, pooling="mean")


@archetypes
def test_streamed_windows(checkpoint: Checkpoint) -> None:
    """Embeddings do not depend on the windows, which are read one at a time."""
    model, tokenizer, _ = checkpoint
    texts = iter(TEXTS * 2)
    windows = encode_in_windows(model, tokenizer, texts, pooling="mean", batch_size=2, window=3)
    first_vectors = next(windows)
    assert list(texts)[:1] == TEXTS[3:]
    windows = encode_in_windows(model, tokenizer, iter(TEXTS * 2), pooling="mean", batch_size=2, window=3)
    vectors = torch.cat(list(windows))
    torch.testing.assert_close(vectors[:3], first_vectors, **TOLERANCES)
    expected = torch.cat([encode_sentences(model, tokenizer, [text], pooling="mean") for text in TEXTS * 2])
    torch.testing.assert_close(vectors, expected, **TOLERANCES)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ({"pooling_mode": "cls"}, "first"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
    ],
)
def test_sentence_transformers_settings(mode: dict, pooling: str, tmp_path: Path, capsys: Any) -> None:
    """`embed sentences` writes the vectors of SentenceTransformer, with its length limit, pooling and normalization."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra `sentences`")
    folder = tmp_path / "model"
    model = save(FAMILIES["bert"], folder)[0]
    model.export_reference(folder)
    modules = {"": "base.modules.transformer.Transformer"}
    modules |= {"pool": "sentence_transformer.modules.pooling.Pooling"}
    modules |= {"norm": "sentence_transformer.modules.normalize.Normalize"}
    (folder / "pool").mkdir()
    files = {
        "sentence_bert_config.json": {"max_seq_length": 5},
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{name}"}
            for number, (path, name) in enumerate(modules.items())
        ],
        "pool/config.json": {"word_embedding_dimension": model.config.hidden_size, **mode},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    reference = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert reference.max_seq_length == 5
    expected = reference.encode(TEXTS)
    source, output = tmp_path / "texts.jsonl", tmp_path / "new" / "vectors.npy"
    source.write_text("".join(json.dumps({"title": text}) + "\n" for text in TEXTS))
    assert run_command("embed", "sentences", model=folder, input=source, text_column="title", output=output) == 0
    np.testing.assert_allclose(np.load(output, mmap_mode="r"), expected, atol=1e-5)
    assert saved_pooling(str(folder)) == (pooling, True)
    assert run_command("embed", "sentences", model=folder, input=source, text_column="title", output=output) == 2
    assert "The file exists" in capsys.readouterr().err
    (folder / "pool" / "config.json").write_text(json.dumps({"pooling_mode": ["cls", "mean"]}))
    with pytest.raises(CtxError, match="The pooling cls and mean is not supported"):
        saved_pooling(str(folder))


@pytest.mark.parametrize("family", ENCODERS, ids=lambda family: family.name)
def test_encode_method(family: FamilySpec, tmp_path: Path) -> None:
    model, tokenizer, folder = save(family, tmp_path)
    embeddings = model.encode(TEXTS, tokenizer)
    assert embeddings.shape == (len(TEXTS), model.config.pooler_size)
    assert model.encode([], tokenizer).shape == (0, model.config.pooler_size)
    loaded = AutoModel.from_pretrained(folder)
    torch.testing.assert_close(loaded.encode(TEXTS, batch_size=3), embeddings, **TOLERANCES)
    torch.testing.assert_close(loaded.encode(TEXTS, normalize=True).norm(dim=1), torch.ones(len(TEXTS)))
    with pytest.raises(CtxError, match="the model's tokenizer"):
        model.encode(TEXTS)


@archetypes
def test_sentence_transformers_module(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Embeddings, gradients, saving, and loading, also with AutoModel."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra `sentences`")
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    from hf_ctxmodels.hub.sentence_module import CtxSentenceEncoder

    model, tokenizer, folder = checkpoint
    expected = encode_sentences(model, tokenizer, TEXTS, pooling="mean", normalize=True)
    module = CtxSentenceEncoder.from_pretrained(folder, pooling="mean", normalize=True)
    encoder = sentence_transformers.SentenceTransformer(modules=[module], device="cpu")
    assert encoder.get_embedding_dimension() == expected.shape[1]
    embeddings = encoder.encode(TEXTS, convert_to_tensor=True, batch_size=3)
    torch.testing.assert_close(embeddings, expected, **TOLERANCES)
    encoder.save(str(tmp_path))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    assert type(loaded[0]) is CtxSentenceEncoder
    assert loaded[0].get_config_dict() == {"pooling": "mean", "normalize": True, "max_seq_length": None}
    torch.testing.assert_close(loaded.encode(TEXTS, convert_to_tensor=True), embeddings, atol=1e-6, rtol=1e-6)
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model)
    for value in (("a cat", "a dog"), None):
        with pytest.raises(CtxError, match=r"sentences\[0\] is a .*, expected a string"):
            encoder.encode([value])
    pairs = [encoder.train().preprocess(texts) for texts in (TEXTS[:2], TEXTS[2:])]
    CosineSimilarityLoss(encoder)(pairs, torch.zeros(2)).backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_sentence_transformers_encoder_of_encoder_decoder(family: str, tmp_path: Path) -> None:
    """The documented modality configuration pools the states of the encoder, also after saving, without remote code."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra `sentences`")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    model, tokenizer, folder = save(FAMILIES[family], tmp_path / "model")
    text = {"method": "forward", "method_output_name": "encoder_last_hidden_state"}
    transformer = Transformer(folder, modality_config={"text": text}, module_output_name="token_embeddings")
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), "mean")]
    encoder = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    expected = encode_sentences(model, tokenizer, TEXTS, pooling="mean")
    torch.testing.assert_close(encoder.encode(TEXTS, convert_to_tensor=True), expected, **TOLERANCES)
    encoder.save(str(tmp_path / "saved"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(loaded.encode(TEXTS, convert_to_tensor=True), expected, **TOLERANCES)
    assert saved_pooling(str(tmp_path / "saved")) == ("mean", False)
