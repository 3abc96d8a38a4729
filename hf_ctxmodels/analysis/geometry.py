"""Geometry of contextual vectors by layer (Ethayarajh 2019, arXiv 1909.00512, section 3).

The mean cosine of all pairs of n unit vectors u is (|sum u|^2 - n) / (n (n - 1)): the measures need only sums of unit
vectors, are exact, and a corpus of any size is encoded once, in constant memory.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.architectures.word_alignment import Sentence, split_words
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError

_MAX_TYPES = 5000  # words whose self-similarity is measured; more are sampled


@dataclass(frozen=True)
class LayerGeometry:
    """Mean cosines by layer. Subtract the anisotropy to correct the similarities, as the paper does.

    Attributes:
        layers: Numbers of the layers (0: embeddings).
        anisotropy: (samples, layers) mean cosine of words of different sentences.
        dominant_dimension: (samples, layers) part of the anisotropy that is due to one dimension, the largest one
            (Timkey & van Schijndel 2021, arXiv 2109.04404).
        self_similarity: (words, layers) mean cosine of the occurrences of each word.
        intra_sentence: (layers,) mean cosine of a word and the mean vector of its sentence.
        words: The words of `self_similarity`, the most frequent one first.
        num_sentences: Number of sentences of `intra_sentence`.
    """

    layers: tuple[int, ...]
    anisotropy: Tensor
    dominant_dimension: Tensor
    self_similarity: Tensor
    intra_sentence: Tensor
    words: list[str]
    num_sentences: int


def mean_cosine(sums: Tensor, counts: Tensor | int) -> Tensor:
    """Mean cosine of all pairs of different vectors, from the (..., hidden) sums of unit vectors and their number."""
    return (sums.double().square().sum(-1) - counts) / (counts * (counts - 1))


def measure_geometry(
    encoder: WordEncoder,
    sentences: Sequence[Sentence],
    *,
    min_occurrences: int = 5,
    sample_size: int = 1000,
    seeds: Sequence[int] = (0,),
) -> LayerGeometry:
    """Anisotropy, self-similarity and intra-sentence similarity of all layers.

    Args:
        encoder: Model with its tokenizer.
        sentences: Texts or lists of words.
        min_occurrences: Occurrences of a word, case included, whose self-similarity is measured.
        sample_size: Sentences, with one word each, for the anisotropy.
        seeds: Seeds of these samples.

    Raises:
        CtxError: Fewer than two sentences have a word with tokens, or no word is frequent enough.
    """
    word_lists = list(map(split_words, sentences))
    frequencies = Counter(word for words in word_lists for word in words)
    types = [word for word, count in frequencies.most_common() if count >= max(2, min_occurrences)]
    if len(types) > _MAX_TYPES:
        selected = set(random.Random(0).sample(types, _MAX_TYPES))
        types = [word for word in types if word in selected]
    rows = {word: row for row, word in enumerate(types)}
    samples = [_sample_words(word_lists, sample_size, seed) for seed in seeds]

    shape = len(encoder.layers), encoder.hidden_size
    type_sums, type_counts = torch.zeros(len(types), *shape), torch.zeros(len(types), 1, dtype=torch.long)
    sample_vectors: list[list[Tensor]] = [[] for _ in seeds]
    sentence_sum, num_sentences = torch.zeros(shape[0], dtype=torch.float64), 0
    encoded = encoder.encode(sentences)
    for number, sentence in enumerate(progress_bar(encoded, "encoding", unit="sentences", total=len(sentences))):
        vectors = sentence.vectors.float()
        unit_vectors = F.normalize(vectors, dim=-1)
        has_tokens = sentence.has_tokens.tolist()
        for sample, sample_units in zip(samples, sample_vectors):
            word = sample.get(number)
            if word is not None and has_tokens[word]:
                sample_units.append(unit_vectors[word])
        positions = [word for word, text in enumerate(sentence.words) if has_tokens[word] and text in rows]
        indices = torch.tensor([rows[sentence.words[word]] for word in positions], dtype=torch.long)
        type_sums.index_add_(0, indices, unit_vectors[positions])
        type_counts.index_add_(0, indices, torch.ones(len(positions), 1, dtype=torch.long))
        if sum(has_tokens) > 1:
            mean = vectors[sentence.has_tokens].mean(0, keepdim=True)
            cosines = F.cosine_similarity(vectors[sentence.has_tokens], mean, dim=-1)
            sentence_sum += cosines.mean(0)
            num_sentences += 1

    is_measured = type_counts[:, 0] > 1
    if not is_measured.any() or not num_sentences or min(map(len, sample_vectors)) < 2:
        raise CtxError(
            f"{len(sentences)} sentences with {len(types)} words of {min_occurrences} occurrences do not suffice.",
            location="min_occurrences",
            hint="use more text, or a lower min_occurrences.",
        )
    anisotropy, dominant = zip(*(_anisotropy(torch.stack(units)) for units in sample_vectors))
    return LayerGeometry(
        layers=encoder.layers,
        anisotropy=torch.stack(anisotropy),
        dominant_dimension=torch.stack(dominant),
        self_similarity=mean_cosine(type_sums, type_counts)[is_measured],
        intra_sentence=sentence_sum / num_sentences,
        words=[word for word, measured in zip(types, is_measured.tolist()) if measured],
        num_sentences=num_sentences,
    )


def _sample_words(sentences: Sequence[Sequence[str]], size: int, seed: int) -> dict[int, int]:
    """Sentences and one word of each, so that no two words are of the same sentence."""
    generator = random.Random(seed)
    numbers = [number for number, sentence in enumerate(sentences) if sentence]
    selected = generator.sample(numbers, min(size, len(numbers)))
    return {number: generator.randrange(len(sentences[number])) for number in selected}


def _anisotropy(unit_vectors: Tensor) -> tuple[Tensor, Tensor]:
    """(words, layers, hidden) unit vectors -> (layers,) mean cosine, and the largest contribution of one dimension."""
    n = len(unit_vectors)
    unit_vectors = unit_vectors.double()
    products = (unit_vectors.sum(0).square() - unit_vectors.square().sum(0)) / (n * (n - 1))
    return products.sum(-1), products.amax(-1)
