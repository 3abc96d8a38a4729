"""Push to a Hub and pull from it, over HTTP."""

import json
from pathlib import Path

import pytest
from fork_server import ForkServer
from hub_repository import PICKLES, REPO, metadata_errors, push_command
from hub_server import HubServer
from saved_models import save_model
from zoo import pretraining_auto_class

from hf_ctxmodels.hub.repository import repository_files
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

# Compares a repository with the local directory, bit by bit; prints a line of JSON for each model.
PULL = """
import json, sys, torch
import hf_ctxmodels, transformers
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoTokenizer
for repo, local, head in json.loads(sys.argv[1]):
    class_names = []
    for auto in (AutoModel, getattr(transformers, head)):
        torch.manual_seed(0)  # a pooler that was not trained is initialized
        pulled = auto.from_pretrained(repo)
        torch.manual_seed(0)
        expected, weights = auto.from_pretrained(local).state_dict(), pulled.state_dict()
        assert expected.keys() == weights.keys(), repo
        assert all(torch.equal(expected[key], weights[key]) for key in expected), repo
        class_names.append(type(pulled).__name__)
    tokenizer = AutoTokenizer.from_pretrained(repo)
    text = "the dog sat on a mat"
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(local)(text).input_ids, repo
    card = ModelCard.load(repo)
    card.validate()
    print(json.dumps([*class_names, type(tokenizer).__name__, card.data.library_name]))
"""

# Runs in a process that has not imported hf_ctxmodels; the saved model opens again without the Hub.
OPEN_REMOTE_CODE = """
import json, sys
import transformers
from transformers import AutoConfig, AutoTokenizer
assert "hf_ctxmodels" not in sys.modules
for repo, folder, head in json.loads(sys.argv[1]):
    tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
    auto = getattr(transformers, head)
    model = auto.from_pretrained(repo, trust_remote_code=True)
    config = AutoConfig.from_pretrained(repo, trust_remote_code=True)
    for saved in (model, tokenizer, config):
        saved.save_pretrained(folder)
    reopened = auto.from_pretrained(folder)
    assert all((reopened.state_dict()[key] == value).all() for key, value in model.state_dict().items()), repo
    print(json.dumps([type(model).__module__, type(tokenizer).__module__]))
"""


