"""Scores of continuations against one forward pass per request, without padding, caches or shared prefixes."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)
from zoo import tiny_config, with_random_parameters

from hf_ctxmodels.architectures.continuations import ContinuationScorer
from hf_ctxmodels.architectures.prefix_trees import TokenRow, pack_trees, prefix_trees
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import target_vocabulary_config
from hf_ctxmodels.models.ulmfit import CtxUlmfitForCausalLM
from hf_ctxmodels.registry import FAMILIES

TEXTS = ["the old sailor carried seven letters over the bridge", "a dog saw the red boat .", "nobody painted it"]
SHOTS = "a dog saw the boat . nobody painted the red boat . "
CHOICES = [" saw", " saw the boat", " painted seven letters over it"]
REQUESTS = [
    *[(f"{SHOTS}{context}", choice) for context in ("the old sailor", "a dog", "it") for choice in CHOICES],
    ("nobody saw the old bridge ", "carried"),
    ("nobody saw the old bridge", " carried"),
    ("it", " carried seven letters over the bridge ."),
]


def build(family_name: str, seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """A tiny random language model or encoder-decoder, and its tokenizer."""
    family = FAMILIES[family_name]
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=300)
    fields = {"vocab_size": len(tokenizer), **target_vocabulary_config(tokenizer), **changes}
    if family_name in ("unilm", "ernie_gen"):
        fields |= {"decoder_start_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    if "max_position_embeddings" in family.config.__dataclass_fields__:
        fields.setdefault("max_position_embeddings", 128)
    auto_class = "AutoModelForCausalLM" if "AutoModelForCausalLM" in family.models else "AutoModelForSeq2SeqLM"
    torch.manual_seed(seed)
    return with_random_parameters(family.models[auto_class](tiny_config(family, **fields)), seed).eval(), tokenizer


@torch.no_grad()
def expected_score(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, int, bool]:
    """Log-probability, number of tokens and whether they are greedy, from one forward pass."""
    spaces = len(context) - len(context.rstrip())
    context, continuation = context.rstrip(), context[len(context) - spaces :] + continuation
    if model.config.is_encoder_decoder:
        target = tokenizer(text_target=continuation)["input_ids"]
        start = model.config.decoder_start_token_id
        first = [token_id for token_id in target[:1] if token_id in (start, tokenizer.bos_token_id)]
        ids = target[len(first) : -1]  # without the end token
        decoder_ids = [start, *(token_id for token_id in first if token_id != start), *ids][:-1]
        logits = model(
            input_ids=torch.tensor([tokenizer(context)["input_ids"]]), decoder_input_ids=torch.tensor([decoder_ids])
        ).logits
    else:
        whole, prefix = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
        if prefix[-1] == tokenizer.eos_token_id:
            whole, prefix = whole[:-1], prefix[:-1]
        ids = whole[len(prefix) :]
        options = {}
        if getattr(model.config, "prefix_lm", False):
            options["prefix_mask"] = (torch.arange(len(whole)) < len(prefix)).long()[None]
        logits = model(input_ids=torch.tensor([whole]), **options).logits[:, :-1]
    log_probabilities = logits[0, -len(ids) :].float().log_softmax(-1)
    total = log_probabilities[torch.arange(len(ids)), torch.tensor(ids)].sum().item()
    return total, len(ids), log_probabilities.argmax(-1).tolist() == list(ids)


def assert_scores(model: Any, tokenizer: Any, **options: Any) -> None:
    expected = [expected_score(model, tokenizer, *request) for request in REQUESTS]
    scores = ContinuationScorer(model, tokenizer, **options).score(REQUESTS)
    for score, (log_probability, num_tokens, is_greedy) in zip(scores, expected, strict=True):
        assert score.log_probability == pytest.approx(log_probability, abs=1e-4, rel=1e-5)
        assert (score.num_tokens, score.is_greedy) == (num_tokens, is_greedy)
    reversed_scores = ContinuationScorer(model, tokenizer, **options).score(REQUESTS[::-1])[::-1]
    assert [round(score.log_probability, 3) for score in reversed_scores] == pytest.approx(
        [round(score.log_probability, 3) for score in scores], abs=2e-3
    )


@pytest.mark.parametrize("batch_tokens", [40, 4096])
@pytest.mark.parametrize(
    "family", ["gpt2", "gpt3", "grover", "xlm", "ulmfit", "seqae", "t5", "bart", "unilm", "ernie_gen", "cove"]
)
def test_scores(family: str, batch_tokens: int) -> None:
    assert_scores(*build(family), batch_tokens=batch_tokens)


@pytest.mark.parametrize("family", ["gpt2", "gpt3"])
def test_prefix_lm(family: str) -> None:
    """Tokens of a context attend to one another in both directions; only its own continuations share it."""
    model, tokenizer = build(family, prefix_lm=True)
    assert_scores(model, tokenizer, batch_tokens=100)
    assert_answers(model, tokenizer)
    scores = ContinuationScorer(model, tokenizer).score([("a dog", " saw the boat"), ("a dog saw", " the boat")])
    model.config.prefix_lm = False
    assert ContinuationScorer(model, tokenizer).score([("a dog", " saw the boat")])[0] != scores[0]


def assert_answers(model: Any, tokenizer: Any) -> None:
    """Answers equal the tokens that `generate` appends to one prompt, also if a string in the middle ends them."""
    prompts = [f"{SHOTS}the old sailor", "it", f"{SHOTS}a dog", f"{SHOTS}a dog saw the boat", "it"]
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        if not model.config.is_encoder_decoder and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
        options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": tokenizer.pad_token_id}
        output = model.generate(torch.tensor([ids]), **options)[0].tolist()
        output = output if model.config.is_encoder_decoder else output[len(ids) :]
        if hasattr(tokenizer, "decode_target"):
            expected.append(tokenizer.decode_target([output])[0].strip())
        else:
            expected.append(tokenizer.decode(output, skip_special_tokens=True).strip())
    scorer = ContinuationScorer(model, tokenizer, batch_tokens=60)
    assert [answer.text for answer in scorer.greedy_answers(prompts, max_new_tokens=12)] == expected
    characters = [character for character in "".join(expected) if "!" <= character <= "~"]
    assert characters, "the answers are empty: choose another seed"
    middle = characters[len(characters) // 2]
    ends = [text.split(middle)[0].strip() for text in expected]
    answers = scorer.greedy_answers(prompts, max_new_tokens=12, until=[middle, "no such text"])
    assert [answer.text for answer in answers] == ends


@pytest.mark.parametrize("family", ["gpt2", "ulmfit", "t5", "bart", "unilm", "cove"])
def test_answers(family: str) -> None:
    model, tokenizer = build(family, seed=4)
    assert_answers(model, tokenizer)


@pytest.mark.parametrize("model_class", [GPT2LMHeadModel, MistralForCausalLM, T5ForConditionalGeneration])
def test_transformers_models(model_class: Any) -> None:
    """Mistral's sliding window is shorter than the texts: it cannot share prefixes."""
    _, tokenizer = build("t5" if model_class is T5ForConditionalGeneration else "gpt2")
    size = {"vocab_size": len(tokenizer), "initializer_range": 0.3}
    torch.manual_seed(0)
    if model_class is GPT2LMHeadModel:
        config: Any = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **size)
    elif model_class is MistralForCausalLM:
        config = MistralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=6, max_position_embeddings=128, **size,
        )  # fmt: skip
    else:
        config = T5Config(
            vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            decoder_start_token_id=0, initializer_factor=4.0,
        )  # fmt: skip
    model = model_class(config).eval()
    assert_scores(model, tokenizer, batch_tokens=60)
    assert_answers(model, tokenizer)


