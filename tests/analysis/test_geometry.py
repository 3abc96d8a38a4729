"""Anisotropy, self-similarity and intra-sentence similarity against loops over pairs of vectors."""

from itertools import combinations

import pytest
import torch
from commands import tiny_pair
from torch.nn import functional as F

from hf_ctxmodels.analysis.geometry import measure_geometry
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.errors import CtxError

SENTENCES = [
    text.split()
    for text in (
        "the cat saw the river",
        "a \x00 cat",
        "the river bank",
        "the cat of the bank saw a cat",
        "",
        "bank",
    )
]


@pytest.fixture(scope="module")
def encoder() -> WordEncoder:
    return WordEncoder(*tiny_pair("bert", "AutoModel", [" ".join(words) for words in SENTENCES]))


def test_similarities_equal_means_over_pairs(encoder):
    encoded = list(encoder.encode(SENTENCES))
    geometry = measure_geometry(encoder, SENTENCES, min_occurrences=3, seeds=(0, 1))
    assert geometry.words == ["the", "cat", "bank"]
    for word, similarities in zip(geometry.words, geometry.self_similarity, strict=True):
        vectors = [
            vector
            for sentence in encoded
            for text, vector in zip(sentence.words, sentence.vectors, strict=True)
            if text == word
        ]
        cosines = [F.cosine_similarity(a, b, dim=-1) for a, b in combinations(vectors, 2)]
        torch.testing.assert_close(similarities.float(), torch.stack(cosines).mean(0))
    means = []
    for sentence in encoded:
        if len(sentence.words) > 1:
            vectors = sentence.vectors[sentence.has_tokens]
            means.append(F.cosine_similarity(vectors, vectors.mean(0, keepdim=True), dim=-1).mean(0))
    assert geometry.num_sentences == len(means) == 4
    torch.testing.assert_close(geometry.intra_sentence.float(), torch.stack(means).mean(0))


def test_anisotropy_samples_one_word_per_sentence(encoder, monkeypatch):
    """Sampled words without tokens are excluded."""
    sample = {0: 1, 1: 1, 2: 2, 5: 0}
    monkeypatch.setattr("hf_ctxmodels.analysis.geometry._sample_words", lambda sentences, size, seed: sample)
    geometry = measure_geometry(encoder, SENTENCES, min_occurrences=3)
    vectors = [sentence.vectors[sample[number]] for number, sentence in enumerate(encoder.encode(SENTENCES))
               if number in sample and number != 1]  # fmt: skip
    cosines = torch.stack([F.cosine_similarity(a, b, dim=-1) for a, b in combinations(vectors, 2)])
    torch.testing.assert_close(geometry.anisotropy[0].float(), cosines.mean(0))
    products = [F.normalize(a, dim=-1) * F.normalize(b, dim=-1) for a, b in combinations(vectors, 2)]
    torch.testing.assert_close(geometry.dominant_dimension[0].float(), torch.stack(products).mean(0).amax(-1))


def test_static_vectors_do_not_depend_on_context():
    encoder = WordEncoder(*tiny_pair("glove", "AutoModel", [" ".join(words) for words in SENTENCES]))
    geometry = measure_geometry(encoder, SENTENCES, min_occurrences=2)
    torch.testing.assert_close(geometry.self_similarity, torch.ones_like(geometry.self_similarity), atol=1e-6, rtol=0)
    with pytest.raises(CtxError, match="do not suffice"):
        measure_geometry(encoder, SENTENCES, min_occurrences=9)
