"""Loss landscapes: interpolation, restored weights, random directions, rollback and trajectories."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import save, tiny_pair
from torch import Tensor, nn

from hf_ctxmodels.analysis.landscapes import (
    RANDOM,
    HeldOutLoss,
    Plane,
    Trajectory,
    checkpoint_weights,
    current_weights,
    difference,
    layer_groups,
    moved_weights,
    random_direction,
    restrict,
    roll_back_layers,
    used_embedding_rows,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.model_loading import load_model

TEXTS = ["a good film", "a bad film", "good and short", "bad and very long"]
LABELS = ("good", "bad", "mixed")


@pytest.fixture(scope="module", params=["bert", "ulmfit", "t5"])
def checkpoints(request, tmp_path_factory) -> dict[str, Path]:
    """Paths of a pretrained encoder, a tuned classifier, a classifier with the pretrained encoder and the tuned head
    ("start"), and labeled data."""
    folder, auto_class = tmp_path_factory.mktemp(request.param), "AutoModelForSequenceClassification"
    tuned, tokenizer = tiny_pair(request.param, auto_class, [*TEXTS, "unseen words"], seed=1)
    tuned.config.id2label = dict(enumerate(LABELS))
    pretrained, _ = tiny_pair(request.param, "AutoModel", [*TEXTS, "unseen words"], seed=2)
    paths = {
        "tuned": save(folder / "tuned", tuned, tokenizer),
        "pretrained": save(folder / "pretrained", pretrained, tokenizer),
    }
    tuned.base_model.load_state_dict(pretrained.state_dict())
    paths["start"] = save(folder / "start", tuned, tokenizer)
    lines = [f"{text}\t{'good' if 'good' in text else 'bad'}" for text in TEXTS]
    paths["data"] = folder / "dev.tsv"
    paths["data"].write_text("\n".join(["text\tlabel", *lines]) + "\n")
    return paths


@pytest.fixture(scope="module")
def loss(checkpoints) -> HeldOutLoss:
    return HeldOutLoss.of_task(str(checkpoints["tuned"]), str(checkpoints["data"]))


def clone_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_line_ends_equal_model_losses(checkpoints, loss):
    before = clone_state_dict(loss.model)
    start, end = checkpoint_weights(loss, checkpoints["pretrained"]), current_weights(loss.model)
    plane = Plane(start, [difference(start, end), random_direction(end, torch.Generator().manual_seed(0))])
    at_start, at_end, off_line = plane.evaluate(loss, [(0, 0), (1, 0), (1, 0.5)])
    expected = HeldOutLoss.of_task(str(checkpoints["start"]), str(checkpoints["data"])).evaluate()
    assert at_start["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert at_end["loss"] == pytest.approx(loss.evaluate()["loss"], rel=1e-5)
    assert {"loss", "accuracy"} <= at_end.keys()
    assert abs(off_line["loss"] - at_end["loss"]) > 1e-6
    assert plane.project(end) == pytest.approx((1, 0), abs=1e-6)
    oblique_plane = Plane(start, [plane.directions[0], {name: change + 0.5 * plane.directions[0][name]
                                                        for name, change in plane.directions[1].items()}])  # fmt: skip
    assert oblique_plane.project(end) == pytest.approx((1, 0), abs=1e-6)
    torch.testing.assert_close(clone_state_dict(loss.model), before, rtol=0, atol=0)


def test_weights_are_restored_after_error(loss):
    before = clone_state_dict(loss.model)
    weights = current_weights(loss.model)
    direction = random_direction(weights, torch.Generator().manual_seed(0))

    def move_and_fail() -> None:
        with moved_weights(loss.model, weights) as move:
            move((0.5, direction))
            assert any((weight != before[name]).any() for name, weight in loss.model.state_dict().items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        move_and_fail()
    torch.testing.assert_close(clone_state_dict(loss.model), before, rtol=0, atol=0)


def test_random_direction_has_filter_norms(loss):
    weights = current_weights(loss.model)
    directions = random_direction(weights, torch.Generator().manual_seed(0))
    assert directions.keys() == weights.keys()
    for name, direction in directions.items():
        if weights[name].dim() < 2:
            assert not direction.any(), name
        else:
            torch.testing.assert_close(direction.flatten(1).norm(dim=1), weights[name].flatten(1).norm(dim=1))


def test_random_weights_depend_only_on_seed(loss):
    """The global random state is not changed."""
    state = torch.random.get_rng_state()
    weights, same_seed, other_seed = (checkpoint_weights(loss, RANDOM, seed) for seed in (3, 3, 4))
    assert weights.keys() == current_weights(loss.model).keys()
    assert all(torch.equal(weights[name], same_seed[name]) for name in weights)
    assert any(not torch.equal(weights[name], other_seed[name]) for name in weights)
    assert torch.equal(state, torch.random.get_rng_state())


def test_layer_rollback(checkpoints, loss):
    """If only one layer differs, rolling it back gives the loss of the initial weights."""
    end = current_weights(loss.model)
    groups = layer_groups(list(end), loss.model.base_model_prefix)
    layer = next(group for group in groups if group.endswith(".1"))
    start = {name: weight.clone() for name, weight in end.items()}
    for name in groups[layer]:
        start[name] *= 1.5
    with moved_weights(loss.model, start) as move:
        move()
        expected = loss.evaluate()
    results = dict(roll_back_layers(loss, start, end))
    assert list(results) == [layer]
    assert results[layer]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert results[layer]["loss"] != pytest.approx(loss.evaluate()["loss"], rel=1e-6)
    assert dict(roll_back_layers(loss, start, end, {layer: {"loss": 7.0}})) == {layer: {"loss": 7.0}}
    pretrained = checkpoint_weights(loss, checkpoints["pretrained"])
    assert set(dict(roll_back_layers(loss, pretrained, end))) <= set(groups)


def test_scalar_parameters(checkpoints, loss, monkeypatch):
    def load_with_scale(*arguments: Any) -> Any:
        model = load_model(*arguments)
        model.register_parameter("scale", nn.Parameter(torch.tensor(3.0)))
        return model

    monkeypatch.setattr("hf_ctxmodels.analysis.landscapes.load_model", load_with_scale)
    loss.model.base_model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    try:
        weights = checkpoint_weights(loss, checkpoints["pretrained"])
    finally:
        del loss.model.base_model.scale
    assert weights[f"{loss.model.base_model_prefix}.scale"] == 3


def test_unused_embedding_rows_are_masked():
    """Rows are masked only if the loss does not depend on all of them; tied weights are counted once."""
    texts = [*TEXTS, "unseen words"]
    model, tokenizer = tiny_pair("bert", "AutoModelForSequenceClassification", texts)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return {"loss": float(model(**batch).logits.sum())}

    loss = HeldOutLoss(model, evaluate, "", 4, depends_on_all_rows=False)
    masks = used_embedding_rows(loss)
    [name] = [name for name, weight in model.named_parameters() if weight is model.get_input_embeddings().weight]
    used_ids = set(batch["input_ids"][batch["attention_mask"] == 1].tolist())
    assert set(masks[name].nonzero()[:, 0].tolist()) - {tokenizer.pad_token_id} == used_ids
    weights = current_weights(model)
    direction = restrict(random_direction(weights, torch.Generator().manual_seed(0)), masks)
    assert set(direction[name].norm(dim=1).nonzero()[:, 0].tolist()) - {tokenizer.pad_token_id} == used_ids
    assert used_embedding_rows(HeldOutLoss(model, evaluate, "", 4)) == {}
    masked_lm = FAMILIES["bert"].models["AutoModelForMaskedLM"](model.config)
    assert len(current_weights(masked_lm)) == len({id(weight) for weight in masked_lm.parameters()})


def test_trajectory_is_pca_of_weights():
    generator = torch.Generator().manual_seed(0)
    checkpoints = [
        {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(2, generator=generator)} for _ in range(5)
    ]
    trajectory = Trajectory.of_checkpoints(checkpoints)
    flat = torch.stack([torch.cat([weights["a"].flatten(), weights["b"]]) for weights in checkpoints]).double()
    spectrum = torch.linalg.svdvals(flat - flat[-1])
    assert trajectory.explained == pytest.approx((spectrum[:2].square() / spectrum.square().sum()).tolist())
    assert trajectory.coordinates[-1] == pytest.approx((0, 0), abs=1e-6)
    for weights, coordinates in zip(checkpoints, trajectory.coordinates, strict=True):
        assert trajectory.plane.project(weights) == pytest.approx(coordinates, abs=1e-5)
    norms = [float(torch.cat([d["a"].flatten(), d["b"]]).norm()) for d in trajectory.plane.directions]
    assert norms == pytest.approx([1, 1], abs=1e-5)
    with pytest.raises(CtxError, match="needs 3 checkpoints, got 2"):
        Trajectory.of_checkpoints(checkpoints[:2])
    start, end = checkpoints[:2]
    line = [{name: start[name] + step * (end[name] - start[name]) for name in start} for step in (0.0, 0.3, 0.7, 1.0)]
    with pytest.raises(CtxError, match="on a line"):
        Trajectory.of_checkpoints(line)
    with pytest.raises(CtxError, match="on a line"):
        Trajectory.of_checkpoints([start] * 3)


def test_language_modeling_loss(tmp_path):
    """A line from a pretrained masked language model to a fine-tuned encoder."""
    masked_lm, tokenizer = tiny_pair("bert", "AutoModelForMaskedLM", TEXTS, seed=1)
    encoder, _ = tiny_pair("bert", "AutoModel", TEXTS, seed=2)
    source = save(tmp_path / "masked", masked_lm, tokenizer)
    tuned = save(tmp_path / "tuned", encoder, tokenizer)
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS * 5))
    loss = HeldOutLoss.of_pretraining(str(source), str(tmp_path / "text.txt"), max_length=16)
    start, end = current_weights(loss.model), checkpoint_weights(loss, tuned)
    at_start, at_end = Plane(start, [difference(start, end)]).evaluate(loss, [(0,), (1,)])
    assert at_start == loss.evaluate()
    masked_lm.base_model.load_state_dict({name: weight for name, weight in encoder.state_dict().items()
                                          if name in masked_lm.base_model.state_dict()})  # fmt: skip
    tuned_loss = HeldOutLoss.of_pretraining(
        str(save(tmp_path / "other", masked_lm, tokenizer)), str(tmp_path / "text.txt"), max_length=16
    )
    assert at_end["loss"] == pytest.approx(tuned_loss.evaluate()["loss"], rel=1e-5)
    for fields, problem in (({"hidden_size": 48}, "differs in shape"), ({"num_hidden_layers": 1}, "is missing")):
        other_encoder, _ = tiny_pair("bert", "AutoModel", TEXTS, **fields)
        with pytest.raises(CtxError, match=f"another architecture: .* {problem}"):
            checkpoint_weights(loss, save(tmp_path / problem, other_encoder, tokenizer))
    # weights of the same names and shapes
    decoder, _ = tiny_pair("gpt2", "AutoModel", TEXTS, hidden_size=encoder.config.hidden_size)
    with pytest.raises(CtxError, match="another architecture: a CtxGpt2Config, expected a CtxBertConfig"):
        checkpoint_weights(loss, save(tmp_path / "decoder", decoder, tokenizer))
