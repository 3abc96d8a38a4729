"""Batched probes against single probes and plain modules."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_ctxmodels.analysis.probing.layer_scores import (
    LabeledVectors,
    MixScores,
    ProbingOptions,
    probe_layers,
    probe_mixes,
)
from hf_ctxmodels.analysis.probing.probes import (
    BilinearOptions,
    EdgeOptions,
    LinearOptions,
    MixedProbes,
    MlpOptions,
    ProbeBatch,
    ProbeGrid,
    build_probes,
    segment_softmax,
)
from hf_ctxmodels.analysis.probing.tasks import Example, ExampleSet, ProbingTask
from hf_ctxmodels.analysis.probing.training import (
    UNKNOWN_LABEL,
    ProbeData,
    ProbeTraining,
    evaluate_probes,
    pool_spans,
    standardize,
    train_probes,
)
from hf_ctxmodels.core.errors import CtxError

TRAINING = ProbeTraining(batch_size=16, epochs=2, min_steps=1, evaluations=3, learning_rate=0.05)
HIDDEN, LABELS = 6, 3


def random_data(num_slots: int, variants: int, multilabel: bool = False, layers: int = 3) -> ProbeData:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(90, layers, HIDDEN, generator=generator)
    starts = torch.randint(0, 80, (40, num_slots), generator=generator)
    lengths = torch.randint(1, 5, (40, num_slots), generator=generator) if multilabel else torch.ones_like(starts)
    targets = torch.randint(0, LABELS, (variants, 40), generator=generator)
    if multilabel:
        targets = torch.rand(variants, 40, LABELS, generator=generator) < 0.4
    return ProbeData(vectors, torch.stack([starts, starts + lengths], -1), targets)


@pytest.mark.parametrize(
    ("options", "num_slots"),
    [
        (LinearOptions(), 1),
        (LinearOptions(), 2),
        (MlpOptions(hidden_size=4), 2),
        (BilinearOptions(rank=4), 2),
        (MlpOptions(hidden_size=4, dropout=0.3), 1),
        (EdgeOptions(hidden_size=4, dropout=0.0), 2),
        (EdgeOptions(hidden_size=4, dropout=0.3), 2),
    ],
    ids=lambda value: type(value).__name__.removesuffix("Options") if not isinstance(value, int) else str(value),
)
def test_batched_probes_equal_single_probes(options: Any, num_slots: int) -> None:
    """Weights, losses and test scores are equal for each layer and variant, whatever the global seed."""
    data = random_data(num_slots, 2, isinstance(options, EdgeOptions))
    grid = ProbeGrid(["0", "1", "2"], ["task", "control"], HIDDEN, num_slots, LABELS)

    def fit_probes(grid: ProbeGrid, data: ProbeData) -> tuple[Any, Tensor, Tensor]:
        probes = build_probes(grid, options)
        train_probes(probes, data.select(0, 24), data.select(24, 32), TRAINING, description="")
        evaluation = evaluate_probes(probes, data.select(32, 40))
        return probes, evaluation.loss, evaluation.score()

    probes, loss, score = fit_probes(grid, data)
    assert loss.std() > 0
    for layer, variant in product(range(3), range(2)):
        single = replace(grid, layers=[grid.layers[layer]], variants=[grid.variants[variant]])
        targets = data.targets[variant : variant + 1]
        probe, single_loss, single_score = fit_probes(single, replace(data, targets=targets, layers=[layer]))
        torch.testing.assert_close(single_loss[0, 0], loss[layer, variant], atol=1e-4, rtol=1e-4)
        assert single_score[0, 0] == score[layer, variant]
        for parameter, expected in zip(probe.parameters(), probes.parameters(), strict=True):
            torch.testing.assert_close(parameter[0, 0], expected[layer, variant], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_edge_probe_equals_plain_modules() -> None:
    """Projections, attention over the words of a span, and the MLP, one example at a time."""
    data = random_data(2, 1, multilabel=True, layers=1)
    probes = build_probes(ProbeGrid(["0"], ["task"], HIDDEN, 2, LABELS), EdgeOptions(hidden_size=4)).eval()
    for parameter in probes.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    logits = probes(data.batch(torch.arange(40)))[0, 0]

    def linear(weight: Tensor, bias: Tensor | float, inputs: Tensor) -> Tensor:
        return inputs @ weight[0, 0] + (bias[0, 0] if isinstance(bias, Tensor) else bias)

    for example, spans in enumerate(data.spans):
        pooled = []
        for slot, (start, stop) in enumerate(spans.tolist()):
            words = linear(probes.projections[slot], probes.projection_biases[slot], data.vectors[start:stop, 0])
            pooled.append((linear(probes.scores[slot], 0.0, words).softmax(0) * words).sum(0, keepdim=True))
        hidden = linear(probes.hidden_weight, probes.hidden_bias, torch.cat(pooled, -1)).tanh()
        norm = nn.LayerNorm(4)
        norm.weight.copy_(probes.norm_weight[0, 0, 0])
        norm.bias.copy_(probes.norm_bias[0, 0, 0])
        torch.testing.assert_close(linear(probes.weight, probes.bias, norm(hidden))[0], logits[example])


def test_layer_mixes() -> None:
    """Mix l is initialized as the mean of layers 0 to l; mix weights get gradients."""
    data = random_data(1, 2)
    probes = MixedProbes(ProbeGrid(["0", "1", "2"], ["a", "b"], HIDDEN, 1, LABELS), LinearOptions())
    logits = probes(data.batch(torch.arange(40)))
    weight, bias = (parameter.view(3, 2, *parameter.shape[2:]) for parameter in probes.probes.parameters())
    for layer, variant in product(range(3), range(2)):
        mean = data.vectors[data.spans[:, 0, 0], : layer + 1].mean(1)
        torch.testing.assert_close(logits[layer, variant], mean @ weight[layer, variant] + bias[layer, variant])
    data.losses(logits, torch.arange(40)).sum().backward()
    assert probes.mix.grad[1:].abs().sum() > 0
    assert probes.mix.grad[0].abs().sum() == 0
    assert probes.mix.grad[1, :, 2].abs().sum() == 0, "layer 2 is not in mix 1"


def test_mix_statistics() -> None:
    """Center of gravity and expected layer, computed by hand; negative gains count."""
    mix = MixScores(
        torch.tensor([[0.5], [0.8], [0.7], [0.9]]).double().numpy(),
        torch.tensor([[0.1], [0.2], [0.3], [0.4]]).double().numpy(),
    )
    assert mix.center_of_gravity() == pytest.approx(2.0)
    assert mix.expected_layer() == pytest.approx((1 * 0.3 - 2 * 0.1 + 3 * 0.2) / 0.4)


def test_segment_softmax() -> None:
    scores, segments = torch.randn(2, 7) * 50, torch.tensor([0, 0, 2, 2, 2, 1, 0])
    weights = segment_softmax(scores, segments, 3)
    for segment in range(3):
        torch.testing.assert_close(weights[:, segments == segment], scores[:, segments == segment].softmax(-1))


def test_pooled_and_standardized_vectors() -> None:
    """Span means in float16; statistics of training rows with tokens; zeros for words without tokens."""
    data = random_data(2, 1, multilabel=True)
    pooled, spans = pool_spans(data.vectors.half(), data.spans)
    start, stop = data.spans[7, 1].tolist()
    torch.testing.assert_close(pooled[spans[7, 1, 0]].float(), data.vectors[start:stop].mean(0), atol=2e-3, rtol=1e-2)
    vectors, has_tokens = torch.randn(50, 2, 4) * 30 + 5, torch.ones(50, dtype=torch.bool)
    vectors[:, 1, 3], has_tokens[3] = 7.0, False
    expected = vectors.clone()
    training_vectors = expected[:30][has_tokens[:30]]
    result = standardize(vectors, 30, has_tokens)
    torch.testing.assert_close(
        result[40, 0], (expected[40, 0] - training_vectors[:, 0].mean(0)) / training_vectors[:, 0].std(0, correction=0)
    )
    assert not result[3].any()
    assert not result[:, 1, 3].any(), "a constant dimension"
    expected[5, 0, 0] = torch.inf
    with pytest.raises(CtxError, match="not finite"):
        standardize(expected, 30, has_tokens)


def word_task(train_size: int, num_types: int, seed: int = 0) -> tuple[ProbingTask, dict[str, Tensor], Tensor]:
    """Words of random types; vectors and tags are random per type."""
    generator = torch.Generator().manual_seed(seed)
    type_vectors, type_tags = (
        torch.randn(num_types, 2, 64, generator=generator),
        torch.randint(0, 4, (num_types,), generator=generator),
    )
    splits, spans, rows = {}, {}, []
    start = 0
    for split, size in (("train", train_size), ("dev", 200), ("test", 400)):
        word_types = torch.randint(0, num_types, (size,), generator=generator)
        words = [f"w{word_type}" for word_type in word_types.tolist()]
        examples = [Example(0, ((i, i + 1),), (str(int(type_tags[word_types[i]])),)) for i in range(size)]
        splits[split] = ExampleSet([words], examples)
        indices = torch.arange(start, start + size)
        spans[split] = torch.stack([indices, indices + 1], -1)[:, None]
        rows.append(type_vectors[word_types])
        start += size
    return ProbingTask("pos", splits), spans, torch.cat(rows)


def test_random_vectors_are_not_selective() -> None:
    """Tags that are random by type are as easy as the control task: selectivity about 0, and equal code lengths."""
    task, spans, vectors = word_task(2000, 150)
    inputs = LabeledVectors(task, vectors, spans, [0, 1], [0, 1])
    options = ProbingOptions(training=ProbeTraining(learning_rate=5e-3, min_steps=100, epochs=3))
    scores = probe_layers(inputs, [0, 1], options, "pos")
    for layer in (0, 1):
        assert min(scores[layer]["score"]) > 0.5
        assert abs(sum(scores[layer]["selectivity"])) / 2 < 0.12
        assert scores[layer]["compression"][0] == pytest.approx(2000 * 2 / scores[layer]["bits"][0])
    mixes = probe_mixes(inputs, [0], options, "pos")
    assert mixes.scores.shape == (2, 1)
    torch.testing.assert_close(mixes.weights.sum(), 1.0, check_dtype=False)


class FixedProbes(nn.Module):
    """Probes of two layers; the vector of an example is its index in the (examples, layers, labels) logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, batch: ProbeBatch) -> Tensor:
        return self.logits[batch.vectors[0, :, 0].long()].transpose(0, 1)[:, None]


