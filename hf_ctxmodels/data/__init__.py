"""Documents, tokenized examples, and their order in training."""

from hf_ctxmodels.data.document_sources import DataArguments, load_documents
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
    UnlabeledMixture,
)
from hf_ctxmodels.data.padding import UnlabeledCollator, mark_unlabeled
from hf_ctxmodels.data.streams import ContiguousStream, ShardedStream, ShuffledStream
from hf_ctxmodels.data.training_set import (
    ContiguousBatchSampler,
    EpochBatchSampler,
    ExampleSampling,
    MixtureBatchSampler,
    ResampledDocuments,
    build_training_set,
    mixing_rates,
    sampling_probabilities,
    training_loader,
)
