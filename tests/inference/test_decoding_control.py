"""Processors of logits against enumeration: bags of words, guidance by a classifier, and answers from a list; also with
models of transformers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import tiny_pair
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference import ClassifierGuidance, allowed_answers, bag_of_words, generate_texts

TEXTS = ["red cats and blue dogs", "no blue cats", "dogs and red cats"]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_pair("gpt2", "AutoModelForCausalLM", TEXTS, vocab_size=280, seed=1, initializer_range=0.3)


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def classifier(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A random classifier with another vocabulary."""
    labels = {"id2label": {0: "calm", 1: "wild", 2: "odd"}, "max_position_embeddings": 16}
    auto_class = "AutoModelForSequenceClassification"
    return tiny_pair(request.param, auto_class, TEXTS[:2], vocab_size=265, seed=2, initializer_range=0.5, **labels)


def enumerated(tokenizer: Any, classifier: tuple[Any, Any], ids: Tensor, scores: Tensor, weight: float) -> Tensor:
    """log P(x) + weight * log P(label | text, x) of each token, normalized, one text at a time."""
    model, words = classifier
    words.truncation_side = "left"
    values = []
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([*ids.tolist(), token_id], skip_special_tokens=True)
        logits = model(**words(text, truncation=True, max_length=16, return_tensors="pt")).logits
        values.append(logits[0].log_softmax(-1)[1].item())
    return (scores[: len(tokenizer)].log_softmax(-1) + weight * torch.tensor(values)).log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("prompt", ["red", "red cats and blue dogs and red cats and blue dogs no blue"])
def test_guidance_is_bayes_rule(pair: Any, classifier: Any, weight: float, prompt: str) -> None:
    """All candidates: the exact product of both probabilities; k candidates: its k most probable tokens, renormalized;
    the texts of a batch do not depend on each other."""
    model, tokenizer = pair
    ids = torch.tensor([tokenizer(prompt).input_ids, [5] * len(tokenizer(prompt).input_ids)])
    scores = model(ids).logits[:, -1]
    expected = torch.stack([enumerated(tokenizer, classifier, *row, weight) for row in zip(ids, scores, strict=True)])
    assert not torch.allclose(expected, scores.log_softmax(-1), atol=0.05), "the classifier is constant"
    everything = ClassifierGuidance(tokenizer, *classifier, "wild", weight, num_candidates=0, batch_size=7)
    torch.testing.assert_close(everything(ids, scores), expected, atol=1e-4, rtol=1e-4)
    guidance = ClassifierGuidance(tokenizer, *classifier, "wild", weight, num_candidates=9)
    guided = guidance(ids, scores)
    alone = torch.cat([guidance(ids[row : row + 1], scores[row : row + 1]) for row in (0, 1)])
    torch.testing.assert_close(guided, alone, atol=1e-5, rtol=0)
    candidates = scores.topk(9).indices
    assert torch.equal((guided > -torch.inf).nonzero()[:, 1].view(2, 9), candidates.sort().values)
    torch.testing.assert_close(
        guided.gather(1, candidates), expected.gather(1, candidates).log_softmax(-1), atol=1e-4, rtol=1e-4
    )
    assert ClassifierGuidance(tokenizer, *classifier, "wild", 0.0)(ids, scores) is scores
    assert guidance.label_log_probabilities(["", " "]).tolist() == pytest.approx([-math.log(3)] * 2)


def test_guidance_of_generation(pair: Any, classifier: Any) -> None:
    """Greedy texts equal a loop over `enumerated`, in a batch as alone."""
    model, tokenizer = pair
    model.generation_config.eos_token_id = None
    guidance = ClassifierGuidance(tokenizer, *classifier, "wild", 2.0, num_candidates=0)
    ids = tokenizer("red cats").input_ids
    for _ in range(3):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(enumerated(tokenizer, classifier, torch.tensor(ids), scores, 2.0).argmax()))
    prompts = ["red cats", "no", "dogs and red"]
    texts = generate_texts(model, tokenizer, prompts, max_new_tokens=3, logits_processor=[guidance])
    assert texts[0] == tokenizer.decode(ids[-3:], skip_special_tokens=True).strip()
    alone = [
        generate_texts(model, tokenizer, [text], max_new_tokens=3, logits_processor=[guidance])[0] for text in prompts
    ]
    assert texts == alone
    assert texts != generate_texts(model, tokenizer, prompts, max_new_tokens=3)


def test_bag_of_words(pair: Any) -> None:
    """The bias is added to the single tokens of the words, with and without a space, and to nothing else."""
    _, tokenizer = pair
    vocabulary = tokenizer.get_vocab()
    scores = torch.randn(2, len(tokenizer))
    processor = bag_of_words(tokenizer, [" cats", "e", "", "unthinkable"], 1.5)
    changed = processor(torch.tensor([[3, 4], [5, 6]]), scores) - scores
    expected = {vocabulary[token] for token in ("cats", "Ġcats", "e", "Ġe") if token in vocabulary}
    assert len(expected) >= 2
    assert set(changed.nonzero()[:, 1].tolist()) == expected
    torch.testing.assert_close(changed[:, sorted(expected)], torch.full((2, len(expected)), 1.5))
    for words in (["unthinkable"], []):
        with pytest.raises(CtxError, match="single token"):
            bag_of_words(tokenizer, words, 1.0)


def test_models_of_transformers(pair: Any, classifier: Any) -> None:
    """The processors and constraints in `generate` of a model of transformers."""
    _, tokenizer = pair
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=tokenizer.pad_token_id, initializer_range=0.3)).eval()
    inputs = tokenizer(["no", "red cats"], return_tensors="pt", padding=True, padding_side="left")
    answers = [" red cats", " red", " blue dogs"]
    function = allowed_answers(tokenizer, answers, inputs["input_ids"].shape[1])
    guidance = ClassifierGuidance(tokenizer, *classifier, "wild")
    for options in (
        {"do_sample": True},
        {"num_beams": 3},
        {"logits_processor": [guidance, bag_of_words(tokenizer, ["dogs", "s"], 3.0)]},
    ):
        output = model.generate(
            **inputs, max_new_tokens=16, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            prefix_allowed_tokens_fn=function, **options,
        )  # fmt: skip
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert set(texts) <= set(answers)


def test_errors(pair: Any, classifier: Any, tmp_path: Path) -> None:
    model, tokenizer = pair
    with pytest.raises(CtxError, match=r"no label 'tame'[\s\S]*calm, wild, odd"):
        ClassifierGuidance(tokenizer, *classifier, "tame")
    regression, words = tiny_pair("bert", "AutoModelForSequenceClassification", TEXTS)
    regression.config.problem_type = "regression"
    with pytest.raises(CtxError, match="predicts a number"):
        ClassifierGuidance(tokenizer, regression, words, "wild")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="CtxGpt2ForCausalLM, which has no labels"):
        ClassifierGuidance.open(str(tmp_path), tokenizer, "wild")
    assert AutoTokenizer.from_pretrained(tmp_path).truncation_side == "right"
    for answers in ([], [""]):
        with pytest.raises(CtxError, match="without a token"):
            allowed_answers(tokenizer, answers, 1)
