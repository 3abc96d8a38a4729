"""Similarity measures against published values and plain formulas, and layer comparison of models."""

import numpy as np
import pytest
import scipy.linalg
import torch
from commands import tiny_pair
from torch import Tensor

from hf_ctxmodels.analysis.geometry import measure_geometry
from hf_ctxmodels.analysis.similarity import (
    MEASURES,
    cka_matrix,
    compare_layers,
    independent_correlation,
    linear_cka,
    neuron_matrix,
    svcca_matrix,
)
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES


@pytest.fixture(scope="module")
def pair() -> tuple[Tensor, Tensor]:
    """The data of the notebook published with Kornblith et al. (2019)."""
    generator = np.random.RandomState(1337)
    x = generator.randn(100, 10)
    return torch.from_numpy(x), torch.from_numpy(generator.randn(100, 10) + x)


def test_cka_equals_published_values(pair):
    assert linear_cka(*pair, debiased=False) == pytest.approx(0.55761, abs=5e-6)
    assert linear_cka(*pair) == pytest.approx(0.51346, abs=5e-6)


def test_gram_matrix_cka_equals_feature_space_cka(pair, monkeypatch):
    """Also with row blocks that do not divide the number of examples."""
    x, y = pair
    representations = [x, y, torch.cat([x.square(), y], 1)]
    expected = [[linear_cka(a, b) for a in representations] for b in representations]
    for block in (2**25, 3 * 100 * 7):
        monkeypatch.setattr("hf_ctxmodels.analysis.similarity._MAX_BLOCK", block)
        torch.testing.assert_close(cka_matrix(representations), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("measure", MEASURES)
def test_invariance_of_measures(measure, pair):
    """Invariant to scale and translation; CKA and SVCCA to rotation, neuron correlation only to permutation."""
    x, y = pair
    rotation = torch.linalg.qr(torch.randn(10, 10, dtype=x.dtype, generator=torch.Generator().manual_seed(0)))[0]
    if measure == "neurons":
        rotation = torch.eye(10, dtype=x.dtype)[torch.arange(10).roll(3)]
    matrix = MEASURES[measure]([x, y, -3 * x @ rotation + 5])
    torch.testing.assert_close(matrix[0, 1:], torch.stack([matrix[2, 1], matrix.new_tensor(1)]))
    assert matrix[0, 1] < 0.9


def test_debiased_cka_of_independent_representations():
    """Debiased CKA is 0 in expectation, unlike plain CKA."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 500, 256, generator=generator)
    assert abs(float(cka_matrix([x, y])[0, 1])) < 0.01
    assert linear_cka(x, y, debiased=False) > 0.3


def test_svcca_of_all_components_equals_cca(pair):
    """Square roots of the eigenvalues of the generalized eigenproblem of CCA (Hotelling 1936)."""
    x, y = ((tensor - tensor.mean(0)).numpy() for tensor in (pair[0], pair[1][:, :4]))
    cov_xx, cov_xy = x.T @ x, x.T @ y
    eigenvalues = scipy.linalg.eigh(cov_xy.T @ np.linalg.solve(cov_xx, cov_xy), y.T @ y, eigvals_only=True)
    padded = torch.nn.functional.pad(pair[0], (0, 3))
    matrix = svcca_matrix([padded, pair[1][:, :4]], variance=1.0)
    assert float(matrix[0, 1]) == pytest.approx(np.sqrt(eigenvalues).mean())
    with pytest.raises(CtxError, match="8 words do not suffice"):
        svcca_matrix([tensor[:8] for tensor in pair])


def test_neuron_correlations(pair):
    """Rows and columns are means over different neurons; constant neurons are excluded."""
    x, y = pair
    correlations = np.abs(np.corrcoef(x.T, y.T)[:10, 10:])
    matrix = neuron_matrix([torch.nn.functional.pad(x, (0, 2), value=1.5), y])
    assert float(matrix[0, 1]) == pytest.approx(correlations.max(1).mean())
    assert float(matrix[1, 0]) == pytest.approx(correlations.max(0).mean())


@pytest.mark.parametrize("words", [4, 8, 60, 1000])
def test_neuron_correlations_of_independent_representations(words):
    representations = torch.randn(6, words, 48, generator=torch.Generator().manual_seed(0))
    similarities = neuron_matrix(list(representations))[~torch.eye(6, dtype=torch.bool)]
    assert float(similarities.mean()) == pytest.approx(independent_correlation(words, 48), rel=0.1)


def test_compare_layers_of_different_tokenizers():
    """Only words that have tokens in all models are compared; a model is equal to itself."""
    texts = [
        f"{subject} {verb} the {noun} near \x00 {place}"
        for subject in ("cats", "dogs") for verb in ("see", "like") for noun in ("river", "bank") for place in "abc"
    ]  # fmt: skip
    sentences = [text.split(" ") for text in texts]
    encoders = [WordEncoder(*tiny_pair(family, "AutoModel", texts)) for family in ("bert", "gpt2", "glove")]
    result = compare_layers(encoders, sentences, max_words=60, seeds=(0, 1))
    assert result.models == [0] * 4 + [1] * 4 + [2]
    assert result.layers == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert result.matrices["cka"].shape == (2, 9, 9)
    assert 40 < result.words < 60
    repeated = compare_layers([encoders[0], encoders[0]], sentences, max_words=60).matrices["cka"][0]
    torch.testing.assert_close(repeated[:4, :4], repeated[4:, :4])
    torch.testing.assert_close(repeated.diagonal(), torch.ones(8, dtype=torch.float64))
    all_words = compare_layers([encoders[0]], sentences, max_words=10**6)
    corpus = encoders[0].encode_corpus(sentences, progress=False)
    states = corpus.vectors[corpus.has_tokens]
    assert float(all_words.matrices["cka"][0][0, 3]) == pytest.approx(linear_cka(states[:, 0], states[:, 3]), abs=1e-4)


@pytest.mark.slow
def test_all_families_in_one_matrix():
    texts = [f"{subject} {verb} the {noun}" for subject in ("cats", "dogs") for verb in ("see", "like", "paint")
             for noun in ("river", "bank", "house")]  # fmt: skip
    sentences = [text.split() for text in texts]
    encoders = [WordEncoder(*tiny_pair(family, "AutoModel", texts)) for family in FAMILIES]
    result = compare_layers(encoders, sentences, max_words=60)
    assert [*dict.fromkeys(result.models)] == list(range(len(FAMILIES)))
    matrix = result.matrices["cka"][0]
    torch.testing.assert_close(matrix.diagonal(), torch.ones(len(matrix), dtype=torch.float64))
    for encoder in encoders:
        assert measure_geometry(encoder, sentences).self_similarity.isfinite().all()
