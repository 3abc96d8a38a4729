"""Fine-tuning methods, compared with naive implementations."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from training_runs import CallbackRun, arguments, new_model, run, trainer_arguments, unbatch
from transformers import Trainer
from zoo import HEADS, Case, as_subtests, assert_close, labeled_batch

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.finetuning import (
    ChainThaw,
    ElasticWeightConsolidation,
    L2SPPenalty,
    Mixout,
    ThreeStageUnfreezing,
    reinitialize_head,
    reinitialize_layers,
)
from hf_ctxmodels.downstream.finetuning.ewc import fisher_information, sampled_targets, save_fisher
from hf_ctxmodels.downstream.finetuning.reinitialization import pretrained_head_modules
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.optimizers import layer_groups, make_optimizer

BERT = Case(FAMILIES["bert"], "AutoModelForSequenceClassification")
MASKED_LM = Case(FAMILIES["bert"], "AutoModelForMaskedLM")
CLASSIFIERS = [case for case in HEADS if case.auto_name == "AutoModelForSequenceClassification"]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """Add noise to all weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("has_new_weights", [False, True])
def test_penalty_values_and_gradients(tmp_path: Path, has_new_weights: bool) -> None:
    """The new head, re-initialized layers and new tokens are not anchored."""
    model, generator, file = BERT.model(), torch.Generator().manual_seed(3), tmp_path / "fisher.safetensors"
    pretrained, mixed_names, new_names = weights_of(model.base_model), set(Mixout(model, 0.5).mixed), set[str]()
    fisher = {name: torch.rand(weight.shape, generator=generator) for name, weight in pretrained.items()}
    save_fisher(file, fisher, model)
    if has_new_weights:
        new_names = {name.removeprefix("bert.") for name in reinitialize_layers(model, 1, seed=3)}
        model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
        model.num_new_tokens = 3
        assert mixed_names & new_names
        assert set(Mixout(model, 0.5).mixed) == mixed_names - new_names
    methods: dict[str, tuple[Any, dict[str, Any]]] = {
        "l2": (L2SPPenalty(model, 0.3, 0.07), dict.fromkeys(pretrained, 1.0)),
        "ewc": (ElasticWeightConsolidation(model, 0.3, file, 0.07), fisher),
    }
    perturb(model)
    for name, (method, importance) in methods.items():
        assert set(method.anchored) == set(pretrained) - new_names
        terms = []
        for key, weight in model.named_parameters():
            key = key.removeprefix("bert.")
            if key in method.anchored:
                terms.append(0.15 * (importance[key] * (weight[: len(pretrained[key])] - pretrained[key]) ** 2).sum())
            else:
                terms.append(0.035 * (weight**2).sum())
        expected: Any = sum(terms)
        penalty_gradients = torch.autograd.grad(expected, list(model.parameters()))
        task_gradients = [torch.randn(gradient.shape, generator=generator) for gradient in penalty_gradients]
        for parameter, gradient in zip(model.parameters(), task_gradients, strict=True):
            parameter.grad = gradient.clone()
        logs = CallbackRun().pre_optimizer_step(method, 4.0)  # only the gradients are scaled
        assert_close(logs["anchor_loss"], expected.detach(), name)
        for parameter, gradient, penalty in zip(model.parameters(), task_gradients, penalty_gradients, strict=True):
            assert_close(parameter.grad, gradient + 4 * penalty, name)
    if has_new_weights:
        model.base_model.embeddings.word_embeddings.weight.data[0] += 1
        with pytest.raises(CtxError, match="from other weights"):
            ElasticWeightConsolidation(model, 1.0, file)


def test_anchored_weights(tmp_path: Path) -> None:
    """Only the head has weight decay; new modules and frozen weights are not anchored."""
    model = BERT.model()
    optimizer = make_optimizer(model, arguments(tmp_path, optimizer="adamw:weight_decay=0.1"))
    CallbackRun(optimizer).begin(L2SPPenalty(model, 0.3, 0.07))
    decayed = {id(weight) for group in optimizer.param_groups if group["weight_decay"] for weight in group["params"]}
    assert decayed == {id(model.classifier.weight)}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    model.newly_initialized_modules = ("bert.pooler", "classifier")
    model.base_model.embeddings.word_embeddings.weight.requires_grad_(False)
    anchored = L2SPPenalty(model, 1.0).anchored
    assert "layers.0.attention.qkv_proj.weight" in anchored
    assert not any(name.startswith(("pooler", "embeddings.word")) for name in anchored)
    model.base_model.requires_grad_(False)
    with pytest.raises(CtxError, match="no trainable weights"):
        L2SPPenalty(model, 1.0)


