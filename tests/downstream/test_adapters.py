"""Bottleneck adapters in all Transformer families, compared with forward hooks."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import trainer_arguments
from transformers import PreTrainedModel, Trainer
from zoo import (
    BASES,
    HEADS,
    PATHS,
    Case,
    as_subtests,
    assert_close,
    assert_same_outputs,
    labeled_batch,
    make_batch,
    scalar_loss,
)

from hf_ctxmodels import CtxAlbertModel, CtxBertConfig, CtxBertModel, CtxError
from hf_ctxmodels.core.adapter_support import has_saved_adapters, is_adapter_parameter
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.downstream.adapters import (
    BottleneckConfig,
    FusionConfig,
    add_adapter,
    add_fusion,
    delete_adapter,
    get_active_adapters,
    load_adapter,
    load_fusion,
    merge_adapter,
    save_adapter,
    save_fusion,
    set_active_adapters,
    train_adapter,
    train_fusion,
)
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import (
    load_model_with_adapters,
    load_saved_model,
)
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments
from hf_ctxmodels.downstream.adapters.insertion import get_invertible_adapters, list_blocks, list_sublayer_adapters
from hf_ctxmodels.downstream.adapters.management import has_adapters, remove_fusion
from hf_ctxmodels.downstream.adapters.modules import BottleneckAdapter, SublayerAdapters
from hf_ctxmodels.layers.transformer import ResidualSum
from hf_ctxmodels.registry import FAMILIES

HOULSBY = BottleneckConfig(
    mh_adapter=True, cross_adapter=True, non_linearity="swish", original_ln_before=False, reduction_factor=4
)
PFEIFFER = BottleneckConfig(reduction_factor=4)
OUTPUT_LAYERS = {"attention": "out_proj", "cross_attention": "out_proj", "feed_forward": "down_proj"}


def transformer_cases(cases: list[Case]) -> list[Case]:
    return [case for case in cases if issubclass(case.family.config, CtxTransformerConfig)]


ENCODERS = transformer_cases(BASES)
MASKED_LM = Case(FAMILIES["bert"], "AutoModelForMaskedLM")
LM_CASES = [case for case in transformer_cases(HEADS) if case.computes_logits_of_labels_only and not case.has_generator]
ONE_HEAD = list(
    {case.family.name: case for case in reversed(transformer_cases(HEADS)) if not case.has_generator}.values()
)


def randomize(model: PreTrainedModel, scale: float = 0.3) -> PreTrainedModel:
    """Set adapters to random values far from the identity, equal for equal names."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in sorted(model.base_model.named_parameters()):
        if is_adapter_parameter(name):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def add_random_adapter(case: Case, config: BottleneckConfig | str = HOULSBY, **options: Any) -> PreTrainedModel:
    model = case.model(**options)
    add_adapter(model, "a", config)
    set_active_adapters(model, "a")
    return randomize(model)


def add_hooks(model: PreTrainedModel, adapter_model: PreTrainedModel) -> PreTrainedModel:
    """Add forward hooks that apply the adapters of another model."""
    for block, hooked_block in zip(list_blocks(adapter_model.base_model), list_blocks(model.base_model), strict=True):
        for sublayer, slot in block.adapters.items():
            down, up = slot.members["a"].adapter_down[0], slot.members["a"].adapter_up  # type: ignore[index, union-attr]

            def hook(_module: nn.Module, _inputs: Any, output: Tensor, down: Any = down, up: Any = up) -> Tensor:
                return output + F.linear(F.silu(F.linear(output, down.weight, down.bias)), up.weight, up.bias)

            getattr(getattr(hooked_block.module, sublayer), OUTPUT_LAYERS[sublayer]).register_forward_hook(hook)
    return model


@as_subtests(ENCODERS)
@torch.no_grad()
def test_all_families_match_hooks(case: Case) -> None:
    """On all attention paths; deleting the adapter restores the model bit by bit."""
    batch, plain = make_batch(case), case.model()
    before, names = plain(**batch).last_hidden_state, list(plain.state_dict())
    model = add_random_adapter(case)
    expected = add_hooks(case.model(attention="eager", unpad=False), model)(**batch)
    for path, options in PATHS.items():
        model.set_attn_implementation(options["attention"])
        model.config.unpad = options["unpad"]
        assert_same_outputs(model(**batch), expected, batch.get("attention_mask"), 2e-5, path)
    assert (model(**batch).last_hidden_state - before).abs().max() > 0.1
    model.set_attn_implementation("sdpa")
    set_active_adapters(model, None)
    assert torch.equal(model(**batch).last_hidden_state, before)
    delete_adapter(model, "a")
    assert list(model.state_dict()) == names
    assert not has_adapters(model)


