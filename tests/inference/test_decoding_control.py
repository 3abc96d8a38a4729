"""Logits processors against enumeration: bags of words, classifier guidance and allowed answers."""

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
def decoder() -> tuple[Any, Any]:
    return tiny_pair("gpt2", "AutoModelForCausalLM", TEXTS, vocab_size=280, seed=1, initializer_range=0.3)


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def classifier(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A random classifier with another vocabulary."""
    labels = {"id2label": {0: "calm", 1: "wild", 2: "odd"}, "max_position_embeddings": 16}
    auto_class = "AutoModelForSequenceClassification"
    return tiny_pair(request.param, auto_class, TEXTS[:2], vocab_size=265, seed=2, initializer_range=0.5, **labels)


def posterior(tokenizer: Any, classifier: tuple[Any, Any], ids: Tensor, scores: Tensor, weight: float) -> Tensor:
    """log P(x) + weight * log P(label | text, x) of each token x, normalized, one text at a time."""
    model, classifier_tokenizer = classifier
    classifier_tokenizer.truncation_side = "left"
    values = []
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([*ids.tolist(), token_id], skip_special_tokens=True)
        logits = model(**classifier_tokenizer(text, truncation=True, max_length=16, return_tensors="pt")).logits
        values.append(logits[0].log_softmax(-1)[1].item())
    return (scores[: len(tokenizer)].log_softmax(-1) + weight * torch.tensor(values)).log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("weight", "prompt"), [(1.0, "red cats and blue dogs and red cats and blue dogs no blue"), (3.0, "red")]
)
def test_classifier_guidance_matches_bayes_rule(decoder: Any, classifier: Any, weight: float, prompt: str) -> None:
    """With all candidates, the product of both probabilities; with k, its k most probable tokens, renormalized; a batch
    equals its rows alone."""
    model, tokenizer = decoder
    classifier[0].double()  # in float32, batches of other sizes and other numbers of threads differ by more than 1e-5
    ids = torch.tensor([tokenizer(prompt).input_ids, [5] * len(tokenizer(prompt).input_ids)])
    scores = model(ids).logits[:, -1]
    expected = torch.stack([posterior(tokenizer, classifier, *row, weight) for row in zip(ids, scores, strict=True)])
    assert not torch.allclose(expected, scores.log_softmax(-1), atol=0.05), "the classifier is constant"
    full_guidance = ClassifierGuidance(tokenizer, *classifier, "wild", weight, num_candidates=0, batch_size=7)
    torch.testing.assert_close(full_guidance(ids, scores), expected, atol=1e-4, rtol=1e-4)
    guidance = ClassifierGuidance(tokenizer, *classifier, "wild", weight, num_candidates=9)
    guided = guidance(ids, scores)
    unbatched = torch.cat([guidance(ids[row : row + 1], scores[row : row + 1]) for row in (0, 1)])
    torch.testing.assert_close(guided, unbatched, atol=1e-5, rtol=0)
    single_texts = ClassifierGuidance(tokenizer, *classifier, "wild", weight, num_candidates=9, batch_size=1)
    torch.testing.assert_close(guided, single_texts(ids, scores), atol=1e-5, rtol=0)
    candidates = scores.topk(9).indices
    assert torch.equal((guided > -torch.inf).nonzero()[:, 1].view(2, 9), candidates.sort().values)
    torch.testing.assert_close(
        guided.gather(1, candidates), expected.gather(1, candidates).log_softmax(-1), atol=1e-4, rtol=1e-4
    )
    assert ClassifierGuidance(tokenizer, *classifier, "wild", 0.0)(ids, scores) is scores
    assert guidance.label_log_probabilities(["", " "]).tolist() == pytest.approx([-math.log(3)] * 2)


@pytest.mark.slow
def test_generation_with_classifier_guidance(decoder: Any, classifier: Any) -> None:
    """Greedy texts equal a loop over `posterior`; batched texts equal single ones."""
    model, tokenizer = decoder
    model.generation_config.eos_token_id = None
    guidance = ClassifierGuidance(tokenizer, *classifier, "wild", 2.0, num_candidates=0)
    ids = tokenizer("red cats").input_ids
    for _ in range(3):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(posterior(tokenizer, classifier, torch.tensor(ids), scores, 2.0).argmax()))
    prompts = ["red cats", "no", "dogs and red"]
    texts = generate_texts(model, tokenizer, prompts, max_new_tokens=3, logits_processor=[guidance])
    assert texts[0] == tokenizer.decode(ids[-3:], skip_special_tokens=True).strip()
    unbatched = [
        generate_texts(model, tokenizer, [text], max_new_tokens=3, logits_processor=[guidance])[0] for text in prompts
    ]
    assert texts == unbatched
    assert texts != generate_texts(model, tokenizer, prompts, max_new_tokens=3)


def test_bag_of_words_bias(decoder: Any, capsys: pytest.CaptureFixture) -> None:
    """Each token of a word gets an equal share of the bias after the previous tokens of the word; tokens that begin
    several words get the largest share."""
    _, tokenizer = decoder
    words, bias = [" cats", "e", "", "unthinkable", "ed", "cats"], 1.5
    spellings = {text for word in words if word.strip() for text in (word.strip(), f" {word.strip()}")}
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in spellings]
    assert {len(ids) for ids in encoded} >= {1, 2}
    longest = max(encoded, key=len)
    processor = bag_of_words(tokenizer, words, bias)
    scores = torch.randn(3, len(tokenizer))
    contexts = [[5] * (len(longest) + 1), [5, 5, *longest[:-1]], [*longest, 5]]
    biases = processor(torch.tensor(contexts), scores) - scores
    for row, text in enumerate(contexts):
        for token in range(len(tokenizer)):
            shares = {}  # previous tokens of the word -> bias
            for ids in encoded:
                for index, token_id in enumerate(ids):
                    if token_id == token and (not index or text[-index:] == ids[:index]):
                        prefix = tuple(ids[:index])
                        shares[prefix] = max(shares.get(prefix, 0), bias / len(ids))
            assert biases[row, token].item() == pytest.approx(sum(shares.values()), abs=1e-5)
    assert biases[1, longest[-1]] > 0
    assert biases[0, longest[-1]] != biases[1, longest[-1]]
    with pytest.raises(CtxError, match="None of the 0 words"):
        bag_of_words(tokenizer, [""], 1.0)
    _, word_tokenizer = tiny_pair("transformer_xl", "AutoModelForCausalLM", TEXTS)
    processor = bag_of_words(word_tokenizer, ["cats", "unthinkable"], 1.0)
    assert "left out: unthinkable" in capsys.readouterr().err
    expected = torch.zeros(1, len(word_tokenizer))
    expected[0, word_tokenizer.convert_tokens_to_ids("cats")] = 1.0
    assert torch.equal(processor(torch.tensor([[5]]), torch.zeros_like(expected)), expected)
    with pytest.raises(CtxError, match="None of the 1 words is in the vocabulary"):
        bag_of_words(word_tokenizer, ["unthinkable"], 1.0)


def test_generate_of_transformers_model(decoder: Any, classifier: Any) -> None:
    """Processors and constraints in `generate` of a model of transformers."""
    _, tokenizer = decoder
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=tokenizer.pad_token_id, initializer_range=0.3)).eval()
    inputs = tokenizer(["no", "red cats"], return_tensors="pt", padding=True, padding_side="left")
    answers = [" red cats", " red", " blue dogs"]
    allowed_tokens = allowed_answers(tokenizer, answers, inputs["input_ids"].shape[1])
    guidance = ClassifierGuidance(tokenizer, *classifier, "wild")
    for options in (
        {"do_sample": True},
        {"num_beams": 3},
        {"logits_processor": [guidance, bag_of_words(tokenizer, ["dogs", "s"], 3.0)]},
    ):
        output = model.generate(
            **inputs, max_new_tokens=16, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            prefix_allowed_tokens_fn=allowed_tokens, **options,
        )  # fmt: skip
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert set(texts) <= set(answers)


def test_invalid_guidance_and_answers_raise(decoder: Any, classifier: Any, tmp_path: Path) -> None:
    model, tokenizer = decoder
    with pytest.raises(CtxError, match=r"no label 'tame'[\s\S]*calm, wild, odd"):
        ClassifierGuidance(tokenizer, *classifier, "tame")
    for name, number in (("num_candidates", -1), ("batch_size", 0)):
        with pytest.raises(CtxError, match=f"{name}={number} is out of range"):
            ClassifierGuidance(tokenizer, *classifier, "wild", **{name: number})
    regression, bert_tokenizer = tiny_pair("bert", "AutoModelForSequenceClassification", TEXTS)
    regression.config.problem_type = "regression"
    with pytest.raises(CtxError, match="predicts a number"):
        ClassifierGuidance(tokenizer, regression, bert_tokenizer, "wild")
    for component in (model, tokenizer):
        component.save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="CtxGpt2ForCausalLM, which has no labels"):
        ClassifierGuidance.open(str(tmp_path), tokenizer, "wild")
    assert AutoTokenizer.from_pretrained(tmp_path).truncation_side == "right"
    for answers in ([], [""]):
        with pytest.raises(CtxError, match="without a token"):
            allowed_answers(tokenizer, answers, 1)
