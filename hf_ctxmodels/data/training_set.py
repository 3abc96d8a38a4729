"""Training examples of documents: a set, a stream, or a mixture."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.examples import DocumentStream, ExampleBuilder, ExampleSet, ExampleStream
from hf_ctxmodels.data.language_sampling import multilingual_training_set
from hf_ctxmodels.data.mixtures import Mixture, SampledMixture, ScheduledMixture


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
        objective: The objective.
        policy: The objective's policy; several tasks cannot be streamed.
        streaming: Make the examples during training, for text that exceeds memory.
        alpha: Exponent of sampling the sources of the documents (see `data.language_sampling`); None for all text once
            per epoch.
        seed: Seed of sampling a stream by `alpha`.

    Raises:
        CtxError: There is no example, or the policy does not allow the other arguments.
    """
    if alpha is not None:
        if policy != SamplingPolicy():
            raise CtxError(
                "The objective defines the order of its examples (contiguous text, or one task per step), so they "
                "cannot be sampled by language.",
                location="--sampling_alpha",
                hint="omit it, or disable the memory of the model (memory_length=0, carry=false).",
            )
        return multilingual_training_set(documents, objective, alpha, seed=seed, streaming=streaming)
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
