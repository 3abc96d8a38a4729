"""Sentence vectors of raw texts equal the ones of the package laserembeddings, which contains LASER's code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ctxmodels.conversion.laser import build_laser, read_encoder
from hf_ctxmodels.conversion.released_files import read_codes

_REASON = "pip install laserembeddings"
encoder: Any = pytest.importorskip("laserembeddings.encoder", reason=_REASON)
preprocessing: Any = pytest.importorskip("laserembeddings.preprocessing", reason=_REASON)

CODES = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "n</w>")]
TEXTS = {
    "en": [
        "Hello, World! It's a \u201ctest\u201d... (and) the cat don't $5.50",
        "3,000 U.S. well-known e.g. that",
        "",
    ],
    "de": ["Das ist ein \u201eTest\u201c \u2013 mit Umlauten: sch\u00f6n, z.B. hier; 1.000,5 km/h."],
    "fr": ["C'est l'\u00e9t\u00e9, n'est-ce pas ? \u00ab\u00a0Oui\u00a0\u00bb !"],
}


def test_vectors_of_raw_texts(tmp_path: Path) -> None:
    (tmp_path / "codes").write_text("".join(f"{first} {second} 9\n" for first, second in CODES))
    tokenizers = {language: preprocessing.Tokenizer(language) for language in TEXTS}
    split_texts = [tokenizers[language].tokenize(text) for language, texts in TEXTS.items() for text in texts]
    characters = sorted({character for text in split_texts for character in text if not character.isspace()})
    subwords = [*characters, *(f"{character}@@" for character in characters), "the", "don", "cat"]
    subwords += ["th@@", "do@@", "ca@@"]  # the reference splits subwords that its vocabulary lacks
    vocabulary = tmp_path / "vocabulary"
    vocabulary.write_text("".join(f"{subword} 9\n" for subword in subwords))
    bpe = preprocessing.BPE(str(tmp_path / "codes"), str(vocabulary))

    torch.manual_seed(0)
    dictionary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *subwords])}
    params = {"num_embeddings": len(dictionary), "padding_idx": 1, "embed_dim": 6, "hidden_size": 5}
    params |= {"num_layers": 2, "bidirectional": True}
    weights = encoder.Encoder(**params).state_dict()
    torch.save({"params": params, "model": weights, "dictionary": dictionary}, tmp_path / "encoder.pt")
    reference = encoder.SentenceEncoder(str(tmp_path / "encoder.pt"), max_tokens=100, cpu=True)
    expected = torch.from_numpy(reference.encode_sentences([bpe.encode_tokens(text) for text in split_texts]))

    model, tokenizer = build_laser(read_encoder(tmp_path / "encoder.pt"), read_codes(tmp_path / "codes"))
    vectors = []
    for language, texts in TEXTS.items():
        tokenizer.moses_language = language
        vectors.append(model.encode(texts, tokenizer))
    torch.testing.assert_close(torch.cat(vectors), expected, atol=1e-5, rtol=1e-5)
