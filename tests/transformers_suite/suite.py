"""The common tests of transformers as a Python package: files unpacked by `fetch.py`, and stubs for missing modules.

The source distribution has the files `tests/test_*.py`, but no subfolders. Three names that these files import from
subfolders are defined here: two empty mixins (tests of exporters and generation are not run), and the common
configuration fields.
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
FOLDER = Path(os.environ.get("TRANSFORMERS_TESTS", ".venv/transformers-tests"))


class NoExportTests:
    """Stub of `ExportTesterMixin`."""


class NoGenerationTests:
    """Stub of `GenerationTesterMixin`."""


# Stub of `config_common_kwargs`: a non-default value for all fields of PreTrainedConfig.
COMMON_CONFIG_FIELDS: dict[str, Any] = {
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
        pytest.exit(
            f"The tests of transformers are not in {folder}. Run `make test-transformers`, which downloads them.", 4
        )
    modules = {
        "": {},
        "exporters": {},
        "exporters.test_export": {"ExportTesterMixin": NoExportTests},
        "generation": {},
        "generation.test_utils": {"GenerationTesterMixin": NoGenerationTests},
        "utils": {},
        "utils.test_configuration_utils": {"config_common_kwargs": COMMON_CONFIG_FIELDS},
    }
    for name, content in modules.items():
        module = ModuleType(f"{PACKAGE}.{name}".rstrip("."))
        module.__path__ = [] if name else [str(folder)]
        vars(module).update(content)
        sys.modules[module.__name__] = module


def import_test_module(name: str) -> ModuleType:
    """Import a module of the tests of transformers, for example `test_modeling_common`."""
    if PACKAGE not in sys.modules:
        _install_package(tests_folder(FOLDER))
    return import_module(f"{PACKAGE}.{name}")


def register_model_classes(module: ModuleType) -> None:
    """Add the registered model classes to the class name tables of a test module, which select tests by task."""
    auto_classes = {name for family in FAMILIES.values() for name in family.models if hasattr(transformers, name)}
    for auto_name in sorted(auto_classes):
        reference_classes = getattr(transformers, auto_name)._model_mapping._model_mapping
        model_classes = {
            family.name: family.models[auto_name] for family in FAMILIES.values() if auto_name in family.models
        }
        for name, table in vars(module).copy().items():
            if table is reference_classes:  # replace it by a copy; transformers still uses the original
                names = {f"ctx-{family}": model_class.__name__ for family, model_class in model_classes.items()}
                setattr(module, name, {**table, **names})
