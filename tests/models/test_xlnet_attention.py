"""Relative attention: both fast ways against the formula written down, outputs and gradients; and what is visible."""

from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from benchmarks.measure import peak_bytes
from torch import Tensor
from zoo import assert_close

from hf_ctxmodels.models.xlnet import relative_attention
from hf_ctxmodels.models.xlnet.cpu_attention import SequenceRange, SequenceRanges, attend_per_sequence, hidden_scores
from hf_ctxmodels.models.xlnet.relative_attention import (
    AttentionPattern,
    RelativeBiases,
    dense_attention,
    distance_encodings,
    eager_attention,
)
from hf_ctxmodels.models.xlnet.visibility import visible_keys

HEADS, HEAD_DIM = 3, 4
CPU = torch.device("cpu")
SHAPES = {  # batch, length, memory, queries
    "one token": (1, 1, 0, 0),
    "one stream": (3, 9, 0, 0),
    "two streams": (2, 9, 0, 4),
    "memory": (2, 5, 8, 3),
    "several blocks of rows": (1, 150, 7, 2),
    "as many rows as a block": (2, 64, 0, 0),
}


class Problem(NamedTuple):
    inputs: list[Tensor]  # query, key, value, relative, and the four biases
    pattern: AttentionPattern
    pieces: SequenceRanges


def make_problem(shape: tuple[int, int, int, int], *, hidden: bool, segments: bool, groups: int = 1) -> Problem:
    """Random inputs; with `hidden` some keys are not seen, and one row sees none."""
    batch, length, memory, queries = shape
    torch.manual_seed(0)
    rows, keys = length + queries, memory + length
    sizes = [(batch, rows), (batch, keys), (batch, keys), (groups, keys + length)]
    inputs = [torch.randn(*size, HEADS, HEAD_DIM) for size in sizes]
    inputs += [torch.randn(HEADS, HEAD_DIM) for _ in range(3)] + [torch.randn(2, HEADS, HEAD_DIM)]
    positions = torch.cat([torch.arange(length).expand(batch, -1), torch.randint(length, (batch, queries))], 1)
    visible = None
    if hidden:
        visible = torch.rand(batch, rows, keys) < 0.6
        visible[0, -1] = False
    row_types = key_types = None
    if segments:
        key_types = torch.randint(-1, 3, (batch, keys))
        row_types = key_types[:, memory:].gather(1, positions)
    pattern = AttentionPattern(length - positions[..., None], visible, row_types, key_types)
    columns = pattern.columns[:, length:] + torch.arange(keys)
    pieces = tuple(
        SequenceRange(
            row * rows,
            (row + 1) * rows,
            row * keys,
            (row + 1) * keys,
            length,
            length,
            columns[row] if queries else None,
            None if visible is None else hidden_scores(visible[row]),
            row * groups // batch,
        )
        for row in range(batch)
    )
    one_hot = [
        None if types is None else torch.nn.functional.one_hot(types.flatten() + 1, 4).float()
        for types in (row_types, key_types)
    ]
    blind = None if visible is None else ~visible.any(-1).flatten()
    return Problem([tensor.requires_grad_() for tensor in inputs], pattern, SequenceRanges(pieces, *one_hot, blind))


