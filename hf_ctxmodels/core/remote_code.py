"""Support of `trust_remote_code=True`: checkpoints contain a module (stub) that imports the installed package.

A checkpoint's `auto_map` can only name modules in the same directory. The stub is such a module. Before running it,
transformers checks that the packages it imports are installed, and suggests `pip install hf_ctxmodels` if not.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
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
    """A class whose code is never copied into checkpoints.

    transformers registers classes loaded with `trust_remote_code=True` as code of their repository, and
    `save_pretrained` then copies their modules. A copy would still need this package, so these classes are not
    registered; the stub imports the package instead.
    """

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: the class is not registered."""


@dataclass(frozen=True)
class RemoteCodeStub:
    """The stub of a family; `models` and `alternative_heads` map Auto classes to model classes, `tokenizer` is None for
    another family's."""

    config: Any
    tokenizer: type | None
    models: Mapping[str, type]
    alternative_heads: Mapping[str, type] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Module name, for example "ctx_bert_auto"."""
        return self.config.model_type.replace("-", "_") + "_auto"

    @property
    def source(self) -> str:
        """Source code of the module."""
        classes = (self.config, self.tokenizer, *self.models.values(), *self.alternative_heads.values())
        names = sorted({cls.__name__ for cls in classes if cls is not None})
        return _SOURCE.format(
            imports="\n".join(f"    {name}," for name in names), names="\n".join(f'    "{name}",' for name in names)
        )

    def auto_map(self, architectures: Sequence[str] | None) -> dict[str, str]:
        """`auto_map` of a config.json with these `architectures`: Auto class -> class."""
        saved_heads = {
            name: head for name, head in self.alternative_heads.items() if head.__name__ in (architectures or ())
        }
        classes = {"AutoConfig": self.config, **self.models, **saved_heads}
        return {auto_class: f"{self.module}.{cls.__name__}" for auto_class, cls in classes.items()}

    @property
    def tokenizer_auto_map(self) -> dict[str, list[str | None]]:
        """`auto_map` of tokenizer_config.json; AutoTokenizer expects a pair (slow, fast)."""
        return {} if self.tokenizer is None else {"AutoTokenizer": [None, f"{self.module}.{self.tokenizer.__name__}"]}

    def write(self, directory: str | PathLike[str]) -> None:
        """Write the module to a directory, which is created if it does not exist."""
        if _writes_stubs.get():
            path = Path(directory) / f"{self.module}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.source, encoding="utf-8")


_stubs: dict[type, RemoteCodeStub] = {}
_writes_stubs: ContextVar[bool] = ContextVar("writes_stubs", default=True)


def register_remote_code(stub: RemoteCodeStub) -> None:
    """Register a stub: configurations and tokenizers of exactly its classes are saved with it."""
    _stubs.update(dict.fromkeys((cls for cls in (stub.config, stub.tokenizer) if cls is not None), stub))


def get_remote_code_stub(config_or_tokenizer: object) -> RemoteCodeStub | None:
    """The stub of a configuration or tokenizer; None for an unregistered class."""
    return _stubs.get(type(config_or_tokenizer))


@contextmanager
def without_remote_code() -> Iterator[None]:
    """Do not save stubs within this context, for exports that do not need this package."""
    token = _writes_stubs.set(False)
    try:
        yield
    finally:
        _writes_stubs.reset(token)
