"""Adapters and projected attention of multi-task models, compared with naive implementations."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel
from zoo import TINY, assert_close, labeled_batch, with_random_parameters
from zoo.cases import Case

from hf_ctxmodels import FAMILIES, CtxError, CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.core.adapter_support import is_adapter_parameter
from hf_ctxmodels.downstream.adapters import add_adapter, get_active_adapters, load_saved_adapters
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_saved_model
from hf_ctxmodels.downstream.adapters.management import freeze_all_but
from hf_ctxmodels.downstream.finetuning.arguments import StartingModelArguments
from hf_ctxmodels.downstream.finetuning.finetuning_run import open_model
from hf_ctxmodels.downstream.multitask.configuration import task_entry
from hf_ctxmodels.downstream.multitask.training import TaskAdapterOptions
from hf_ctxmodels.inference import Predictor

CASES = {
    "pairs": Case(FAMILIES["bert"], "AutoModelForSequenceClassification"),
    "words": Case(FAMILIES["bert"], "AutoModelForTokenClassification"),
}
STACKS = {"pairs": ["shared", "pairs"], "words": ["shared", "words"]}


def make_model(family: str = "bert", **options: Any) -> CtxMultiTaskModel:
    cases = {task: Case(FAMILIES[family], case.auto_name) for task, case in CASES.items()}
    entries = {task: task_entry(case.auto_name, case.config()) for task, case in cases.items()}
    torch.manual_seed(0)
    config = CtxMultiTaskConfig(encoder=cases["pairs"].config(), tasks=entries, **options)
    return with_random_parameters(CtxMultiTaskModel(config), seed=1).eval()


def make_adapter_model() -> CtxMultiTaskModel:
    model = make_model(task_adapters=STACKS)
    for name in ("shared", "pairs", "words"):
        add_adapter(model, name)
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            parameter.data.normal_(std=0.3)
    return model


def naive_attention(states: Tensor, module: Any, heads: int, mask: Tensor) -> Tensor:
    """(batch, length, width) -> concatenated heads, without an output projection."""
    query, key, value = F.linear(states, module.qkv_proj.weight, module.qkv_proj.bias).chunk(3, -1)
    query, key, value = (projection.unflatten(-1, (heads, -1)).transpose(1, 2) for projection in (query, key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def naive_states(model: CtxMultiTaskModel, task: str, states: Tensor, mask: Tensor) -> Tensor:
    """BERT layers with the projected attention of a task."""
    pals: Any = model.task_attention.members[task]
    heads = model.config.projected_attention["heads"]
    for number, layer in enumerate(model.encoder.layers):
        context = naive_attention(states, layer.attention, TINY["num_attention_heads"], mask)
        attended = layer.attention_norm(states + layer.attention.out_proj(context))
        transformed = layer.feed_forward.down_proj(F.gelu(layer.feed_forward.up_proj(attended)))
        projected = naive_attention(pals.down_proj(states), pals.attentions[number], heads, mask)
        task_output = F.gelu(pals.up_proj(projected))
        states = layer.feed_forward_norm(attended + transformed + task_output)
    return states


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_projected_attention_matches_naive_layers(family: str, tmp_path: Path) -> None:
    """Outputs, gradients, copies and saved files; layers of other tasks have no gradients."""
    model = make_model(family, projected_attention={"size": 6, "heads": 3})
    batch = labeled_batch(CASES["words"])
    mask = batch["attention_mask"].bool()
    loss = model(**batch, task="words").loss
    model.task_attention.active = "words"
    states = model.encoder(batch["input_ids"], mask.long(), output_hidden_states=True)
    if family == "bert":  # layers of ALBERT are shared and named differently
        expected = naive_states(model, "words", states.hidden_states[0], mask)
        assert_close(states.last_hidden_state[mask], expected[mask], tolerance=1e-5)
        weights = list(model.task_attention.members["words"].parameters())
        factors = torch.randn(expected[mask].shape)
        gradients = (
            torch.autograd.grad((values * factors).sum(), weights, retain_graph=True)
            for values in (states.last_hidden_state[mask], expected[mask])
        )
        for actual, naive in zip(*gradients, strict=True):
            assert_close(actual, naive, tolerance=1e-3)
    loss.backward()
    for task, layers in model.task_attention.members.items():
        assert all((parameter.grad is not None) == (task == "words") for parameter in layers.parameters())
    model.save_pretrained(tmp_path)
    reloaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for restored in (reloaded, copy.deepcopy(model)):
        assert torch.equal(restored(**batch, task="words").loss, loss)
    with torch.no_grad():
        states = model(batch["input_ids"], mask.long()).last_hidden_state  # without the layers of a task
        for parameter in model.task_attention.parameters():
            parameter.zero_()
        model.task_attention.active = "words"
        assert_close(model.encoder(batch["input_ids"], mask.long()).last_hidden_state[mask], states[mask])


def test_tasks_have_separate_adapters(tmp_path: Path) -> None:
    """Only the shared adapter and that of the task have gradients; both are saved with the single-task model."""
    model = make_adapter_model()
    freeze_all_but(model, ["shared", "pairs", "words"])
    losses = {}
    for task, case in CASES.items():
        model.zero_grad(set_to_none=True)
        losses[task] = model(**labeled_batch(case), task=task).loss
        losses[task].backward()
        trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        adapters = {name.split(".members.")[1].split(".")[0] for name in trained if is_adapter_parameter(name)}
        assert adapters == {"shared", task}
        assert all(name.startswith((f"heads.{task}.", "encoder.pooler.")) for name in trained if "adapters" not in name)
    assert get_active_adapters(model) == ("shared", "words")
    model(torch.tensor([[5, 6]]))
    assert get_active_adapters(model) == ("shared",)

    model.save_pretrained(tmp_path / "multitask")
    reloaded = AutoModel.from_pretrained(tmp_path / "multitask")
    load_saved_adapters(reloaded, tmp_path / "multitask")
    for task, case in CASES.items():
        assert torch.equal(reloaded(**labeled_batch(case), task=task).loss, losses[task])
        reloaded.task(task).save_pretrained(tmp_path / task)
        single = load_saved_model(str(tmp_path / task))
        assert get_active_adapters(single) == ("shared", task)
        assert_close(single(**labeled_batch(case)).loss, losses[task])


def test_order_of_shared_adapters_is_saved(tmp_path: Path) -> None:
    """The keys of a saved configuration are sorted."""
    model = make_model(task_adapters={"words": ["lower", "upper"], "pairs": ["upper", "lower"]})
    for name in ("upper", "lower"):
        add_adapter(model, name)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    load_saved_adapters(loaded, tmp_path)
    for multitask_model in (model, loaded):
        multitask_model.activate_task(None)
        assert get_active_adapters(multitask_model) == ("upper", "lower")


def test_invalid_options_raise() -> None:
    for options, message in (
        ({"projected_attention": {"size": 7, "heads": 2}}, "not a multiple"),
        ({"task_adapters": {"ner": ["shared"]}}, "no task ner"),
        ({"family": "gpt2", "projected_attention": {"size": 6, "heads": 2}}, "does not support projected attention"),
    ):
        with pytest.raises(CtxError, match=message):
            make_model(**options)  # type: ignore[arg-type]
    with pytest.raises(CtxError, match="the name of the adapter that all tasks share"):
        TaskAdapterOptions(sharing="both").stack("shared")
    assert TaskAdapterOptions(sharing="task").stack("shared") == ["shared"]
    with pytest.raises(CtxError, match="no projected attention layers"):
        make_model(projected_attention={"size": 6, "heads": 2}).task("words")
    model = make_model(task_adapters={"pairs": ["missing"]})
    add_adapter(model, "shared")
    with pytest.raises(CtxError, match="no adapter 'missing'"):
        model(torch.tensor([[5, 6]]), task="pairs")


@pytest.mark.parametrize("kind", ["adapters", "projected attention"])
def test_predictions_of_a_task_use_its_layers(kind: str, tmp_path: Path) -> None:
    """`Predictor` has the outputs of the multi-task model; a model of one task cannot be fine-tuned from the layers."""
    pals = {"projected_attention": {"size": 6, "heads": 2}}
    model = make_adapter_model() if kind == "adapters" else make_model(**pals)
    model.save_pretrained(tmp_path)
    FAMILIES["bert"].tokenizer.train(["the film was lovely"] * 5, vocab_size=60).save_pretrained(tmp_path)
    predictors = dict(Predictor.open_tasks(str(tmp_path)))
    assert [*predictors] == [*CASES]
    for task, case in CASES.items():
        batch = {name: labeled_batch(case)[name] for name in ("input_ids", "attention_mask")}
        assert_close(predictors[task].model(**batch).logits, model(**batch, task=task).logits)
    if kind == "projected attention":
        task = predictors["words"].task
        start = StartingModelArguments(model=str(tmp_path), task_name="words")
        with pytest.raises(CtxError, match="projected attention layers, which a model of one task would lack"):
            open_model(start, task, predictors["words"].model.config, predictors["words"].tokenizer)