def test_shared_prefixes_are_computed_once() -> None:
    """The examples are one row, and all contexts with their choices another one."""
    model, tokenizer = build("gpt2")
    shapes: list[torch.Size] = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].shape))
    contexts = [2 * SHOTS + "a dog", 2 * SHOTS + "it"]
    requests = [(context, choice) for context in contexts for choice in CHOICES]
    ContinuationScorer(model, tokenizer).score(requests)
    num_examples = len(tokenizer(2 * SHOTS.rstrip())["input_ids"])
    num_alone = sum(len(tokenizer("".join(request))["input_ids"]) - 1 for request in requests)
    examples, trees = shapes
    assert abs(examples[-1] - num_examples) <= 1
    assert trees[0] == 1
    assert examples[-1] + trees[-1] <= num_alone - (len(requests) - 1) * examples[-1]


def test_prefix_trees() -> None:
    """Each row is the path to its node; targets and requests are at their tokens; equal rows share a node."""
    generator = np.random.default_rng(0)
    rows = []
    for request in range(60):
        prefix = [[7] * 9, [7] * 9 + [3, 4, 5], []][request % 3]
        ids = np.array([*prefix, *generator.integers(0, 3, generator.integers(1, 5))], dtype=np.int32)
        rows.append(TokenRow(ids, list(range(100, 100 + int(generator.integers(1, len(ids) + 1)))), request))
    found: dict[int, list[int]] = {}
    targets: dict[int, dict[int, int]] = {row.request: {} for row in rows}
    num_tokens = 0
    roots = prefix_trees(rows)
    stack = [(node, []) for node in roots]
    while stack:
        node, before = stack.pop()
        num_tokens += len(node.ids)
        path = [*before, *node.ids.tolist()]
        for target in node.targets:
            targets[target.request][len(before) + target.column] = target.token_id
        for request in node.requests:
            assert request not in found
            found[request] = path
        stack.extend((child, path) for child in node.children)
    assert num_tokens < 0.5 * sum(len(row.ids) for row in rows)
    for row in rows:
        assert found[row.request] == row.ids.tolist()
        first = len(row.ids) - len(row.targets)
        assert targets[row.request] == {first + index: token for index, token in enumerate(row.targets)}
    for flat, _ in pack_trees([(root, 0) for root in roots], 60):  # in one row, a token attends to its path
        if flat.layout is None:
            assert flat.num_tokens > 60
            continue
        assert len(flat.ids) <= 60
        for target in flat.targets:
            (columns,) = flat.layout.visible[target.column].nonzero()
            columns = columns[flat.layout.positions[columns].argsort()]
            assert flat.layout.positions[columns].tolist() == list(range(len(columns)))
            assert columns[-1] == target.column
            assert flat.ids[columns].tolist() == found[target.request][: len(columns)]
            assert targets[target.request][len(columns) - 1] == target.token_id


