"""From text to training examples."""

from hf_ctxmodels.data.arguments import DataArguments
from hf_ctxmodels.data.documents import Documents, load_documents
from hf_ctxmodels.data.examples import ExampleSet, ExampleStream, build_training_set
from hf_ctxmodels.data.sampling import (
    EpochBatchSampler,
    LaneBatchSampler,
    LaneStream,
    ShuffledStream,
    training_loader,
)

__all__ = [
    "DataArguments",
    "Documents",
    "EpochBatchSampler",
    "ExampleSet",
    "ExampleStream",
    "LaneBatchSampler",
    "LaneStream",
    "ShuffledStream",
    "build_training_set",
    "load_documents",
    "training_loader",
]
