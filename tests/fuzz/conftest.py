"""Fixtures of the fuzz tests."""

from collections.abc import Iterator

import pytest
from transformers.utils import logging


@pytest.fixture(autouse=True)
def silence_transformers() -> Iterator[None]:
    """Disable warnings, which contain the mutated values: pytest-xdist cannot serialize lone surrogates."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    yield
    logging.set_verbosity(verbosity)
