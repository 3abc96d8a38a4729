"""Scores of texts against one prediction at a time, without batches and padding."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference import score
from hf_ctxmodels.registry import FAMILIES

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge", "the dog saw the cat"]
MASKED = ["bert", "roberta", "xlm_roberta", "albert", "electra"]


def opened(family: str, auto_name: str, **changes: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = FAMILIES[family].tokenizer.train(TEXTS * 5, vocab_size=300)
    names = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = Case(FAMILIES[family], auto_name).model(vocab_size=len(tokenizer), **names, **changes)
    return model, tokenizer


def assert_scores(found: list[Any], expected: list[tuple[float, int]]) -> None:
    assert [each.predictions for each in found] == [number for _, number in expected]
    logs = [each.log_probability for each in found]
    assert logs == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert len({round(value, 3) for value in logs}) == len(TEXTS)


def log_probability(logits: torch.Tensor, target: int) -> float:
    return logits.detach().double().log_softmax(-1)[target].item()


@pytest.mark.parametrize(
    ("family", "backward"), [("ulmfit", False), ("ulmfit", True), ("seqae", False)], ids=["ulmfit", "backward", "seqae"]
)
def test_causal(family: str, backward: bool) -> None:
    """Each token after those before it, begun by the token that begins a text, or ends the one before."""
    model, tokenizer = opened(family, "AutoModelForCausalLM", **({"backward": True} if backward else {}))
    assert model.is_backward is backward
    expected = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        ids = [tokenizer.eos_token_id, *ids] if family == "seqae" else ids
        value = 0.0
        for place in range(1, len(ids)):
            if backward:
                value += log_probability(model(torch.tensor([ids[place:]])).logits[0, 0], ids[place - 1])
            else:
                value += log_probability(model(torch.tensor([ids[:place]])).logits[0, -1], ids[place])
        expected.append((value, len(ids) - 1))
    assert_scores(score(model, tokenizer, TEXTS, batch_size=3), expected)


@pytest.mark.parametrize("family", MASKED)
def test_masked(family: str) -> None:
    """Each token behind a mask token; ELECTRA's by its generator, alone or in the pair."""
    for auto_name in ("AutoModelForMaskedLM", "AutoModelForPreTraining"):
        model, tokenizer = opened(family, auto_name)
        generator = getattr(model, "generator", model)
        expected = []
        for text in TEXTS:
            encoded = tokenizer(text, return_tensors="pt", return_special_tokens_mask=True)
            places = (encoded.pop("special_tokens_mask")[0] == 0).nonzero()[:, 0].tolist()
            value = 0.0
            for place in places:
                ids = encoded["input_ids"].clone()
                ids[0, place] = tokenizer.mask_token_id
                outputs = generator(**{**encoded, "input_ids": ids})
                logits = outputs.get("logits", outputs.get("prediction_logits"))
                value += log_probability(logits[0, place], int(encoded["input_ids"][0, place]))
            expected.append((value, len(places)))
        assert_scores(score(model, tokenizer, TEXTS, batch_size=7), expected)


def test_permuted() -> None:
    """Each token as the reference asks for it: hidden from all rows, and mapped to the only target."""
    model, tokenizer = opened("xlnet", "AutoModelForCausalLM")
    expected = []
    for text in TEXTS:
        encoded = tokenizer(text, return_tensors="pt", return_special_tokens_mask=True)
        places = (encoded.pop("special_tokens_mask")[0] == 0).nonzero()[:, 0].tolist()
        length, value = encoded["input_ids"].shape[1], 0.0
        for place in places:
            hidden = torch.zeros(1, length, length)
            hidden[..., place] = 1
            mapping = torch.zeros(1, 1, length)
            mapping[..., place] = 1
            logits = model(**encoded, perm_mask=hidden, target_mapping=mapping).logits[0, 0]
            changed = {**encoded, "input_ids": encoded["input_ids"].clone()}
            changed["input_ids"][0, place] = 5
            assert torch.equal(model(**changed, perm_mask=hidden, target_mapping=mapping).logits[0, 0], logits)
            value += log_probability(logits, int(encoded["input_ids"][0, place]))
        expected.append((value, len(places)))
    assert_scores(score(model, tokenizer, TEXTS, batch_size=7), expected)


def test_both_directions() -> None:
    """The forward model reads the words before, the backward model those after."""
    model, tokenizer = opened("elmo", "AutoModelForPreTraining", max_characters_per_token=50)
    expected = []
    for text in TEXTS:
        rows = torch.tensor([tokenizer(text)["input_ids"]])
        [(numbers, _)] = tokenizer.vocabulary_ids([text])
        value = 0.0
        for place in range(1, len(numbers)):
            value += log_probability(model(rows[:, :place]).logits[0, -1, 0], int(numbers[place]))
            value += log_probability(model(rows[:, place:]).logits[0, 0, 1], int(numbers[place - 1]))
        expected.append((value, 2 * (len(numbers) - 1)))
    assert_scores(score(model, tokenizer, TEXTS, batch_size=3), expected)


def test_what_cannot_be_scored() -> None:
    model, tokenizer = opened("bert", "AutoModelForSequenceClassification")
    with pytest.raises(CtxError, match="CtxBertForSequenceClassification is not a language model"):
        score(model, tokenizer, TEXTS)
    model, tokenizer = opened("bert", "AutoModelForMaskedLM")
    model.train()
    with pytest.raises(CtxError, match=r"Text 1 has no token"):
        score(model, tokenizer, ["the cat", " "])
    assert model.training
