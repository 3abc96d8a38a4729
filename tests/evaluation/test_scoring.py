"""Text scores against single predictions, without batches and padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.continuations import ContinuationScorer
from hf_ctxmodels.evaluation import (
    detects_replaced_tokens,
    language_model_class,
    likelihood_kind,
    score_originality,
    score_tokens,
)
from hf_ctxmodels.evaluation.scoring import input_length
from hf_ctxmodels.inference import score
from hf_ctxmodels.registry import FAMILIES

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge", "the dog saw the cat"]
MASKED_FAMILIES = ["bert", "roberta", "xlm_roberta", "albert", "electra"]


def make_model(family: str, auto_name: str, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = FAMILIES[family].tokenizer.train(TEXTS * 5, vocab_size=300)
    names = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = Case(FAMILIES[family], auto_name).model(vocab_size=len(tokenizer), **names, **overrides)
    return model, tokenizer


TokenLogProbs = Callable[[str], list[float]]


def assert_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, token_log_probs: TokenLogProbs, batch_size: int
) -> None:
    """Compare text scores with sums of `token_log_probs`."""
    scores, expected = score(model, tokenizer, TEXTS, batch_size=batch_size), list(map(token_log_probs, TEXTS))
    assert [text.predictions for text in scores] == list(map(len, expected))
    sums = [text.log_probability for text in scores]
    assert sums == pytest.approx(list(map(sum, expected)), abs=1e-4)
    assert len({round(value, 3) for value in sums}) == len(TEXTS)


def log_probability(logits: torch.Tensor, target: int) -> float:
    return logits.detach().double().log_softmax(-1)[target].item()


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[Any, list[int]]:
    """The encoding of a text, and the positions of its tokens that are not special."""
    encoded = tokenizer(text, return_tensors="pt", return_special_tokens_mask=True)
    return encoded, (encoded.pop("special_tokens_mask")[0] == 0).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("family", "backward"), [("ulmfit", False), ("ulmfit", True), ("seqae", False)], ids=["ulmfit", "backward", "seqae"]
)
def test_causal_lm_scores(family: str, backward: bool) -> None:
    """Each token given the previous ones, from the token that begins a text or ends the previous text."""
    model, tokenizer = make_model(family, "AutoModelForCausalLM", **({"backward": True} if backward else {}))
    assert model.is_backward is backward

    def token_log_probs(text: str) -> list[float]:
        ids = tokenizer(text)["input_ids"]
        ids = [tokenizer.eos_token_id, *ids] if family == "seqae" else ids
        ids = ids[::-1] if backward else ids
        inputs = [ids[:position][:: -1 if backward else 1] for position in range(1, len(ids))]
        logits = [model(torch.tensor([row])).logits[0, 0 if backward else -1] for row in inputs]
        return list(map(log_probability, logits, ids[1:]))

    assert_scores(model, tokenizer, token_log_probs, 3)


def test_prefix_lm_scores() -> None:
    """The prefix is the token before the text, as for the continuation of an empty prompt."""
    model, tokenizer = make_model("gpt2", "AutoModelForCausalLM", prefix_lm=True)

    def token_log_probs(text: str, prefix_length: int = 1) -> list[float]:
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
        prefix_mask = (torch.arange(len(ids)) < prefix_length).long()[None]
        logits = model(torch.tensor([ids]), prefix_mask=prefix_mask).logits[0]
        return list(map(log_probability, logits, ids[1:]))

    assert_scores(model, tokenizer, token_log_probs, 3)
    assert sum(token_log_probs(TEXTS[0], 4)) != pytest.approx(sum(token_log_probs(TEXTS[0])), abs=1e-3)
    continued = ContinuationScorer(model, tokenizer).score([("", text) for text in TEXTS])
    scores = [text.log_probability for text in score(model, tokenizer, TEXTS)]
    assert [text.log_probability for text in continued] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("family", MASKED_FAMILIES)
def test_masked_lm_scores(family: str) -> None:
    """Each token is masked in turn; ELECTRA uses its generator, alone or with the discriminator."""
    for auto_name in ("AutoModelForMaskedLM", "AutoModelForPreTraining"):
        model, tokenizer = make_model(family, auto_name)

        def token_log_probs(text: str, model: Any = model, tokenizer: Any = tokenizer) -> list[float]:
            encoded, positions = encode(tokenizer, text)
            values = []
            for position in positions:
                ids = encoded["input_ids"].clone()
                ids[0, position] = tokenizer.mask_token_id
                outputs = getattr(model, "generator", model)(**{**encoded, "input_ids": ids})
                logits = outputs.get("logits", outputs.get("prediction_logits"))
                values.append(log_probability(logits[0, position], int(encoded["input_ids"][0, position])))
            return values

        assert_scores(model, tokenizer, token_log_probs, 7)


@pytest.mark.parametrize("family", [*MASKED_FAMILIES, "xlnet"])
def test_later_tokens_of_a_word_are_hidden(family: str) -> None:
    """The words of the text are separated by spaces."""
    model, tokenizer = make_model(family, "AutoModelForCausalLM" if family == "xlnet" else "AutoModelForMaskedLM")
    text = "the gardenletters saw nobodybridge"
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    word_of_token = [
        -1 if is_special else text[:start].count(" ")
        for (start, _), is_special in zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
    ]
    positions = [position for position, word in enumerate(word_of_token) if word >= 0]
    assert len(positions) > len(text.split()) + 2
    expected = 0.0
    for position in positions:
        ids = torch.tensor([encoded["input_ids"]])
        hidden = [later for later in positions if later >= position and word_of_token[later] == word_of_token[position]]
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        if family == "xlnet":
            target = torch.zeros(1, 1, len(ids[0]))
            target[..., position] = 1
            inputs |= {"perm_mask": torch.zeros(1, len(ids[0]), len(ids[0])), "target_mapping": target}
            inputs["perm_mask"][..., hidden] = 1
            inputs["token_type_ids"] = torch.tensor([encoded["token_type_ids"]])
        logits = model(ids.index_fill(1, torch.tensor(hidden), tokenizer.mask_token_id), **inputs).logits
        expected += log_probability(logits[0, 0 if family == "xlnet" else position], int(ids[0, position]))
    [result] = score(model, tokenizer, [text], pll_metric="within_word_l2r")
    assert result.log_probability == pytest.approx(expected, abs=1e-4)
    assert result.predictions == len(positions)
    assert abs(score(model, tokenizer, [text])[0].log_probability - expected) > 1e-3
    batch = score(model, tokenizer, [*TEXTS, text], pll_metric="within_word_l2r", batch_size=5)
    assert batch[-1].log_probability == pytest.approx(expected, abs=1e-4)


def test_unknown_and_unsupported_pll_metrics_raise() -> None:
    model, tokenizer = make_model("bert", "AutoModelForMaskedLM")
    with pytest.raises(CtxError, match="pll_metric"):
        score(model, tokenizer, TEXTS, pll_metric="word")  # type: ignore[arg-type]
    model, tokenizer = make_model("gpt2", "AutoModelForCausalLM")
    with pytest.raises(CtxError, match="computes log-likelihoods"):
        score(model, tokenizer, TEXTS, pll_metric="within_word_l2r")


def test_originality_scores() -> None:
    """ELECTRA's discriminator, each text without padding."""
    model, tokenizer = make_model("electra", "AutoModelForPreTraining")
    expected = []
    for text in TEXTS:
        encoded, positions = encode(tokenizer, text)
        logits = model(**encoded).logits[0, positions].detach().double()
        expected.append(torch.log(1 - torch.sigmoid(logits)).sum().item())
    scores = score_originality(model, tokenizer, TEXTS, batch_size=2)
    assert scores == pytest.approx(expected, abs=1e-4)
    assert detects_replaced_tokens(model)
    bert, tokenizer = make_model("bert", "AutoModelForMaskedLM")
    assert not detects_replaced_tokens(bert)
    with pytest.raises(CtxError, match="does not detect replaced tokens"):
        score_originality(bert, tokenizer, TEXTS)


