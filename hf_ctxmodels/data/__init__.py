"""From text to training examples."""

from hf_ctxmodels.data.arguments import DataArguments
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.epochs import EpochBatchSampler
from hf_ctxmodels.data.examples import DocumentStream, ExampleSet, ExampleStream
from hf_ctxmodels.data.mixtures import (
    Mixture,
    MixtureBatchSampler,
    RoundRobinMixture,
    SampledMixture,
    SampledStream,
)
from hf_ctxmodels.data.multilingual import ResampledDocuments, sampling_probabilities
from hf_ctxmodels.data.sampling import (
    ContiguousBatchSampler,
    ContiguousStream,
    ShuffledStream,
    training_loader,
)
from hf_ctxmodels.data.sources import load_documents
from hf_ctxmodels.data.training_set import SamplingPolicy, build_training_set
from hf_ctxmodels.data.unlabelled import UnlabelledCollator, without_labels
