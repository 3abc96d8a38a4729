"""Documents, tokenized examples, and their order in training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_ctxmodels.data.batch_samplers import ContiguousBatchSampler, EpochBatchSampler, MixtureBatchSampler
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.examples import DocumentStream, ExampleSet, ExampleStream
from hf_ctxmodels.data.language_sampling import ResampledDocuments, sampling_probabilities
from hf_ctxmodels.data.loaders import ContiguousStream, ShuffledStream, training_loader
from hf_ctxmodels.data.mixtures import (
    Mixture,
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

# Modules that read files are imported on access: models do not need them.
_READERS = {"DataArguments": "hf_ctxmodels.data.arguments", "load_documents": "hf_ctxmodels.data.document_sources"}


def __getattr__(name: str) -> Any:
    """Import modules that read files on first access."""
    if name not in _READERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_READERS[name]), name)