@torch.no_grad()
def test_sublayer_adapters_match_formula() -> None:
    """All combinations of norms and residuals, with post-norm and pre-norm, in stacks of two adapters."""
    torch.manual_seed(0)
    output, states, norm = torch.randn(5, 8), torch.randn(5, 8), nn.LayerNorm(8)
    options = {
        "original_ln_before": (True, False),
        "original_ln_after": (True, False),
        "residual_before_ln": (True, False, "post_add"),
        "ln_after": (True, False),
        "is_parallel": (True, False),
    }
    for choices, pre_norm in itertools.product(itertools.product(*options.values()), (True, False)):
        overrides = dict(zip(options, choices, strict=True))
        config = BottleneckConfig(**overrides, reduction_factor=2, scaling=0.5, ln_before=True)
        slot = SublayerAdapters()
        for name in ("a", "b"):
            slot.members[name] = BottleneckAdapter(8, config, 0)
            for parameter in slot.members[name].parameters():
                parameter.data.normal_()
        slot.active = ("a", "b")
        sum_norm: Callable[[Tensor], Tensor] = (lambda x: x) if pre_norm else norm
        value = output
        for name in slot.active:
            adapter: Any = slot.members[name]
            total = value + states
            adapter_input = states if config.is_parallel else sum_norm(total) if config.original_ln_before else value
            residual = {True: value, False: adapter_input, "post_add": total if config.original_ln_before else value}
            up = adapter.adapter_up(F.relu(adapter.adapter_down[1](adapter.adapter_down[0](adapter_input)))) * 0.5
            up = adapter.adapter_norm_after(up) if config.ln_after else up
            value = up + (value if config.is_parallel else residual[config.residual_before_ln])
        expected = sum_norm(value + states) if config.original_ln_after else value
        residual_sum = ResidualSum()
        slot.attach(residual_sum)
        assert_close(residual_sum(states, output, None if pre_norm else norm, 0), expected, str((overrides, pre_norm)))


@pytest.mark.parametrize(("scaling", "size"), [("learned", 1), ("channel", 8)])
@torch.no_grad()
def test_learned_scaling(scaling: Literal["learned", "channel"], size: int) -> None:
    """The factors are 1 before training."""
    adapter, states = BottleneckAdapter(8, BottleneckConfig(reduction_factor=2, scaling=scaling), 0), torch.randn(5, 8)
    adapter.adapter_up.weight.normal_()
    output = adapter.adapter_up(adapter.adapter_down(states))
    assert_close(adapter(states), output)
    factors = torch.linspace(2, 3, size)
    adapter.scaling.copy_(factors)
    assert_close(adapter(states), output * factors)


@as_subtests(LM_CASES)
@torch.no_grad()
def test_invertible_adapter_is_inverted_before_output_layer(case: Case) -> None:
    """Logits and losses equal those with hooks after the embeddings and before the output layer."""
    config = BottleneckConfig(reduction_factor=4, inv_adapter="nice")
    if case.model().get_output_embeddings() is None:
        with pytest.raises(CtxError, match="no output layer"):
            add_random_adapter(case, config)
        return
    model, plain, batch = add_random_adapter(case, config), case.model(), labeled_batch(case)
    slot = get_invertible_adapters(model.base_model)
    states = torch.randn(3, 7, model.get_input_embeddings().embedding_dim)
    assert_close(slot.inverse(slot(states)), states)
    assert (slot(states) - states).abs().max() > 0.05
    hooked = copy.deepcopy(model)
    get_invertible_adapters(hooked.base_model).active = None
    base: Any = hooked.base_model
    if case.family.name == "xlnet":
        embedding = base.word_embeddings
    elif hasattr(base, "embeddings"):
        embedding = base.embeddings.dropout
    else:
        embedding = base.encoder.dropout if base.config.is_encoder_decoder else base.dropout
    embedding.register_forward_hook(lambda _module, _inputs, embedded, slot=slot: slot(embedded))
    decoder = hooked.get_output_embeddings()
    for module in hooked.modules():
        if isinstance(module, nn.Linear) and module.weight is decoder.weight:
            module.register_forward_pre_hook(lambda _module, states, slot=slot: (slot.inverse(states[0]),))
    if case.family.name == "xlnet":
        batch = {name: value for name, value in batch.items() if "target" not in name and "order" not in name}
    assert_close(model(**batch).loss, hooked(**batch).loss, "loss")
    assert (model(**batch).loss - plain(**batch).loss).abs() > 1e-4
    if case.accepts_return_logits:
        outputs = [encoder(**batch, return_logits=True) for encoder in (model, hooked)]
        assert_same_outputs(*outputs, batch.get("attention_mask"), where="with logits")


