"""Transformer-XL compared with the equations of Dai et al. 2019 and of the adaptive softmax, token by token."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import command_output, save
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM
from zoo import tiny_config

from hf_ctxmodels import FAMILIES, CtxError, CtxGpt2ForCausalLM
from hf_ctxmodels.evaluation import perplexity
from hf_ctxmodels.evaluation.perplexity import RunningText, measure_perplexity_with_memory
from hf_ctxmodels.models.transformer_xl import (
    CtxTransformerXLConfig,
    CtxTransformerXLForCausalLM,
    CtxTransformerXLTokenizer,
)
from hf_ctxmodels.models.transformer_xl.adaptive import AdaptiveEmbedding, AdaptiveSoftmax

VARIANTS = {
    "clusters": {"cutoffs": [20, 40], "div_val": 2},
    "one width": {"cutoffs": [20, 40], "div_val": 1, "tie_projs": [True, True, False]},
    "no clusters": {"cutoffs": [], "div_val": 1},
    "narrow embeddings": {"cutoffs": [], "div_val": 1, "embedding_size": 8},
    "shared biases": {"cutoffs": [30], "div_val": 2, "untie_r": False, "clamp_len": 5, "same_length": False},
}


def make_model(**fields: Any) -> CtxTransformerXLForCausalLM:
    """A random model of three layers."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 61, "hidden_size": 16, "embedding_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 24, "mem_len": 6, "clamp_len": -1, "hidden_dropout_prob": 0.0, "initializer_range": 0.3,
        "projection_initializer_range": 0.3,
    }  # fmt: skip
    model = CtxTransformerXLForCausalLM(CtxTransformerXLConfig(**values | fields)).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("softmax"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def reference_states(
    model: CtxTransformerXLForCausalLM, ids: list[int], mems: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """(length, hidden) states of a segment, and the new memory, by the equations of section 3.3."""
    config, width = model.config, model.config.hidden_size
    heads, size = config.num_attention_heads, width // config.num_attention_heads
    embedding: AdaptiveEmbedding = model.transformer.word_embeddings
    starts = [0, *config.cutoffs]
    rows = []
    for token in ids:
        cluster = max(number for number, start in enumerate(starts) if token >= start)
        vector = embedding.clusters[cluster].weight[token - starts[cluster]]
        if len(embedding.projections):
            vector = embedding.projections[cluster] @ vector
        rows.append(vector * width**0.5)
    states = torch.stack(rows)
    new_mems = []
    for memory, layer in zip(mems, model.transformer.layers, strict=True):
        attention = layer.attention
        keys = torch.cat([memory, states])
        new_mems.append(keys[-config.mem_len :])
        query_weight, key_weight, value_weight = attention.qkv_proj.weight.chunk(3)
        outputs = []
        for position, state in enumerate(states):
            context = []
            for head in range(heads):
                columns = slice(head * size, (head + 1) * size)
                query = query_weight[columns] @ state
                scores, values = [], []
                for index in range(len(keys)):
                    distance = position + len(memory) - index
                    if distance < 0 or (config.same_length and distance >= config.mem_len):
                        continue
                    clamped = min(distance, config.clamp_len) if config.clamp_len > 0 else distance
                    angles = [clamped / 10000 ** (2 * i / width) for i in range(width // 2)]
                    encoding = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
                    relative = attention.position_proj.weight[columns] @ encoding
                    content = (query + attention.content_bias[head]) @ (key_weight[columns] @ keys[index])
                    scores.append((content + (query + attention.position_bias[head]) @ relative) / size**0.5)
                    values.append(value_weight[columns] @ keys[index])
                context.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            outputs.append(attention.out_proj.weight @ torch.cat(context))
        states = layer.attention_norm(states + torch.stack(outputs))
        hidden = (states @ layer.feed_forward.up_proj.weight.T + layer.feed_forward.up_proj.bias).relu()
        states = layer.feed_forward_norm(states + layer.feed_forward.down_proj(hidden))
    return states, new_mems


@torch.no_grad()
def reference_log_probability(model: CtxTransformerXLForCausalLM, state: Tensor, token: int) -> Tensor:
    """Log-probability of a token: of its cluster and within it. The first cluster symbol stands for cluster 1."""
    softmax: AdaptiveSoftmax = model.softmax
    embedding, starts = model.transformer.word_embeddings, [0, *model.config.cutoffs]

    def logits(cluster: int) -> Tensor:
        projected = state
        if len(embedding.projections):
            is_untied = str(cluster) in softmax.projections
            projection = softmax.projections[str(cluster)] if is_untied else embedding.projections[cluster]
            projected = projection.T @ state
        scores = embedding.clusters[cluster].weight @ projected + softmax.biases[cluster]
        if cluster == 0 and softmax.cluster_weight is not None:
            scores = torch.cat([scores, softmax.cluster_weight @ projected + softmax.cluster_bias])
        return scores.log_softmax(0)

    cluster = max(number for number, start in enumerate(starts) if token >= start)
    if cluster == 0:
        return logits(0)[token]
    return logits(0)[starts[1] + cluster - 1] + logits(cluster)[token - starts[cluster]]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_states_and_log_probabilities_match_equations(variant: str) -> None:
    """States, memory and log-probabilities of three segments."""
    model = make_model(**VARIANTS[variant])
    generator = torch.Generator().manual_seed(1)
    mems, expected_mems = None, [torch.zeros(0, model.config.hidden_size)] * 3
    for length in (4, 5, 3):
        ids = torch.randint(0, 61, (1, length), generator=generator)
        outputs = model(ids, mems=mems, use_mems=True)
        mems = outputs.mems
        states, expected_mems = reference_states(model, ids[0].tolist(), expected_mems)
        for memory, expected_memory in zip(mems, expected_mems, strict=True):
            torch.testing.assert_close(memory[0], expected_memory, atol=1e-5, rtol=1e-4)
        expected = [[reference_log_probability(model, state, token) for token in range(61)] for state in states]
        torch.testing.assert_close(outputs.logits[0], torch.tensor(expected), atol=1e-5, rtol=1e-4)
    assert mems[0].shape[1] == 6


@pytest.mark.parametrize("num_layers", [1, 3])
def test_shared_biases_are_saved_and_loaded(num_layers: int, tmp_path: Path) -> None:
    """A single layer shares its biases with no other."""
    model = make_model(**VARIANTS["shared biases"], num_hidden_layers=num_layers)
    model.save_pretrained(tmp_path)
    loaded = CtxTransformerXLForCausalLM.from_pretrained(tmp_path)
    assert len({id(layer.attention.content_bias) for layer in loaded.transformer.layers}) == 1
    ids = torch.arange(12)[None]
    torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_is_mean_of_log_probabilities(variant: str) -> None:
    """Gradients are equal as well; only the clusters of the targets are computed."""
    model = make_model(**VARIANTS[variant])
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(9) == 4, -100)
    loss = model(ids, labels=labels, return_logits=False).loss
    log_probabilities = model(ids).logits
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = torch.nn.functional.nll_loss(log_probabilities.transpose(1, 2), targets)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in (loss, expected)]
    for actual, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected_gradient, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_segments_with_memory_match_full_text() -> None:
    """With `same_length`, a memory of `mem_len` contains all keys that a token attends to, in each layer."""
    model = make_model(**VARIANTS["clusters"])
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(2))
    expected, mems, logits = model(ids).logits, None, []
    for segment in ids.split([7, 1, 8, 4], 1):
        outputs = model(segment, mems=mems, use_mems=True)
        mems = outputs.mems
        logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_generation_matches_recomputation(tmp_path: Path) -> None:
    """Prompts of different lengths, greedy and beam search, with a reloaded model."""
    make_model(**VARIANTS["clusters"], eos_token_id=None).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = [[5, 17, 60, 33], [41, 8]]
    padded = torch.tensor([prompts[0], [0, 0, *prompts[1]]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    for options in ({}, {"num_beams": 3}):
        settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
        batch = model.generate(padded, attention_mask=mask, **settings)
        for row, prompt in zip(batch[:, 4:].tolist(), prompts, strict=True):
            ids = torch.tensor([prompt])
            if options:
                row_output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                assert row_output[0, len(prompt) :].tolist() == row
                continue
            for _ in range(8):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            assert ids[0, len(prompt) :].tolist() == row


@pytest.mark.parametrize(
    ("memory_length", "segment_length", "batch_size"), [(6, 4, 1), (6, 7, 3), (2, 3, 2), (0, 5, 2)]
)
@torch.no_grad()
def test_perplexity_with_memory(memory_length: int, segment_length: int, batch_size: int) -> None:
    """All tokens but the first are predicted once, from the preceding segments of their stream."""
    tokenizer = CtxTransformerXLTokenizer.from_words([f"w{number}" for number in range(59)])
    words = [f"w{number % 59}" for number in range(3, 140, 7)]
    texts = [" ".join(words[:8]), " ".join(words[8:])]
    model = make_model(**VARIANTS["clusters"], eos_token_id=0)
    result = measure_perplexity_with_memory(
        model, RunningText.tokenize(tokenizer, texts),
        memory_length=memory_length, segment_length=segment_length, batch_size=batch_size,
    )  # fmt: skip
    text = torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])
    stream_length, nats = math.ceil((len(text) - 1) / batch_size), 0.0
    model.config.mem_len = memory_length
    for start in range(0, len(text) - 1, stream_length):
        stream, mems = text[start : start + stream_length + 1], None
        for first in range(0, len(stream) - 1, segment_length):
            last = min(first + segment_length, len(stream) - 1)
            outputs = model(stream[None, first:last], mems=mems, use_mems=True)
            targets, mems = stream[first + 1 : last + 1], outputs.mems
            nats -= float(outputs.logits[0].gather(1, targets[:, None]).sum())
    assert result.nats == pytest.approx(nats, rel=1e-5)
    assert (result.tokens, result.words) == (len(text) - 1, len(words))
    assert (result.characters, result.bytes) == (sum(map(len, texts)), sum(map(len, texts)))
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / sum(map(len, texts)))


