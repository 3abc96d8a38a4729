"""From text to training examples."""

from hf_ctxmodels.data.arguments import DataArguments
from hf_ctxmodels.data.documents import Documents, load_documents
from hf_ctxmodels.data.epochs import EpochBatchSampler
from hf_ctxmodels.data.examples import ExampleSet, ExampleStream, build_training_set
from hf_ctxmodels.data.sampling import (
    LaneBatchSampler,
    LaneStream,
    ShuffledStream,
    training_loader,
)
from hf_ctxmodels.data.turns import DrawnTurns, TurnBatchSampler, Turns, UnlabelledCollator, without_labels

__all__ = [
    "DataArguments",
    "Documents",
    "DrawnTurns",
    "EpochBatchSampler",
    "ExampleSet",
    "ExampleStream",
    "LaneBatchSampler",
    "LaneStream",
    "ShuffledStream",
    "TurnBatchSampler",
    "Turns",
    "UnlabelledCollator",
    "build_training_set",
    "load_documents",
    "training_loader",
    "without_labels",
]