@as_subtests(ONE_HEAD)
def test_only_adapter_and_head_have_gradients(case: Case) -> None:
    """Gradients are equal for padded and packed rows and with activation checkpointing."""
    batch, gradients = labeled_batch(case), []
    for options in ({}, {"unpad": False, "attention": "eager"}, {"recompute": True}):
        recompute = options.pop("recompute", False)
        model = case.model(**options)
        has_inverse = case.is_base or case not in LM_CASES or model.get_output_embeddings() is not None
        add_adapter(model, "below", "madx-language" if has_inverse else HOULSBY)
        add_adapter(model, "a", HOULSBY)
        train_adapter(model, "a", ["below"])
        randomize(model).train()
        if recompute:
            model.activation_checkpointing_enable()
        torch.manual_seed(0)
        scalar_loss(case, model, batch).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    prefix = f"{model.base_model_prefix}."
    encoder_names = {name for name in gradients[0] if name.startswith(prefix) and ".pooler." not in name}
    assert encoder_names == {name for name, _ in model.named_parameters() if ".adapters." in name and ".a." in name}
    assert all(gradients[0][name].abs().max() > 0 for name in encoder_names)
    for other_gradients in gradients[1:]:
        assert other_gradients.keys() == gradients[0].keys()
        for name, gradient in gradients[0].items():
            assert_close(other_gradients[name], gradient, f"{case} {name}", 1e-4)


