"""Fixtures: a local Hub, a saved model of each family, and processes with this Hub as endpoint."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_process import HubProcess
from hub_server import ROOT, TOKEN, HubServer, environment_for
from saved_models import save_model

from hf_ctxmodels import FAMILIES
from hf_ctxmodels.spec import FamilySpec


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> FamilySpec:
    return request.param


@pytest.fixture(scope="module")
def saved_model(family: FamilySpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model of the family; see `save_model`."""
    return save_model(family, tmp_path_factory.mktemp("runs") / f"tiny-{family.name}")


@pytest.fixture(scope="module")
def run_python(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    """Runs Python in a new process that has not imported this package, with the local Hub and empty caches."""

    def run_python(*arguments: str, token: str | None = TOKEN) -> subprocess.CompletedProcess:
        environment = environment_for(hub, tmp_path_factory.mktemp("cache"), token)
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    return run_python


@pytest.fixture(scope="module")
def hub_process(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(hub, tmp_path_factory.mktemp("hub")) as process:
        yield process
