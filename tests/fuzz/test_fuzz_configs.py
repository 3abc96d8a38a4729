"""Mutated configurations of all families load or raise a readable error that names the directory."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from mutations import SEED_COUNTS, assert_readable_errors, check_seeds, dump_json, mutate_json
from zoo import Case, pretraining_auto_class, tiny_config

from hf_ctxmodels import CtxBertConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.model_loading import load_config, load_config_file, load_model, make_config

all_families = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
NAN = float("nan")
INVALID_FIELDS: list[tuple[str, Any]] = [
    *(("vocab_size", value) for value in (0, -5, 1e20, 10**20)),
    *(("hidden_size", value) for value in (0, -4, 10**9 * 4)),
    *(("num_hidden_layers", value) for value in (-1, 10**7)),
    *(("num_attention_heads", value) for value in (0, -1)),
    *(("hidden_dropout_prob", value) for value in (NAN, -0.1, 1.5)),
    *(("classifier_dropout", value) for value in (NAN, 2.0)),
    *(("initializer_range", value) for value in (NAN, float("inf"))),
    *(("id2label", value) for value in (["a", "b"], {"x": "a"}, "ab")),
    *(("num_labels", value) for value in (0, -1, 10**10, "two")),
    *(("dtype", value) for value in ("zzz", "nn", "")),
]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.fast_families("bert", "t5", "elmo")
@pytest.mark.parametrize("count", SEED_COUNTS)
@all_families
def test_mutated_configurations(family: FamilySpec, count: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = json.loads(tiny_config(family).to_json_string(use_diff=False))

    def check(rng: random.Random) -> None:
        text = dump_json(mutate_json(fields, rng))
        path.write_text(text)
        with assert_readable_errors(text[:300]):
            load_config(tmp_path, family.config)

    path.write_text(json.dumps(fields))
    assert type(load_config(tmp_path)) is family.config
    check_seeds(count, check)


@all_families
def test_invalid_field_raises(family: FamilySpec, tmp_path: Path) -> None:
    """Errors are raised before a model with millions of layers or empty embeddings is built."""
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    common_fields = ("id2label", "num_labels", "dtype")
    fields_of_family = (*common_fields, *family.config.__dataclass_fields__)
    invalid_fields = [(name, value) for name, value in INVALID_FIELDS if name in fields_of_family]
    assert len(invalid_fields) > len(common_fields)
    for name, value in invalid_fields:
        changed = fields | {name: value}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        for read in (load_config, lambda folder: load_pretrained(transformers.AutoConfig, folder, "model")):
            with pytest.raises(CtxError, match=name):
                read(tmp_path)
        with pytest.raises(CtxError, match=name):
            make_config(family.config, changed, location="here")


def test_changes_are_validated(tmp_path: Path) -> None:
    tiny_config(FAMILIES["bert"]).save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="hidden_dropout_prob=nan must be a finite number"):
        load_config(tmp_path, changes={"hidden_dropout_prob": NAN})


def test_deeply_nested_lists(tmp_path: Path) -> None:
    for read in (load_config, lambda folder: load_config_file(CtxBertConfig, folder / "config.json")):
        (tmp_path / "config.json").write_text(f'{{"model_type": "ctx-bert", "note": {DEEP}}}')
        with pytest.raises(CtxError, match=re.escape(str(tmp_path))):
            read(tmp_path)


def test_unsafe_pickle_is_rejected(tmp_path: Path) -> None:
    """The code in the pickle does not run."""
    case = Case(FAMILIES["bert"], pretraining_auto_class(FAMILIES["bert"]))
    config = case.config()
    config.save_pretrained(tmp_path)
    touched = tmp_path / "touched"
    code = f"cposix\nsystem\n(S'touch {touched}'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(code.encode())
    with pytest.raises(CtxError, match="cannot be opened"):
        load_model(tmp_path, case.auto_name, config)
    assert not touched.exists()
