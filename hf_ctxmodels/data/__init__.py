"""From text to training examples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.epochs import EpochBatchSampler
from hf_ctxmodels.data.examples import DocumentStream, ExampleSet, ExampleStream
from hf_ctxmodels.data.language_sampling import ResampledDocuments, sampling_probabilities
from hf_ctxmodels.data.loaders import (
    ContiguousBatchSampler,
    ContiguousStream,
    ShuffledStream,
    training_loader,
)
from hf_ctxmodels.data.mixtures import (
    Mixture,
    MixtureBatchSampler,
    ReweightedMixture,
    RoundRobinMixture,
    SampledMixture,
    SampledStream,
    ScheduledMixture,
    ShuffledMixture,
)
from hf_ctxmodels.data.training_set import SamplingPolicy, build_training_set
from hf_ctxmodels.data.unlabelled import UnlabelledCollator, mark_unlabelled

if TYPE_CHECKING:
    from hf_ctxmodels.data.arguments import DataArguments
    from hf_ctxmodels.data.document_sources import load_documents

__all__ = [
    "ContiguousBatchSampler",
    "ContiguousStream",
    "DataArguments",
    "DocumentStream",
    "Documents",
    "EpochBatchSampler",
    "ExampleSet",
    "ExampleStream",
    "Mixture",
    "MixtureBatchSampler",
    "ResampledDocuments",
    "ReweightedMixture",
    "RoundRobinMixture",
    "SampledMixture",
    "SampledStream",
    "SamplingPolicy",
    "ScheduledMixture",
    "ShuffledMixture",
    "ShuffledStream",
    "UnlabelledCollator",
    "build_training_set",
    "load_documents",
    "mark_unlabelled",
    "sampling_probabilities",
    "training_loader",
]

# What reads files imports the readers of all tasks, which a model does not need.
_READERS = {"DataArguments": "hf_ctxmodels.data.arguments", "load_documents": "hf_ctxmodels.data.document_sources"}


def __getattr__(name: str) -> Any:
    """Import what reads files when it is asked for."""
    if name not in _READERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_READERS[name]), name)
