"""Continuation scores against one forward pass per request, without padding, caches or shared prefixes."""

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


def build(family_name: str, seed: int = 0, **overrides: Any) -> tuple[Any, Any]:
    """A tiny random language model or encoder-decoder, and its tokenizer."""
    family = FAMILIES[family_name]
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=300)
    fields = {"vocab_size": len(tokenizer), **target_vocabulary_config(tokenizer), **overrides}
    if family_name in ("unilm", "ernie_gen"):
        fields |= {"decoder_start_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    if "max_position_embeddings" in family.config.__dataclass_fields__:
        fields.setdefault("max_position_embeddings", 128)
    auto_class = "AutoModelForCausalLM" if "AutoModelForCausalLM" in family.models else "AutoModelForSeq2SeqLM"
    torch.manual_seed(seed)
    return with_random_parameters(family.models[auto_class](tiny_config(family, **fields)), seed).eval(), tokenizer


@torch.no_grad()
def expected_score(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, int, bool]:
    """Log-probability, number of tokens and whether the continuation is greedy, from one forward pass."""
    spaces = len(context) - len(context.rstrip())
    context, continuation = context.rstrip(), context[len(context) - spaces :] + continuation
    if model.config.is_encoder_decoder:
        target = tokenizer(text_target=continuation)["input_ids"]
        start = model.config.decoder_start_token_id
        start_ids = [token_id for token_id in target[:1] if token_id in (start, tokenizer.bos_token_id)]
        ids = target[len(start_ids) : -1]  # without the end token
        decoder_ids = [start, *(token_id for token_id in start_ids if token_id != start), *ids][:-1]
        logits = model(
            input_ids=torch.tensor([tokenizer(context)["input_ids"]]), decoder_input_ids=torch.tensor([decoder_ids])
        ).logits
    else:
        full_ids, prefix_ids = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
        if prefix_ids[-1] == tokenizer.eos_token_id:
            full_ids, prefix_ids = full_ids[:-1], prefix_ids[:-1]
        ids = full_ids[len(prefix_ids) :]
        options = {}
        if getattr(model.config, "prefix_lm", False):
            options["prefix_mask"] = (torch.arange(len(full_ids)) < len(prefix_ids)).long()[None]
        logits = model(input_ids=torch.tensor([full_ids]), **options).logits[:, :-1]
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
def test_scores_equal_separate_forward_passes(family: str, batch_tokens: int) -> None:
    assert_scores(*build(family), batch_tokens=batch_tokens)


@pytest.mark.parametrize("family", ["gpt2", "gpt3"])
def test_prefix_lm(family: str) -> None:
    """Context tokens attend in both directions, so that only continuations of an equal context share it."""
    model, tokenizer = build(family, prefix_lm=True)
    assert_scores(model, tokenizer, batch_tokens=100)
    assert_answers(model, tokenizer)
    scores = ContinuationScorer(model, tokenizer).score([("a dog", " saw the boat"), ("a dog saw", " the boat")])
    model.config.prefix_lm = False
    assert ContinuationScorer(model, tokenizer).score([("a dog", " saw the boat")])[0] != scores[0]


def assert_answers(model: Any, tokenizer: Any) -> None:
    """Answers equal the output of `generate` for each prompt, also with a stop string."""
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
    stop_string = characters[len(characters) // 2]
    stopped = [text.split(stop_string)[0].strip() for text in expected]
    answers = scorer.greedy_answers(prompts, max_new_tokens=12, until=[stop_string, "no such text"])
    assert [answer.text for answer in answers] == stopped


@pytest.mark.parametrize("family", ["gpt2", "ulmfit", "t5", "bart", "unilm", "cove"])
def test_answers_equal_generate(family: str) -> None:
    model, tokenizer = build(family, seed=4)
    assert_answers(model, tokenizer)


@pytest.mark.parametrize("model_class", [GPT2LMHeadModel, MistralForCausalLM, T5ForConditionalGeneration])
def test_transformers_models(model_class: Any) -> None:
    """The sliding window of Mistral is shorter than the texts: it cannot share prefixes."""
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
    """One row for the shared examples, another one for all contexts and choices."""
    model, tokenizer = build("gpt2")
    shapes: list[torch.Size] = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].shape))
    contexts = [2 * SHOTS + "a dog", 2 * SHOTS + "it"]
    requests = [(context, choice) for context in contexts for choice in CHOICES]
    ContinuationScorer(model, tokenizer).score(requests)
    num_shot_tokens = len(tokenizer(2 * SHOTS.rstrip())["input_ids"])
    num_separate_tokens = sum(len(tokenizer("".join(request))["input_ids"]) - 1 for request in requests)
    shots, trees = shapes
    assert abs(shots[-1] - num_shot_tokens) <= 1
    assert trees[0] == 1
    assert shots[-1] + trees[-1] <= num_separate_tokens - (len(requests) - 1) * shots[-1]


def test_batches_are_limited() -> None:
    model, tokenizer = build("gpt2")
    shapes: list[torch.Size] = []
    model.register_forward_pre_hook(
        lambda module, inputs, options: shapes.append(options["input_ids"].shape), with_kwargs=True
    )
    ContinuationScorer(model, tokenizer, batch_tokens=40).score(REQUESTS)
    assert any(rows > 1 for rows, _ in shapes)
    assert all(rows == 1 or rows * length <= 40 for rows, length in shapes)


