"""What ELMo's task heads read: mixes of layers drawn to their average, and the fixed vectors of another model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification
from zoo import CASES, TINY, Case, learnable_batch, make_batch, make_targets

from hf_ctxmodels import CtxElmoConfig, CtxElmoForTokenClassification, CtxElmoTokenizer, CtxError
from hf_ctxmodels.conversion.word_vectors import WordVectors

HEADS = [case for case in CASES if case.has_field("mix_decay") and "Classification" in case.auto_name]
WORDS = ["the", "cat", "sat"]
TEXT = ["The cat", "a CAT sat down"]


@pytest.fixture
def vectors(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A model of a static family, saved with its tokenizer."""
    matrix = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    folder = tmp_path / "vectors"
    for part in WordVectors(WORDS, matrix, lower_case=True).to_model(getattr(request, "param", "glove")):
        part.save_pretrained(folder)
    return str(folder)


def config(**changes: object) -> CtxElmoConfig:
    fields = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
    return CtxElmoConfig(**{**fields, "num_characters": 262, "max_characters_per_token": 50, **changes})


@pytest.mark.parametrize("vectors", ["glove", "word2vec"], indirect=True)
def test_word_vectors_follow_the_mixes_and_are_saved(vectors: str, tmp_path: Path) -> None:
    tokenizer = CtxElmoTokenizer.from_words([])
    batch = tokenizer(TEXT, padding=True, return_tensors="pt")
    plain = CtxElmoForTokenClassification(config()).eval()
    plain.elmo.save_pretrained(tmp_path / "encoder")
    fields = CtxElmoForTokenClassification.embedding_fields(vectors)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "encoder", **fields).eval()
    assert not model.encode(**batch).last_hidden_state[..., 32:].any(), "opening a model opens no other one"
    model.load_pretrained_embeddings()
    assert model.classifier.in_features == 32 + 5
    matrix = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    with torch.no_grad():
        read = model.encode(**batch).last_hidden_state
    expected = torch.zeros(2, 6, 5)
    for row, places in enumerate(({1: 0, 2: 1}, {2: 1, 3: 2})):
        for place, word in places.items():
            expected[row, place] = torch.from_numpy(matrix[word])
    assert torch.equal(read[..., 32:], expected)
    assert torch.equal(model.elmo(**batch).last_hidden_state, plain.elmo(**batch).last_hidden_state)

    model.save_pretrained(tmp_path / "head")
    Path(vectors).rename(tmp_path / "elsewhere")  # they are in the head's own weights
    again = AutoModelForTokenClassification.from_pretrained(tmp_path / "head").eval()
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert again.config.pretrained_embeddings == vectors


@pytest.mark.parametrize("trainable", [False, True])
def test_they_are_trained_or_not(vectors: str, trainable: bool) -> None:
    fields = CtxElmoForTokenClassification.embedding_fields(vectors)
    model = CtxElmoForTokenClassification(config(**fields, train_pretrained_embeddings=trainable))
    model.load_pretrained_embeddings()
    batch = CtxElmoTokenizer.from_words([])(TEXT, padding=True, return_tensors="pt")
    before = model.vectors.table.clone()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
    model(**batch, labels=torch.ones_like(batch["attention_mask"])).loss.backward()
    optimizer.step()
    assert torch.equal(model.vectors.table, before) != trainable


def test_what_cannot_be(vectors: str, tmp_path: Path) -> None:
    model = CtxElmoForTokenClassification(config(**CtxElmoForTokenClassification.embedding_fields(vectors)))
    with pytest.raises(CtxError, match="needs characters"):
        model(inputs_embeds=torch.zeros(1, 2, 16))
    with pytest.raises(CtxError, match="without their number and width"):
        CtxElmoForTokenClassification(config(pretrained_embeddings=vectors))
    with pytest.raises(CtxError, match="the model of the word vectors"):
        CtxElmoForTokenClassification.embedding_fields(str(tmp_path / "nowhere"))
    other = CtxElmoForTokenClassification(config(pretrained_embedding_size=4, pretrained_vocab_size=3))
    with pytest.raises(CtxError, match="pretrained_embeddings is None"):
        other.load_pretrained_embeddings()
    with pytest.raises(CtxError, match="but the table is"):
        other.load_pretrained_embeddings(vectors)
    with pytest.raises(CtxError, match="no table for word vectors"):
        CtxElmoForTokenClassification(config()).load_pretrained_embeddings(vectors)


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_mixes_are_drawn_to_their_average(head: Case) -> None:
    """The loss in training holds the multiple of the squared weights, once for a batch however it is divided."""
    batch = make_batch(head)
    batch |= make_targets(head, batch)
    models = [head.model(mix_decay=decay, classifier_dropout=0.0) for decay in (0.0, 0.5)]
    plain, decayed = (model.train()(**batch).loss for model in models)
    distance = sum(mix.weights.square().sum().item() for mix in models[0].mixes)
    assert distance > 1e-3
    torch.testing.assert_close(decayed - plain, torch.tensor(0.5 * distance), rtol=1e-3, atol=1e-5)
    assert models[0].eval()(**batch).loss == models[1].eval()(**batch).loss
    count = (batch["labels"] != -100).sum()
    models[1].train()
    halves = [{name: value[part] for name, value in batch.items()} for part in (slice(2), slice(2, None))]
    total = sum(models[1](**half, num_items_in_batch=count).loss for half in halves)
    torch.testing.assert_close(total, decayed)


def test_decay_holds_the_mix_at_its_average() -> None:
    head = next(case for case in HEADS if case.labels_tokens)
    weights = []
    for decay in (0.0, 10.0):
        model = head.model(mix_decay=decay).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for step in range(60):
            batch, _ = learnable_batch(head, 16, seed=step)
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        weights.append(model.mixes[0].weights.detach().abs().max())
    assert weights[1] < 0.05 < weights[0]


def test_the_second_layer_is_the_first_with_a_residual() -> None:
    """The first layer's input is the token layer, which is not added to its output."""
    case = next(case for case in CASES if case.family.name == "elmo" and case.is_base)
    batch = make_batch(case)
    plain, residual = (
        case.model(num_hidden_layers=2, residual=added)(**batch, output_hidden_states=True).hidden_states
        for added in (False, True)
    )
    assert torch.equal(residual[1], plain[1])
    torch.testing.assert_close(residual[2], plain[2] + plain[1])
