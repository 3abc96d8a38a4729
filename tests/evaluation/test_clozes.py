"""Cloze scores (PET) against single forward passes, and cloze tasks in `evaluate prompts`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command_output, save, tiny_pair

from hf_ctxmodels import CtxError
from hf_ctxmodels.evaluation import Cloze, score_clozes
from hf_ctxmodels.evaluation.prompts.evaluation import PseudoLikelihoodScorer, evaluate_prompts
from hf_ctxmodels.evaluation.prompts.tasks import read_tasks

TEXTS = ["the cat saw a small garden", "a dog carried seven letters", "nobody mended the bridge", "it was good or bad"]
WORDS = ("good", "bad")
SINGLE_TOKEN = [
    Cloze((("It was ", ". the cat saw a small garden"),), WORDS),
    Cloze((('"nobody mended the bridge"?',), ("", ', "the dog"')), WORDS),
    Cloze((("a dog carried ", " letters"),), ("seven", "small", "good")),
]
LONG_CHOICES = ("a small garden", "bad", "the bridge")
MULTI_TOKEN = [Cloze((("the cat saw ", " it"),), LONG_CHOICES), Cloze((("nobody saw",), ("", " it was")), LONG_CHOICES)]


@pytest.fixture(scope="module", params=["bert", "roberta", "albert"])
def masked_lm(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    sizes = {"initializer_range": 0.3, "max_position_embeddings": 40}
    return tiny_pair(request.param, "AutoModelForMaskedLM", TEXTS * 3, vocab_size=340, **sizes)


def token_ids(tokenizer: Any, choice: str) -> list[int]:
    return tokenizer(f" {choice}", add_special_tokens=False)["input_ids"]


@torch.no_grad()
def logits_at_masks(model: Any, tokenizer: Any, ids: torch.Tensor, **inputs: Any) -> dict[int, torch.Tensor]:
    """Logits of each mask token, by position."""
    logits = model(input_ids=ids, **inputs).logits[0].double()
    return {position: logits[position] for position in (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()}


def encode(tokenizer: Any, cloze: Cloze, num_masks: int) -> dict[str, torch.Tensor]:
    segments = [(tokenizer.mask_token * num_masks).join(texts).strip() for texts in cloze.segments]
    return dict(tokenizer(*segments, return_tensors="pt"))


def single_token_scores(model: Any, tokenizer: Any, cloze: Cloze) -> list[float]:
    """Log-softmax over the verbalizers of their logits at the mask."""
    inputs = encode(tokenizer, cloze, 1)
    (logits,) = logits_at_masks(model, tokenizer, inputs.pop("input_ids"), **inputs).values()
    values = torch.stack([logits[token_ids(tokenizer, choice)[0]] for choice in cloze.choices])
    return (values.exp() / values.exp().sum()).log().tolist()


def multi_token_score(model: Any, tokenizer: Any, cloze: Cloze, choice: str) -> float:
    """Fill the masks one by one, the most probable token first."""
    tokens = token_ids(tokenizer, choice)
    inputs = encode(tokenizer, cloze, len(tokens))
    ids, total = inputs.pop("input_ids"), 0.0
    targets = dict(zip((ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist(), tokens, strict=True))
    while targets:
        logits = logits_at_masks(model, tokenizer, ids, **inputs)
        values = {position: logits[position].log_softmax(-1)[token].item() for position, token in targets.items()}
        position = max(values, key=lambda position: values[position])
        total += values[position]
        ids[0, position] = targets.pop(position)
    return total


@pytest.mark.parametrize("batch_tokens", [1, 50, 2048])
def test_cloze_scores_match_single_passes(masked_lm: Any, batch_tokens: int) -> None:
    model, tokenizer = masked_lm
    scores = score_clozes(model, tokenizer, [*SINGLE_TOKEN, *MULTI_TOKEN], batch_tokens=batch_tokens)
    for cloze, group in zip(SINGLE_TOKEN, scores[: len(SINGLE_TOKEN)], strict=True):
        assert all(len(token_ids(tokenizer, choice)) == 1 for choice in cloze.choices), "choices must be single tokens"
        expected = single_token_scores(model, tokenizer, cloze)
        assert [score.log_probability for score in group] == pytest.approx(expected, abs=1e-4)
        assert max(expected) - min(expected) > 0.01
    for cloze, group in zip(MULTI_TOKEN, scores[len(SINGLE_TOKEN) :], strict=True):
        assert [score.num_tokens for score in group] == [len(token_ids(tokenizer, choice)) for choice in cloze.choices]
        assert max(score.num_tokens for score in group) >= 3
        expected = [multi_token_score(model, tokenizer, cloze, choice) for choice in cloze.choices]
        assert [score.log_probability for score in group] == pytest.approx(expected, abs=1e-4)
    assert not any(score.is_truncated for group in scores for score in group)


def test_long_texts_are_truncated(masked_lm: Any) -> None:
    """The side with more tokens is truncated, at the end that is far from the mask."""
    model, tokenizer = masked_lm
    short = Cloze((("it was ", " the bridge"),), WORDS)
    long = Cloze(((f"{'the cat saw ' * 20}it was ", " the bridge"),), WORDS)
    limit = encode(tokenizer, short, 1)["input_ids"].shape[1]
    (expected,), (truncated,) = (
        score_clozes(model, tokenizer, [short]),
        score_clozes(model, tokenizer, [long], max_length=limit),
    )
    tokens, long_tokens = (encode(tokenizer, cloze, 1)["input_ids"][0, 1:].tolist() for cloze in (short, long))
    assert long_tokens[-len(tokens) :] == tokens, "the truncated text must have the tokens of the short one"
    values = [score.log_probability for score in truncated]
    assert values == pytest.approx([score.log_probability for score in expected], abs=1e-4)
    assert all(score.is_truncated for score in truncated)
    ((score_at_limit, _),) = score_clozes(model, tokenizer, [long])  # limited by the positions of the model
    assert score_at_limit.is_truncated
    with pytest.raises(CtxError, match="exceeds the maximum length of 2"):
        score_clozes(model, tokenizer, [short], max_length=2)


def test_invalid_clozes_raise(masked_lm: Any) -> None:
    model, tokenizer = masked_lm
    blank = (("it was ", ""),)
    with pytest.raises(CtxError, match="2 mask tokens, expected 1"):
        score_clozes(model, tokenizer, [Cloze(((f"{tokenizer.mask_token} was ", ""),), WORDS)])
    with pytest.raises(CtxError, match="has the tokens of another one"):
        score_clozes(model, tokenizer, [Cloze(blank, ("good", "good"))])
    with pytest.raises(CtxError, match="predicts no masked tokens"):
        score_clozes(*tiny_pair("gpt2", "AutoModelForCausalLM", TEXTS), [Cloze(blank, WORDS)])


TASK_YAML = """
tasks:
  mood:
    file: {train: data.jsonl, validation: data.jsonl}
    scoring: cloze
    input: '"{text!p}"? [SEP] [MASK], "{other}"'
    target: "{label}"
    labels: {0: bad, 1: good}
