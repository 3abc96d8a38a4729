"""The matrix of the common suite: every family of the registry with every Auto class in its row."""

import pytest
from zoo import ARCHETYPES, BASES, CASES, HEADS, NETWORKS, TIED_HEADS, TOKEN_HEADS, Case


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Every model class."""
    return request.param


@pytest.fixture(params=HEADS, ids=str)
def head(request: pytest.FixtureRequest) -> Case:
    """Every model class with a loss."""
    return request.param


@pytest.fixture(params=[*NETWORKS, *ARCHETYPES], ids=str)
def sample(request: pytest.FixtureRequest) -> Case:
    """Every network, and one head of each kind."""
    return request.param


@pytest.fixture(params=ARCHETYPES, ids=str)
def archetype(request: pytest.FixtureRequest) -> Case:
    """One head of each kind; see `zoo.ARCHETYPES`."""
    return request.param


@pytest.fixture(params=TOKEN_HEADS, ids=str)
def token_head(request: pytest.FixtureRequest) -> Case:
    """Every model class with one label per token and no other target."""
    return request.param


@pytest.fixture(params=TIED_HEADS, ids=str)
def tied_head(request: pytest.FixtureRequest) -> Case:
    """Every model class with tied weights."""
    return request.param


@pytest.fixture(params=[case for case in NETWORKS if case.attends], ids=str)
def attentive(request: pytest.FixtureRequest) -> Case:
    """Every network that has attention."""
    return request.param


@pytest.fixture(params=NETWORKS, ids=str)
def base(request: pytest.FixtureRequest) -> Case:
    """Every family's encoder, but one that is its parent's without a change."""
    return request.param


@pytest.fixture(params=BASES, ids=str)
def encoder(request: pytest.FixtureRequest) -> Case:
    """Every family's encoder."""
    return request.param