def test_penalty_is_added_once_per_step(workspace: Any, pretraining_setup: Any, tmp_path: Path) -> None:
    """One batch of 8 and four of 2 give equal losses and weights, with an L2-SP penalty and mixout."""
    runs = {}
    for name, size, accumulation in (("one", 8, 1), ("four", 2, 4)):
        model = new_model(workspace)
        methods = [Mixout(model, 0.4, seed=5), L2SPPenalty(model, 0.5)]
        perturb(model)
        options = arguments(tmp_path / name, per_device_batch_size=size, gradient_accumulation_steps=accumulation)
        result = run(model, pretraining_setup, options, callbacks=methods)
        runs[name] = weights_of(model), [record["loss"] for record in result.curve if "loss" in record]
        assert all(record["anchor_loss"] > 0.1 for record in result.curve if "loss" in record)
    assert runs["one"][1] == pytest.approx(runs["four"][1], rel=1e-5)
    for key, value in runs["one"][0].items():
        assert_close(value, runs["four"][0][key], key, 1e-4)


@pytest.mark.parametrize("setup", ["anchor", "chain"])
def test_resumed_run_equals_uninterrupted_run(
    workspace: Any, pretraining_setup: Any, tmp_path: Path, setup: str
) -> None:
    """The anchor is the start of the first run, and the best weights of a stage are restored."""

    def callbacks(model: Any) -> list:
        return [Mixout(model, 0.3), L2SPPenalty(model, 0.5)] if setup == "anchor" else [ChainThaw(model, 1e-2, 1e-2)]

    def evaluate(model: Any, accelerator: Any) -> dict[str, float]:
        """A function of the weights; an early evaluation of a stage is the best."""
        return {"eval_loss": sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())}

    options = {"max_steps": 8, "save_steps": 3, "eval_steps": 1, "save_total_limit": 20}
    folders = tmp_path / "whole", tmp_path / "stopped"
    model = new_model(workspace, "dropout.json")
    run(model, pretraining_setup, arguments(folders[0], **options), callbacks=callbacks(model), evaluate=evaluate)
    shutil.copytree(*folders)
    for step in (6, 8):
        (folders[1] / f"checkpoint-{step}").rename(tmp_path / f"gone-{step}")
    model = new_model(workspace, "dropout.json")
    run(
        model,
        pretraining_setup,
        arguments(folders[1], resume=True, **options),
        callbacks=callbacks(model),
        evaluate=evaluate,
    )
    expected, resumed = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(value, resumed[name]) for name, value in expected.items())
    if setup == "anchor":
        (folders[1] / "checkpoint-8").rename(tmp_path / "gone")
        model = perturb(new_model(workspace, "dropout.json"))
        resumed_options = arguments(folders[1], resume=True, **options)
        with pytest.raises(CtxError, match="start_weights is"):
            run(model, pretraining_setup, resumed_options, callbacks=callbacks(model), evaluate=evaluate)


def test_fisher_information_is_mean_squared_gradient(tmp_path: Path) -> None:
    """Gradients are squared for each example, not for the mean loss of a batch."""
    model = MASKED_LM.model().eval()
    batch = labeled_batch(MASKED_LM)
    rows = [{name: value[[row]] for name, value in batch.items()} for row in range(4)]
    with pytest.raises(CtxError, match="labels='gold' is unknown"):
        fisher_information(model, rows, "gold")
    fisher = fisher_information(model, rows, "data")
    model.config.unpad = False
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    parameters = dict(model.base_model.named_parameters())
    squares = {name: torch.zeros_like(weight) for name, weight in parameters.items()}
    num_examples = 0
    for row, labels in enumerate(batch["labels"]):
        if bool((labels != -100).any()):
            gradients = torch.autograd.grad(
                F.cross_entropy(logits[row], labels), list(parameters.values()), retain_graph=True
            )
            num_examples += 1
            for total, gradient in zip(squares.values(), gradients, strict=True):
                total += gradient**2
    for name, value in fisher.items():
        assert_close(value, squares[name] / num_examples, name)
    assert set(fisher) == {name for name, value in squares.items() if bool(value.any())}

    save_fisher(tmp_path / "fisher.safetensors", fisher, model)
    head = BERT.model()
    with pytest.raises(CtxError, match="from other weights"):
        ElasticWeightConsolidation(head, 1.0, tmp_path / "fisher.safetensors")
    head.base_model.load_state_dict(model.base_model.state_dict(), strict=False)
    method = ElasticWeightConsolidation(head, 1.0, tmp_path / "fisher.safetensors")
    assert method.importance("pooler.dense.weight") == 0.0
    (tmp_path / "fisher.safetensors").write_bytes(b"{}")
    with pytest.raises(CtxError, match="cannot be read"):
        ElasticWeightConsolidation(head, 1.0, tmp_path / "fisher.safetensors")


