"""Documents, tokenized examples, and their order in training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.examples import DocumentStream, ExampleSet, ExampleStream
from hf_ctxmodels.data.mixtures import (
    Mixture,
    ReweightedMixture,
    RoundRobinMixture,
    SampledMixture,
    SampledStream,
    ScheduledMixture,
    ShuffledMixture,
)
from hf_ctxmodels.data.padding import UnlabelledCollator, mark_unlabelled
from hf_ctxmodels.data.training_set import (
    ContiguousBatchSampler,
    ContiguousStream,
    EpochBatchSampler,
    MixtureBatchSampler,
    ResampledDocuments,
    SamplingPolicy,
    ShuffledStream,
    build_training_set,
    sampling_probabilities,
    training_loader,
)

if TYPE_CHECKING:
    from hf_ctxmodels.data.document_sources import DataArguments, load_documents


def __getattr__(name: str) -> Any:
    """Import the modules that read files on first access: models do not need them."""
    if name not in ("DataArguments", "load_documents"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("hf_ctxmodels.data.document_sources"), name)
