"""The common tests of transformers as a Python package: what `fetch.py` unpacked, and stand-ins for what it lacks.

The source distribution has the files `tests/test_*.py` and no subfolder. Three names that these files import from
subfolders are made here: two empty mixins, whose tests therefore are not run (exporters and generation), and the
table of common configuration fields.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from fetch import tests_folder

from hf_ctxmodels.registry import FAMILIES

PACKAGE = "transformers_tests"
FOLDER = Path(os.environ.get("PEER_TESTS", ".venv/peer"))


class NoExportTests:
    """In the place of `ExportTesterMixin`."""


class NoGenerationTests:
    """In the place of `GenerationTesterMixin`."""


# A value other than the default for every field that PreTrainedConfig has; in the place of `config_common_kwargs`.
COMMON_FIELDS: dict[str, Any] = {
    "name_or_path": "a model",
    "output_hidden_states": True,
    "output_attentions": True,
    "return_dict": False,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["BertModel"],
    "id2label": {0: "a label"},
    "label2id": {"a label": 0},
    "problem_type": "regression",
}


def _install_package(folder: Path) -> None:
    if not (folder / "__init__.py").is_file():
        pytest.exit(f"The tests of transformers are not in {folder}. Run `make test-peer`, which fetches them.", 4)
    names = {
        "": {},
        "exporters": {},
        "exporters.test_export": {"ExportTesterMixin": NoExportTests},
        "generation": {},
        "generation.test_utils": {"GenerationTesterMixin": NoGenerationTests},
        "utils": {},
        "utils.test_configuration_utils": {"config_common_kwargs": COMMON_FIELDS},
    }
    for name, content in names.items():
        module = ModuleType(f"{PACKAGE}.{name}".rstrip("."))
        module.__path__ = [] if name else [str(folder)]
        vars(module).update(content)
        sys.modules[module.__name__] = module


def peer_module(name: str) -> ModuleType:
    """A module of the tests of transformers, for example `test_modeling_common`."""
    if PACKAGE not in sys.modules:
        _install_package(tests_folder(FOLDER))
    return import_module(f"{PACKAGE}.{name}")


def add_our_classes(module: ModuleType) -> None:
    """Add the registry's classes to a module's tables of class names by task, by which its tests choose what to do."""
    auto_classes = {name for family in FAMILIES.values() for name in family.models}
    for auto_name in sorted(auto_classes):
        peers = getattr(transformers, auto_name)._model_mapping._model_mapping
        ours = {family.name: family.models[auto_name] for family in FAMILIES.values() if auto_name in family.models}
        for name, table in vars(module).copy().items():
            if table is peers:  # a copy: that of transformers itself stays as it is
                names = {f"ctx-{family}": model_class.__name__ for family, model_class in ours.items()}
                setattr(module, name, {**table, **names})