def test_sampled_targets_follow_model_distribution(subtests: Any) -> None:
    """Frequencies equal the probabilities of the model at the targets, which causal models shift by one."""
    for family, auto_class in (("bert", "AutoModelForMaskedLM"), ("gpt2", "AutoModelForCausalLM")):
        with subtests.test(family):
            case = Case(FAMILIES[family], auto_class)
            model, batch = case.model().eval(), labeled_batch(case)
            name = "labels" if family == "bert" else "shift_labels"
            targets = batch["labels"] if family == "bert" else model.resolve_targets(**batch)
            generator = torch.Generator().manual_seed(0)
            samples = [sampled_targets(model, batch, generator)[name] for _ in range(100)]
            assert all(torch.equal(sample == -100, targets == -100) for sample in samples)
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            probabilities = model(**inputs).logits[targets != -100].softmax(-1).detach()
            frequencies = sum(F.one_hot(sample[targets != -100], probabilities.shape[-1]) for sample in samples) / 100
            assert float((frequencies - probabilities).abs().max()) < 0.25
            assert float((frequencies - probabilities).abs().mean()) < 0.03
    for family in ("electra", "glove"):  # their losses are not token likelihoods
        unsupported = Case(FAMILIES[family], "AutoModelForPreTraining")
        with pytest.raises(CtxError, match="labels=data"):
            sampled_targets(unsupported.model().eval(), labeled_batch(unsupported), torch.Generator())


def test_mixout_masks_columns_and_is_unbiased() -> None:
    """Weights and gradients match the formula; the update is applied to the unmixed weights."""
    model = BERT.model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pretrained, mixout, p = weights_of(model.base_model), Mixout(model, 0.3, seed=2), 0.3
    training = CallbackRun()
    assert all(name.endswith("weight") and "embeddings" not in name and "norm" not in name for name in mixout.mixed)
    assert len(mixout.mixed) == 4 * len(model.base_model.layers) + 1  # and the pooler
    perturb(model)
    current, batch = weights_of(model), labeled_batch(BERT)
    means = {name: torch.zeros_like(weight) for name, weight in mixout.mixed.items()}
    for step in range(400):
        training.step_begin(mixout, step)
        for name, weight in mixout.mixed.items():
            means[name] += weight.detach() / 400
        if step == 0:
            mixed = copy.deepcopy(model)
            (gradients,) = [torch.autograd.grad(model(**batch).loss, list(mixout.mixed.values()))]
            model(**batch).loss.backward()
        training.pre_optimizer_step(mixout)
        if step == 0:
            for number, (name, weight) in enumerate(mixout.mixed.items()):
                columns = mixout.mask(0, number, weight.shape[-1])
                mask = columns.float().expand(weight.shape)  # equal for all outputs; u, w and p as in the paper
                u, w = pretrained[name], current[f"bert.{name}"]
                expected = (mask * u + (1 - mask) * w - p * u) / (1 - p)
                assert_close(mixed.base_model.get_parameter(name), expected, name, 1e-5)
                assert torch.equal(mixed.base_model.get_parameter(name)[:, columns].amax(0), u[:, columns].amax(0))
                assert_close(weight.grad, gradients[number] * (1 - mask) / (1 - p), name, 1e-5)
                assert 0 < columns.float().mean() < 0.7
    assert all(torch.equal(parameter, current[name]) for name, parameter in model.named_parameters())
    for name, mean in means.items():
        spread = (current[f"bert.{name}"] - pretrained[name]).abs().max()
        assert float((mean - current[f"bert.{name}"]).abs().max()) < 0.2 * float(spread), name
    assert not torch.equal(mixout.mask(1, 0, 100), mixout.mask(2, 0, 100))
    for invalid in (-0.1, 1.0):
        with pytest.raises(CtxError, match="from 0 to below 1"):
            Mixout(model, invalid)


