"""Saved models open with `trust_remote_code=True` in a process that has not imported this package."""

import json
from importlib import import_module
from pathlib import Path

import pytest
from fork_server import ForkServer
from hub_server import HubServer
from saved_models import save_model
from transformers import AutoModel
from zoo import Case, pretraining_auto_class

from hf_ctxmodels import CtxBertConfig, CtxBertForMaskedLM, CtxBertTokenizer
from hf_ctxmodels.core.remote_code import get_remote_code_stub
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

# Imports transformers once, and opens each directory in a forked process.
OPEN = """
import json, os, sys
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertModel, Trainer  # imports their modules

def open_all(directory, head):
    assert "hf_ctxmodels" not in sys.modules
    trusted = {"trust_remote_code": True}
    model = getattr(transformers, head).from_pretrained(directory, **trusted)
    objects = (AutoConfig.from_pretrained(directory, **trusted), AutoModel.from_pretrained(directory, **trusted), model)
    tokenizer = AutoTokenizer.from_pretrained(directory, **trusted)
    return [type(instance).__name__ for instance in (*objects, tokenizer)], model

first, *_ = jobs = json.loads(sys.argv[1])
for job in jobs:
    if not (child := os.fork()):
        names, model = open_all(*job)
        if job is first:
            model.push_to_hub("zoo/pushed-by-the-model")
        os.write(1, (json.dumps(names) + "\\n").encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, job
"""


USER_MODEL = """
from transformers import PreTrainedModel
from hf_ctxmodels import CtxBertConfig, CtxBertModel

class UserModel(PreTrainedModel):
    config_class = CtxBertConfig
    config: CtxBertConfig

    def __init__(self, config):
        super().__init__(config)
        self.encoder = CtxBertModel(config)
        self.post_init()
"""


@pytest.mark.parametrize(
    "families",
    [[FAMILIES["bert"]], pytest.param([*FAMILIES.values()], marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_saved_directories_open_without_importing_package(
    families: list[FamilySpec], process_without_package: ForkServer, hub: HubServer, tmp_path: Path
) -> None:
    """The stub that imports the package has the same code in all families."""
    jobs = [(str(save_model(family, tmp_path / family.name)), pretraining_auto_class(family)) for family in families]
    result = process_without_package.run("-c", OPEN, json.dumps(jobs))
    assert result.returncode == 0, result.stderr
    for family, line in zip(families, result.stdout.splitlines(), strict=True):
        classes = (
            family.config,
            family.models["AutoModel"],
            family.models[pretraining_auto_class(family)],
            family.tokenizer,
        )
        assert json.loads(line) == [cls.__name__ for cls in classes]
    stub = f"{families[0].stub.module}.py"
    assert {stub, "config.json", "model.safetensors"} <= set(hub.files("zoo/pushed-by-the-model"))


@pytest.fixture
def model() -> CtxBertForMaskedLM:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return CtxBertForMaskedLM(CtxBertConfig(vocab_size=50, **sizes))


def test_saved_tokenizer_has_the_stub(tmp_path: Path) -> None:
    CtxBertTokenizer.train(["the cat sat"], vocab_size=40).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["auto_map"] == {"AutoTokenizer": [None, "ctx_bert_auto.CtxBertTokenizer"]}
    assert "CtxBertTokenizer" in (tmp_path / "ctx_bert_auto.py").read_text()


def test_auto_map_is_only_in_the_file(tmp_path: Path, model: CtxBertForMaskedLM) -> None:
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoConfig"] == "ctx_bert_auto.CtxBertConfig"
    loaded_config = AutoModel.from_pretrained(tmp_path).config
    assert model.config.auto_map == {}  # trl reads the attribute of each class that transformers lacks
    assert loaded_config.auto_map == {}
    assert "auto_map" not in model.config.to_dict()


def test_registered_class_of_user_is_in_auto_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's model with a configuration of this package, whose code is saved with the weights."""
    (tmp_path / "user_model.py").write_text(USER_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = import_module("user_model").UserModel(Case(FAMILIES["bert"], "AutoModel").config())
    model.register_for_auto_class("AutoModel")
    for folder in ("first", "second"):
        model.save_pretrained(tmp_path / folder)
        auto_map = json.loads((tmp_path / folder / "config.json").read_text())["auto_map"]
        assert auto_map["AutoModel"] == "user_model.UserModel"
        assert auto_map["AutoConfig"] == "ctx_bert_auto.CtxBertConfig"
    assert (tmp_path / "second" / "user_model.py").is_file()


def test_export_has_no_auto_map(tmp_path: Path, model: CtxBertForMaskedLM) -> None:
    model.export_reference(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_unregistered_class_has_no_auto_map(tmp_path: Path) -> None:
    class UnregisteredConfig(CtxBertConfig):
        model_type = "unregistered"

    UnregisteredConfig(vocab_size=50).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}
    assert get_remote_code_stub(UnregisteredConfig(vocab_size=50)) is None
