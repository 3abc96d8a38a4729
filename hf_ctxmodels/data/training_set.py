"""Training examples of documents, a set, a stream, or a mixture; and exponential sampling of languages.

With n_i sentences of language i and p_i = n_i / sum(n), language i is sampled with probability q_i = p_i^alpha /
sum(p^alpha) (Lample & Conneau 2019, section 3.1; Conneau et al. 2020, section 3.1). XLM uses alpha = 0.5 for its
vocabulary and 0.7 for training, XLM-R 0.3 for both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import Documents, DocumentTexts
from hf_ctxmodels.data.examples import DocumentStream, ExampleBuilder, ExampleSet, ExampleStream
from hf_ctxmodels.data.mixtures import Mixture, SampledMixture, SampledStream, ScheduledMixture


@dataclass(frozen=True)
class SamplingPolicy:
    """The order of an objective's examples in training, by default shuffled.

    Attributes:
        contiguous: Consecutive examples are contiguous text, for models with a memory or recurrent state
            (`ContiguousBatchSampler`).
        task_column: Column with the number of the task. Each optimizer step then has examples of one random task
            (`SampledMixture`).
        task_periods: Task -> period in steps, instead of random choices.
        task_stages: For each of several stages task -> number of steps (`ScheduledMixture`), instead of random choices.
    """

    contiguous: bool = False
    task_column: str | None = None
    task_periods: Mapping[int, int] = field(default_factory=dict)
    task_stages: tuple[Mapping[int, int], ...] = ()


def build_training_set(
    documents: Iterable[list[str]],
    objective: ExampleBuilder,
    policy: SamplingPolicy = SamplingPolicy(),
    *,
    streaming: bool = False,
    alpha: float | None = None,
    seed: int = 0,
) -> ExampleSet | ExampleStream | Mixture:
    """Examples of an objective, in memory or as a stream, for `training_loader`.

    Args:
        documents: Read once, or once per epoch when streaming.
        policy: The objective's policy; several tasks cannot be streamed.
        streaming: Make the examples during training, for text that exceeds memory.
        alpha: Exponent of sampling the sources of the documents, one per language (see the module): examples of a small
            language are repeated, in a new order and with new masks in every pass. None for all text once per epoch.
        seed: Seed of sampling a stream by `alpha`.
    """
    if alpha is not None:
        if policy != SamplingPolicy():
            raise CtxError(
                "The objective defines the order of its examples (contiguous text, or one task per step), so they "
                "cannot be sampled by language.",
                location="--sampling_alpha",
                hint="omit it, or disable the memory of the model (memory_length=0, carry=false).",
            )
        sources = _split_sources(documents)
        if streaming:
            probabilities = sampling_probabilities([_count_sentences(source) for source in sources], alpha)
            return SampledStream([DocumentStream(source, objective) for source in sources], probabilities, seed)
        datasets, sizes = [], []
        for source in sources:
            sizes.append(0)
            datasets.append(ExampleSet.build(objective.examples(_counted(source, sizes))))
        return SampledMixture(datasets, probabilities=sampling_probabilities(sizes, alpha), is_per_example=True)
    if policy.task_column is not None and streaming:
        raise CtxError(
            "The objective samples a task for each step, which requires all examples in memory.",
            location="--streaming",
            hint="omit it.",
        )
    if streaming:
        return DocumentStream(documents, objective)
    before = dict(objective.statistics)
    examples = ExampleSet.build(objective.examples(documents))
    examples.statistics = {name: value - before.get(name, 0) for name, value in objective.statistics.items()}
    objective.check(examples)
    if policy.task_column is None:
        return examples
    if policy.task_stages:
        return ScheduledMixture.by_column(examples, policy.task_column, policy.task_stages)
    return SampledMixture.by_column(examples, policy.task_column, policy.task_periods)


def sampling_probabilities(sizes: Sequence[float] | np.ndarray, alpha: float) -> np.ndarray:
    """(languages,) probabilities q_i of languages with sizes n_i > 0; raises CtxError unless `alpha` is in [0, 1]."""
    if not 0 <= alpha <= 1:
        raise CtxError(f"sampling_alpha={alpha} is out of range.", hint="use 0 (equal shares) to 1 (as in the text).")
    weights = (np.asarray(sizes, dtype=np.float64) / np.sum(sizes)) ** alpha
    return weights / weights.sum()


def _counted(documents: Iterable[list[str]], sizes: list[int]) -> Iterator[list[str]]:
    """The documents; adds their sentences to the last of the sizes while they are read."""
    for document in documents:
        sizes[-1] += len(document)
        yield document


@dataclass(frozen=True)
class ResampledDocuments:
    """Text for training a vocabulary: several sources in shares by `alpha`, with the same total number of sentences.

    Documents are repeated or skipped at a constant rate per source, without randomness, and sources are read one after
    the other. Iterating raises CtxError if there is one source, or alpha is out of range.
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