def test_chain_thaw_trains_stages_and_keeps_best_weights(
    workspace: Any, pretraining_setup: Any, tmp_path: Path
) -> None:
    model = new_model(workspace)
    groups = layer_groups(model)
    order = [{len(groups) - 1}, *({depth} for depth in range(len(groups) - 1)), set(range(len(groups)))]
    method = ChainThaw(model, 1e-2, 1e-3)
    values = iter([2.0, 1.0, 3.0] * len(order) + [0.5])  # the second of three evaluations per stage is best
    evaluated: list[dict[str, torch.Tensor]] = []

    def evaluate(model: Any, accelerator: Any) -> dict[str, float]:
        evaluated.append(weights_of(model))
        return {"eval_loss": next(values)}

    start, steps = weights_of(model), 3 * len(order)
    result = run(
        model,
        pretraining_setup,
        arguments(tmp_path, max_steps=steps, eval_steps=1),
        callbacks=[method],
        evaluate=evaluate,
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    before = start
    for stage, trained in enumerate(order):
        first, best, last = evaluated[3 * stage : 3 * stage + 3]
        for depth, group in enumerate(groups):
            for name in (names[id(parameter)] for parameter in group):
                if depth not in trained:
                    assert torch.equal(last[name], before[name]), (stage, name)
        changed = [
            depth
            for depth, group in enumerate(groups)
            if any(not torch.equal(first[names[id(parameter)]], before[names[id(parameter)]]) for parameter in group)
        ]
        assert set(changed) == trained
        before = best
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in evaluated[-1].items())  # the final evaluation
    assert result.metrics["eval_loss"] == 0.5
    assert len(evaluated) == steps + 1
    rates = [record["learning_rate"] for record in result.curve if "learning_rate" in record]
    assert rates[:3] == [1e-2] * 3
    assert set(rates[3:]) == {1e-3}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_three_stage_unfreezing_and_lm_loss_decay() -> None:
    case = Case(FAMILIES["gpt"], "AutoModelForSequenceClassification")
    model = case.model(lm_loss_weight=0.5)
    groups = layer_groups(model)
    method = ThreeStageUnfreezing(model, (1.0, 3.0), (0.2, 0.1))
    training = CallbackRun(max_steps=41, epochs=4.1)
    training.begin(method)
    for step in range(41):
        training.step_begin(method, step)
        trained = {depth for depth, group in enumerate(groups) if all(parameter.requires_grad for parameter in group)}
        lowest = len(groups) - 1 if step < 10 else 1 if step < 30 else 0
        assert trained == set(range(lowest, len(groups))), step
        assert model.config.lm_loss_weight == pytest.approx(0.2 * 0.5 ** (step / 40))
    training.end(method)
    assert model.config.lm_loss_weight == 0.5
    assert all(parameter.requires_grad for group in groups for parameter in group)