def test_permutation_lm_scores() -> None:
    """As in the reference, each token is hidden by perm_mask and is the only target."""
    model, tokenizer = make_model("xlnet", "AutoModelForCausalLM")

    def token_log_probs(text: str) -> list[float]:
        encoded, positions = encode(tokenizer, text)
        values = []
        for position in positions:
            target = torch.zeros(1, 1, encoded["input_ids"].shape[1])
            target[..., position] = 1
            masks = {"perm_mask": target.expand(1, target.shape[-1], -1), "target_mapping": target}
            logits = model(**encoded, **masks).logits[0, 0]
            changed = {**encoded, "input_ids": encoded["input_ids"].clone()}
            changed["input_ids"][0, position] = 5
            assert torch.equal(model(**changed, **masks).logits[0, 0], logits)
            values.append(log_probability(logits, int(encoded["input_ids"][0, position])))
        return values

    assert_scores(model, tokenizer, token_log_probs, 7)


def test_bidirectional_lm_scores() -> None:
    """The forward model reads the previous words, the backward model the following ones."""
    model, tokenizer = make_model("elmo", "AutoModelForPreTraining", max_characters_per_token=50)

    def token_log_probs(text: str) -> list[float]:
        rows = torch.tensor([tokenizer(text)["input_ids"]])
        [(ids, _)] = tokenizer.vocabulary_ids([text])
        values = []
        for position in range(1, len(ids)):
            values.append(log_probability(model(rows[:, :position]).logits[0, -1, 0], int(ids[position])))
            values.append(log_probability(model(rows[:, position:]).logits[0, 0, 1], int(ids[position - 1])))
        return values

    assert_scores(model, tokenizer, token_log_probs, 3)


