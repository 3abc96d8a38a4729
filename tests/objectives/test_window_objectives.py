"""Sampling for word2vec: subsampling, windows, negatives, and the Huffman tree of hierarchical softmax."""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numbered_text import with_index

from hf_ctxmodels import (
    CtxError,
    CtxWord2VecConfig,
    CtxWord2VecForPreTraining,
    CtxWord2VecTokenizer,
    DataCollatorForWindowPrediction,
)
from hf_ctxmodels.data.seeding import Purpose, row_hashes, uniforms
from hf_ctxmodels.objectives import ContinuousBagOfWords, SkipGram, window_sampling
from hf_ctxmodels.objectives.window_sampling import (
    HuffmanTree,
    NoiseDistribution,
    sample_noise,
    subsampling_probabilities,
)

COUNTS = [4000, 1000, 400, 90, 40, 9, 5, 5]
NUM_WORDS = [f"w{number}" for number in range(len(COUNTS))]


@pytest.fixture
def tokenizer() -> CtxWord2VecTokenizer:
    return CtxWord2VecTokenizer.from_words(NUM_WORDS, COUNTS)


def features(rows: int = 3, length: int = 50, epoch: int = 0) -> Iterator[dict]:
    for index in range(rows):
        ids = np.random.default_rng(index).integers(2, 10, size=length)
        yield {"input_ids": ids, "example_index": index, "epoch": epoch}


class TestCollator:
    def test_rows_depend_on_epoch_but_not_on_batch(self, tokenizer) -> None:
        collate = DataCollatorForWindowPrediction(tokenizer, seed=3, subsampling=0)
        rows = list(features())
        batch, single, next_epoch = collate(rows), collate(rows[1:2]), collate(list(features(epoch=1)))
        for name in ("input_ids", "labels", "windows", "negatives"):
            assert (batch[name][1] == single[name][0]).all(), name
        assert (next_epoch["windows"] != batch["windows"]).any()
        assert (next_epoch["negatives"] != batch["negatives"]).any()

    def test_shapes_and_padding(self, tokenizer) -> None:
        rows = [*features(rows=2, length=50), *features(rows=1, length=7)]
        batch = DataCollatorForWindowPrediction(tokenizer, subsampling=0, block=16, shared_negatives=9)(rows)
        assert batch["input_ids"].shape == batch["labels"].shape == batch["windows"].shape == (3, 64)
        assert batch["negatives"].shape == (3, 4, 9)
        assert batch["attention_mask"].sum(1).tolist() == [50, 50, 7]
        assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()
        assert int(batch["windows"].min()) == 1
        assert int(batch["windows"].max()) == 5
        assert int(batch["negatives"][:2].min()) >= 2, "a special token was sampled"
        assert (batch["negatives"][2, :1] >= 2).all()
        assert not batch["negatives"][2, 1:].any(), "padding has negatives"

    @pytest.mark.parametrize("output", ["negative-sampling", "hierarchical-softmax", "softmax"])
    @pytest.mark.parametrize("architecture", ["skip-gram", "cbow"])
    @pytest.mark.parametrize("block", [1, 4, 16])
    def test_packed_rows_are_independent(self, tokenizer, output: str, architecture: str, block: int) -> None:
        collate = DataCollatorForWindowPrediction(tokenizer, output=output, subsampling=0, block=block)
        lengths = (40, 7, 3, 20, 2, 9)
        rows = [next(features(rows=1, length=length)) | {"example_index": n} for n, length in enumerate(lengths)]
        config = CtxWord2VecConfig(vocab_size=10, hidden_size=6, architecture=architecture, output=output)
        torch.manual_seed(0)
        model = CtxWord2VecForPreTraining(config)
        for table in model.parameters():
            torch.nn.init.normal_(table)
        packed = collate(rows)
        assert len(packed["input_ids"]) < len(rows)
        assert int(packed["attention_mask"].sum()) == sum(lengths)
        expected = sum(float(model(**collate([row])).loss) * length for row, length in zip(rows, lengths))
        assert float(model(**packed).loss) * sum(lengths) == pytest.approx(expected, rel=1e-5)

    def test_subsampling_rates(self, tokenizer) -> None:
        ids = np.tile(np.arange(2, 10), 4000)
        collate = DataCollatorForWindowPrediction(tokenizer, subsampling=1e-2)
        batch = collate(with_index([{"input_ids": ids}]))
        counts = np.bincount(batch["input_ids"][batch["attention_mask"] == 1], minlength=10)[2:]
        expected = 4000 * collate.subsampling_probabilities[2:]
        assert collate.subsampling_probabilities[2] < 0.2
        assert collate.subsampling_probabilities[-1] == 1
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()

    def test_subsampling_keeps_one_word(self, tokenizer) -> None:
        rows = with_index([{"input_ids": np.array([2, 2])}] * 200)
        batch = DataCollatorForWindowPrediction(tokenizer, subsampling=1e-9)(rows)
        assert batch["attention_mask"].sum(1).tolist() == [1] * 200

    def test_hierarchical_softmax_paths(self, tokenizer) -> None:
        collate = DataCollatorForWindowPrediction(tokenizer, output="hierarchical-softmax", subsampling=0, block=10)
        batch = collate(list(features(rows=2)))
        assert "negatives" not in batch
        assert batch["paths"].shape == batch["codes"].shape == (2, 5, 10, batch["paths"].shape[-1])
        flat = batch["paths"].flatten(1, 2)
        for position in (0, 17, 49):
            path = collate.tree.paths[batch["input_ids"][1, position]]
            assert flat[1, position].tolist() == path[: flat.shape[-1]].tolist()

    @pytest.mark.parametrize("output", ["negative-sampling", "hierarchical-softmax"])
    @pytest.mark.parametrize("block", [1, 4])
    @pytest.mark.parametrize("subsampling", [0, 1e-3, 1e-9])
    def test_compiled_sampling_equals_reference(self, tokenizer, output: str, block: int, subsampling: float) -> None:
        compiled = pytest.importorskip("hf_ctxmodels.objectives.window_kernels", reason="needs numba")
        rows = [next(features(rows=1, length=n)) | {"example_index": n, "epoch": n % 3} for n in (1, 40, 7, 3, 900)]
        batches = []
        for sampler in (compiled, window_sampling):
            collate = DataCollatorForWindowPrediction(
                tokenizer, output=output, block=block, subsampling=subsampling, seed=4
            )
            collate.sampler = sampler
            batches.append(collate(rows))
        assert batches[0].keys() == batches[1].keys()
        for name, column in batches[0].items():
            assert torch.equal(column, batches[1][name]), name

    def test_tokenizer_without_counts_raises(self) -> None:
        with pytest.raises(CtxError, match="no word counts"):
            DataCollatorForWindowPrediction(CtxWord2VecTokenizer.from_words(NUM_WORDS))


