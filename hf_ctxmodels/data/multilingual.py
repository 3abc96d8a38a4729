"""Languages of unequal size, sampled by an exponent (Lample & Conneau 2019, section 3.1; Conneau et al. 2020, 3.1).

With n_i sentences of language i and p_i = n_i / sum(n), language i is sampled with probability q_i = p_i^alpha /
sum(p^alpha). alpha = 1 keeps the languages' shares of the text, alpha = 0 makes them equal. XLM has 0.5 for its
vocabulary and 0.7 for training, XLM-R has 0.3 for both.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import Documents, DocumentTexts
from hf_ctxmodels.data.examples import DocumentStream, ExampleMaker, ExampleSet
from hf_ctxmodels.data.mixtures import SampledMixture, SampledStream


def sampling_probabilities(sizes: Sequence[float] | np.ndarray, alpha: float) -> np.ndarray:
    """(languages,) the probability q_i of each; see the module.

    Args:
        sizes: n_i, in sentences or any other unit; all above 0.
        alpha: from 0 to 1.

    Raises:
        CtxError: alpha is out of range.
    """
    if not 0 <= alpha <= 1:
        raise CtxError(f"sampling_alpha={alpha} is out of range.", hint="use 0 (equal shares) to 1 (as in the text).")
    weights = (np.asarray(sizes, dtype=np.float64) / np.sum(sizes)) ** alpha
    return weights / weights.sum()


def multilingual_training_set(
    documents: Iterable[list[str]], objective: ExampleMaker, alpha: float, *, seed: int, streaming: bool = False
) -> SampledMixture | SampledStream:
    """Examples of several sources, one for each language, of which training draws each example by `alpha`.

    An example holds text of one source. Examples of a small language are repeated, in every pass in another order and
    with other masks; those of a large one are all used, over several epochs.

    Args:
        documents: `Documents` of several sources. When streaming they are read once to count sentences.
        objective: makes the examples.
        alpha: see the module.
        seed: of the draws from a stream; a set is drawn from by the seed of its loader.
        streaming: make the examples while training.

    Raises:
        CtxError: there is one source, or one without an example, or alpha is out of range.
    """
    parts = _several(documents)
    if streaming:
        probabilities = sampling_probabilities([_count_sentences(part) for part in parts], alpha)
        return SampledStream([DocumentStream(part, objective) for part in parts], probabilities, seed)
    counted = [_Counted(part) for part in parts]
    sets = [ExampleSet.build(objective.examples(part)) for part in counted]
    probabilities = sampling_probabilities([part.sentences for part in counted], alpha)
    return SampledMixture(sets, probabilities=probabilities, by_example=True)


@dataclass(frozen=True)
class ResampledDocuments:
    """As many sentences as there are in several sources, in shares by `alpha`: text to train a vocabulary on.

    Each document is given as often as its source's share asks for, on average: of a large language every n-th one, of a
    small one each several times. Nothing is drawn at random, and sources are read one after the other.

    Attributes:
        documents: of several sources.
        alpha: see the module.

    Raises:
        CtxError: while iterating, there is one source, or alpha is out of range.
    """

    documents: Documents
    alpha: float

    @cached_property
    def _rates(self) -> list[tuple[Documents, float]]:
        """Each source, and how often each of its sentences is given. Reads all of them once."""
        parts = _several(self.documents)
        sizes = np.array([_count_sentences(part) for part in parts])
        rates = sampling_probabilities(sizes, self.alpha) * sizes.sum() / sizes
        return list(zip(parts, rates.tolist(), strict=True))

    def __iter__(self) -> Iterator[list[str]]:
        for part, rate in self._rates:
            due = 0.5  # sentences; so that rounding is to the nearest
            for document in part:
                due += rate * len(document)
                while due >= len(document):
                    yield document
                    due -= len(document)

    def texts(self) -> DocumentTexts:
        """See `Documents.texts`."""
        return DocumentTexts(self)


@dataclass
class _Counted:
    """Documents, and the number of their sentences once they are read."""

    documents: Iterable[list[str]]
    sentences: int = 0

    def __iter__(self) -> Iterator[list[str]]:
        self.sentences = 0
        for document in self.documents:
            self.sentences += len(document)
            yield document


def _several(documents: Iterable[list[str]]) -> list[Documents]:
    parts = documents.parts() if isinstance(documents, Documents) else []
    if len(parts) < 2:
        raise CtxError(
            "Sampling by language needs several data sets.",
            location="--sampling_alpha",
            hint="give --dataset a file or Hub id for each language.",
        )
    return parts


def _count_sentences(documents: Iterable[list[str]]) -> int:
    return sum(map(len, documents))