@pytest.mark.parametrize("fields", [{"clamp_len": 3}, {"same_length": False}, {"clamp_len": -1, "same_length": True}])
def test_perplexity_with_overridden_distances(fields: dict[str, Any]) -> None:
    """Overrides apply to a single measurement, as if they were in the model's configuration."""
    tokenizer = CtxTransformerXLTokenizer.from_words([f"w{number}" for number in range(59)])
    texts = [" ".join(f"w{number % 59}" for number in range(3, 300, 7))]
    trained: dict[str, Any] = {"clamp_len": 6, "same_length": "same_length" in fields and not fields["same_length"]}
    trained |= VARIANTS["clusters"]
    model, overridden = make_model(**trained), make_model(**trained | fields)
    text, measure = RunningText.tokenize(tokenizer, texts), {"memory_length": 8, "segment_length": 6, "batch_size": 2}
    original = measure_perplexity_with_memory(model, text, **measure)
    result = measure_perplexity_with_memory(model, text, **measure, **fields)
    assert result.nats == pytest.approx(measure_perplexity_with_memory(overridden, text, **measure).nats)
    assert abs(result.nats - original.nats) > 1e-3
    assert measure_perplexity_with_memory(model, text, **measure) == original


def test_perplexity_and_generation_commands(tmp_path: Path) -> None:
    """Perplexity with overridden distances, and generation, from the command line."""
    texts = ["the cat sat on the mat", "the dog sät on the cat"]
    tokenizer = CtxTransformerXLTokenizer.train(texts * 3, vocab_size=30)
    model = save(tmp_path / "model", make_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1), tokenizer)
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    flags = {"model": model, "dataset": tmp_path / "text.txt", "memory_length": 4, "max_length": 3}
    report = command_output("evaluate perplexity", **flags, clamp_len=2, same_length="false")
    options = {"memory_length": 4, "segment_length": 3, "clamp_len": 2, "same_length": False}
    text = RunningText.tokenize(tokenizer, texts)
    expected = measure_perplexity_with_memory(load_model(model), text, **options)
    assert f"bits {expected.bits_per_character:.4f} per character, {expected.bits_per_byte:.4f} per byte" in report
    assert f"{sum(map(len, texts))} characters, {sum(map(len, texts)) + 1} bytes" in report
    del flags["memory_length"]
    assert "without a memory" in command_output("evaluate perplexity", **flags, clamp_len=2, fails=True)
    (tmp_path / "prompts.txt").write_text("the cat\nthe dog sät\n")
    generate = {"model": model, "input": tmp_path / "prompts.txt", "max_new_tokens": 4}
    *lines, summary = command_output("generate", **generate).splitlines()
    assert summary == "2 texts generated"
    for prompt, line in zip(("the cat", "the dog sät"), lines, strict=True):
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        output = load_model(model).generate(ids, max_new_tokens=4, do_sample=False)[0]
        assert tokenizer.decode(output, skip_special_tokens=True).endswith(line.strip())