"""


def test_cloze_task_and_command(masked_lm: Any, tmp_path: Path) -> None:
    model, tokenizer = masked_lm
    rows = [{"text": f"{text} .?", "other": text, "label": index % 2} for index, text in enumerate(TEXTS)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks.yaml").write_text(TASK_YAML)
    task = read_tasks(tmp_path / "tasks.yaml", tmp_path)["mood"]
    examples = task.read("validation")
    segments = ((f'"{TEXTS[0]} "? ',), (" ", f', "{TEXTS[0]}"'))
    assert task.cloze("", examples[0]) == Cloze(segments, ("bad", "good"))
    assert task.demonstration(examples[1]) == f'"{TEXTS[1]} "? good, "{TEXTS[1]}"\n\n'
    contexts = task.contexts(examples, examples, 1, seed=0, is_same_file=True)
    assert task.cloze(contexts[0], examples[0]).segments[0][0].startswith(contexts[0])
    result = evaluate_prompts(task, examples, [""] * len(examples), PseudoLikelihoodScorer(model, tokenizer))
    expected = [single_token_scores(model, tokenizer, task.cloze("", example)) for example in examples]
    assert [record["log_probabilities"] for record in result.records] == [
        pytest.approx(values, abs=1e-4) for values in expected
    ]
    accuracy = (
        sum(values[example.text.label] == max(values) for values, example in zip(expected, examples, strict=True)) / 4
    )
    assert result.metrics["acc"].value == accuracy
    assert list(result.metrics) == ["acc"]

    options = {"task": tmp_path / "tasks.yaml", "tasks_folder": tmp_path, "output_dir": tmp_path / "out"}
    printed = command_output("evaluate prompts", model=save(tmp_path / "model", model, tokenizer), **options)
    assert f"|acc     |↑  |{accuracy:.4f}" in printed.replace("|acc   |", "|acc     |").replace("|acc|", "|acc     |")
    gpt2 = save(tmp_path / "gpt2", *tiny_pair("gpt2", "AutoModelForCausalLM", TEXTS))
    error = command_output("evaluate prompts", model=gpt2, fails=True, **options | {"output_dir": tmp_path / "other"})
    assert "The task mood needs a model that predicts masked tokens" in error
