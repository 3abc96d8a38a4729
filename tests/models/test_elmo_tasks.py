"""Task heads of ELMo: layer mixes with their penalty, pretrained word vectors and text pairs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification
from zoo import CASES, TINY, Case, labeled_batch

from hf_ctxmodels import (
    CtxElmoConfig,
    CtxElmoForSequenceClassification,
    CtxElmoForTokenClassification,
    CtxElmoTokenizer,
    CtxError,
)
from hf_ctxmodels.conversion.word_vectors import WordVectors

HEADS = [case for case in CASES if case.has_field("mix_decay") and "Classification" in case.auto_name]
WORDS = ["the", "cat", "sat"]
TEXT = ["The cat", "a CAT sat down"]


@pytest.fixture
def vectors(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A model of a static family, saved with its tokenizer."""
    matrix = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    folder = tmp_path / "vectors"
    model, tokenizer = WordVectors(WORDS, matrix, lower_case=True).to_model(getattr(request, "param", "glove"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def config(**overrides: object) -> CtxElmoConfig:
    fields = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
    return CtxElmoConfig(**{**fields, "num_characters": 262, "max_characters_per_token": 50, **overrides})


@pytest.mark.parametrize("vectors", ["glove", "word2vec"], indirect=True)
def test_word_vectors_are_appended_and_saved(vectors: str, tmp_path: Path) -> None:
    tokenizer = CtxElmoTokenizer.from_words([])
    batch = tokenizer(TEXT, padding=True, return_tensors="pt")
    without_vectors = CtxElmoForTokenClassification(config()).eval()
    without_vectors.elmo.save_pretrained(tmp_path / "encoder")
    fields = CtxElmoForTokenClassification.embedding_fields(vectors)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "encoder", **fields).eval()
    assert not model.encode(**batch).last_hidden_state[..., 32:].any(), "loading a model must not load the word vectors"
    model.load_pretrained_embeddings()
    assert model.classifier.in_features == 32 + 5
    matrix = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    with torch.no_grad():
        states = model.encode(**batch).last_hidden_state
    expected = torch.zeros(2, 6, 5)
    for row, words in enumerate(({1: 0, 2: 1}, {2: 1, 3: 2})):
        for position, word in words.items():
            expected[row, position] = torch.from_numpy(matrix[word])
    assert torch.equal(states[..., 32:], expected)
    assert torch.equal(model.elmo(**batch).last_hidden_state, without_vectors.elmo(**batch).last_hidden_state)

    model.save_pretrained(tmp_path / "head")
    Path(vectors).rename(tmp_path / "elsewhere")  # the head's checkpoint contains the vectors
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "head").eval()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert loaded.config.pretrained_embeddings == vectors


@pytest.mark.parametrize("trainable", [False, True])
def test_train_pretrained_embeddings(vectors: str, trainable: bool) -> None:
    fields = CtxElmoForTokenClassification.embedding_fields(vectors)
    model = CtxElmoForTokenClassification(config(**fields, train_pretrained_embeddings=trainable))
    model.load_pretrained_embeddings()
    batch = CtxElmoTokenizer.from_words([])(TEXT, padding=True, return_tensors="pt")
    initial_vectors = model.vectors.table.clone()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
    model(**batch, labels=torch.ones_like(batch["attention_mask"])).loss.backward()
    optimizer.step()
    assert torch.equal(model.vectors.table, initial_vectors) != trainable


def test_pretrained_embeddings_errors(vectors: str) -> None:
    model = CtxElmoForTokenClassification(config(**CtxElmoForTokenClassification.embedding_fields(vectors)))
    with pytest.raises(CtxError, match="requires characters"):
        model(inputs_embeds=torch.zeros(1, 2, 16))
    with pytest.raises(CtxError, match="without their number and width"):
        CtxElmoForTokenClassification(config(pretrained_embeddings=vectors))
    model = CtxElmoForTokenClassification(config(pretrained_embedding_size=4, pretrained_vocab_size=3))
    with pytest.raises(CtxError, match=r"\(3, 4\)"):
        model.load_pretrained_embeddings(vectors)
    with pytest.raises(CtxError, match="no embeddings for word vectors"):
        CtxElmoForTokenClassification(config()).load_pretrained_embeddings(vectors)


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_mix_decay_is_added_to_training_loss(head: Case) -> None:
    """The penalty is independent of the split into microbatches."""
    batch = labeled_batch(head)
    models = [head.model(mix_decay=decay, classifier_dropout=0.0) for decay in (0.0, 0.5)]
    loss, decayed_loss = (model.train()(**batch).loss for model in models)
    penalty = sum(mix.weights.square().sum().item() for mix in models[0].mixes)
    assert penalty > 1e-3
    torch.testing.assert_close(decayed_loss - loss, torch.tensor(0.5 * penalty), rtol=1e-3, atol=1e-5)
    assert models[0].eval()(**batch).loss == models[1].eval()(**batch).loss
    count = (batch["labels"] != -100).sum()
    models[1].train()
    microbatches = [{name: value[rows] for name, value in batch.items()} for rows in (slice(2), slice(2, None))]
    total = sum(models[1](**microbatch, num_items_in_batch=count).loss for microbatch in microbatches)
    torch.testing.assert_close(total, decayed_loss)


@torch.no_grad()
def test_text_pair_features() -> None:
    """The classifier with `text_pairs` combines two separately encoded texts; a single text is paired with itself."""
    torch.manual_seed(0)
    tokenizer = CtxElmoTokenizer.from_words([])
    model = CtxElmoForSequenceClassification(config(text_pairs=True, pooling="mean+max", num_labels=3)).eval()

    def vector(text: str) -> torch.Tensor:
        states = model.elmo(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        mixed = model.mixes[0](states)[0]
        return torch.cat([mixed.mean(0), mixed.amax(0)])

    pairs = [("The cat", "a CAT sat down on it"), ("so", "it"), ("a cat sat down and slept", "no")]
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    for inputs, texts in ((batch, pairs), (tokenizer(["The cat"], return_tensors="pt"), [("The cat", "The cat")])):
        u, v = (torch.stack([vector(text) for text in column]) for column in zip(*texts, strict=True))
        expected = model.classifier(torch.cat([u, v, (u - v).abs(), u * v], -1))
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-4)
