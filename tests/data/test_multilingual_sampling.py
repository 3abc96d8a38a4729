"""Language sampling with an exponent: probabilities, realized rates, determinism and resuming."""

from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import (
    ExampleSampling,
    ExampleSet,
    MixtureBatchSampler,
    ResampledDocuments,
    SampledMixture,
    SampledStream,
    build_training_set,
    load_documents,
    sampling_probabilities,
    training_loader,
    training_set,
)
from hf_ctxmodels.data.documents import DocumentTexts
from hf_ctxmodels.objectives import MaskedLM

SIZES = (320, 40, 8)  # sentences of three languages


@given(sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=20), alpha=st.sampled_from([0, 1]) | st.floats(0, 1))
def test_sampling_probabilities_match_formula(sizes, alpha):
    probabilities = sampling_probabilities(sizes, alpha)
    shares = [(size / sum(sizes)) ** alpha for size in sizes]
    assert probabilities == pytest.approx([share / sum(shares) for share in shares])
    assert (np.diff(probabilities[np.argsort(sizes)]) >= -1e-12).all(), "smaller languages are not sampled more often"


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    alpha=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    batch_size=st.integers(1, 16),
    seed=st.integers(0, 99),
    start=st.integers(0, 50),
)
def test_mixture_matches_probabilities_and_resumes(sizes, alpha, batch_size, seed, start):
    probabilities = sampling_probabilities(sizes, alpha)
    datasets = [[{"language": number}] * size for number, size in enumerate(sizes)]
    mixture = SampledMixture(datasets, probabilities=probabilities, is_per_example=True)
    assert len(mixture) == sum(sizes)
    number = 1500 // batch_size
    batches = list(islice(MixtureBatchSampler(mixture, batch_size, seed), number))
    keys = [key for batch in batches for key in batch]
    assert all(len(batch) == batch_size for batch in batches)
    counts = np.bincount([mixture[key]["language"] for key in keys], minlength=len(sizes))
    deviations = np.sqrt(len(keys) * probabilities * (1 - probabilities))
    assert (np.abs(counts - len(keys) * probabilities) <= 6 * deviations + 3).all()
    for dataset, size in enumerate(sizes):  # each epoch has every example once
        samples = [(epoch, index) for epoch, index in keys if 0 <= index - mixture.starts[dataset] < size]
        assert [epoch for epoch, _ in samples] == [position // size for position in range(len(samples))]
        assert len(set(samples)) == len(samples)
    resumed = MixtureBatchSampler(mixture, batch_size, seed, start)
    assert list(islice(resumed, number - start)) == batches[start:]


def test_choice_counts_of_several_blocks():
    mixture = SampledMixture([[{}] * 9, [{}]], probabilities=[0.9, 0.1], is_per_example=True)
    count = 150_001
    choices = mixture.choose(np.arange(count), seed=4)
    assert mixture.choices_before(count, seed=4).tolist() == np.bincount(choices).tolist()
    assert (mixture.choose(np.arange(count), seed=5) != choices).any()


@pytest.fixture
def languages(tmp_path, documents):
    """One file per language; its sentences begin with the language tag."""
    files = []
    for number, size in enumerate(SIZES):
        sentences = [sentence for _, document in zip(range(400), 9 * documents) for sentence in document][:size]
        text = "\n\n".join("\n".join(sentences[start : start + 4]) for start in range(0, size, 4))
        files.append(str(tmp_path / f"{number}.txt"))
        (tmp_path / f"{number}.txt").write_text(text)
    return load_documents(*files, language_tags=["the", "seven", "boat"])


@pytest.fixture
def objective(tokenizer):
    return MaskedLM(tokenizer, max_length=24, seed=0)


@pytest.fixture
def language_of(tokenizer):
    tags = [tokenizer(tag).input_ids[1] for tag in ("the", "seven", "boat")]

    return lambda row: tags.index(row["input_ids"][1])


def test_sources_partition_documents(languages):
    for documents in languages, *languages.split(0.5):
        parts = documents.by_source()
        assert len(parts) == 3
        assert [document for part in parts for document in part] == list(documents)


@pytest.mark.parametrize("streaming", [False, True])
def test_examples_follow_language_probabilities(languages, objective, language_of, streaming):
    examples = build_training_set(languages, objective, streaming=streaming, alpha=0.3, seed=1)
    assert type(examples) is (SampledStream if streaming else SampledMixture)
    probabilities = sampling_probabilities(SIZES, 0.3)
    loader = training_loader(examples, list, batch_size=50, seed=1)
    rows = [row for batch in islice(loader, 40) for row in batch]
    counts = np.bincount([language_of(row) for row in rows])
    assert np.abs(counts / 2000 - probabilities).max() < 0.06
    assert len({(row["epoch"], row["example_index"]) for row in rows}) == len(rows), "repeated examples have new masks"
    assert max(row["epoch"] for row in rows if language_of(row) == 2) > 10


@pytest.mark.parametrize("streaming", [False, True])
def test_batches_do_not_depend_on_workers_or_resuming(languages, objective, streaming, monkeypatch):
    monkeypatch.setattr(training_set, "ShuffledStream", partial(training_set.ShuffledStream, buffer_size=300))
    examples = build_training_set(languages, objective, streaming=streaming, alpha=0.5, seed=3)

    def batches(count, **options):
        loader = training_loader(examples, objective.collate, batch_size=6, seed=3, **options)
        return [batch["input_ids"].tolist() for batch in islice(loader, count)]

    expected = batches(20)
    assert batches(20, workers=2) == expected
    assert batches(13, start_batch=7) == expected[7:]
    assert batches(13, start_batch=7, workers=1) == expected[7:]


def test_invalid_sampling_raises(languages, objective, tmp_path):
    for alpha in (-0.1, 1.1):
        with pytest.raises(CtxError, match="out of range"):
            sampling_probabilities([30, 10], alpha)
    for sampling in ExampleSampling(contiguous=True), ExampleSampling(task_column="task"):
        with pytest.raises(CtxError, match="defines the order"):
            build_training_set(languages, objective, sampling, alpha=0.3)
    with pytest.raises(CtxError, match="requires several datasets"):
        build_training_set(load_documents(str(tmp_path / "0.txt")), objective, alpha=0.3)
    with pytest.raises(CtxError, match="requires several datasets"):
        list(ResampledDocuments(load_documents(str(tmp_path / "0.txt")), 0.3))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_resampled_documents_follow_exponent(languages, alpha):
    sampled = list(ResampledDocuments(languages, alpha))
    assert list(ResampledDocuments(languages, alpha)) == sampled
    tags = Counter(sentence.split()[0] for document in sampled for sentence in document)
    expected = sampling_probabilities(SIZES, alpha) * sum(SIZES)
    assert [tags[tag] for tag in ("the", "seven", "boat")] == pytest.approx(expected, abs=4), "exact up to one document"
    if alpha == 1:
        assert sampled == list(languages)
    first_language = [document for document in sampled if document[0].startswith("the ")]
    positions = [list(languages).index(document) for document in first_language]
    assert max(positions) > 70, "documents of the largest language come from all positions"
    texts = list(DocumentTexts(ResampledDocuments(languages, alpha)))
    assert texts[:2] == ["\n".join(document) for document in sampled[:2]]


def test_mixture_size_is_sum_of_language_sizes(languages, objective):
    mixture = build_training_set(languages, objective, alpha=0.3)
    assert len(mixture) == sum(len(ExampleSet.build(objective.examples(part))) for part in languages.by_source())