def test_unsupported_arguments_raise(tmp_path: Path) -> None:
    model, layers = BERT.model(), len(BERT.model().base_model.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    short_run = CallbackRun(optimizer, 3, 0.3)
    stream_run, run_without_evaluation = CallbackRun(optimizer, 3), CallbackRun(optimizer, 99, has_evaluation=False)
    for message, call in (
        (f"has {layers} layers", lambda: reinitialize_layers(model, layers + 1, 0)),
        ("no head", lambda: reinitialize_head(model.base_model, 0)),
        ("no auxiliary language modeling loss", lambda: ThreeStageUnfreezing(model, lm_weights=(0.2, 0.1))),
        ("before the embeddings", lambda: ThreeStageUnfreezing(model, (2.0, 1.0))),
        ("before the embeddings are trained", lambda: short_run.begin(ThreeStageUnfreezing(model))),
        ("a stream", lambda: stream_run.begin(ThreeStageUnfreezing(model))),
        ("stages, but the run has 3 steps", lambda: short_run.begin(ChainThaw(model))),
        ("chooses weights by evaluations", lambda: run_without_evaluation.begin(ChainThaw(model))),
        ("no heads above", lambda: ChainThaw(Case(FAMILIES["gpt"], "AutoModel").model())),
        ("0 or more", lambda: L2SPPenalty(model, -1.0)),
        ("no linear layers", lambda: Mixout(Case(FAMILIES["glove"], BERT.auto_name).model(), 0.1)),
        ("cannot be read", lambda: ElasticWeightConsolidation(model, 1.0, tmp_path / "none")),
    ):
        with pytest.raises(CtxError, match=message):
            call()
    model.newly_initialized_modules = ("classifier",)
    assert pretrained_head_modules(model) == []
    model.newly_initialized_modules = ("bert.pooler",)
    assert pretrained_head_modules(model) == ["classifier"]


def test_methods_with_trainer(tmp_path: Path) -> None:
    """One SGD step equals the step computed by hand; chain-thaw trains its stages in order."""
    batch = labeled_batch(BERT)
    rows = unbatch(batch)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    options |= {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    model = BERT.model(**no_dropout)
    method = L2SPPenalty(model, 0.5)
    perturb(model)
    expected = copy.deepcopy(model)
    expected(**batch).loss.backward()
    for name, parameter in expected.named_parameters():
        start = method.pretrained.get(name.removeprefix("bert."))
        parameter.data -= 0.1 * (parameter.grad + (0 if start is None else 0.5 * (parameter.data - start)))
    Trainer(model, trainer_arguments(tmp_path, max_steps=1, **options), train_dataset=rows, callbacks=[method]).train()
    for name, parameter in expected.named_parameters():
        assert_close(model.get_parameter(name), parameter.detach(), name, 1e-5)
    with_decay = trainer_arguments(tmp_path, max_steps=1, weight_decay=0.1, **options)
    with pytest.raises(CtxError, match="Weight decay"):
        Trainer(model, with_decay, train_dataset=rows, callbacks=[method]).train()

    model = BERT.model(**no_dropout)
    chain = ChainThaw(model, 0.1, 0.1)
    before, steps = weights_of(model), len(chain.stages)
    training = trainer_arguments(tmp_path, max_steps=steps - 1, **options)
    chain.stages = chain.stages[:-1]
    Trainer(model, training, train_dataset=rows, eval_dataset=rows, callbacks=[chain]).train()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters() if name.endswith("proj.weight"))


@as_subtests(CLASSIFIERS)
def test_reinitialized_weights_equal_new_model(case: Case) -> None:
    """For the top layer and for the head; other weights are unchanged."""
    model = case.model()
    groups = {id(parameter) for group in layer_groups(model)[:-1] for parameter in group}
    layers = getattr(getattr(model.base_model, "decoder", model.base_model), "layers", None)
    before = weights_of(model)
    if layers is None:
        with pytest.raises(CtxError, match="has 0 layers"):
            reinitialize_layers(model, 1, seed=4)
    else:
        names = set(reinitialize_layers(model, 1, seed=4))
        top = {id(parameter) for parameter in list(layers)[-1].parameters()}
        assert names == {name for name, parameter in model.named_parameters() if id(parameter) in top}
        assert top <= groups
        check_reinitialized(model, before, names)
    before, rng_state = weights_of(model), torch.get_rng_state()
    names = {name for name in reinitialize_head(model, seed=4) if name in before}
    assert torch.equal(rng_state, torch.get_rng_state())
    assert names == {name for name in before if not name.startswith(f"{model.base_model_prefix}.")}
    check_reinitialized(model, before, names)


def test_pretrained_heads_and_new_poolers() -> None:
    for family, modules in (("t5", []), ("bart", []), ("mass", ["lm_head"]), ("unilm", ["mlm_head"])):  # unless tied
        assert pretrained_head_modules(Case(FAMILIES[family], "AutoModelForSeq2SeqLM").model()) == modules, family
    model = BERT.model()
    before = weights_of(model)
    names = set(reinitialize_layers(model, 0, seed=4, pooler=True))
    assert names == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    check_reinitialized(model, before, names)
    model = BERT.model(classifier_pooling="mean")
    with pytest.raises(CtxError, match="has no pooler"):
        reinitialize_layers(model, 0, seed=4, pooler=True)


def check_reinitialized(model: Any, before: dict[str, torch.Tensor], names: set[str]) -> None:
    torch.manual_seed(4)
    expected = dict(type(model)(copy.deepcopy(model.config)).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name] if name in names else before[name]), name
        assert name not in names or not torch.equal(parameter, before[name]) or parameter.ndim < 2