def test_parameter_counts_and_adapters_per_depth() -> None:
    with torch.device("meta"):
        model = CtxBertModel(CtxBertConfig(), add_pooling_layer=False)
    for name, config, count in (
        ("houlsby", BottleneckConfig(**{**vars(HOULSBY), "reduction_factor": 12}), 2_379_264),
        ("pfeiffer", "pfeiffer", 894_528),
        ("all_but_the_last", BottleneckConfig(leave_out=(11,)), 894_528 * 11 // 12),
        ("by_layer", BottleneckConfig(reduction_factor={"0": 768 / 48, "default": 768}), 74_544 + 11 * 2_305),
    ):
        add_adapter(model, name, config)
        adapters = [slot.members[name] for _, _, slot in list_sublayer_adapters(model) if name in slot.members]
        assert sum(parameter.numel() for adapter in adapters for parameter in adapter.parameters()) == count, name

    case = Case(FAMILIES["albert"], "AutoModel")

    def albert(**overrides: Any) -> CtxAlbertModel:
        return case.model(**{"num_hidden_layers": 4, "num_hidden_groups": 2, **overrides})  # type: ignore[return-value]

    shared, by_depth = albert(), albert()
    add_adapter(shared, "a", HOULSBY)
    add_adapter(by_depth, "a", BottleneckConfig(**{**vars(HOULSBY), "one_per_depth": True, "leave_out": (3,)}))
    counts = [sum(p.numel() for n, p in model.named_parameters() if ".adapters." in n) for model in (shared, by_depth)]
    assert counts[1] * 2 == counts[0] * 3  # two shared layers; three of four depths
    unshared = albert(parameter_sharing="none", num_hidden_groups=1)
    add_adapter(unshared, "a", HOULSBY)
    for model in (unshared, by_depth):
        set_active_adapters(model, "a")
    layers = [block.module for block in list_blocks(unshared)]
    state = unshared.state_dict()
    for name in state:
        prefix, number, *suffix = name.split(".")
        if not is_adapter_parameter(name):
            shared_name = ".".join([prefix, str(int(number) // 2), *suffix]) if prefix == "layers" else name
            state[name] = shared.state_dict()[shared_name]
    unshared.load_state_dict(state)
    randomize(by_depth)
    for depth, sublayer in itertools.product(range(4), ("attention", "feed_forward")):
        adapters = list_blocks(by_depth)[depth // 2].adapters[sublayer].adapters_at(["a"], depth)
        assert bool(adapters) == (depth != 3)
        members = layers[depth].adapters[sublayer].members
        if adapters:
            members["a"].load_state_dict(adapters[0].state_dict())
        else:
            del members["a"]
    batch = make_batch(case)
    with torch.no_grad():
        assert_close(by_depth(**batch).last_hidden_state, unshared(**batch).last_hidden_state)


@as_subtests(ENCODERS)
def test_adapters_are_saved_and_loaded(tmp_path: Path, case: Case) -> None:
    """Adapters have separate files, except in checkpoints, whose model file contains them."""
    model, batch, folder = add_random_adapter(case, "houlsby"), make_batch(case), tmp_path / str(case)
    set_active_adapters(model, None)
    add_adapter(model, "inv", "madx-language")
    set_active_adapters(randomize(model), ["inv", "a"])
    model.save_pretrained(folder)
    reloaded = type(model).from_pretrained(folder).eval()
    assert not any(is_adapter_parameter(name) for name in reloaded.state_dict())
    for name in ("inv", "a"):
        assert load_adapter(reloaded, folder / "adapters" / name) == name
    set_active_adapters(reloaded, ["inv", "a"])
    with torch.no_grad():
        assert_same_outputs(reloaded(**batch), model(**batch), batch.get("attention_mask"), 0)
    model.save_pretrained(folder / "checkpoint-5")
    _, report = type(model).from_pretrained(folder / "checkpoint-5", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with pytest.raises(CtxError, match="holds a model"):
        save_adapter(model, "a", folder)
    for name, remaining in (("inv", {"a", "stack.json"}), ("a", set())):  # deleted adapters are not saved again
        delete_adapter(model, name)
        model.save_pretrained(folder)
        assert {path.name for path in folder.glob("adapters/*")} == remaining
    assert not has_saved_adapters(folder)


@pytest.fixture
def bert() -> PreTrainedModel:
    return MASKED_LM.model()


def test_loading_reports_adapters(bert: PreTrainedModel, tmp_path: Path, capsys: Any) -> None:
    """`from_pretrained` loads a model without its saved adapters, the other functions add them."""
    add_adapter(bert, "a")
    bert.save_pretrained(tmp_path)
    loaders = {
        "load_saved_model": lambda: load_saved_model(str(tmp_path)),
        "load_model_with_adapters": lambda: load_model_with_adapters(tmp_path, "AutoModelForMaskedLM", bert.config),
        "from_pretrained": lambda: type(bert).from_pretrained(tmp_path),
    }
    for name, load in loaders.items():
        capsys.readouterr()
        is_loaded = any(map(is_adapter_parameter, load().state_dict()))
        message = capsys.readouterr().err
        assert is_loaded == (name != "from_pretrained")
        assert ("the adapters a are loaded" in message) == is_loaded, name
        assert ("loaded without its adapters a;" in message) != is_loaded, name
    (tmp_path / "adapters" / "stack.json").unlink()
    assert not any(map(is_adapter_parameter, load_saved_model(str(tmp_path)).state_dict()))
    assert "loaded without its adapters a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a/model_head.safetensors", "x"),
        ("a/head_config.json", '{"config": [1]}'),
        ("a/head_config.json", "[]"),
        ("a/adapter.safetensors", "x"),
        ("a/adapter_config.json", "{}"),
        ("a/adapter_config.json", "leave_out"),
        ("stack.json", "[]"),
        ("stack.json", "{}"),
        ("stack.json", '{"active": 3}'),
        ("a,b/adapter_fusion_config.json", '{"adapter_names": 3}'),
        ("a,b/adapter_fusion_config.json", "{}"),
    ],
)
def test_damaged_files_raise(bert: PreTrainedModel, tmp_path: Path, file: str, content: str) -> None:
    model = copy.deepcopy(bert)
    for name in ("a", "b"):
        add_adapter(model, name)
    add_fusion(model, ["a", "b"])
    model.save_pretrained(tmp_path)
    save_adapter(model, "a", tmp_path / "adapters" / "a", with_head=True)
    damaged = tmp_path / "adapters" / file
    if content == "leave_out":
        content = damaged.read_text().replace('"leave_out": []', '"leave_out": 1')
    damaged.write_text(content)
    with pytest.raises(CtxError) as error:
        load_saved_model(str(tmp_path))
    assert error.value.location
    if file.startswith("a/"):
        with pytest.raises(CtxError):
            load_adapter(bert, damaged.parent)
        assert not has_adapters(bert)


def test_fusion_of_another_form_is_not_added(bert: PreTrainedModel, tmp_path: Path) -> None:
    for name in ("a", "b"):
        add_adapter(bert, name)
    add_fusion(bert, ["a", "b"])
    save_fusion(bert, ["a", "b"], tmp_path)
    remove_fusion(bert, ["a", "b"])
    names = set(bert.state_dict())
    file = tmp_path / "adapter_fusion_config.json"
    text = file.read_text()
    file.write_text(text.replace('"key": true', '"key": false'))
    with pytest.raises(CtxError, match=r"has no parameter .*key"):
        load_fusion(bert, tmp_path)
    assert set(bert.state_dict()) == names
    file.write_text(text)
    assert load_fusion(bert, tmp_path) == ("a", "b")


def test_errors_list_valid_choices(bert: PreTrainedModel) -> None:
    add_adapter(bert, "de", "madx-language")
    add_adapter(bert, "ner")
    add_adapter(bert, "high", BottleneckConfig(leave_out=(0,)))
    add_adapter(bert, "other", "parallel")
    lstm, encoder = (Case(FAMILIES[family], "AutoModel").model() for family in ("elmo", "bert"))
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: add_adapter(bert, "ner"), "already has an adapter 'ner'"),
        (lambda: add_adapter(bert, "a.b"), "not a valid name"),
        (lambda: add_adapter(bert, "train"), "not a valid name"),
        (lambda: set_active_adapters(bert, [[["ner"]]]), "not a valid name"),  # type: ignore[list-item]
        (lambda: add_adapter(encoder, "x", BottleneckConfig(reduction_factor={"0": 2})), "no value for layer 1"),
        (lambda: add_adapter(bert, "x", "lora"), "'lora'(.|\n)*houlsby"),
        (lambda: add_adapter(bert, "x", BottleneckConfig(non_linearity="sharp")), "no activation 'sharp'"),
        (lambda: BottleneckConfig(original_ln_before="False"), "original_ln_before='False'.*bool"),  # type: ignore[arg-type]
        (lambda: BottleneckConfig(leave_out=0), "leave_out=0"),  # type: ignore[arg-type]
        (lambda: BottleneckConfig(init_weights="foo"), "init_weights='foo'.*bert.*houlsby"),  # type: ignore[arg-type]
        (lambda: BottleneckConfig(scaling="big"), "scaling='big'"),  # type: ignore[arg-type]
        (lambda: BottleneckConfig(reduction_factor=0), "reduction_factor=0.*out of range"),
        (lambda: AdapterArguments("pfeiffer:inv_adapter=nicest"), "inv_adapter"),
        (lambda: add_adapter(bert, "x", BottleneckConfig(leave_out=(3,))), "leave_out=\\[3\\], but the model has 3"),
        (
            lambda: add_adapter(encoder, "x", BottleneckConfig(output_adapter=False, cross_adapter=True)),
            "CtxBertModel has no layer for an adapter",
        ),
        (lambda: add_adapter(lstm, "x"), "no Transformer layers(.|\n)*xlnet"),
        (lambda: set_active_adapters(bert, "fr"), "no adapter 'fr'(.|\n)*de, ner"),
        (lambda: set_active_adapters(bert, ["ner", "de"]), "'de' is invertible, and not the lowest"),
        (lambda: set_active_adapters(bert, ["ner", "ner"]), "twice"),
        (lambda: set_active_adapters(bert, [["ner", "high"]]), "no fusion of ner, high"),
        (lambda: add_fusion(bert, ["ner", "high"]), "not after the same sub-layers"),
        (lambda: add_fusion(bert, ["ner", "de"]), "'de' is invertible, and cannot be fused"),
        (lambda: add_fusion(bert, ["ner", "other"]), "'other' is parallel"),
        (lambda: add_fusion(bert, ["ner"]), "two or more"),
        (lambda: delete_adapter(bert, "fr"), "no adapter 'fr'"),
        (lambda: merge_adapter(bert, "ner"), "single active adapter"),
        (lambda: save_adapter(bert, "fr", "x"), "no adapter 'fr'"),
        (lambda: load_adapter(bert, "/none"), "no such directory"),
    ]
    for call, message in calls:
        with pytest.raises(CtxError, match=message):
            call()
    assert not any(is_adapter_parameter(name) for name, _ in encoder.named_modules())  # failed calls add nothing
    options = "original_ln_before=False,ln_after=true,inv_adapter=None,leave_out=0,2,scaling=learned"
    conf = AdapterArguments(f"madx-language:{options}").adapter.config
    assert (conf.original_ln_before, conf.ln_after, conf.inv_adapter, conf.leave_out) == (False, True, None, (0, 2))
    assert get_active_adapters(bert) == ()
    set_active_adapters(bert, "ner")
    with pytest.raises(CtxError, match="cannot be merged: its non-linearity is relu"):
        merge_adapter(bert, "ner")


@as_subtests(ENCODERS)
@torch.no_grad()
def test_linear_adapter_is_merged(case: Case) -> None:
    """Merged weights give the outputs of the adapter, also with one scaling factor per feature."""
    config = BottleneckConfig(**{**vars(HOULSBY), "non_linearity": "linear", "scaling": "channel"})
    model, batch = add_random_adapter(case, config), make_batch(case)
    expected = model(**batch)
    if case.family.name in ("t5", "xlnet", "transformer_xl"):
        with pytest.raises(CtxError, match="no bias"):
            merge_adapter(model, "a")
        return
    merge_adapter(model, "a")
    assert not any(is_adapter_parameter(name) for name in model.state_dict())
    assert_same_outputs(model(**batch), expected, batch.get("attention_mask"), 1e-4)


def test_fusion_training_with_penalty() -> None:
    """Only fusion and head have gradients; the loss includes the distance of the value weights from the identity."""
    case = Case(FAMILIES["bert"], "AutoModelForTokenClassification")
    model, batch = case.model(), labeled_batch(case)
    for name in ("a", "b"):
        add_adapter(model, name)
    add_fusion(model, ["a", "b"], FusionConfig(value_initialized=False))
    randomize(model).train()
    train_fusion(model, ["a", "b"])
    loss = model(**batch).loss
    loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and "classifier" not in name}
    assert trained == {name for name, _ in model.named_parameters() if "fusions" in name}
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("value.weight")]
    penalty = sum((0.01 * (value - torch.eye(len(value))).square().sum() for value in weights), torch.zeros(()))
    assert_close(loss - model.eval()(**batch).loss, penalty)
    delete_adapter(model, "a")
    assert get_active_adapters(model) == ()
    assert not any("fusions" in name for name in model.state_dict())