def test_noise_distribution() -> None:
    noise = NoiseDistribution(np.array([0.0, 0.0, *COUNTS]), 0.75)
    expected = np.array([0, 0, *COUNTS], dtype=float) ** 0.75
    expected /= expected.sum()
    np.testing.assert_allclose(noise.probabilities, expected)
    samples = np.bincount(sample_noise(np.random.default_rng(0).random(200_000), noise.table), minlength=10)
    assert samples[:2].sum() == 0
    assert (np.abs(samples - 200_000 * expected) <= 5 * np.sqrt(200_000 * expected)).all()


def test_subsampling_probabilities() -> None:
    shares = subsampling_probabilities(np.array([900.0, 99.0, 1.0]), 1e-3)
    assert shares[0] == pytest.approx((1e-3 / 0.9) ** 0.5 + 1e-3 / 0.9)
    assert shares[2] == 1
    assert subsampling_probabilities(np.array([900.0, 1.0]), 0).tolist() == [1, 1]


class TestTree:
    @pytest.mark.parametrize("word_counts", [COUNTS, [1] * 4, [1] * 7, [1, 2, 4, 8, 16]], ids=str)
    def test_code_is_optimal(self, word_counts: list[int]) -> None:
        counts = np.array([0, 0, *word_counts], dtype=float)
        tree = HuffmanTree(counts)
        lengths = (tree.paths >= 0).sum(1)
        assert lengths[:2].tolist() == [0, 0]
        assert (0.5 ** lengths[2:]).sum() == 1  # a complete prefix code (Kraft equality)
        codes = {tuple(zip(path[path >= 0], code)) for path, code in zip(tree.paths[2:], tree.codes[2:])}
        assert len(codes) == len(word_counts)
        assert len(set(tree.paths[2:, 0])) == 1, "every path begins at the root"
        assert sorted(set(tree.paths[tree.paths >= 0])) == list(range(len(word_counts) - 1))
        heap = list(word_counts)
        heapq.heapify(heap)
        optimal_length = 0
        while len(heap) > 1:
            merged = heapq.heappop(heap) + heapq.heappop(heap)
            optimal_length += merged
            heapq.heappush(heap, merged)
        assert counts @ lengths == optimal_length

    def test_scores_yield_word_frequencies(self) -> None:
        counts = np.array(COUNTS, dtype=float) * 1e6
        tree = HuffmanTree(counts)
        logits = tree.scores(counts)[tree.paths] * (1 - 2 * tree.codes)
        probabilities = np.where(tree.paths >= 0, 1 / (1 + np.exp(-logits)), 1).prod(1)
        np.testing.assert_allclose(probabilities, counts / counts.sum(), rtol=1e-4)


