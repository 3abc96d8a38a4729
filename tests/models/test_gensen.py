"""GenSen's own: decoders and classifier by their equations, rows of several tasks, what generate writes, training."""

from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from zoo import Case, gradients, make_batch, make_targets

from hf_ctxmodels import CtxError, CtxGenSenConfig, CtxGenSenForPreTraining
from hf_ctxmodels.registry import FAMILIES

HEAD = Case(FAMILIES["gensen"], "AutoModelForPreTraining")
BASE = Case(FAMILIES["gensen"], "AutoModel")
BEGIN, END = 0, 2


def small(**changes: object) -> CtxGenSenForPreTraining:
    return HEAD.model(3, **{"initializer_range": 0.5, **changes})


def gru_step(layer: torch.nn.Module, direction: int, read: Tensor, state: Tensor) -> Tensor:
    into = (layer.input_weight[direction] @ read + layer.bias[direction]).chunk(3)
    kept = (layer.state_weight[direction] @ state + layer.state_bias[direction]).chunk(3)
    reset, update = (into[0] + kept[0]).sigmoid(), (into[1] + kept[1]).sigmoid()
    return (1 - update) * (into[2] + reset * kept[2]).tanh() + update * state


def encoded(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """(hidden,) the vector of one text: both directions' last states, word by word."""
    words = model.embeddings.weight[ids]
    for layer in model.layers:
        found = []
        for direction, order in enumerate((range(len(ids)), range(len(ids) - 1, -1, -1))):
            states, state = {}, torch.zeros(layer.hidden_size)
            for place in order:
                states[place] = state = gru_step(layer, direction, words[place], state)
            found.append(([states[place] for place in range(len(ids))], state))
        words = torch.cat([torch.stack(states) for states, _ in found], -1)
    return torch.cat([state for _, state in found])


@torch.no_grad()
def written(model: CtxGenSenForPreTraining, sentence: Tensor, target: list[int], task: int) -> Tensor:
    """(steps, vocabulary) log-probabilities of the tokens behind each of `target`, one step at a time."""
    decoder, state, logs = list(model.decoders.values())[task], sentence, []
    for word in target:
        state = gru_step(decoder.layers[0], 0, torch.cat([decoder.embeddings.weight[word], sentence]), state)
        logs.append((decoder.prediction.weight @ state + decoder.prediction.bias).log_softmax(0))
    return torch.stack(logs)


@torch.no_grad()
def test_the_vector_is_where_both_directions_end() -> None:
    model, batch = BASE.model(num_hidden_layers=2), make_batch(BASE, side="left")
    got = model(**batch).pooler_output
    for row, mask in enumerate(batch["attention_mask"].bool()):
        expected = encoded(model, batch["input_ids"][row, mask].tolist())
        torch.testing.assert_close(got[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "mean"])
@torch.no_grad()
def test_other_vectors(pooling: str) -> None:
    model, batch = BASE.model(pooling=pooling), make_batch(BASE)
    outputs = model(**batch)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        states = outputs.last_hidden_state[row, mask]
        expected = states.amax(0) if pooling == "max" else states.mean(0)
        torch.testing.assert_close(outputs.pooler_output[row], expected)


@pytest.mark.parametrize("unpad", [True, False])
@torch.no_grad()
def test_every_row_is_written_by_its_tasks_decoder(unpad: bool) -> None:
    """From the first text alone; also the loss, of which some rows have no part."""
    model, batch = small(unpad=unpad), make_batch(HEAD, (9, 4, 7, 6, 5))
    batch["target_languages"] = torch.tensor([2, 0, 2, 1, 0])
    labels = make_targets(HEAD, batch)["labels"]
    labels[3] = -100
    logits = model(**batch).logits.log_softmax(-1)
    loss = model(**batch, labels=labels).loss
    total = 0.0
    for row, read in enumerate(batch["decoder_input_ids"].tolist()):
        first = (batch["attention_mask"][row] == 1) & (batch["token_type_ids"][row] == 0)
        sentence = encoded(model.gensen, batch["input_ids"][row, first].tolist())
        expected = written(model, sentence, read, int(batch["target_languages"][row]))
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        target_mask = labels[row] != -100
        total -= float(expected[target_mask].gather(1, labels[row][target_mask][:, None]).sum())
    assert float(loss) == pytest.approx(total / int((labels != -100).sum()), rel=1e-5)


@torch.no_grad()
def test_relations_by_the_formula() -> None:
    model, batch = small(), make_batch(HEAD, (9, 4, 7, 1))
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    got = model(**given, relation_labels=torch.tensor([1, -100, 0, 1]))
    logs = []
    for row in range(4):
        sides = []
        for side in (0, 1):
            there = (batch["attention_mask"][row] == 1) & (batch["token_type_ids"][row] == side)
            there = there if there.any() else batch["attention_mask"][row] == 1  # a text alone is compared with itself
            sides.append(encoded(model.gensen, batch["input_ids"][row, there].tolist()))
        u, v = sides
        first, second = model.relation[0], model.relation[2]
        hidden = (first.weight @ torch.cat([u, v, (u - v).abs(), u * v]) + first.bias).clamp(min=0)
        logs.append((second.weight @ hidden + second.bias).log_softmax(0))
    logs = torch.stack(logs)
    torch.testing.assert_close(got.relation_logits.log_softmax(-1), logs, atol=1e-5, rtol=1e-5)
    assert float(got.loss) == pytest.approx(float(-(logs[0, 1] + logs[2, 0] + logs[3, 1]) / 3), rel=1e-5)
    assert got.generation_loss is None
    right = int((logs.argmax(1)[[0, 2, 3]] == torch.tensor([1, 0, 1])).sum())
    assert got.metrics["relation_accuracy"].tolist() == [right, 3]


def test_a_task_reaches_the_encoder_and_its_own_part_alone() -> None:
    model, batch = small(), make_batch(HEAD)
    targets = make_targets(HEAD, batch)
    batch["target_languages"] = torch.full((4,), 1)
    written = gradients(model, model(**batch, labels=targets["labels"]).loss)
    related = gradients(model, model(**batch, relation_labels=targets["relation_labels"]).loss)
    for found, own in ((written, "decoders.next."), (related, "relation.")):
        for name, gradient in found.items():
            assert bool(gradient.any()) == name.startswith(("gensen.", own)), name


@pytest.mark.parametrize("cached", [True, False])
@torch.no_grad()
def test_greedy_search_by_every_decoder(cached: bool) -> None:
    model, batch = small(), make_batch(HEAD, (7, 3, 5))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tasks = torch.tensor([2, 0, 1])
    options = {"do_sample": False, "max_new_tokens": 7, "use_cache": cached, "target_languages": tasks}
    got = model.generate(**inputs, **options)
    vectors = model.gensen(**inputs).pooler_output
    for row in range(3):
        text = [BEGIN]
        while len(text) < 8 and text[-1] != END:
            text.append(int(written(model, vectors[row], text, int(tasks[row]))[-1].argmax()))
        assert got[row, : len(text)].tolist() == text
    beams = {**options, "num_beams": 3}
    assert torch.equal(
        model.generate(**inputs, **beams), model.generate(**inputs, **{**beams, "use_cache": not cached})
    )


def test_one_task_alone() -> None:
    batch = make_batch(HEAD)
    targets = make_targets(HEAD, batch)
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    relates = small(decoder_tasks=[])
    assert relates(**given, relation_labels=targets["relation_labels"]).loss > 0
    with pytest.raises(CtxError, match="decoder_tasks is empty"):
        relates(**given, labels=targets["labels"])
    writes = small(relations=[])
    assert writes(**given, labels=targets["labels"]).loss > 0
    assert writes(**batch).relation_logits is None
    with pytest.raises(CtxError, match="relation_labels require config.relations"):
        writes(**given, relation_labels=targets["relation_labels"])
    with pytest.raises(CtxError, match=r"target_languages\[1\] is 3, outside \[0, num_languages=3\)"):
        writes(**batch | {"target_languages": torch.tensor([0, 3, 1, 1])})


def test_a_decoder_is_found_by_its_tasks_name(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    config = CtxGenSenConfig.from_pretrained(tmp_path, decoder_tasks=["<new>", "next"])
    other = CtxGenSenForPreTraining.from_pretrained(tmp_path, config=config)
    for name, weight in model.decoders["next"].state_dict().items():
        assert torch.equal(other.decoders["next"].state_dict()[name], weight)
    assert list(other.decoders) == ["<new>", "next"]


def test_bad_configurations() -> None:
    for wrong in ({"hidden_size": 7}, {"classifier_size": 0}, {"relations": ["a", "a"]}):
        with pytest.raises(StrictDataclassError, match=next(iter(wrong))):
            CtxGenSenConfig(**wrong)


def test_processes_that_train_together_get_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them may wait for a decoder that its batch does not use; what is learned is the same."""
    model, batch = small().train(), make_batch(HEAD)
    batch |= {"labels": make_targets(HEAD, batch)["labels"], "target_languages": torch.zeros(4, dtype=torch.long)}
    alone = model(**batch).loss
    alone.backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    assert expected["decoders.next.prediction.weight"] is None
    model.zero_grad(set_to_none=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    together = model(**batch).loss
    together.backward()
    assert together.item() == alone.item()
    for name, parameter in model.named_parameters():
        value = expected[name]
        assert torch.equal(parameter.grad, torch.zeros_like(parameter) if value is None else value), name
