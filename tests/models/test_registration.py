"""Importing the package: what it registers, what it does not import, and what it says to a rival."""

import subprocess
import sys

import pytest

import hf_ctxmodels
from hf_ctxmodels.registry import FAMILIES, register

MODEL_TYPE = next(iter(FAMILIES.values())).config.model_type


def run(code: str) -> str:
    """The standard output of `code` in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_leaves_heavy_packages_alone() -> None:
    heavy = ["datasets", "accelerate.accelerator", "evaluate", "matplotlib", "gensim", "hf_ctxmodels.training"]
    alone = "import sys, transformers.models.bert.modeling_bert, transformers.models.auto.modeling_auto"
    ours = f"{alone}\nbefore = set(sys.modules)\nimport hf_ctxmodels\n"
    loaded = run(f"{ours}print(*[name for name in {heavy} if name in set(sys.modules) - before])")
    assert loaded.split() == []


def test_registering_twice_changes_nothing() -> None:
    register()
    hf_ctxmodels.register()


def test_reloading_changes_nothing() -> None:
    run(
        "import importlib, transformers, hf_ctxmodels\n"
        "importlib.reload(hf_ctxmodels)\n"
        "hf_ctxmodels.register()\n"
        f"assert type(transformers.AutoConfig.for_model({MODEL_TYPE!r})) is "
        f"hf_ctxmodels.get_family({MODEL_TYPE!r}).config\n"
    )


@pytest.mark.parametrize("rival", ["configuration", "conversion"])
def test_a_rival_registration_is_named(rival: str) -> None:
    registration = {
        "configuration": (
            "from transformers import AutoConfig, PreTrainedConfig\n"
            f"class Rival(PreTrainedConfig):\n    model_type = {MODEL_TYPE!r}\n"
            f"AutoConfig.register({MODEL_TYPE!r}, Rival)\n"
        ),
        "conversion": (
            "from transformers.conversion_mapping import register_checkpoint_conversion_mapping\n"
            f"register_checkpoint_conversion_mapping({MODEL_TYPE!r}, [])\n"
        ),
    }[rival]
    message = run(f"{registration}try:\n    import hf_ctxmodels\nexcept RuntimeError as error:\n    print(error)\n")
    assert f"{MODEL_TYPE!r} is registered already" in message
    assert ("__main__.Rival" if rival == "configuration" else "somebody") in message
    assert "rename" in message or "renaming" in message


def test_public_names_exist() -> None:
    for name in hf_ctxmodels.__all__:
        assert getattr(hf_ctxmodels, name) is not None
