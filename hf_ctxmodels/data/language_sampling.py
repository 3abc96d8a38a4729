"""Exponential sampling of languages (Lample & Conneau 2019, section 3.1; Conneau et al. 2020, section 3.1).

With n_i sentences of language i and p_i = n_i / sum(n), language i is sampled with probability q_i = p_i^alpha /
sum(p^alpha). XLM uses alpha = 0.5 for its vocabulary and 0.7 for training, XLM-R 0.3 for both.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import Documents, DocumentTexts
from hf_ctxmodels.data.examples import DocumentStream, ExampleBuilder, ExampleSet
from hf_ctxmodels.data.mixtures import SampledMixture, SampledStream


def sampling_probabilities(sizes: Sequence[float] | np.ndarray, alpha: float) -> np.ndarray:
    """(languages,) probabilities q_i of languages with sizes n_i > 0; raises CtxError unless `alpha` is in [0, 1]."""
    if not 0 <= alpha <= 1:
        raise CtxError(f"sampling_alpha={alpha} is out of range.", hint="use 0 (equal shares) to 1 (as in the text).")
    weights = (np.asarray(sizes, dtype=np.float64) / np.sum(sizes)) ** alpha
    return weights / weights.sum()


def multilingual_training_set(
    documents: Iterable[list[str]], objective: ExampleBuilder, alpha: float, *, seed: int, streaming: bool = False
) -> SampledMixture | SampledStream:
    """Examples of several sources, one per language, sampled by `alpha`.

    Examples of a small language are repeated, in a new order and with new masks in every pass; the examples of a large
    one are used over several epochs.

    Args:
        documents: `Documents` of several sources, read once to count sentences when streaming.
        objective: The objective.
        alpha: See the module.
        seed: Seed of sampling a stream; examples in memory are sampled by their loader.
        streaming: Make the examples during training.

    Raises:
        CtxError: There is one source, a source has no example, or alpha is out of range.
    """
    sources = _split_sources(documents)
    if streaming:
        probabilities = sampling_probabilities([_count_sentences(source) for source in sources], alpha)
        return SampledStream([DocumentStream(source, objective) for source in sources], probabilities, seed)
    counting = [_CountingDocuments(source) for source in sources]
    datasets = [ExampleSet.build(objective.examples(source)) for source in counting]
    probabilities = sampling_probabilities([source.sentences for source in counting], alpha)
    return SampledMixture(datasets, probabilities=probabilities, is_per_example=True)


@dataclass(frozen=True)
class ResampledDocuments:
    """Text for training a vocabulary: several sources in shares by `alpha`, with the same total number of sentences.

    Documents are repeated or skipped at a constant rate per source, without randomness, and sources are read one after
    the other.

    Attributes:
        documents: Documents of several sources.
        alpha: See the module.

    Raises:
        CtxError: While iterating, there is one source, or alpha is out of range.
    """

    documents: Documents
    alpha: float

    @cached_property
    def _rates(self) -> list[tuple[Documents, float]]:
        """Each source and the rate of its sentences. Reads all sources once."""
        sources = _split_sources(self.documents)
        sizes = np.array([_count_sentences(source) for source in sources])
        rates = sampling_probabilities(sizes, self.alpha) * sizes.sum() / sizes
        return list(zip(sources, rates.tolist(), strict=True))

    def __iter__(self) -> Iterator[list[str]]:
        for source, rate in self._rates:
            due = 0.5  # sentences; rounds to the nearest
            for document in source:
                due += rate * len(document)
                while due >= len(document):
                    yield document
                    due -= len(document)

    def texts(self) -> DocumentTexts:
        """The documents as strings, see `Documents.texts`."""
        return DocumentTexts(self)


@dataclass
class _CountingDocuments:
    """Documents that count their sentences while they are read."""

    documents: Iterable[list[str]]
    sentences: int = 0

    def __iter__(self) -> Iterator[list[str]]:
        self.sentences = 0
        for document in self.documents:
            self.sentences += len(document)
            yield document


def _split_sources(documents: Iterable[list[str]]) -> list[Documents]:
    sources = documents.by_source() if isinstance(documents, Documents) else []
    if len(sources) < 2:
        raise CtxError(
            "Sampling by language requires several datasets.",
            location="--sampling_alpha",
            hint="set --dataset to a file or Hub id for each language.",
        )
    return sources


def _count_sentences(documents: Iterable[list[str]]) -> int:
    return sum(map(len, documents))
