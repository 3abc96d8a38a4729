"""Registry and package import: lookup, validation of specs, registration and import direction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import grimp
import pytest
from fork_server import ForkServer
from zoo import HEADS, Case, as_subtests, tiny_config

import hf_ctxmodels
from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES, check_specs, checkpoint_class, get_family, register
from hf_ctxmodels.spec import PublishedCount, Traits

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = list(FAMILIES.values())[:2]

MODEL_TYPE = FIRST.config.model_type


HEAVY_MODULES = ["datasets", "accelerate.accelerator", "evaluate", "matplotlib", "gensim"]
HEAVY_MODULES += [f"hf_ctxmodels.{name}" for name in ("training", "downstream.tasks", "cli")]
IMPORT_FAILS = "try:\n    import hf_ctxmodels\nexcept RuntimeError as error:\n    print(error)\n"
PROGRAMS = {
    "import": (
        "import sys\nfrom transformers import conversion_mapping as mapping\nbefore = set(sys.modules)\n"
        "import hf_ctxmodels\n"
        f"heavy = [name for name in {HEAVY_MODULES} if name in set(sys.modules) - before]\n"
        "family, conversions = hf_ctxmodels.get_family('bert'), mapping._checkpoint_conversion_mapping_cache\n"
        "family.models['AutoModel'](family.config(**family.sizes['tiny']))\n"
        "registered = mapping.get_checkpoint_conversion_mapping(family.config.model_type)\n"
        "print(heavy, conversions is None, len(registered) == len(family.conversion) > 0)\n"
    ),
    "conflicting configuration": (
        "from transformers import AutoConfig, PreTrainedConfig\n"
        f"class Conflicting(PreTrainedConfig):\n    model_type = {MODEL_TYPE!r}\n"
        f"AutoConfig.register({MODEL_TYPE!r}, Conflicting)\n{IMPORT_FAILS}"
    ),
    "conflicting conversion": (
        "from transformers.conversion_mapping import register_checkpoint_conversion_mapping\n"
        f"register_checkpoint_conversion_mapping({MODEL_TYPE!r}, [])\n{IMPORT_FAILS}"
    ),
}


@pytest.fixture(scope="module")
def outputs(process_without_package: ForkServer) -> dict[str, str]:
    """The output of each program of `PROGRAMS` in a process that had not imported the package."""
    results = {name: process_without_package.run("-c", code) for name, code in PROGRAMS.items()}
    assert not [result for result in results.values() if result.returncode]
    return {name: result.stdout for name, result in results.items()}


def test_import_loads_no_heavy_packages(outputs: dict[str, str]) -> None:
    """Conversions are registered when the first model is created, since transformers then builds the conversions of all
    its models."""
    assert outputs["import"] == "[] True True\n"


def test_registration_is_idempotent() -> None:
    register()
    assert get_family(MODEL_TYPE) is FIRST


@pytest.mark.parametrize("registration", ["configuration", "conversion"])
def test_conflicting_registration_raises(registration: str, outputs: dict[str, str]) -> None:
    message = outputs[f"conflicting {registration}"]
    assert f"{MODEL_TYPE!r} is already registered" in message
    assert ("__main__.Conflicting" if registration == "configuration" else "another package") in message
    assert "rename" in message or "renaming" in message


def test_public_names_exist() -> None:
    for name in hf_ctxmodels.__all__:
        assert getattr(hf_ctxmodels, name) is not None


def test_families_import_only_their_parent() -> None:
    graph = grimp.build_graph("hf_ctxmodels", cache_dir=None)
    for name, family in FAMILIES.items():
        package = f"hf_ctxmodels.models.{name}"
        modules = {package, *graph.find_descendants(package)}
        imported = {name for module in modules for name in graph.find_modules_directly_imported_by(module)} - modules
        families = {name.split(".")[2] for name in imported if name.startswith("hf_ctxmodels.models.")}
        assert families <= {family.parent}, f"{name} imports {sorted(families)}, its SPEC.parent is {family.parent}"


def test_all_family_folders_are_registered() -> None:
    folders = {path.parent.name for path in ROOT.glob("hf_ctxmodels/models/*/__init__.py")}
    # an encoder-decoder from two models has no separate configurations
    assert folders - {"encoder_decoder"} == set(FAMILIES)


def test_all_families_have_model_cards() -> None:
    assert [family.card for family in FAMILIES.values() if not (ROOT / family.card).is_file()] == []


def test_configuration_subclass_has_no_family() -> None:
    class Derived(FIRST.config):
        model_type = "derived"

    with pytest.raises(CtxError, match=r"Derived \(model_type 'derived'\) is not a configuration"):
        get_family(Derived(**tiny_config(FIRST).to_diff_dict()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"models": {"AutoModelForMaskedLM": FIRST.models["AutoModel"]}}, "no 'AutoModel'"),
        ({"models": {**FIRST.models, "AutoModelForReading": FIRST.models["AutoModel"]}}, "'AutoModelForReading'"),
        ({"models": {"AutoModel": SECOND.models["AutoModel"]}}, f"with a {FIRST.config.__name__}"),
        ({"reference_heads": {"AutoModelForReading": FIRST.models["AutoModel"]}}, "reference_heads has Auto classes"),
        ({"sizes": {"tiny": {}}}, "lacks 'tiny' or 'base'"),
        ({"sizes": {"tiny": {"hiden_size": 3}, "base": {}}}, r"sizes\['tiny'\] has no field .*hiden_size"),
        ({"published": {"x": PublishedCount({"hiden_size": 3}, {})}}, r"published\['x'\] has no field .*hiden_size"),
        ({"published": {"x": PublishedCount({}, {"CtxReader": 3})}}, "has unknown classes.*CtxReader"),
        ({"traits": Traits(tiny={"hiden_size": 3})}, "traits.tiny has no field .*hiden_size"),
        ({"traits": Traits(loss_weights={"loss": "wieght"})}, "traits.loss_weights has no field .*wieght"),
        ({"parent": SECOND.name}, f"parent '{SECOND.name}' is not listed before"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split(" .*")[0],
)
def test_invalid_specs(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CtxError, match=message) as error:
        check_specs([replace(FIRST, **overrides)])
    assert f"the family '{FIRST.name}'" in str(error.value)


def test_names_and_model_types_are_unique() -> None:
    for duplicate in (replace(SECOND, name=FIRST.name), replace(FIRST, name="another")):
        with pytest.raises(CtxError, match=f"the family '{FIRST.name}' has the same name or model_type"):
            check_specs([FIRST, duplicate])


@as_subtests(HEADS)
def test_heads_use_base_model_of_family(case: Case) -> None:
    """Not the parent family's base model. Heads of an encoder-decoder may use its separate encoder."""
    base_models = (case.family.models.get(name) for name in ("AutoModel", "AutoModelForTextEncoding"))
    assert type(case.model().base_model) in base_models, str(case)


@pytest.mark.parametrize(
    ("family", "reference", "expected"),
    [
        ("bert", "BertModel", "CtxBertModel"),
        ("gpt2", "GPT2LMHeadModel", "CtxGpt2ForCausalLM"),
        ("electra", "ElectraForPreTraining", "CtxElectraForReplacedTokenDetection"),  # not the joint model
        ("ernie", "ErnieForPreTraining", "CtxErnieForMaskedLMWithPair"),
        ("xlm", "XLMWithLMHeadModel", "CtxXLMForMaskedLM"),
    ],
)
def test_checkpoint_class(family, reference, expected):
    config = FAMILIES[family].config()
    for architecture in (reference, expected):
        config.architectures = [architecture]
        assert checkpoint_class(config).__name__ == expected
    config.architectures = ["ResNetModel"]
    with pytest.raises(CtxError, match="ResNetModel"):
        checkpoint_class(config)