def test_truncation_keeps_the_end() -> None:
    """A long context gives the score of its last tokens; a long continuation is an error."""
    model, tokenizer = build("gpt2")
    scorer = ContinuationScorer(model, tokenizer, max_length=20)
    (long, short) = scorer.score([(" ".join([SHOTS] * 3) + "x y z the old sailor", " saw"), ("it", " saw")])
    ids = tokenizer(" ".join([SHOTS] * 3) + "x y z the old sailor saw")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[-21:-1]])).logits[0].log_softmax(-1)
    num = long.num_tokens
    expected = logits[torch.arange(20 - num, 20), torch.tensor(ids[-num:])].sum().item()
    assert long.log_probability == pytest.approx(expected, abs=1e-4)
    assert short.log_probability == pytest.approx(expected_score(model, tokenizer, "it", " saw")[0], abs=1e-4)
    with pytest.raises(CtxError, match="above the maximum length of 20"):
        scorer.score([("it", SHOTS * 3)])


def test_padding_does_not_exceed_the_positions() -> None:
    """A short context with long continuations is not padded to the length of a context that fills the model."""
    model, tokenizer = build("gpt2", max_position_embeddings=48)
    words = " ".join(TEXTS)
    requests = [
        (context, f" {continuation}")
        for context in (f"{words} {words} {words}", f"{words} {words}", SHOTS)
        for continuation in ("saw", TEXTS[0], "it")
    ]
    scores = ContinuationScorer(model, tokenizer).score(requests)
    expected = [ContinuationScorer(model, tokenizer).score([request])[0].log_probability for request in requests]
    assert [score.log_probability for score in scores] == pytest.approx(expected, abs=1e-4)


def test_end_tokens_of_targets() -> None:
    """With the end token, a target that begins another one is no longer always more probable."""
    model, tokenizer = build("t5")
    requests = [("it", " saw"), ("it", " saw the boat")]
    without = ContinuationScorer(model, tokenizer).score(requests)
    scores = ContinuationScorer(model, tokenizer, scores_end=True).score(requests)
    assert without[0].log_probability > without[1].log_probability
    assert [score.num_tokens - other.num_tokens for score, other in zip(scores, without, strict=True)] == [1, 1]
    ids = tokenizer(text_target=" saw")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=torch.tensor([tokenizer("it")["input_ids"]]), labels=torch.tensor([ids])).loss
    assert scores[0].log_probability == pytest.approx(-loss.item() * len(ids), abs=1e-4)


def test_errors() -> None:
    model, tokenizer = build("gpt2")
    with pytest.raises(CtxError, match="has no token"):
        ContinuationScorer(model, tokenizer).score([("it", "")])
    bert = FAMILIES["bert"].models["AutoModelForMaskedLM"](tiny_config(FAMILIES["bert"]))
    with pytest.raises(CtxError, match="does not predict texts from left to right"):
        ContinuationScorer(bert, tokenizer)
    xlnet = XLNetLMHeadModel(XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8))
    with pytest.raises(CtxError, match="does not predict texts from left to right"):
        ContinuationScorer(xlnet, tokenizer)
    backward = CtxUlmfitForCausalLM(tiny_config(FAMILIES["ulmfit"], backward=True))
    with pytest.raises(CtxError, match="use the forward model"):
        ContinuationScorer(backward, tokenizer)
    assert ContinuationScorer(model, tokenizer).score([]) == []
