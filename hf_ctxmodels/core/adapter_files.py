"""Names of the adapters saved with a model, and the notice that they were not loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.console import print_status

ADAPTERS_FOLDER = "adapters"
"""Folder in a model's directory with one folder for each adapter."""
STACK_FILE = "stack.json"
"""File in `ADAPTERS_FOLDER` with the active adapters."""
BLOCK_ADAPTERS, INVERTIBLE_ADAPTERS = "adapters", "invertible"
"""Names of adapters as children of a block and of the embeddings; components of the keys in training checkpoints."""
ADAPTER_KEYS = rf"(^|\.)({BLOCK_ADAPTERS}|{INVERTIBLE_ADAPTERS})\."
"""Pattern of the keys that a model without adapters ignores in a training checkpoint."""

_IS_NOTICE_SUPPRESSED = ContextVar("is_adapter_notice_suppressed", default=False)


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter, module or checkpoint key of this name belongs to an adapter."""
    return not {BLOCK_ADAPTERS, INVERTIBLE_ADAPTERS}.isdisjoint(name.split("."))


@contextmanager
def suppress_adapter_notice() -> Iterator[None]:
    """Suppress the notice while the caller loads a model and then adds its saved adapters."""
    token = _IS_NOTICE_SUPPRESSED.set(True)
    try:
        yield
    finally:
        _IS_NOTICE_SUPPRESSED.reset(token)


def report_unloaded_adapters(source: Any) -> None:
    """Print which adapters in the directory of a loaded model were not loaded: without them its outputs differ."""
    if not isinstance(source, str | Path):
        return
    folder = Path(source) / ADAPTERS_FOLDER
    names = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
    if names and not (_IS_NOTICE_SUPPRESSED.get() and (folder / STACK_FILE).is_file()):
        print_status(
            f"{source}: loaded without its adapters {', '.join(names)}; adapters.load_saved_adapters adds them"
        )
