"""A running local Hub, a saved model of every family, and clean processes that talk to that Hub."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
    """See `save_model`."""
    return save_model(family, tmp_path_factory.mktemp("runs") / f"tiny-{family.name}")


@pytest.fixture(scope="module")
def run(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    """Run Python in a clean process whose Hub is the local server and whose caches are empty."""

    def run(*arguments: str, token: str | None = TOKEN) -> subprocess.CompletedProcess:
        environment = environment_for(hub, tmp_path_factory.mktemp("cache"), token)
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    return run
