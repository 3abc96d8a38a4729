"""Fixtures and options of the whole suite."""

import gc
import os
import re
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer

pytest_plugins = ["training_runs"]

SUBJECTS = ["The cat", "A dog", "Her brother", "The old sailor", "Nobody", "My neighbour", "The committee"]
VERBS = ["saw", "carried", "painted", "forgot", "praised", "followed", "counted", "mended"]
OBJECTS = ["the red boat", "seven letters", "a small garden", "the bridge", "every window", "this story"]

# Property tests have no time limit: the machine may be busy.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data next to the repository; without it, tests that need it are skipped."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder}, which is not part of the repository")
    return folder


@pytest.fixture(scope="session")
def documents() -> list[list[str]]:
    """Forty documents of one to nine sentences."""

    def sentence(number: int) -> str:
        return f"{SUBJECTS[number % 7]} {VERBS[number // 7 % 8]} {OBJECTS[number // 56 % 6]}."

    return [[sentence(37 * index + 11 * number) for number in range(1 + index % 9)] for index in range(40)]


@pytest.fixture(scope="session")
def tokenizer(documents: list[list[str]]) -> CtxBertTokenizer:
    return CtxBertTokenizer.train([" ".join(document) for document in documents], vocab_size=150)


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Use one thread per process: tests run in several processes."""
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, which Trainer runs often."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--family", help="run only the tests of one model family, for example bert")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--family`, keep the files named after the family and the items whose parameters name it."""
    family = config.getoption("--family")
    if family is None:
        return
    parameter = re.compile(rf"\[(.*-)?{re.escape(family)}(-.*)?\]$")
    file = re.compile(rf"test_(.*_)?{re.escape(family)}(_.*)?\.py$")
    selected = [item for item in items if parameter.search(item.name) or file.search(item.path.name)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
    items[:] = selected
