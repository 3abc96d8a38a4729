"""From documents to what training draws its examples from: a set, a stream, or a mixture."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.examples import DocumentStream, ExampleMaker, ExampleSet, ExampleStream
from hf_ctxmodels.data.mixtures import SampledMixture
from hf_ctxmodels.data.multilingual import multilingual_training_set


@dataclass(frozen=True)
class SamplingPolicy:
    """In which order training draws the examples of an objective: shuffled unless one of the attributes is set.

    Attributes:
        contiguous: each example continues the text of the one before it. Training keeps that order in every row of a
            batch, so that a model with a memory or recurrent state can carry it (`ContiguousBatchSampler`).
        task_column: the column of an example that holds the number of its task. Each optimizer step then has examples
            of one task alone, drawn at random (`SampledMixture`).
        task_periods: task -> one in how many steps it has, in place of random draws.
    """

    contiguous: bool = False
    task_column: str | None = None
    task_periods: Mapping[int, int] = field(default_factory=dict)


def build_training_set(
    documents: Iterable[list[str]],
    objective: ExampleMaker,
    policy: SamplingPolicy = SamplingPolicy(),
    *,
    streaming: bool = False,
    alpha: float | None = None,
    seed: int = 0,
) -> ExampleSet | ExampleStream | SampledMixture:
    """Examples of an objective, in memory or as a stream, for `training_loader`.

    Args:
        documents: read once, or once per epoch when streaming.
        objective: makes the examples.
        policy: the objective's; a stream of several tasks is not possible.
        streaming: make the examples while training, for text that exceeds memory.
        alpha: draw examples from the documents' sources by this exponent (see `data.multilingual`); None for all text
            once per epoch.
        seed: of draws from a stream by `alpha`.

    Raises:
        CtxError: no document gives an example, or the policy does not allow what is asked for.
    """
    if alpha is not None:
        if policy != SamplingPolicy():
            raise CtxError(
                "The objective's examples have an order of their own (contiguous rows, or one task a step), so that "
                "they cannot be drawn by language.",
                location="--sampling_alpha",
                hint="leave it out, or for contiguous rows switch the memory off.",
            )
        return multilingual_training_set(documents, objective, alpha, seed=seed, streaming=streaming)
    if policy.task_column is not None and streaming:
        raise CtxError(
            "The objective draws a task for each step, which needs all examples in memory.",
            location="--streaming",
            hint="leave it out.",
        )
    if streaming:
        return DocumentStream(documents, objective)
    before = dict(objective.statistics)
    examples = ExampleSet.build(objective.examples(documents))
    examples.statistics = {name: value - before.get(name, 0) for name, value in objective.statistics.items()}
    if policy.task_column is None:
        return examples
    return SampledMixture.by_column(examples, policy.task_column, policy.task_periods)
