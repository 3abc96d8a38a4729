"""The stub that lets `trust_remote_code=True` open what this package saved, where the package is installed.

A directory's `auto_map` may only name modules that lie in the directory itself. The stub is such a module: it imports
the classes from the installed package. Before running it, transformers checks that every package it imports can be
imported, and answers with "Run `pip install hf_ctxmodels`" where it cannot.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

_SOURCE = '''"""Opens this repository's model; its code is in the package hf_ctxmodels (`pip install hf_ctxmodels`)."""

from hf_ctxmodels import (
{imports}
)

__all__ = [
{names}
]
'''


class InstalledCode:
    """A class that is always imported from the installed package.

    transformers registers classes opened with `trust_remote_code=True` as code of that repository, and then
    `save_pretrained` copies their modules beside the weights. Such a copy would still need this package, so these
    classes are not registered; `RemoteCodeStub` imports the package instead.
    """

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do not register the class."""


@dataclass(frozen=True)
class RemoteCodeStub:
    """The stub of a family.

    Attributes:
        model_type: Of its configuration.
        config, tokenizer: Its classes; no tokenizer where that is another family's, which has a stub of its own.
        models: Auto class -> model class.
    """

    model_type: str
    config: type
    tokenizer: type | None
    models: Mapping[str, type]

    @property
    def module(self) -> str:
        """Name of the module, for example "ctx_bert_auto"."""
        return self.model_type.replace("-", "_") + "_auto"

    @property
    def source(self) -> str:
        """What the module holds."""
        classes = (self.config, self.tokenizer, *self.models.values())
        names = sorted({cls.__name__ for cls in classes if cls is not None})
        return _SOURCE.format(
            imports="\n".join(f"    {name}," for name in names), names="\n".join(f'    "{name}",' for name in names)
        )

    @property
    def auto_map(self) -> dict[str, str]:
        """The entry of config.json: Auto class -> class."""
        classes = {"AutoConfig": self.config, **self.models}
        return {auto_class: f"{self.module}.{cls.__name__}" for auto_class, cls in classes.items()}

    @property
    def tokenizer_auto_map(self) -> dict[str, list[str | None]]:
        """The entry of tokenizer_config.json; AutoTokenizer expects the pair (slow, fast)."""
        return {} if self.tokenizer is None else {"AutoTokenizer": [None, f"{self.module}.{self.tokenizer.__name__}"]}

    def write(self, directory: str | PathLike[str]) -> None:
        """Write the module into a directory, which is made where it is missing."""
        if _is_written.get():
            path = Path(directory) / f"{self.module}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.source, encoding="utf-8")


_stubs: dict[type, RemoteCodeStub] = {}
_is_written: ContextVar[bool] = ContextVar("_is_written", default=True)


def register_remote_code(stub: RemoteCodeStub) -> None:
    """Let configurations and tokenizers of exactly these classes be saved with the stub."""
    _stubs.update(dict.fromkeys((cls for cls in (stub.config, stub.tokenizer) if cls is not None), stub))


def get_remote_code_stub(saved: object) -> RemoteCodeStub | None:
    """The stub to save a configuration or tokenizer with; None for a class that is registered by nobody."""
    return _stubs.get(type(saved))


@contextmanager
def without_remote_code() -> Iterator[None]:
    """Inside, what is saved gets no module: it is for readers without this package."""
    token = _is_written.set(False)
    try:
        yield
    finally:
        _is_written.reset(token)