def test_perplexity_by_memory_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several lengths of the memory are compared in a table and a figure, whose values are those of single runs."""
    texts = ["the cat sat on the mat", "the dog sat on the cat"]
    tokenizer = CtxTransformerXLTokenizer.train(texts * 3, vocab_size=30)
    model = save(tmp_path / "model", make_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1), tokenizer)
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    flags = {"model": model, "dataset": tmp_path / "text.txt", "max_length": 3, "output_dir": tmp_path / "memory"}
    monkeypatch.setattr(perplexity, "_encoded_documents", encode := Mock(wraps=perplexity._encoded_documents))
    report = command_output("evaluate perplexity", **flags, memory_length=[4, 0])
    assert encode.call_count == 1
    result = json.loads((tmp_path / "memory" / "perplexity.json").read_text())["values"]
    assert result["memory_length"] == [0, 4]
    text = RunningText.tokenize(tokenizer, texts)
    for length, per_token in zip(result["memory_length"], result["perplexity per token"], strict=True):
        options = {"memory_length": length, "segment_length": 3}
        expected = measure_perplexity_with_memory(load_model(model), text, **options).per_token
        assert per_token == pytest.approx(expected)
        assert f"{per_token:.4f}" in report
    assert len(set(result["perplexity per token"])) == 2
    assert "states of the memory" in (tmp_path / "memory" / "perplexity-memory.svg").read_text()
    assert "already holds" in command_output("evaluate perplexity", **flags, memory_length=[4, 0], fails=True)
    assert "at least two lengths" in command_output("evaluate perplexity", **flags, memory_length=4, fails=True)
    assert "at least 0" in command_output("evaluate perplexity", **flags, memory_length=[4, -1], fails=True)


def load_model(source: Path) -> CtxTransformerXLForCausalLM:
    return AutoModelForCausalLM.from_pretrained(source).eval()


def test_perplexity_with_memory_requires_memory_and_text() -> None:
    model = CtxGpt2ForCausalLM(tiny_config(FAMILIES["gpt2"]))
    tokenizer = CtxTransformerXLTokenizer.from_words(["a"])
    with pytest.raises(CtxError, match="has no memory"):
        measure_perplexity_with_memory(model, RunningText.tokenize(tokenizer, ["a a"]), memory_length=4)
    with pytest.raises(CtxError, match="no text to predict"):
        RunningText.tokenize(tokenizer, [""])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cutoffs": [40, 20]}, "must ascend"),
        ({"cutoffs": [20, 61]}, "must ascend"),
        ({"tie_projs": [True]}, "one value for each"),
        ({"div_val": 100}, "leaves no width"),
        ({"tie_word_embeddings": False}, "shares the embeddings"),
        ({"mem_len": -1}, "negative"),
    ],
)
def test_invalid_configurations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        make_model(**VARIANTS["clusters"] | fields)


def test_resizing_vocabulary_raises() -> None:
    with pytest.raises(CtxError, match="cannot be resized"):
        make_model(**VARIANTS["clusters"]).resize_token_embeddings(70)