def test_prefix_trees() -> None:
    """Each row is the path to a node that has its request and targets; equal rows share a node."""
    generator = np.random.default_rng(0)
    rows = []
    for request in range(60):
        prefix = [[7] * 9, [7] * 9 + [3, 4, 5], []][request % 3]
        ids = np.array([*prefix, *generator.integers(0, 3, generator.integers(1, 5))], dtype=np.int32)
        rows.append(TokenRow(ids, list(range(100, 100 + int(generator.integers(1, len(ids) + 1)))), request))
    paths: dict[int, list[int]] = {}
    targets: dict[int, dict[int, int]] = {row.request: {} for row in rows}
    num_tokens = 0
    roots = prefix_trees(rows)
    stack = [(node, []) for node in roots]
    while stack:
        node, parent_path = stack.pop()
        num_tokens += len(node.ids)
        path = [*parent_path, *node.ids.tolist()]
        for target in node.targets:
            targets[target.request][len(parent_path) + target.column] = target.token_id
        for request in node.requests:
            assert request not in paths
            paths[request] = path
        stack.extend((child, path) for child in node.children)
    assert num_tokens < 0.5 * sum(len(row.ids) for row in rows)
    for row in rows:
        assert paths[row.request] == row.ids.tolist()
        offset = len(row.ids) - len(row.targets)
        assert targets[row.request] == {offset + index: token for index, token in enumerate(row.targets)}
    for packed, _ in pack_trees([(root, 0) for root in roots], 60):  # in a packed row, a token attends to its path
        if packed.layout is None:
            assert packed.num_tokens > 60
            continue
        assert len(packed.ids) <= 60
        for target in packed.targets:
            (columns,) = packed.layout.visible[target.column].nonzero()
            columns = columns[packed.layout.positions[columns].argsort()]
            assert packed.layout.positions[columns].tolist() == list(range(len(columns)))
            assert columns[-1] == target.column
            assert packed.ids[columns].tolist() == paths[target.request][: len(columns)]
            assert targets[target.request][len(columns) - 1] == target.token_id


def test_truncation_keeps_context_end() -> None:
    """A long context is truncated to its last tokens; a long continuation raises an error."""
    model, tokenizer = build("gpt2")
    scorer = ContinuationScorer(model, tokenizer, max_length=20)
    (long_score, short_score) = scorer.score([(" ".join([SHOTS] * 3) + "x y z the old sailor", " saw"), ("it", " saw")])
    ids = tokenizer(" ".join([SHOTS] * 3) + "x y z the old sailor saw")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[-21:-1]])).logits[0].log_softmax(-1)
    num_tokens = long_score.num_tokens
    expected = logits[torch.arange(20 - num_tokens, 20), torch.tensor(ids[-num_tokens:])].sum().item()
    assert long_score.log_probability == pytest.approx(expected, abs=1e-4)
    assert short_score.log_probability == pytest.approx(expected_score(model, tokenizer, "it", " saw")[0], abs=1e-4)
    with pytest.raises(CtxError, match="above the maximum length of 20"):
        scorer.score([("it", SHOTS * 3)])


@pytest.mark.parametrize("family", ["unilm", "ernie_gen"])
def test_source_and_target_share_the_maximum_length(family: str) -> None:
    """A long source is truncated so that it fits with its target, up to the last position and up to `max_length`."""
    model, tokenizer = build(family, max_position_embeddings=64)
    source = " ".join([SHOTS] * 6)
    for new_tokens in (1, 5):
        [answer] = ContinuationScorer(model, tokenizer).greedy_answers([source], max_new_tokens=new_tokens)
        assert answer.is_truncated
    scorer = ContinuationScorer(model, tokenizer, max_length=12)
    [pair] = scorer._encoder.encode_pairs([(source, " saw")])
    assert (len(pair.context) + len(pair.continuation), pair.is_truncated) == (12, True)
    assert scorer.score([(source, " saw")])[0].is_truncated
    with pytest.raises(CtxError, match="12 new tokens exceed the maximum length of 12"):
        scorer.greedy_answers([source], max_new_tokens=12)


def test_padding_does_not_exceed_max_positions() -> None:
    """A short context with long continuations is not padded to the length of a context that fills the model."""
    model, tokenizer = build("gpt2", max_position_embeddings=48)
    long_text = " ".join(TEXTS)
    requests = [
        (context, f" {continuation}")
        for context in (f"{long_text} {long_text} {long_text}", f"{long_text} {long_text}", SHOTS)
        for continuation in ("saw", TEXTS[0], "it")
    ]
    scores = ContinuationScorer(model, tokenizer).score(requests)
    expected = [ContinuationScorer(model, tokenizer).score([request])[0].log_probability for request in requests]
    assert [score.log_probability for score in scores] == pytest.approx(expected, abs=1e-4)


def test_scored_end_tokens() -> None:
    """Without the end token, a prefix of a target is always more probable than the target."""
    model, tokenizer = build("t5")
    requests = [("it", " saw"), ("it", " saw the boat")]
    without_end = ContinuationScorer(model, tokenizer).score(requests)
    scores = ContinuationScorer(model, tokenizer, scores_end=True).score(requests)
    assert without_end[0].log_probability > without_end[1].log_probability
    assert [score.num_tokens - base.num_tokens for score, base in zip(scores, without_end, strict=True)] == [1, 1]
    ids = tokenizer(text_target=" saw")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=torch.tensor([tokenizer("it")["input_ids"]]), labels=torch.tensor([ids])).loss
    assert scores[0].log_probability == pytest.approx(-loss.item() * len(ids), abs=1e-4)


def test_invalid_models_and_requests_raise() -> None:
    model, tokenizer = build("gpt2")
    with pytest.raises(CtxError, match="has no token"):
        ContinuationScorer(model, tokenizer).score([("it", "")])
    for limit in ("batch_tokens", "max_length"):
        with pytest.raises(CtxError, match=f"{limit}=0 is out of range"):
            ContinuationScorer(model, tokenizer, **{limit: 0})
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
