"""BiDAF with self-attention, compared with the formulas of the papers for one example without padding."""

import pytest
import torch
from network_oracles import assert_same_with_gradients, randomize, run_recurrent
from torch import Tensor

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.networks import pairs
from hf_ctxmodels.downstream.networks.questions import (
    AnswerSpanNetwork,
    AnswerSpanOptions,
    AnswerSpanScores,
    TrilinearAttention,
    answer_span_loss,
)

INPUT, OUTPUT = 5, 2
LENGTHS = ((3, 6), (1, 1), (4, 9))  # words of question and context


def make_batch(layout: str) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """(vectors, is_word, is_context), and the columns of question and context of each row."""
    is_word, is_context, columns = torch.zeros(3, 15, dtype=torch.bool), torch.zeros(3, 15, dtype=torch.bool), []
    for row, (question, context) in enumerate(LENGTHS):
        begin = {"right": 0, "left": 15 - question - context, "context first": 1}[layout]
        first, second = (context, question) if layout == "context first" else (question, context)
        texts = torch.arange(begin, begin + first), torch.arange(begin + first, begin + first + second)
        columns.append(texts[::-1] if layout == "context first" else texts)
        is_word[row, begin : begin + first + second] = True
        is_context[row, columns[-1][1]] = True
    return torch.randn(3, 15, INPUT, requires_grad=True), is_word, is_context, columns


def naive_scores(layer: TrilinearAttention, states: Tensor, queries: Tensor) -> Tensor:
    first, second, third = layer.weights
    return torch.stack([torch.stack([first @ h + second @ q + third @ (h * q) for q in queries]) for h in states])


def naive_network(network: AnswerSpanNetwork, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> Tensor:
    """(2 * context + 1,) start logits, end logits and the logit of no answer."""
    q, h = (
        torch.cat([run_recurrent(network.encoder, text), output], -1)
        for text, output in zip(inputs, outputs, strict=True)
    )
    scores = naive_scores(network.attention, h, q)
    query_to_context = scores.max(1).values.softmax(0) @ h
    x = []
    for word, word_scores in zip(h, scores, strict=True):
        c = word_scores.softmax(0) @ q
        x.append(network.fusion(torch.cat([word, c, word * c, word * query_to_context])).relu())
    x = torch.stack(x)
    g = run_recurrent(network.modeling, x)
    scores = naive_scores(network.self_attention, g, g).exp()
    updates = []
    for i in range(len(g)):
        others = [j for j in range(len(g)) if j != i]
        total = sum(scores[i, j] for j in others) + network.no_alignment.exp()
        s = sum((scores[i, j] / total * g[j] for j in others), torch.zeros_like(g[i]))
        updates.append(network.self_fusion(torch.cat([g[i], s, g[i] * s])).relu())
    x = x + torch.stack(updates)
    u = run_recurrent(network.start_layer, x)
    v = run_recurrent(network.end_layer, torch.cat([u, x], -1))
    start, end = network.start(u)[:, 0], network.end(v)[:, 0]
    means = [start.softmax(0) @ u, end.softmax(0) @ v, (x @ network.summary.weight[0]).softmax(0) @ x]
    hidden, _, output = network.no_answer
    return torch.cat([start, end, output(hidden(torch.cat(means)).relu())])


@pytest.mark.parametrize("layout", ["right", "left", "context first"])
def test_network_matches_formulas(layout: str) -> None:
    """Logits and gradients, with padding on either side and with the question after its context."""
    torch.manual_seed(1)
    options = AnswerSpanOptions(hidden_size=3, no_answer=True, no_answer_size=6)
    network = randomize(AnswerSpanNetwork(INPUT, options, OUTPUT))
    vectors, is_word, is_context, columns = make_batch(layout)
    output_vectors = torch.randn(3, 15, OUTPUT, requires_grad=True)
    start, end, no_answer = network(vectors, is_word, is_context, output_vectors)
    assert (start[~is_context] == torch.finfo(start.dtype).min).all()
    logits = torch.cat(
        [torch.cat([start[row, text], end[row, text], no_answer[row, None]]) for row, (_, text) in enumerate(columns)]
    )
    expected = torch.cat(
        [
            naive_network(
                network, tuple(vectors[row, text] for text in texts), tuple(output_vectors[row, text] for text in texts)
            )
            for row, texts in enumerate(columns)
        ]
    )
    assert_same_with_gradients(network, logits, expected, vectors, output_vectors)


@pytest.mark.parametrize("no_answer", [True, False])
def test_loss_is_cross_entropy_over_spans_and_no_answer(no_answer: bool) -> None:
    """An answer, no answer (a word of the question) and an ignored example; also with a given number of examples."""
    torch.manual_seed(0)
    _, _, is_context, columns = make_batch("right")
    logits = torch.randn(2, 3, 15).masked_fill(~is_context, torch.finfo(torch.float32).min)
    no_answer_logits = torch.randn(3) if no_answer else None
    scores = AnswerSpanScores(*logits, no_answer_logits)
    expected = []
    for row, (first, last) in enumerate(((4, 6), (0, 0))):
        text = columns[row][1].tolist()
        spans = {(i, j): logits[0, row, i] + logits[1, row, j] for i in text for j in text}
        if no_answer:
            spans[0, 0] = no_answer_logits[row]
        probabilities = dict(zip(spans, torch.stack([*spans.values()]).softmax(0), strict=True))
        if (first, last) in probabilities:
            expected.append(-probabilities[first, last].log())
    starts, ends = torch.tensor([4, 0, 99]), torch.tensor([6, 0, -1])
    loss = answer_span_loss(scores, is_context, starts, ends)
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    accumulated = answer_span_loss(scores, is_context, starts, ends, {"start_positions": 8})
    torch.testing.assert_close(accumulated, torch.stack(expected).sum() / 8)


def test_packed_equals_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced network also computes padding, with equal logits."""
    torch.manual_seed(0)
    inputs = make_batch("left")[:3]
    network = randomize(AnswerSpanNetwork(INPUT, AnswerSpanOptions(hidden_size=3)))
    expected = network(*inputs)
    monkeypatch.setattr(pairs, "is_traced", lambda tensor: True)
    torch.testing.assert_close(network(*inputs)[:2], expected[:2], atol=1e-5, rtol=1e-4)


def test_missing_question_raises() -> None:
    vectors, is_word, _, _ = make_batch("left")
    with pytest.raises(CtxError, match="Example 0 of the batch has no words in its question"):
        AnswerSpanNetwork(INPUT, AnswerSpanOptions())(vectors, is_word, is_word)