@pytest.mark.parametrize("batch_size", [2, 100])
def test_scores_of_fixed_predictions(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy, F1 of a label, and micro F1 of several labels per example; losses."""
    monkeypatch.setattr("hf_ctxmodels.analysis.probing.training._EVALUATION_BATCH", batch_size)
    predictions = torch.tensor([[1, 1, 0, 2, 1, 0], [0, 0, 0, 0, 0, 0]])  # by layer
    probes = FixedProbes(4.0 * torch.eye(3)[predictions].transpose(0, 1) - 2)
    rows = torch.arange(6)
    spans = torch.stack([rows, rows + 1], -1)[:, None]
    vectors = rows[:, None, None].expand(6, 2, 1)
    data = ProbeData(vectors, spans, torch.tensor([[0, 1, 1, 2, UNKNOWN_LABEL, 0]]))
    evaluation = evaluate_probes(probes, data)
    assert evaluation.score().tolist() == [[3 / 6], [2 / 6]]
    correct, wrong = math.log(1 + 2 * math.exp(-4)), math.log(math.exp(4) + 2)
    assert evaluation.loss.flatten().tolist() == pytest.approx([3 * correct + 2 * wrong, 2 * correct + 3 * wrong])
    assert evaluate_probes(probes, data, 1).score().tolist() == [[2 * 1 / (3 + 2)], [0.0]]
    assert evaluate_probes(probes, data, 0).score().tolist() == [[2 * 1 / (2 + 2)], [2 * 2 / (6 + 2)]]
    label_sets = [{0, 1}, {1}, set(), {2}, {1, 2}, {0}]
    targets = torch.tensor([[[label in labels for label in range(3)] for labels in label_sets]])
    evaluation = evaluate_probes(probes, replace(data, targets=targets))
    assert evaluation.score().flatten().tolist() == pytest.approx([2 * 5 / (6 + 7), 2 * 2 / (6 + 7)])
    # wrong decisions have a loss of 2 more nats: 3 of 18 in the first layer, 9 in the second
    assert evaluation.loss.flatten().tolist() == pytest.approx(
        [18 * math.log(1 + math.exp(-2)) + 2 * errors for errors in (3, 9)]
    )


def test_labels_missing_in_training() -> None:
    """Unseen labels count as errors and have no loss; a class of one example does not disturb the others."""
    data = random_data(1, 1)
    data.targets[0, :20] = torch.arange(20) % LABELS
    data.targets[0, 20:] = UNKNOWN_LABEL
    data.targets[0, 0] = LABELS
    probes = build_probes(ProbeGrid(["0", "1", "2"], ["task"], HIDDEN, 1, LABELS + 1), LinearOptions())
    train_probes(probes, data.select(0, 20), data, TRAINING, description="")
    assert evaluate_probes(probes, data.select(20, 40)).score().sum() == 0
    assert evaluate_probes(probes, data.select(20, 40)).loss.sum() == 0
    assert evaluate_probes(probes, data.select(0, 20)).score().max() > 0.3


def test_labels_missing_in_training_of_edge_probes() -> None:
    """Unseen labels count as missed: one per test example doubles the expected labels."""
    scores, mixes = [], []
    for labels in ((), ("unseen",)):
        task, spans, vectors = word_task(400, 20)
        examples = task.splits["test"].examples
        examples[:] = [example._replace(labels=(*example.labels, *labels)) for example in examples]
        inputs = LabeledVectors(task, vectors, spans, [0, 1], [0, 1])
        options = ProbingOptions(
            EdgeOptions(hidden_size=8, dropout=0.0), ProbeTraining(learning_rate=0.02, min_steps=40, epochs=1)
        )
        scores.append(probe_layers(inputs, [0], options, "pos")[0])
        mixes.append(probe_mixes(inputs, [0], options, "pos").scores[0, 0])
    assert scores[0]["score"][0] > 0.5
    assert scores[1]["score"][0] < 0.8 * scores[0]["score"][0]
    assert scores[1]["control"] == scores[0]["control"]
    assert mixes[1] < 0.8 * mixes[0]


def test_invalid_probes_raise() -> None:
    with pytest.raises(CtxError, match="needs pairs"):
        build_probes(ProbeGrid(["0"], ["task"], HIDDEN, 1, LABELS), BilinearOptions())
    task, spans, vectors = word_task(10, 3)
    task.splits["train"].examples[0] = Example(0, ((0, 1),), ("0", "1"))
    with pytest.raises(CtxError, match="several labels"):
        probe_layers(LabeledVectors(task, vectors, spans, [0], [0]), [0], ProbingOptions(), "")
