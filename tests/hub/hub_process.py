"""Fixtures: a local Hub, and processes with this Hub as endpoint.

huggingface_hub reads the endpoint when it is imported, so that the processes of `forked` cannot be used.
"""

from collections.abc import Iterator

import pytest
from fork_server import ForkServer
from hub_server import TOKEN, HubServer, environment_for

PACKAGE_MODULES = (
    "hf_ctxmodels.cli.pretrain",
    "hf_ctxmodels.cli.finetune",
    "hf_ctxmodels.cli.push",
    "matplotlib.figure",
)
TRANSFORMERS_MODULES = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.conversion_mapping",
)


def _fork_server(modules: tuple[str, ...], hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> ForkServer:
    folder = tmp_path_factory.mktemp("hub")
    return ForkServer(modules, environment_for(hub, folder / "cache", TOKEN), folder)


@pytest.fixture(scope="session")
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def hub(hub_server: HubServer) -> HubServer:
    """A local Hub without repositories."""
    hub_server.repositories.clear()
    return hub_server


@pytest.fixture(scope="session")
def hub_process(hub_server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Runs `python <command>` with the local Hub as endpoint."""
    with _fork_server(PACKAGE_MODULES, hub_server, tmp_path_factory) as process:
        yield process


@pytest.fixture(scope="session")
def process_without_package(hub_server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """The same for commands that start without this package, with a separate cache."""
    with _fork_server(TRANSFORMERS_MODULES, hub_server, tmp_path_factory) as process:
        yield process
