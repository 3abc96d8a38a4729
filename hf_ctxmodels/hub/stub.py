"""Stub for `trust_remote_code=True` in the published directory."""

import json
from pathlib import Path

from hf_ctxmodels.core.remote_code import RemoteCodeStub
from hf_ctxmodels.hub.local_paths import without_local_paths
from hf_ctxmodels.spec import FamilySpec


def stub_name(family: FamilySpec) -> str:
    """Module name of the stub, for example "ctx_bert_auto"."""
    return family.stub.module


def stub_files(directory: Path, family: FamilySpec) -> dict[str, bytes]:
    """The stub and the two configuration files that refer to it.

    Args:
        directory: Directory of a saved model and tokenizer, which is not changed.
        family: The model's family.

    Returns:
        File name -> content for the stub, config.json and tokenizer_config.json.
    """
    stub: RemoteCodeStub = family.stub
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # a field may contain the local directory of another model
    config = {name: without_local_paths(value) if isinstance(value, str) else value for name, value in config.items()}
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    return {
        f"{stub.module}.py": stub.source.encode(),
        "config.json": _to_json(config | {"auto_map": stub.auto_map}),
        "tokenizer_config.json": _to_json(tokenizer | {"auto_map": stub.tokenizer_auto_map}),
    }


def _to_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
