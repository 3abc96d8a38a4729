"""GenSen: encoder and classifier compared with their equations, and multi-task training."""

from pathlib import Path

import pytest
import torch
from recurrent_decoders import gensen_embedding
from zoo import Case, gradients, make_batch, make_targets

from hf_ctxmodels import CtxError, CtxGenSenConfig, CtxGenSenForPreTraining
from hf_ctxmodels.registry import FAMILIES

HEAD = Case(FAMILIES["gensen"], "AutoModelForPreTraining")
BASE = Case(FAMILIES["gensen"], "AutoModel")


def build_model(**overrides: object) -> CtxGenSenForPreTraining:
    return HEAD.model(3, **{"initializer_range": 0.5, **overrides})


@torch.no_grad()
def test_source_is_first_text() -> None:
    """In `forward`, and in `generate`, which encodes the source by `get_encoder`."""
    model, batch = build_model(), make_batch(HEAD, lengths=(8, 8))
    steps = batch.pop("decoder_input_ids")
    first = {name: value[:, :4] if value.dim() > 1 else value for name, value in batch.items()}
    assert batch["token_type_ids"][0].tolist() == [0] * 4 + [1] * 4
    expected = model(**first, decoder_input_ids=steps).logits
    torch.testing.assert_close(model(**batch, decoder_input_ids=steps).logits, expected)
    names = ("input_ids", "attention_mask", "token_type_ids")
    encoder_outputs = model.get_encoder()(**{name: batch[name] for name in names})
    languages = batch["target_languages"]
    actual = model(encoder_outputs=encoder_outputs, decoder_input_ids=steps, target_languages=languages).logits
    torch.testing.assert_close(actual, expected)
    options = {"max_new_tokens": 4, "eos_token_id": None, "num_beams": 2, "return_dict_in_generate": True}
    outputs, expected_outputs = (model.generate(**inputs, **options, output_scores=True) for inputs in (batch, first))
    torch.testing.assert_close(outputs.scores, expected_outputs.scores)


@torch.no_grad()
def test_embedding_concatenates_final_states() -> None:
    model, batch = BASE.model(num_hidden_layers=2), make_batch(BASE, side="left")
    embeddings = model(**batch).pooler_output
    for row, mask in enumerate(batch["attention_mask"].bool()):
        expected = gensen_embedding(model, batch["input_ids"][row, mask])
        torch.testing.assert_close(embeddings[row], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_relation_loss_matches_formula() -> None:
    model, batch = build_model(), make_batch(HEAD, (9, 4, 7, 1))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    output = model(**inputs, relation_labels=torch.tensor([1, -100, 0, 1]))
    log_prob = []
    for row in range(4):
        embeddings = []
        for text in (0, 1):
            token_mask = batch["attention_mask"][row] == 1
            text_mask = token_mask & (batch["token_type_ids"][row] == text)
            text_mask = text_mask if text_mask.any() else token_mask  # a single text is paired with itself
            embeddings.append(gensen_embedding(model.gensen, batch["input_ids"][row, text_mask]))
        u, v = embeddings
        first_layer, second_layer = model.relation[0], model.relation[2]
        hidden = (first_layer.weight @ torch.cat([u, v, (u - v).abs(), u * v]) + first_layer.bias).clamp(min=0)
        log_prob.append((second_layer.weight @ hidden + second_layer.bias).log_softmax(0))
    log_prob = torch.stack(log_prob)
    torch.testing.assert_close(output.relation_logits.log_softmax(-1), log_prob, atol=1e-5, rtol=1e-5)
    assert float(output.loss) == pytest.approx(float(-(log_prob[0, 1] + log_prob[2, 0] + log_prob[3, 1]) / 3), rel=1e-5)
    assert output.generation_loss is None
    correct = int((log_prob.argmax(1)[[0, 2, 3]] == torch.tensor([1, 0, 1])).sum())
    assert output.metrics["relation_accuracy"].tolist() == [correct, 3]


def test_task_loss_trains_encoder_and_task_head() -> None:
    model, batch = build_model(), make_batch(HEAD)
    targets = make_targets(HEAD, batch)
    batch["target_languages"] = torch.full((4,), 1)
    generation_gradients = gradients(model, model(**batch, labels=targets["labels"]).loss)
    relation_gradients = gradients(model, model(**batch, relation_labels=targets["relation_labels"]).loss)
    for task_gradients, head in ((generation_gradients, "decoders.next."), (relation_gradients, "relation.")):
        for name, gradient in task_gradients.items():
            assert bool(gradient.any()) == name.startswith(("gensen.", head)), name


def test_models_with_single_task() -> None:
    batch = make_batch(HEAD)
    targets = make_targets(HEAD, batch)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    relation_model = build_model(decoder_tasks=[])
    assert relation_model(**inputs, relation_labels=targets["relation_labels"]).loss > 0
    with pytest.raises(CtxError, match="decoder_tasks is empty"):
        relation_model(**inputs, labels=targets["labels"])
    generation_model = build_model(relations=[])
    assert generation_model(**inputs, labels=targets["labels"]).loss > 0
    assert generation_model(**batch).relation_logits is None
    with pytest.raises(CtxError, match="relation_labels require"):
        generation_model(**inputs, relation_labels=targets["relation_labels"])


def test_decoders_are_loaded_by_name(tmp_path: Path) -> None:
    model = build_model()
    model.save_pretrained(tmp_path)
    config = CtxGenSenConfig.from_pretrained(tmp_path, decoder_tasks=["<new>", "next"])
    loaded = CtxGenSenForPreTraining.from_pretrained(tmp_path, config=config)
    for name, weight in model.decoders["next"].state_dict().items():
        assert torch.equal(loaded.decoders["next"].state_dict()[name], weight)
    assert list(loaded.decoders) == ["<new>", "next"]


def test_unused_decoders_have_zero_gradients_if_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, processes would wait for gradients of decoders that the batch does not use."""
    model, batch = build_model().train(), make_batch(HEAD)
    batch |= {"labels": make_targets(HEAD, batch)["labels"], "target_languages": torch.zeros(4, dtype=torch.long)}
    single_loss = model(**batch).loss
    single_loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert expected["decoders.next.prediction.weight"] is None
    model.zero_grad(set_to_none=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    distributed_loss = model(**batch).loss
    distributed_loss.backward()
    assert distributed_loss.item() == single_loss.item()
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if expected[name] is None else expected[name]
        assert torch.equal(parameter.grad, gradient), name