@pytest.mark.slow
@torch.no_grad()
def test_compiled_model_matches_eager() -> None:
    bert = MASKED_LM.model(num_hidden_layers=1)
    add_adapter(bert, "de", "madx-language")
    add_adapter(bert, "ner", HOULSBY)
    set_active_adapters(randomize(bert), ["de", "ner"])
    batch = make_batch(MASKED_LM)
    expected = bert(**batch).logits
    compiled = torch.compile(bert, backend="eager")
    assert_same_outputs(compiled(**batch), {"logits": expected}, batch["attention_mask"])


@pytest.mark.filterwarnings("ignore")
def test_trainer_accumulates_and_resumes(tmp_path: Path) -> None:
    """With transformers' Trainer, two micro-batches equal one batch, and a resumed run an uninterrupted one."""
    batch = labeled_batch(MASKED_LM)
    rows = [{name: value[index % len(value)] for name, value in batch.items()} for index in range(16)]

    def run(folder: str, *, batch_size: int, accumulate: int, resume: bool = False) -> dict[str, Tensor]:
        model = MASKED_LM.model()
        torch.manual_seed(3)
        add_adapter(model, "de", "madx-language")
        train_adapter(model, "de", freeze_head=True)
        if resume:  # all of these weights must be overwritten
            randomize(model)
        sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulate, "max_steps": 4}
        saving = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.01}
        arguments = trainer_arguments(tmp_path / folder, **sizes, **saving)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2") if resume else None)
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    expected = run("a", batch_size=4, accumulate=1)
    assert expected
    assert all(is_adapter_parameter(name) for name in expected)
    for name, value in run("a", batch_size=4, accumulate=1, resume=True).items():
        assert torch.equal(value, expected[name]), name
    for name, value in run("b", batch_size=2, accumulate=2).items():
        assert_close(value, expected[name], name, 1e-4)
