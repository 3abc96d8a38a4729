"""Layer groups, discriminative learning rates, and gradual unfreezing."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from training_runs import CallbackRun, trainer_arguments, unbatch
from transformers import Trainer
from zoo import ARCHETYPE_FAMILIES, HEADS, Case, make_training_batch

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.finetuning import ChainThaw, GradualUnfreezing, ThreeStageUnfreezing
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.arguments import LoopArguments, steps_of
from hf_ctxmodels.training.optimizers import layer_groups, make_optimizer, make_scheduler, slanted_triangle

CLASSIFIERS = [case for case in HEADS if case.auto_name == "AutoModelForSequenceClassification"]
T5_ENCODER = Case(FAMILIES["t5"], "AutoModelForTokenClassification")
archetypes = pytest.mark.parametrize(
    "case", [case for case in CLASSIFIERS if case.family in ARCHETYPE_FAMILIES], ids=str
)


def parameter_names(model: torch.nn.Module, group: list[torch.nn.Parameter]) -> set[str]:
    names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names_by_id[id(parameter)] for parameter in group}


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def arguments(folder: Path, **overrides: Any) -> LoopArguments:
    return LoopArguments(output_dir=str(folder), max_steps=10, **overrides)


def ordered_layers(base: torch.nn.Module) -> list[str]:
    """Names of the layers with weights, the encoder's before the decoder's."""
    stacks = ["layers"] if hasattr(base, "layers") else ["encoder.layers", "decoder.layers"]
    names = [name for name, _ in base.named_parameters()]
    return [
        f"{stack}.{number}."
        for stack in stacks
        for number in range(20)
        if any(name.startswith(f"{stack}.{number}.") for name in names)
    ]


@pytest.mark.parametrize("case", [*CLASSIFIERS, T5_ENCODER], ids=str)
def test_layer_groups(case: Case) -> None:
    model = case.model()
    groups = layer_groups(model)
    assert sum(map(len, groups)) == len(trainable(model))
    assert len({id(parameter) for group in groups for parameter in group}) == sum(map(len, groups))
    embeddings = next(model.get_input_embeddings().parameters())
    assert any(embeddings is parameter for parameter in groups[0]) == embeddings.requires_grad
    head = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    assert head
    assert head <= parameter_names(model, groups[-1])
    expected, prefix = ordered_layers(model.base_model), model.base_model_prefix
    layers = [parameter_names(model, group) for group in groups[int(embeddings.requires_grad) : -1]]
    assert len(layers) == len(expected)
    final_norm = {name for name, _ in model.named_parameters() if name.startswith(f"{prefix}.encoder.final_norm.")}
    for layer, group in zip(expected, layers, strict=True):
        extra = final_norm if layer == "decoder.layers.0." else set()  # the norm of the encoder, whose output it reads
        assert group == {name for name, _ in model.named_parameters() if name.startswith(f"{prefix}.{layer}")} | extra
    assert not any(".layers." in name for name in parameter_names(model, groups[-1]) if name.startswith(f"{prefix}."))
    if layers and embeddings.requires_grad:
        assert len(ChainThaw(model).stages) == len(groups) + 1
        ThreeStageUnfreezing(model)
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    assert len(layer_groups(model)) == 1


@archetypes
def test_layer_groups_of_base_models(case: Case, tmp_path: Path) -> None:
    """A base model has no heads, unless it has a pooler."""
    base = case.model().base_model
    groups = layer_groups(base)
    head_arguments = arguments(tmp_path, head_learning_rate=0.3)
    if any(name.startswith("pooler.") for name in parameter_names(base, groups[-1])):
        assert make_optimizer(base, head_arguments).param_groups[0]["lr"] == 0.3
    else:
        with pytest.raises(CtxError, match="has no head"):
            make_optimizer(base, head_arguments)
    assert sum(map(len, groups)) == len(trainable(base))
    assert len(groups) >= len(layer_groups(case.model())) - 1

    model = case.model()
    if not hasattr(model.base_model, "layers"):  # word vectors
        return
    model.base_model.blocks = model.base_model._modules.pop("layers")  # with another name the depths are unknown
    assert make_optimizer(model, head_arguments).param_groups[0]["lr"] == 0.3
    decaying = arguments(tmp_path, layerwise_lr_decay=2.0)
    for make in (lambda: GradualUnfreezing(model, 1), lambda: make_optimizer(model, decaying)):
        with pytest.raises(CtxError, match="no stack `layers`"):
            make()


@archetypes
def test_layerwise_learning_rates(case: Case, tmp_path: Path) -> None:
    """Decay by depth, and the learning rate of the head."""
    model = case.model()
    groups = layer_groups(model)
    for decay, head in ((2.6, None), (1.0, 0.3), (2.0, 0.3)):
        options = {"optimizer": "adamw", "learning_rate": 0.01}
        options |= {"layerwise_lr_decay": decay, "head_learning_rate": head}
        optimizer = make_optimizer(model, arguments(tmp_path, **options))
        rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
        assert len(rates) == len(trainable(model))
        expected = [0.01 / decay**depth for depth in range(len(groups))]
        if head is None:
            assert optimizer.param_groups[0]["lr"] == 0.01
        else:
            expected = [head, *expected[:-1]]
        for rate, group in zip(expected, reversed(groups), strict=True):
            assert [rates[id(parameter)] for parameter in group] == pytest.approx([rate] * len(group))
        decayed = {id(weight) for part in optimizer.param_groups if part["weight_decay"] for weight in part["params"]}
        assert decayed == {id(parameter) for parameter in trainable(model) if parameter.ndim >= 2}


def test_slanted_triangular_schedule(tmp_path: Path) -> None:
    """Equation 3 with T = 100, cut_frac = 0.1, ratio = 32."""
    total, cut_frac, ratio = 100, 0.1, 32
    cut = math.floor(total * cut_frac)
    for step in range(total):
        share = step / cut if step < cut else 1 - (step - cut) / (cut * (1 / cut_frac - 1))
        assert slanted_triangle(step, cut, total, ratio) == pytest.approx((1 + share * (ratio - 1)) / ratio)
    model = torch.nn.Linear(2, 2)
    schedule = {"lr_scheduler": "slanted-triangular", "warmup_steps": 0.1, "learning_rate": 0.5}
    loop_arguments = LoopArguments(output_dir=str(tmp_path), max_steps=100, **schedule)
    optimizer = make_optimizer(model, loop_arguments)
    scheduler = make_scheduler(optimizer, loop_arguments, 100)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.5 / 32)
    rates = []
    for _ in range(100):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert max(rates) == rates[9] == 0.5
    assert rates[-1] == pytest.approx(0.5 / 32)
    assert slanted_triangle(0, 0, 1) == 1


@archetypes
def test_gradual_unfreezing(case: Case) -> None:
    model = case.model()
    groups, trainable_before = layer_groups(model), trainable(model)
    unfreezing, run = GradualUnfreezing(model, 3), CallbackRun()
    for step in range(3 * len(groups) + 4):
        run.step_begin(unfreezing, step)
        frozen = len(groups) - min(len(groups), 1 + step // 3)
        for depth, group in enumerate(groups):
            assert {parameter.requires_grad for parameter in group} == {depth >= frozen}
    run.step_begin(unfreezing, 0)
    run.end(unfreezing)
    assert list(map(id, trainable(model))) == list(map(id, trainable_before))
    assert GradualUnfreezing(model, 0).num_trained_groups(0) == len(groups)
    for interval, share in ((0.5, 0.5), (None, 1 / len(groups))):
        unfreezing = GradualUnfreezing(model, interval)
        for max_steps in (20, 1000):  # in two runs, after one another
            CallbackRun(max_steps=max_steps).begin(unfreezing)
            numbers = [unfreezing.num_trained_groups(step) for step in (int(share * max_steps) - 1, share * max_steps)]
            assert numbers == [1, 2]
    with pytest.raises(CtxError, match="negative"):
        GradualUnfreezing(model, -1)


def test_gradual_unfreezing_with_trainer(tmp_path: Path) -> None:
    case = CLASSIFIERS[0]
    rows = unbatch(make_training_batch(case, 16, seed=1)[0])
    model = case.model()
    groups, trainable_before = layer_groups(model), trainable(model)
    initial_groups = [[parameter.detach().clone() for parameter in group] for group in groups]
    training = trainer_arguments(tmp_path, max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2)
    Trainer(model, training, train_dataset=rows, callbacks=[GradualUnfreezing(model, 4)]).train()  # type: ignore[arg-type]
    for depth, (group, initial_group) in enumerate(zip(groups, initial_groups, strict=True)):
        has_changed = any(
            not torch.equal(parameter, value) for parameter, value in zip(group, initial_group, strict=True)
        )
        assert has_changed == (depth == len(groups) - 1)
    assert list(map(id, trainable(model))) == list(map(id, trainable_before))


def test_unfreezing_sharded_weights_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    unfreezing = GradualUnfreezing(CLASSIFIERS[0].model(), 1)
    state = SimpleNamespace(num_processes=2, distributed_type=DistributedType.FSDP)
    monkeypatch.setattr("hf_ctxmodels.training.callbacks.AcceleratorState", lambda: state)
    with pytest.raises(CtxError, match="sharded"):
        CallbackRun().begin(unfreezing)


def test_invalid_values(tmp_path: Path) -> None:
    assert [steps_of(steps, 100) for steps in (0.25, 0.001, 7)] == [25, 0, 7]
    for invalid, name in (
        ({"layerwise_lr_decay": 0.5}, "layerwise_lr_decay"),
        ({"lr_scheduler": "slanted-triangular:ratio=0"}, "ratio"),
        ({"head_learning_rate": -1.0}, "head_learning_rate"),
    ):
        with pytest.raises(CtxError, match=f"{name}=.* is out of range"):
            arguments(tmp_path, **invalid)