@pytest.mark.parametrize(("objective_class", "architecture"), [(SkipGram, "skip-gram"), (ContinuousBagOfWords, "cbow")])
def test_rows_contain_known_words(tokenizer, objective_class: type, architecture: str) -> None:
    objective = objective_class(tokenizer, max_length=4, seed=0, window=2)
    documents = [["w0 w1 unheard w2.", "w3 w4 w5"], ["nothing known"], ["w6"]]
    rows = [tokenizer.convert_ids_to_tokens(row["input_ids"]) for row in objective.examples(documents)]
    assert rows == [["w0", "w1", "w2", "w3"], ["w4", "w5"]]
    assert objective.statistics["unknown_tokens"] == 4
    assert objective.config_fields["architecture"] == architecture
    assert objective.config_fields["window"] == 2


def test_empty_row_raises(tokenizer) -> None:
    with pytest.raises(CtxError, match="no word"):
        DataCollatorForWindowPrediction(tokenizer)(with_index([{"input_ids": np.array([], dtype=int)}]))


class TestUniforms:
    def test_numbers_match_splitmix(self) -> None:
        def splitmix(state: int) -> Iterator[float]:
            """Steele, Lea & Flood 2014, figure 17, with the constants of its released version."""
            while True:
                state = (state + 0x9E3779B97F4A7C15) % 2**64
                bits = state
                for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                    bits = ((bits ^ bits >> shift) * factor) % 2**64
                yield ((bits ^ bits >> 31) >> 11) / 2**53

        keys = row_hashes(5, [0, 0, 1], [0, 1, 0])
        samples = uniforms(np.repeat(keys, 9000), np.tile(np.arange(9000), 3)).reshape(3, 9000)
        for key, row in zip(keys, samples, strict=True):
            assert row.tolist() == list(itertools.islice(splitmix(int(key)), 9000))

    def test_keys_depend_on_all_arguments(self) -> None:
        grid = itertools.product(range(3), range(3), range(3), (Purpose.CORRUPTION, Purpose.PAIRING), range(3))
        keys = [int(row_hashes(seed, [epoch], [index], stream, use)[0]) for seed, epoch, index, stream, use in grid]
        assert len(set(keys)) == 3**4 * 2

    def test_rows_and_positions_are_independent(self) -> None:
        """Chi-squared test of adjacent pairs, in a row and in consecutive rows."""
        keys = row_hashes(0, [0] * 400, range(400))
        samples = uniforms(np.repeat(keys, 400), np.tile(np.arange(400), 400)).reshape(400, 400)
        cells = (samples * 10).astype(int)
        for first, second in ((cells[:, 1:], cells[:, :-1]), (cells[1:], cells[:-1])):
            pairs = np.bincount((10 * first + second).ravel(), minlength=100)
            expected = pairs.sum() / 100
            assert ((pairs - expected) ** 2 / expected).sum() < 99 + 5 * (2 * 99) ** 0.5
