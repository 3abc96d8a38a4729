"""A running local Hub, a saved model of every family, and clean processes that talk to that Hub."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hub_server import ROOT, TOKEN, HubServer, environment_for
from zoo import main_head

from hf_ctxmodels import FAMILIES
from hf_ctxmodels.registry import Family
from hf_ctxmodels.training.summary import TrainingSummary

TEXTS = ["the cat sat on the mat", "a dog ran after the cat", "cats and dogs sat and ran on a mat"] * 3


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def saved_model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its tokenizer and the record of its training, as the scripts leave them."""
    directory = tmp_path_factory.mktemp("runs") / f"tiny-{family.name}"
    tokenizer = family.tokenizer.train(TEXTS, vocab_size=80)
    torch.manual_seed(0)
    config = family.config(vocab_size=len(tokenizer), **family.sizes["tiny"])
    model = family.models[main_head(family)](config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    TrainingSummary(
        task="pretraining" if family.objectives else "sequence-classification",
        model_class=type(model).__name__,
        model_type=config.model_type,
        dataset="demo",
        seed=13,
        parameters=model.num_parameters(),
        steps=40,
        global_batch_size=8,
        max_length=32,
        tokens=4321,
        objective=next(iter(family.objectives), None),
        objective_options={"mlm_probability": 0.15},
        rates={"masked": 0.1498},
        metrics={"eval_loss": 2.25},
        hyperparameters={"learning_rate": 1e-4},
        curve=[{"step": step, "loss": 5.0 - step / 20} for step in range(5, 41, 5)],
    ).save(directory)
    return directory


@pytest.fixture(scope="module")
def run(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    """Run Python in a clean process whose Hub is the local server and whose caches are empty."""

    def run(*arguments: str, token: str | None = TOKEN) -> subprocess.CompletedProcess:
        environment = environment_for(hub, tmp_path_factory.mktemp("cache"), token)
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    return run