@pytest.mark.parametrize(
    "families",
    [[FAMILIES["bert"]], pytest.param([*FAMILIES.values()], marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_push_pull_and_remote_code(
    families: list[FamilySpec],
    process_without_package: ForkServer,
    hub: HubServer,
    hub_process: ForkServer,
    tmp_path: Path,
) -> None:
    directories = {family.name: save_model(family, tmp_path / f"tiny-{family.name}") for family in families}
    repos = {name: f"zoo/{directory.name}" for name, directory in directories.items()}
    heads = {name: pretraining_auto_class(FAMILIES[name]) for name in repos}
    for name, repo in repos.items():
        push_result = hub_process.run(*push_command(directories[name], repo))
        assert push_result.returncode == 0, push_result.stderr
        assert repo in push_result.stdout
        files = hub.files(repo)
        assert files["model.safetensors"] == (directories[name] / "model.safetensors").read_bytes()
        assert not [file for file in files if file.endswith(PICKLES)]
        assert {"config.json", "tokenizer.json", "README.md", "training_curve.png", "training_summary.json"} <= {*files}
        assert metadata_errors(files["README.md"].decode()) == []
        assert len(hub.repositories[repo].commits) == 2, "the initial commit, and one with all files"

    jobs = [(repo, str(directories[name]), heads[name]) for name, repo in repos.items()]
    pull_result = hub_process.run("-c", PULL, json.dumps(jobs), HF_TOKEN="")
    assert pull_result.returncode == 0, pull_result.stderr + "\n".join(hub.requests)
    for name, line in zip(repos, pull_result.stdout.splitlines(), strict=True):
        family = FAMILIES[name]
        classes = (family.models["AutoModel"], family.models[heads[name]], family.tokenizer)
        assert json.loads(line) == [*(cls.__name__ for cls in classes), "transformers"]

    jobs = [(repo, str(tmp_path / "remote" / name), heads[name]) for name, repo in repos.items()]
    open_result = process_without_package.run("-c", OPEN_REMOTE_CODE, json.dumps(jobs), HF_TOKEN="")
    assert open_result.returncode == 0, open_result.stderr
    for name, line in zip(repos, open_result.stdout.splitlines(), strict=True):
        assert all(module.startswith("hf_ctxmodels.") for module in json.loads(line)), name
        code = {path.name: path.read_text("utf-8") for path in (tmp_path / "remote" / name).glob("*.py")}
        stub = FAMILIES[name].stub
        assert code == {f"{stub.module}.py": stub.source}, "only the stub is saved"


# Pushes models with nested folders by both methods of transformers, and adds files that are not part of the model.
PUSH_BY_METHODS = """
import sys
from pathlib import Path
from transformers import AutoModel
from hf_ctxmodels import CtxTaskNetworkModel
from hf_ctxmodels.downstream.adapters import add_adapter
from hf_ctxmodels.downstream.networks.creation import new_network

source, folder, repo = sys.argv[1:]
adapted_model, network = AutoModel.from_pretrained(source), CtxTaskNetworkModel(new_network({"x": source}, {})[0])
add_adapter(adapted_model, "task")
network.load_pretrained_components()
for name, model, other_folder in (("adapter", adapted_model, "features"), ("network", network, "adapters")):
    directory = Path(folder, name)
    for file in ("notes.txt", "checkpoint-1/optimizer.pt", "config.json", f"{other_folder}/notes.txt"):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text("{}")
    model.save_pretrained(directory, push_to_hub=True, repo_id=f"{repo}-{name}-saved")
    model.push_to_hub(f"{repo}-{name}", revision="trial", private=True)
"""
OPEN_NESTED = """
import sys
from transformers import AutoModel
from hf_ctxmodels import CtxTaskNetworkModel
from hf_ctxmodels.downstream.adapters import load_saved_adapters

repo = sys.argv[1]
model = AutoModel.from_pretrained(f"{repo}-adapter-saved")
AutoModel.from_pretrained(f"{repo}-adapter-saved")
assert load_saved_adapters(model, f"{repo}-adapter-saved") == ["task"]
assert list(CtxTaskNetworkModel.from_pretrained(f"{repo}-network", revision="trial").stack.tokenizers) == ["x"]
"""


def test_push_to_hub_uploads_nested_folders(hub: HubServer, hub_process: ForkServer, tmp_path: Path) -> None:
    source = save_model(FAMILIES["bert"], tmp_path / "bert")
    result = hub_process.run("-c", PUSH_BY_METHODS, str(source), str(tmp_path), "zoo/nested")
    assert result.returncode == 0, result.stderr
    stub_file = {f"{FAMILIES['bert'].stub.module}.py"}
    adapter = {"adapters/stack.json", "adapters/task/adapter_config.json", "adapters/task/adapter.safetensors"}
    files = {
        "adapter": adapter | stub_file,
        "network": {"features/x/tokenizer.json", "features/x/tokenizer_config.json"},
    }
    for name, expected in files.items():
        for repo, revision in ((f"zoo/nested-{name}-saved", "main"), (f"zoo/nested-{name}", "trial")):
            uploaded = {*hub.files(repo, revision)}
            assert expected | {"README.md", "config.json", "model.safetensors"} <= uploaded
            assert not [file for file in uploaded if "notes" in file or "checkpoint" in file]
    hub.requests.clear()
    result = hub_process.run("-c", OPEN_NESTED, "zoo/nested")
    assert result.returncode == 0, result.stderr
    notice = "zoo/nested-adapter-saved: loaded without its adapters; adapters.load_saved_adapters adds them"
    assert result.stderr.count(notice) == 2
    assert "zoo/nested-network: loaded without" not in result.stderr
    assert len([request for request in hub.requests if "nested-network" in request and "stack.json" in request]) == 1


@pytest.mark.fast_families("bert", "t5")
def test_auto_map_lists_all_auto_classes(family: FamilySpec, saved_model: Path) -> None:
    files = repository_files(saved_model, REPO)
    auto_map = json.loads(files["config.json"])["auto_map"]
    assert set(auto_map) == {"AutoConfig", *family.models}
    (module,) = {reference.split(".")[0] for reference in auto_map.values()}
    assert "from hf_ctxmodels import" in files[f"{module}.py"].decode()
