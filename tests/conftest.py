"""Fixtures and pytest options of the test suite."""

import gc
import os
import re
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import masking_utils
from transformers.integrations.flex_attention import WrappedFlexAttention

from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.registry import FAMILIES

pytest_plugins = ["training_runs", "hub_process"]

# Which tests `make test` runs: all that are not `slow`. If a test is parametrized by family and runs on one of these
# families, it is slow for the other families, which also get the marker `matrix`. Exceptions are tests with the marker
# `all_families`, such as comparisons with transformers, and long tests, whose marker `fast_families` names fewer
# families. `--family` ignores this rule.
REPRESENTATIVE_FAMILIES = {
    "bert": "encoder, layer normalization after the residual sum",
    "gpt2": "decoder, layer normalization before the sub-layer",
    "t5": "encoder-decoder, relative positions",
    "xlnet": "two-stream attention with a memory",
    "electra": "generator and discriminator",
    "elmo": "recurrent language models of both directions, characters",
    "ulmfit": "recurrent language model with a state across batches",
    "cove": "recurrent encoder-decoder",
    "glove": "static embeddings",
}

SUBJECTS = ["The cat", "A dog", "Her brother", "The old sailor", "Nobody", "My neighbor", "The committee"]
VERBS = ["saw", "carried", "painted", "forgot", "praised", "followed", "counted", "mended"]
OBJECTS = ["the red boat", "seven letters", "a small garden", "the bridge", "every window", "this story"]

# Property tests have no time limit: the machine may be busy.
settings.register_profile("suite", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Python reference of flex attention and its masks: compilation takes half a minute per shape. It also has
    gradients, which `flex_attention` rejects on a CPU since the compiled kernel has none."""

    def block_mask(*args: Any, **kwargs: Any) -> BlockMask:
        return create_block_mask(*args, **kwargs | {"_compile": False})

    monkeypatch.setattr(masking_utils, "create_block_mask", block_mask)
    monkeypatch.setattr(WrappedFlexAttention, "__init__", lambda self, training: None)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention.flex_attention)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)


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


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs unless `-m gpu` selects tests that need one; other tests compare with CPU results, some bit for bit."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr or ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--family`, skip files that neither mention the family nor iterate over families."""
    family = config.getoption("--family")
    if family is None or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    regex = re.compile(rf"\b{re.escape(family)}\b|\bFAMILIES\b|\bzoo\b")
    return (
        None if regex.search(f"{collection_path.stem.replace('_', ' ')} {collection_path.read_text('utf-8')}") else True
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--family`, keep files named after the family and items parametrized with it; without, mark items of
    non-representative families."""
    family = config.getoption("--family")
    if family is None:
        _mark_matrix(items)
        return
    file_pattern = re.compile(rf"test_(.*_)?{re.escape(family)}(_.*)?\.py$")
    selected = [item for item in items if family in _parameter_families(item) or file_pattern.search(item.path.name)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
    items[:] = selected


def _parameter_families(item: pytest.Item) -> set[str]:
    """Families that the parameters of a test name, such as bert in `test_weight_tying[bert-AutoModelForMaskedLM]`."""
    return FAMILIES.keys() & re.split(r"[\[\]-]", item.name)


def _mark_matrix(items: list[pytest.Item]) -> None:
    """Mark the items of other families in tests that also run on representative families."""
    items_by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    fast_families: dict[str, Set[str]] = defaultdict(REPRESENTATIVE_FAMILIES.keys)
    for item in items:
        name, marker = item.nodeid.partition("[")[0], item.get_closest_marker("fast_families")
        if marker is not None:
            fast_families[name] = set(marker.args)
        elif item.get_closest_marker("all_families"):
            continue
        if _parameter_families(item) and not item.get_closest_marker("slow"):
            items_by_test[name].append(item)
    for name, test_items in items_by_test.items():
        matrix = [item for item in test_items if not _parameter_families(item) & fast_families[name]]
        for item in matrix if len(matrix) < len(test_items) else ():
            item.add_marker("slow")
            item.add_marker("matrix")
