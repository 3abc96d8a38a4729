"""Fixtures: the families, and a saved model of each."""

from pathlib import Path

import pytest
from saved_models import save_model

from hf_ctxmodels import FAMILIES
from hf_ctxmodels.spec import FamilySpec


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> FamilySpec:
    return request.param


@pytest.fixture(scope="module")
def saved_model(family: FamilySpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model of the family; see `save_model`."""
    return save_model(family, tmp_path_factory.mktemp("runs") / f"tiny-{family.name}")
