"""The stub for `trust_remote_code=True` in a directory that was saved without one."""

import json
from pathlib import Path

from hf_ctxmodels.core.remote_code import RemoteCodeStub
from hf_ctxmodels.hub.local_paths import without_local_paths
from hf_ctxmodels.spec import FamilySpec


def stub_name(family: FamilySpec) -> str:
    """The stub's module name, for example "ctx_bert_auto"."""
    return family.stub.module


def stub_files(directory: Path, family: FamilySpec) -> dict[str, bytes]:
    """The stub and the two configuration files that point at it.

    Args:
        directory: of a saved model and tokenizer; it is only read.
        family: the model's registry row.

    Returns:
        File name -> content for the stub, config.json and tokenizer_config.json.
    """
    stub: RemoteCodeStub = family.stub
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # A field may name another model, by its local directory.
    config = {name: without_local_paths(value) if isinstance(value, str) else value for name, value in config.items()}
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    return {
        f"{stub.module}.py": stub.source.encode(),
        "config.json": _as_json(config | {"auto_map": stub.auto_map}),
        "tokenizer_config.json": _as_json(tokenizer | {"auto_map": stub.tokenizer_auto_map}),
    }


def _as_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
