"""The stub that lets `trust_remote_code=True` open a published model where the package is installed.

A repository's `auto_map` may only name modules that lie in the repository itself. The stub is such a module: it imports
the classes from the installed package. Before running it, transformers checks that every package it imports can be
imported, and answers with "Run `pip install hf_ctxmodels`" where it cannot.
"""

import json
from pathlib import Path

from hf_ctxmodels.hub.local_paths import without_local_paths
from hf_ctxmodels.spec import FamilySpec

_STUB = '''"""Opens this repository's model; its code is in the package hf_ctxmodels (`pip install hf_ctxmodels`)."""

from hf_ctxmodels import (
{imports}
)

__all__ = [
{names}
]
'''


def stub_name(family: FamilySpec) -> str:
    """The stub's module name, for example "ctx_bert_auto"."""
    return family.config.model_type.replace("-", "_") + "_auto"


def stub_files(directory: Path, family: FamilySpec) -> dict[str, bytes]:
    """The stub and the two configuration files that point at it.

    Args:
        directory: of a saved model and tokenizer; it is only read.
        family: the model's registry row.

    Returns:
        File name -> content for the stub, config.json and tokenizer_config.json.
    """
    module = stub_name(family)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # A field may name another model, by its local directory.
    config = {name: without_local_paths(value) if isinstance(value, str) else value for name, value in config.items()}
    config["auto_map"] = {
        "AutoConfig": f"{module}.{family.config.__name__}",
        **{auto_class: f"{module}.{model.__name__}" for auto_class, model in family.models.items()},
    }
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    # AutoTokenizer expects the pair (slow, fast).
    tokenizer["auto_map"] = {"AutoTokenizer": [None, f"{module}.{family.tokenizer.__name__}"]}
    return {
        f"{module}.py": _stub_source(family).encode(),
        "config.json": _as_json(config),
        "tokenizer_config.json": _as_json(tokenizer),
    }


def _stub_source(family: FamilySpec) -> str:
    names = sorted({cls.__name__ for cls in (family.config, family.tokenizer, *family.models.values())})
    return _STUB.format(
        imports="\n".join(f"    {name}," for name in names), names="\n".join(f'    "{name}",' for name in names)
    )


def _as_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
