"""Push to a Hub and pull from it, over HTTP and in processes of their own (`HF_ENDPOINT` is read at import)."""

import json
from pathlib import Path

from hub_repository import PICKLES, REPO, metadata_errors, push_command
from hub_server import HubServer
from zoo import main_head

from hf_ctxmodels.hub.publish import repository_files
from hf_ctxmodels.registry import Family

# Compares what comes from the Hub with the local directory, bit by bit.
PULL = """
import sys, torch
import hf_ctxmodels, transformers
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoTokenizer
repo, local = sys.argv[1:3]
for auto in (AutoModel, getattr(transformers, sys.argv[3])):
    pulled = auto.from_pretrained(repo)
    ours, theirs = auto.from_pretrained(local).state_dict(), pulled.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    print(type(pulled).__name__)
tokenizer = AutoTokenizer.from_pretrained(repo)
text = "the dog sat on a mat"
assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(local)(text).input_ids
print(type(tokenizer).__name__)
card = ModelCard.load(repo)
card.validate()
print(card.data.library_name)
"""

# In a process that has not imported hf_ctxmodels; what it saves opens again, now without the Hub.
OPEN_REMOTE_CODE = """
import sys
import transformers
from transformers import AutoConfig, AutoTokenizer
assert "hf_ctxmodels" not in sys.modules
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
auto = getattr(transformers, sys.argv[3])
model = auto.from_pretrained(sys.argv[1], trust_remote_code=True)
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
for part in (model, tokenizer, config):
    part.save_pretrained(sys.argv[2])
again = auto.from_pretrained(sys.argv[2])
assert all((again.state_dict()[key] == value).all() for key, value in model.state_dict().items())
print(type(model).__module__, type(tokenizer).__module__)
"""


def test_push_pull_and_remote_code(run, hub: HubServer, saved_model: Path, family: Family, tmp_path: Path) -> None:
    """One test of three processes: a push takes long, and serves all that follows."""
    repo = f"zoo/{saved_model.name}"
    pushed = run(*push_command(saved_model, repo))
    assert pushed.returncode == 0, pushed.stderr
    assert repo in pushed.stdout
    _check_that_everything_came_in_one_commit(hub, repo, saved_model)
    _check_that_a_pull_is_bit_identical(run, hub, repo, saved_model, family)
    _check_that_remote_code_opens_it(run, repo, tmp_path / "again", family)


def _check_that_everything_came_in_one_commit(hub: HubServer, repo: str, saved_model: Path) -> None:
    files = hub.files(repo)
    assert files["model.safetensors"] == (saved_model / "model.safetensors").read_bytes()
    assert not [name for name in files if name.endswith(PICKLES)]
    assert {"config.json", "tokenizer.json", "README.md", "training_curve.png", "training_summary.json"} <= set(files)
    assert metadata_errors(files["README.md"].decode()) == []
    assert len(hub.repositories[repo].commits) == 2, "the initial commit and ours"


def _check_that_a_pull_is_bit_identical(run, hub: HubServer, repo: str, saved_model: Path, family: Family) -> None:
    pulled = run("-c", PULL, repo, str(saved_model), main_head(family), token=None)
    assert pulled.returncode == 0, pulled.stderr + "\n".join(hub.requests)
    model, head = family.models["AutoModel"], family.models[main_head(family)]
    assert pulled.stdout.split() == [model.__name__, head.__name__, family.tokenizer.__name__, "transformers"]


def _check_that_remote_code_opens_it(run, repo: str, again: Path, family: Family) -> None:
    opened = run("-c", OPEN_REMOTE_CODE, repo, str(again), main_head(family), token=None)
    assert opened.returncode == 0, opened.stderr
    assert all(module.startswith("hf_ctxmodels.") for module in opened.stdout.split())
    saved = {path.name: path.read_text("utf-8", errors="replace") for path in again.iterdir()}
    assert not [name for name in saved if name.endswith(".py")], "code stays in the installed package"
    assert "auto_map" not in saved["config.json"] + saved["tokenizer_config.json"]


def test_auto_map_covers_the_registry_row(saved_model: Path, family: Family) -> None:
    files = repository_files(saved_model, REPO)
    auto_map = json.loads(files["config.json"])["auto_map"]
    assert set(auto_map) == {"AutoConfig", *family.models}
    (module,) = {reference.split(".")[0] for reference in auto_map.values()}
    assert "from hf_ctxmodels import" in files[f"{module}.py"].decode()
