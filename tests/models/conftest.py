"""Fixtures of the common tests: cases of the test matrix, each a model class of a family."""

import pytest
from zoo import ARCHETYPES, BASES, HEADS, NETWORKS, Case

from hf_ctxmodels.layers.attention.layouts import PackedLayout


@pytest.fixture
def packed_layouts(monkeypatch: pytest.MonkeyPatch) -> list[PackedLayout]:
    """The packed layouts built during the test, in order; empty if no forward pass was unpadded."""
    layouts: list[PackedLayout] = []
    build = PackedLayout.build.__func__

    def spy(cls: type[PackedLayout], *args: object) -> PackedLayout:
        layouts.append(build(cls, *args))
        return layouts[-1]

    monkeypatch.setattr(PackedLayout, "build", classmethod(spy))
    return layouts


@pytest.fixture(params=BASES, ids=str)
def base_case(request: pytest.FixtureRequest) -> Case:
    """Base model of each family."""
    return request.param


@pytest.fixture(params=NETWORKS, ids=str)
def network_case(request: pytest.FixtureRequest) -> Case:
    """Base model of each family whose network differs from its parent's."""
    return request.param


@pytest.fixture(params=[case for case in NETWORKS if case.has_attention], ids=str)
def attention_case(request: pytest.FixtureRequest) -> Case:
    """Network cases with attention."""
    return request.param


@pytest.fixture(params=HEADS, ids=str)
def head_case(request: pytest.FixtureRequest) -> Case:
    """All model classes with a loss."""
    return request.param


@pytest.fixture(params=ARCHETYPES, ids=str)
def archetype_case(request: pytest.FixtureRequest) -> Case:
    """One head case for each type of training; see `zoo.matrix`."""
    return request.param


@pytest.fixture(params=[*NETWORKS, *ARCHETYPES], ids=str)
def trained_case(request: pytest.FixtureRequest) -> Case:
    """The network cases and the archetype cases."""
    return request.param