def attend(problem: Problem, way: str, dropout: float = 0.0) -> Tensor:
    """(batch, rows, heads, head_dim)."""
    query, key, value, relative, *biases = problem.inputs
    options = {"scaling": HEAD_DIM**-0.5, "dropout": dropout}
    if way == "pieces":
        flat = [tensor.flatten(0, 1) for tensor in (query, key, value)]
        return attend_per_sequence(*flat, relative, RelativeBiases(*biases), problem.pieces, **options).view_as(query)
    relative = relative.repeat_interleave(len(query) // len(relative), 0) if len(relative) > 1 else relative
    if way in ("dense", "blocks"):
        with patch.object(relative_attention, "DENSE_ROWS", 4 if way == "blocks" else 10**6):
            return dense_attention(query, key, value, relative, RelativeBiases(*biases), problem.pattern, **options)
    return eager_attention(query, key, value, relative, RelativeBiases(*biases), problem.pattern, **options)[0]


def outputs_and_gradients(problem: Problem, way: str) -> list[Tensor]:
    context = attend(problem, way)
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((context * weights).sum(), problem.inputs, allow_unused=True)
    return [context, *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]


def assert_every_way_is_the_formula(problem: Problem, what: str = "") -> None:
    """Outputs and all gradients."""
    wanted = outputs_and_gradients(problem, "eager")
    for way in ("dense", "blocks", "pieces"):
        for number, (got, expected) in enumerate(zip(outputs_and_gradients(problem, way), wanted, strict=True)):
            assert_close(got, expected, f"output or gradient {number} by {way} {what}")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_equal_to_the_formula(shape: tuple[int, int, int, int]) -> None:
    for hidden, segments in product((True, False), repeat=2):
        problem = make_problem(shape, hidden=hidden, segments=segments)
        assert_every_way_is_the_formula(problem, f"with hidden={hidden}, segments={segments}")


def test_two_tables_of_distances() -> None:
    assert_every_way_is_the_formula(make_problem((4, 6, 2, 2), hidden=True, segments=True, groups=2))


def test_a_row_that_sees_nothing_gets_nothing() -> None:
    problem = make_problem((2, 5, 0, 2), hidden=True, segments=True)
    sighted = problem.pattern.visible.any(-1)
    assert not sighted[0, -1]
    for way in ("eager", "dense", "blocks", "pieces"):
        context = attend(problem, way)
        assert not context[~sighted].any(), way
        assert context[sighted].any(-1).all(), way


def test_blocks_never_hold_the_scores_of_all_rows() -> None:
    problem = make_problem((2, 120, 0, 8), hidden=True, segments=True)
    peaks = {way: peak_bytes(lambda way=way: outputs_and_gradients(problem, way), CPU) for way in ("dense", "blocks")}
    assert peaks["blocks"] < 0.4 * peaks["dense"]


def test_the_formula_by_hand() -> None:
    """One pair of a row and a key at a time, in plain numbers."""
    problem = make_problem((1, 4, 2, 1), hidden=False, segments=True)
    query, key, value, relative, content, position, segment, segments = (tensor.detach() for tensor in problem.inputs)
    pattern = problem.pattern
    encoded = {distance: relative[0, index] for index, distance in enumerate(range(6, -4, -1))}
    for row in range(5):
        at = 4 - int(pattern.columns[0, row, 0])
        for head in range(HEADS):
            scores = torch.empty(6)
            for other in range(6):
                q = query[0, row, head]
                kind = int(pattern.row_types[0, row] != pattern.key_types[0, other])
                scores[other] = (
                    (q + content[head]) @ key[0, other, head]
                    + (q + position[head]) @ encoded[at + 2 - other][head]
                    + (q + segment[head]) @ segments[kind, head]
                )
            expected = (scores / HEAD_DIM**0.5).softmax(0) @ value[0, :, head]
            torch.testing.assert_close(attend(problem, "eager")[0, row, head], expected)


@pytest.mark.parametrize("way", ["eager", "pieces"])
def test_dropout_keeps_the_mean(way: str) -> None:
    problem = make_problem((1, 6, 0, 2), hidden=True, segments=True)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = attend(problem, way)
        draws = torch.stack([attend(problem, way, dropout=0.3) for _ in range(600)])
    assert (draws[0] - expected).abs().max() > 0.01
    assert (draws.mean(0) - expected).abs().mean() < 0.05


def test_dropout_gradients_are_those_of_the_drawn_mask() -> None:
    """The same draw moves the output as its gradient says."""
    problem = make_problem((1, 5, 2, 2), hidden=True, segments=True)
    weights = torch.randn(1, 7, HEADS, HEAD_DIM)

    def number() -> Tensor:
        torch.manual_seed(5)
        return (attend(problem, "pieces", dropout=0.4) * weights).sum()

    gradients = torch.autograd.grad(number(), problem.inputs)
    for tensor, gradient in zip(problem.inputs, gradients, strict=True):
        direction = torch.randn_like(tensor)
        values = []
        with torch.no_grad():
            for step in (1e-2, -1e-2):
                tensor += step * direction
                values.append(number())
                tensor -= step * direction
        slope = (values[0] - values[1]) / 2e-2
        torch.testing.assert_close(slope, (gradient * direction).sum(), atol=2e-2, rtol=2e-2)


def test_encodings_are_sines_then_cosines() -> None:
    encoded = distance_encodings(torch.tensor([0, 3, -3]), 6, torch.float32)
    frequencies = torch.tensor([1.0, 10000 ** (-2 / 6), 10000 ** (-4 / 6)])
    torch.testing.assert_close(encoded[0], torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(encoded[1], torch.cat([(3 * frequencies).sin(), (3 * frequencies).cos()]))
    torch.testing.assert_close(encoded[2], encoded[1] * torch.tensor([-1.0] * 3 + [1.0] * 3))


class TestVisibility:
    def test_order(self) -> None:
        """Content sees its own rank and lower ones, a query lower ones, a query without target nothing."""
        order, targets = torch.tensor([[-1, 1, -1, 0]]), torch.tensor([[1, 3, -1]])
        seen = visible_keys((1, 4), CPU, order=order, target_positions=targets)
        expected = [[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]
        assert seen[0].long().tolist() == expected

    def test_hidden_pairs(self) -> None:
        hidden = torch.tensor([[[1, 0], [1, 1]]]).bool()
        seen = visible_keys((1, 2), CPU, hidden_pairs=hidden, target_positions=torch.tensor([[1, 0]]))
        assert seen[0].long().tolist() == [[1, 1], [0, 1], [0, 0], [0, 1]]

    def test_padding_and_memory(self) -> None:
        tokens = torch.tensor([[False, True, True]])
        memory = torch.tensor([[False, True]])
        seen = visible_keys((1, 3), CPU, tokens=tokens, memory_length=2, memory_tokens=memory)
        assert seen[0].long().tolist() == [[0, 1, 0, 1, 1]] * 3

    def test_sequences(self) -> None:
        seen = visible_keys((1, 4), CPU, same_sequence=torch.tensor([[1, 1, 2, 3]]))
        assert seen[0].long().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

    def test_causal(self) -> None:
        seen = visible_keys((1, 3), CPU, causal=True, memory_length=2)
        assert seen[0].long().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
        seen = visible_keys((1, 3), CPU, causal=True, same_length=True, memory_length=3)
        assert seen[0].long().tolist() == [[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]

    def test_nothing_hidden_needs_no_mask(self) -> None:
        assert visible_keys((2, 3), CPU, memory_length=4) is None
