"""Whatever this package saves opens by `trust_remote_code=True` in a process that has not imported it."""

import json
from pathlib import Path

import pytest
from hub_server import HubServer
from saved_models import save_model
from transformers import AutoModel
from zoo import pretraining_auto_class

from hf_ctxmodels import CtxBertConfig, CtxBertForMaskedLM, CtxBertTokenizer
from hf_ctxmodels.core.remote_code import get_remote_code_stub
from hf_ctxmodels.registry import FAMILIES

# transformers is imported once; every directory is opened by a process of its own, forked from this one.
OPEN = """
import json, os, sys
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertModel, Trainer  # with all that they import

def opened(directory, head):
    assert "hf_ctxmodels" not in sys.modules
    trusted = {"trust_remote_code": True}
    model = getattr(transformers, head).from_pretrained(directory, **trusted)
    parts = (AutoConfig.from_pretrained(directory, **trusted), AutoModel.from_pretrained(directory, **trusted), model)
    return [type(part).__name__ for part in (*parts, AutoTokenizer.from_pretrained(directory, **trusted))], model

first, *_ = jobs = json.loads(sys.argv[1])
for job in jobs:
    if not (child := os.fork()):
        names, model = opened(*job)
        if job is first:
            model.push_to_hub("zoo/pushed-by-the-model")
        os.write(1, (json.dumps(names) + "\\n").encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, job
"""


def test_every_saved_directory_opens_in_a_clean_process(run, hub: HubServer, tmp_path: Path) -> None:
    directories = {name: save_model(family, tmp_path / name) for name, family in FAMILIES.items()}
    jobs = [(str(directory), pretraining_auto_class(FAMILIES[name])) for name, directory in directories.items()]
    opened = run("-c", OPEN, json.dumps(jobs))
    assert opened.returncode == 0, opened.stderr
    for family, line in zip(FAMILIES.values(), opened.stdout.splitlines(), strict=True):
        classes = (
            family.config,
            family.models["AutoModel"],
            family.models[pretraining_auto_class(family)],
            family.tokenizer,
        )
        assert json.loads(line) == [cls.__name__ for cls in classes]
    assert {"ctx_bert_auto.py", "config.json", "model.safetensors"} <= set(hub.files("zoo/pushed-by-the-model"))


@pytest.fixture
def model() -> CtxBertForMaskedLM:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return CtxBertForMaskedLM(CtxBertConfig(vocab_size=50, **shape))


def test_a_tokenizer_alone_has_the_stub_as_well(tmp_path: Path) -> None:
    CtxBertTokenizer.train(["the cat sat"], vocab_size=40).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["auto_map"] == {"AutoTokenizer": [None, "ctx_bert_auto.CtxBertTokenizer"]}
    assert "CtxBertTokenizer" in (tmp_path / "ctx_bert_auto.py").read_text()


def test_the_entry_is_the_files_and_not_the_configurations(tmp_path: Path, model: CtxBertForMaskedLM) -> None:
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoConfig"] == "ctx_bert_auto.CtxBertConfig"
    opened = AutoModel.from_pretrained(tmp_path).config
    assert not hasattr(model.config, "auto_map")
    assert not hasattr(opened, "auto_map")
    assert "auto_map" not in model.config.to_dict()


def test_an_export_for_transformers_has_none(tmp_path: Path, model: CtxBertForMaskedLM) -> None:
    model.export_reference(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_a_class_that_is_registered_by_nobody_has_none(tmp_path: Path) -> None:
    class OwnConfig(CtxBertConfig):
        model_type = "own"

    OwnConfig(vocab_size=50).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}
    assert get_remote_code_stub(OwnConfig(vocab_size=50)) is None
