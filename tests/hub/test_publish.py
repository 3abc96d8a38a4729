"""Push to a Hub and pull from it, over HTTP and in processes of their own (`HF_ENDPOINT` is read at import)."""

import json
from pathlib import Path

import pytest
from hub_repository import PICKLES, REPO, metadata_errors, push_command
from hub_server import HubServer
from saved_models import save_model
from zoo import ARCHETYPE_FAMILIES, pretraining_auto_class

from hf_ctxmodels.hub.repository import repository_files
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

PUSH = """
import json, runpy, sys
for command in json.loads(sys.argv[1]):
    sys.argv = command[1:]  # without -m
    try:
        runpy.run_module(command[1], run_name="__main__")
    except SystemExit as stopped:
        assert not stopped.code, command
"""

# Compares what comes from the Hub with the local directory, bit by bit; a line of JSON for every model.
PULL = """
import json, sys, torch
import hf_ctxmodels, transformers
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoTokenizer
for repo, local, head in json.loads(sys.argv[1]):
    found = []
    for auto in (AutoModel, getattr(transformers, head)):
        torch.manual_seed(0)  # a pooler that was not trained is drawn
        pulled = auto.from_pretrained(repo)
        torch.manual_seed(0)
        ours, theirs = auto.from_pretrained(local).state_dict(), pulled.state_dict()
        assert ours.keys() == theirs.keys(), repo
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), repo
        found.append(type(pulled).__name__)
    tokenizer = AutoTokenizer.from_pretrained(repo)
    text = "the dog sat on a mat"
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(local)(text).input_ids, repo
    card = ModelCard.load(repo)
    card.validate()
    print(json.dumps([*found, type(tokenizer).__name__, card.data.library_name]))
"""

# In a process that has not imported hf_ctxmodels; what it saves opens again, now without the Hub.
OPEN_REMOTE_CODE = """
import json, sys
import transformers
from transformers import AutoConfig, AutoTokenizer
assert "hf_ctxmodels" not in sys.modules
for repo, again, head in json.loads(sys.argv[1]):
    tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
    auto = getattr(transformers, head)
    model = auto.from_pretrained(repo, trust_remote_code=True)
    config = AutoConfig.from_pretrained(repo, trust_remote_code=True)
    for part in (model, tokenizer, config):
        part.save_pretrained(again)
    reopened = auto.from_pretrained(again)
    assert all((reopened.state_dict()[key] == value).all() for key, value in model.state_dict().items()), repo
    print(json.dumps([type(model).__module__, type(tokenizer).__module__]))
"""


@pytest.mark.parametrize(
    "families",
    [ARCHETYPE_FAMILIES, pytest.param(list(FAMILIES.values()), marks=pytest.mark.slow)],
    ids=["archetypes", "all"],
)
def test_push_pull_and_remote_code(families: list[FamilySpec], run, hub: HubServer, tmp_path: Path) -> None:
    """Several families in one test of three processes, whose imports take long."""
    saved = {family.name: save_model(family, tmp_path / f"tiny-{family.name}") for family in families}
    repos = {name: f"zoo/{directory.name}" for name, directory in saved.items()}
    pushed = run("-c", PUSH, json.dumps([push_command(saved[name], repo) for name, repo in repos.items()]))
    assert pushed.returncode == 0, pushed.stderr
    for name, repo in repos.items():
        assert repo in pushed.stdout
        _check_that_everything_came_in_one_commit(hub, repo, saved[name])
    _check_that_pulls_are_bit_identical(run, hub, repos, saved)
    _check_that_remote_code_opens_them(run, repos, tmp_path / "again")


def _check_that_everything_came_in_one_commit(hub: HubServer, repo: str, saved_model: Path) -> None:
    files = hub.files(repo)
    assert files["model.safetensors"] == (saved_model / "model.safetensors").read_bytes()
    assert not [name for name in files if name.endswith(PICKLES)]
    assert {"config.json", "tokenizer.json", "README.md", "training_curve.png", "training_summary.json"} <= set(files)
    assert metadata_errors(files["README.md"].decode()) == []
    assert len(hub.repositories[repo].commits) == 2, "the initial commit and ours"


def _check_that_pulls_are_bit_identical(run, hub: HubServer, repos: dict[str, str], saved: dict[str, Path]) -> None:
    wanted = [(repo, str(saved[name]), pretraining_auto_class(FAMILIES[name])) for name, repo in repos.items()]
    pulled = run("-c", PULL, json.dumps(wanted), token=None)
    assert pulled.returncode == 0, pulled.stderr + "\n".join(hub.requests)
    for name, line in zip(repos, pulled.stdout.splitlines(), strict=True):
        family = FAMILIES[name]
        model, head = family.models["AutoModel"], family.models[pretraining_auto_class(family)]
        assert json.loads(line) == [model.__name__, head.__name__, family.tokenizer.__name__, "transformers"]


def _check_that_remote_code_opens_them(run, repos: dict[str, str], again: Path) -> None:
    wanted = [(repo, str(again / name), pretraining_auto_class(FAMILIES[name])) for name, repo in repos.items()]
    opened = run("-c", OPEN_REMOTE_CODE, json.dumps(wanted), token=None)
    assert opened.returncode == 0, opened.stderr
    for name, line in zip(repos, opened.stdout.splitlines(), strict=True):
        assert all(module.startswith("hf_ctxmodels.") for module in json.loads(line)), name
        saved = {path.name: path.read_text("utf-8", errors="replace") for path in (again / name).iterdir()}
        stub = FAMILIES[name].stub
        code = {file: text for file, text in saved.items() if file.endswith(".py")}
        assert code == {f"{stub.module}.py": stub.source}, "code stays in the installed package"


def test_auto_map_covers_the_registry_row(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        files = repository_files(save_model(family, tmp_path / name), REPO)
        auto_map = json.loads(files["config.json"])["auto_map"]
        assert set(auto_map) == {"AutoConfig", *family.models}, name
        (module,) = {reference.split(".")[0] for reference in auto_map.values()}
        assert "from hf_ctxmodels import" in files[f"{module}.py"].decode(), name
