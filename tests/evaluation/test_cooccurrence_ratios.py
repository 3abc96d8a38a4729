"""Ratios of co-occurrence probabilities, against loops over word pairs and learned by GloVe."""

from pathlib import Path

import pytest
import torch
from commands import command_output, save

from hf_ctxmodels import CtxError, CtxGloveConfig, CtxGloveForPreTraining, CtxGloveTokenizer
from hf_ctxmodels.evaluation.cooccurrence_ratios import cooccurrence_probabilities, learned_ratios, word_ids

DOCUMENTS = [
    ["Ice is a solid .", "ice is cold water"],
    ["steam is a gas .", "steam is hot water .", "water is not a fashion"],
    ["the steam of the ice"],
]
WORDS, PROBES = ["Ice", "steam"], ["solid", "gas", "water", "fashion", "ice"]


@pytest.fixture(scope="module")
def tokenizer() -> CtxGloveTokenizer:
    sentences = [sentence for document in DOCUMENTS for sentence in document]
    return CtxGloveTokenizer.train([*sentences, *["solid gas fashion"] * 2], vocab_size=17, min_count=2)


def probability_by_loops(tokenizer: CtxGloveTokenizer, word: str, probe: str, window: int) -> float:
    """Sums of 1 / distance over the neighbors of `word` that are in the vocabulary."""
    total = probe_sum = 0.0
    for document in DOCUMENTS:
        words = [token for token in tokenizer.tokenize(" ".join(document)) if token != "[UNK]"]
        for i, center in enumerate(words):
            for j, context in enumerate(words):
                if center == word and i != j and abs(i - j) <= window:
                    total += 1 / abs(i - j)
                    probe_sum += (context == probe) / abs(i - j)
    return probe_sum / total


@pytest.mark.parametrize("window", [2, 10])
def test_probabilities_match_loops(tokenizer: CtxGloveTokenizer, window: int) -> None:
    probabilities = cooccurrence_probabilities(tokenizer, DOCUMENTS, WORDS, PROBES, window)
    expected = [[probability_by_loops(tokenizer, word, probe, window) for probe in PROBES] for word in ("ice", "steam")]
    torch.testing.assert_close(probabilities, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (probabilities > 0).any()
    assert (probabilities == 0).any()


@pytest.mark.parametrize("word", ["Snow", "[UNK]"])
def test_unknown_words_raise(tokenizer: CtxGloveTokenizer, word: str) -> None:
    with pytest.raises(CtxError, match="Not in the vocabulary"):
        word_ids(tokenizer, ["ice", word])


def fitted_model(tokenizer: CtxGloveTokenizer) -> CtxGloveForPreTraining:
    """A model that fits random counts X of all cells exactly, with the biases log X_i."""
    torch.manual_seed(0)
    model = CtxGloveForPreTraining(CtxGloveConfig(vocab_size=len(tokenizer), hidden_size=len(tokenizer)))
    counts = torch.rand(len(tokenizer), len(tokenizer)) + 0.1
    with torch.no_grad():
        model.glove.context_embeddings.weight.copy_(torch.eye(len(tokenizer)))
        model.glove.word_embeddings.weight.copy_((counts / counts.sum(1, keepdim=True)).log())
        model.word_bias.weight.copy_(counts.sum(1, keepdim=True).log())
        model.context_bias.weight.zero_()
    return model


def test_learned_ratios(tokenizer: CtxGloveTokenizer) -> None:
    model = fitted_model(tokenizer)
    ice, steam, *probes = word_ids(tokenizer, ["ice", "steam", *PROBES])
    counts = model(torch.tensor([[ice, steam]])).logits[0].exp()
    probabilities = (counts / counts.sum(1, keepdim=True))[:, probes].double()
    ratios = learned_ratios(model.glove, tokenizer, WORDS, PROBES)
    torch.testing.assert_close(ratios, probabilities[0] / probabilities[1], rtol=1e-4, atol=0)


def test_ratios_command(tokenizer: CtxGloveTokenizer, tmp_path: Path) -> None:
    model = save(tmp_path / "model", fitted_model(tokenizer), tokenizer)
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(document) for document in DOCUMENTS))
    flags = {"model": model, "ratios": ["ice,steam", "solid", "water"]}
    lines = command_output("evaluate words", **flags, ratio_text=tmp_path / "text.txt").splitlines()
    assert lines[0].split() == ["k", "P(k|ice)", "P(k|steam)", "ratio", "learned", "ratio"]
    assert lines[1].split()[2:4] == ["0.000e+00", "inf"], "solid does not occur near steam"
    _, ice, steam, ratio, learned = lines[2].split()
    expected = [probability_by_loops(tokenizer, word, "water", 10) for word in ("ice", "steam")]
    assert [float(ice), float(steam)] == pytest.approx(expected, rel=1e-3)
    assert float(ratio) == pytest.approx(expected[0] / expected[1], rel=1e-3)
    learned_ratio = learned_ratios(fitted_model(tokenizer).glove, tokenizer, WORDS, ["water"])
    assert float(learned) == pytest.approx(float(learned_ratio), rel=1e-3)
    assert command_output("evaluate words", **flags).splitlines()[0].split() == ["k", "learned", "ratio"]


@pytest.mark.parametrize("ratios", [["ice,steam"], ["ice", "water"], ["ice,steam,gas", "water"]])
def test_invalid_ratios_raise(tokenizer: CtxGloveTokenizer, ratios: list[str], tmp_path: Path) -> None:
    model = save(tmp_path / "model", fitted_model(tokenizer), tokenizer)
    assert "Expected two words" in command_output("evaluate words", model=model, ratios=ratios, fails=True)


def test_model_without_context_vectors_raises(tokenizer: CtxGloveTokenizer) -> None:
    config = CtxGloveConfig(vocab_size=len(tokenizer), hidden_size=4, context_vectors=False)
    with pytest.raises(CtxError, match="no context vectors"):
        learned_ratios(CtxGloveForPreTraining.encoder_class(config), tokenizer, WORDS, PROBES)
