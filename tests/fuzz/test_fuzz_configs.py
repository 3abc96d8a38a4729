"""Damaged configurations of every family: a configuration, or one screen that names the directory."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from mutations import COUNTS, as_json, damaged_json, each_seed, one_screen
from zoo import Case, main_head, tiny_config

from hf_ctxmodels import CtxBertConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.model_loading import load_config, load_config_file, load_model, make_config

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
NAN = float("nan")
REFUSED: list[tuple[str, Any]] = [
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


@pytest.mark.parametrize("count", COUNTS)
@each_family
def test_other_values_in_a_configuration(family: FamilySpec, count: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = json.loads(tiny_config(family).to_json_string(use_diff=False))

    def check(rng: random.Random) -> None:
        text = as_json(damaged_json(fields, rng))
        path.write_text(text)
        with one_screen(text[:300]):
            load_config(tmp_path, family.config)

    path.write_text(json.dumps(fields))
    assert type(load_config(tmp_path)) is family.config
    each_seed(count, check)


@each_family
def test_values_that_no_model_has(family: FamilySpec, tmp_path: Path) -> None:
    """Before a model is made of them; `load_model` would make ten million layers, or a table of nothing."""
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    general = ("id2label", "num_labels", "dtype")
    tried = [each for each in REFUSED if each[0] in (*general, *family.config.__dataclass_fields__)]
    assert len(tried) > len(general)
    for name, value in tried:
        changed = fields | {name: value}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        for read in (load_config, lambda folder: load_pretrained(transformers.AutoConfig, folder, "it")):
            with pytest.raises(CtxError, match=name):
                read(tmp_path)
        with pytest.raises(CtxError, match=name):
            make_config(family.config, changed, location="here")


def test_a_change_by_a_flag_is_held_to_the_same_bounds(tmp_path: Path) -> None:
    tiny_config(FAMILIES["bert"]).save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="hidden_dropout_prob=nan must be a finite number"):
        load_config(tmp_path, changes={"hidden_dropout_prob": NAN})


def test_lists_that_are_nested_too_deeply(tmp_path: Path) -> None:
    for read in (load_config, lambda folder: load_config_file(CtxBertConfig, folder / "config.json")):
        (tmp_path / "config.json").write_text(f'{{"model_type": "ctx-bert", "note": {DEEP}}}')
        with pytest.raises(CtxError, match=re.escape(str(tmp_path))):
            read(tmp_path)


def test_weights_that_are_no_pickle_of_tensors(tmp_path: Path) -> None:
    """Nothing of it is run."""
    case = Case(FAMILIES["bert"], main_head(FAMILIES["bert"]))
    config = case.config()
    config.save_pretrained(tmp_path)
    touched = tmp_path / "touched"
    code = f"cposix\nsystem\n(S'touch {touched}'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(code.encode())
    with pytest.raises(CtxError, match="cannot be opened"):
        load_model(tmp_path, case.auto_name, config)
    assert not touched.exists()