@pytest.mark.parametrize(
    ("family", "auto_name"),
    [
        ("ulmfit", "AutoModelForCausalLM"),
        ("seqae", "AutoModelForCausalLM"),
        ("gpt2", "AutoModelForCausalLM"),
        ("bert", "AutoModelForMaskedLM"),
        ("xlnet", "AutoModelForCausalLM"),
        ("elmo", "AutoModelForPreTraining"),
    ],
)
def test_token_scores_sum_to_text_score(family: str, auto_name: str) -> None:
    model, tokenizer = make_model(family, auto_name, **({"backward": True} if family == "ulmfit" else {}))
    ids = [[*ids] for ids, _ in tokenizer.vocabulary_ids(TEXTS)] if family == "elmo" else tokenizer(TEXTS)["input_ids"]
    for text, text_ids, text_score in zip(TEXTS, ids, score(model, tokenizer, TEXTS), strict=True):
        tokens = score_tokens(model, tokenizer, text, batch_size=3, num_predictions=len(tokenizer))
        assert [token.position for token in tokens] == sorted({token.position for token in tokens})
        # ELMo predicts words in both directions, and the ends of the text in one direction
        ends = (0, len(text_ids) - 1)
        weights = [2 if family == "elmo" and token.position not in ends else 1 for token in tokens]
        assert sum(weights) == text_score.predictions
        sums = sum(weight * token.log_probability for weight, token in zip(weights, tokens, strict=True))
        assert sums == pytest.approx(text_score.log_probability, abs=1e-4)
        for token in tokens:
            if token.position < len(text_ids):
                assert token.predictions[token.rank - 1] == text_ids[token.position]


@pytest.mark.parametrize(
    ("family", "auto_name"),
    [("bert", "AutoModelForMaskedLM"), ("gpt2", "AutoModelForCausalLM"), ("elmo", "AutoModelForPreTraining")],
    ids=["bert", "gpt2", "elmo"],
)
def test_long_texts_print_no_warning_of_the_tokenizer(
    family: str, auto_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = make_model(family, auto_name)
    tokenizer.model_max_length = 3
    assert input_length(model, tokenizer, TEXTS[2]) > 3
    assert "longer than the specified maximum" not in caplog.text


@pytest.mark.parametrize("is_masked", [True, False])
def test_scores_of_transformers_models(tokenizer: PreTrainedTokenizerBase, is_masked: bool) -> None:
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(**sizes)) if is_masked else GPT2LMHeadModel(GPT2Config(**sizes))
    assert language_model_class(model.config) == ("AutoModelForMaskedLM" if is_masked else "AutoModelForCausalLM")
    assert likelihood_kind(model, tokenizer) == ("pseudo-log-likelihood" if is_masked else "log-likelihood")
    model.eval()
    tokens = score_tokens(model, tokenizer, TEXTS[0])
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    assert [token.position for token in tokens] == list(range(1, ids.shape[1] - is_masked))
    for token in tokens:
        inputs = ids.clone()
        inputs[0, token.position] = tokenizer.mask_token_id
        logits = model(inputs if is_masked else ids[:, : token.position]).logits[0, token.position if is_masked else -1]
        target = int(ids[0, token.position])
        assert token.log_probability == pytest.approx(log_probability(logits, target), abs=1e-4)
        assert token.rank == logits.argsort(descending=True).tolist().index(target) + 1
        assert token.predictions == logits.topk(5).indices.tolist()


def test_unsupported_models_and_texts_raise() -> None:
    model, tokenizer = make_model("bert", "AutoModelForSequenceClassification")
    with pytest.raises(CtxError, match="CtxBertForSequenceClassification is not a language model"):
        score(model, tokenizer, TEXTS)
    model, tokenizer = make_model("bert", "AutoModelForMaskedLM")
    model.train()
    with pytest.raises(CtxError, match=r"Text 1 has no token"):
        score(model, tokenizer, ["the cat", " "])
    assert model.training
