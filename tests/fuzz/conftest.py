"""What the fuzz tests share."""

from collections.abc import Iterator

import pytest
from transformers.utils import logging


@pytest.fixture(autouse=True)
def silence_transformers() -> Iterator[None]:
    """It warns with the strange values themselves, and pytest-xdist cannot pass on a lone surrogate."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    yield
    logging.set_verbosity(verbosity)
