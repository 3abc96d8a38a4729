"""Scores under control codes against a loop, source attribution, and naive Bayes."""

import math

import numpy as np
import pytest
import torch
from commands import tiny_pair

from hf_ctxmodels import CtxError
from hf_ctxmodels.data.documents import TextWithCode
from hf_ctxmodels.evaluation.control import (
    Attribution,
    ControlScores,
    UnigramClassifier,
    coded_texts,
    confusion_table,
    cut_windows,
    score_codes,
)

TEXTS = ["a red cat sees one big dog", "one big dog and a cat", "a dog"]


def test_scores_are_cross_entropies_under_each_code() -> None:
    fields = {"max_position_embeddings": 12, "initializer_range": 0.3, "control_codes": {"x": 70, "y": 65}}
    model, tokenizer = tiny_pair("gpt2", "AutoModelForCausalLM", TEXTS, **fields)
    texts = [("y", np.array([5, 9, 7, 30])), ("x", np.array([8, 8])), ("y", np.arange(40, 51))]
    scores = score_codes(model, tokenizer, texts, batch_size=4)
    assert scores.codes == ("x", "y")
    assert scores.labels.tolist() == [1, 0, 1]
    assert scores.tokens.tolist() == [4, 2, 11]
    for (_, ids), nats in zip(texts, scores.nats, strict=True):
        for prefix, value in zip((70, 65, tokenizer.eos_token_id), nats, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[prefix, *ids.tolist()]])).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids), reduction="sum")
            assert value == pytest.approx(loss.item(), rel=1e-4)
    for coded, message in (([("z", texts[0][1])], r"code z[\s\S]*x, y"), ([("x", np.arange(12))], "longest input")):
        with pytest.raises(CtxError, match=message):
            score_codes(model, tokenizer, coded)
    model.config.control_codes = None
    with pytest.raises(CtxError, match="model with control codes"):
        score_codes(model, tokenizer, texts)


def test_attribution_and_perplexities() -> None:
    nats = np.array([[1.0, 2, 3, 4], [5, 1, 1.5, 2], [1, 2, 9, 2]])
    scores = ControlScores(("a", "b", "c"), np.array([0, 2, 1]), nats, np.array([2, 1, 1]))
    attribution = scores.attribution()
    assert attribution.confusion.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert attribution.accuracy == attribution.chance == pytest.approx(1 / 3)
    assert confusion_table(attribution)[2].split() == ["b", "1", "0", "0"]
    assert scores.perplexities() == {
        "right": pytest.approx(math.exp((1 + 1.5 + 2) / 4)),
        "wrong": pytest.approx(math.exp((2.5 + 3 + 5) / 4)),
        "none": pytest.approx(math.exp(8 / 4)),
    }
    pair = ControlScores(("a", "b"), np.array([0, 1]), nats[:2, [0, 1, 3]], np.array([2, 1]))
    assert pair.perplexities() == {
        "right": pytest.approx(math.exp((1 + 1) / 3)),
        "wrong": pytest.approx(math.exp((2 + 5) / 3)),
        "none": pytest.approx(math.exp((4 + 2) / 3)),
    }
    single = ControlScores(("a",), np.array([0, 0]), nats[:2, [0, 3]], np.array([2, 1]))
    assert single.perplexities() == {"right": pytest.approx(math.exp(6 / 3)), "none": pytest.approx(math.exp(6 / 3))}


def test_naive_bayes_classifier() -> None:
    training = [("a", np.array([0, 0, 1])), ("b", np.array([1, 2])), ("b", np.array([2]))]
    unigrams = UnigramClassifier(training, ("a", "b"), 4)
    text = np.array([0, 2, 3])
    expected = [math.log(3 / 7 * 1 / 7 * 1 / 7), math.log(1 / 7 * 3 / 7 * 1 / 7)]
    assert unigrams.scores([text])[0] == pytest.approx(expected)
    result = unigrams.attribution([("a", np.array([0])), ("a", np.array([2])), ("b", np.array([2, 1]))])
    assert result.confusion.tolist() == [[1, 1], [0, 1]]
    assert isinstance(result, Attribution)
    assert unigrams.attribution([]).confusion.tolist() == [[0, 0], [0, 0]]


def test_coded_texts_and_windows() -> None:
    _, tokenizer = tiny_pair("gpt2", "AutoModelForCausalLM", TEXTS)
    documents = [TextWithCode([TEXTS[0], TEXTS[1]], "a"), ["without code"], TextWithCode([TEXTS[2]], "b")]
    texts = list(coded_texts(tokenizer, documents))
    assert [(code, ids.tolist()) for code, ids in texts] == [
        ("a", tokenizer(" ".join(TEXTS[:2])).input_ids),
        ("b", tokenizer(TEXTS[2]).input_ids),
    ]
    windows = cut_windows(texts, 2)
    assert {len(ids) for _, ids in windows} == {2}
    assert (
        np.concatenate([ids for code, ids in windows if code == "a"]).tolist()
        == texts[0][1][: len(texts[0][1]) // 2 * 2].tolist()
    )
    assert [code for code, _ in cut_windows(texts, 2, 1)] == ["a", "b"]
