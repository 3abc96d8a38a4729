"""Push to a Hub and pull from it, over HTTP and in processes of their own (`HF_ENDPOINT` is read at import)."""

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hub_repository import metadata_errors
from hub_server import ROOT, TOKEN, HubServer, environment_for
from safetensors import safe_open
from zoo import main_head

from hf_ctxmodels import CtxError
from hf_ctxmodels.hub.publish import repository_files
from hf_ctxmodels.registry import Family

REPO = "zoo/tiny-model"
PICKLES = (".bin", ".pt", ".pth", ".pkl")

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

OPEN_WITHOUT_PACKAGE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_ctxmodels":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Hidden())
from transformers import AutoModel
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def command(model: Path, repo_id: str, *flags: str) -> list[str]:
    return ["scripts/push_to_hub.py", "--model", str(model), "--repo_id", repo_id, *flags]


@pytest.fixture(scope="module")
def published(run, saved_model: Path) -> str:
    """The name of a repository that holds `saved_model`."""
    repo_id = f"zoo/{saved_model.name}"
    pushed = run(*command(saved_model, repo_id))
    assert pushed.returncode == 0, pushed.stderr
    assert repo_id in pushed.stdout
    return repo_id


def test_push_sends_everything_in_one_commit(hub: HubServer, published: str, saved_model: Path) -> None:
    files = hub.files(published)
    assert files["model.safetensors"] == (saved_model / "model.safetensors").read_bytes()
    assert not [name for name in files if name.endswith(PICKLES)]
    assert {"config.json", "tokenizer.json", "README.md", "training_curve.png", "training_summary.json"} <= set(files)
    assert metadata_errors(files["README.md"].decode()) == []
    assert len(hub.repositories[published].commits) == 2, "the initial commit and ours"


def test_pull_is_bit_identical(run, hub: HubServer, published: str, saved_model: Path, family: Family) -> None:
    pulled = run("-c", PULL, published, str(saved_model), main_head(family), token=None)
    assert pulled.returncode == 0, pulled.stderr + "\n".join(hub.requests)
    model, head = family.models["AutoModel"], family.models[main_head(family)]
    assert pulled.stdout.split() == [model.__name__, head.__name__, family.tokenizer.__name__, "transformers"]


def test_remote_code_opens_it_in_a_clean_process(run, published: str, tmp_path: Path, family: Family) -> None:
    opened = run("-c", OPEN_REMOTE_CODE, published, str(tmp_path / "again"), main_head(family), token=None)
    assert opened.returncode == 0, opened.stderr
    assert all(module.startswith("hf_ctxmodels.") for module in opened.stdout.split())
    saved = {path.name: path.read_text("utf-8", errors="replace") for path in (tmp_path / "again").iterdir()}
    assert not [name for name in saved if name.endswith(".py")], "code stays in the installed package"
    assert "auto_map" not in saved["config.json"] + saved["tokenizer_config.json"]


def test_without_the_package_the_error_names_it(run, published: str) -> None:
    failed = run("-c", OPEN_WITHOUT_PACKAGE, published, token=None)
    assert failed.returncode != 0
    assert "pip install hf_ctxmodels" in failed.stderr


def test_wrong_token_is_refused_and_changes_nothing(run, hub: HubServer, saved_model: Path) -> None:
    failed = run(*command(saved_model, "zoo/refused", "--token", "hf_wrong"), token=None)
    assert failed.returncode == 2
    assert "refused the token" in failed.stderr
    assert "--token" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "zoo/refused" not in hub.repositories


def test_a_hub_that_cannot_be_reached_is_one_screen(hub: HubServer, saved_model: Path, tmp_path: Path) -> None:
    environment = environment_for(hub, tmp_path / "cache", TOKEN) | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    failed = subprocess.run(
        [sys.executable, *command(saved_model, REPO)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "The Hub was not reached" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_killed_upload_leaves_the_repository_as_it_was(
    run, hub: HubServer, published: str, saved_model: Path, tmp_path: Path
) -> None:
    before, commits = hub.files(published), len(hub.repositories[published].commits)
    changed = shutil.copytree(saved_model, tmp_path / "changed")
    flipped = bytearray((changed / "model.safetensors").read_bytes())
    flipped[-1] ^= 1
    (changed / "model.safetensors").write_bytes(flipped)

    hub.stall_uploads.set()
    pushing = subprocess.Popen(
        [sys.executable, *command(changed, published)], cwd=ROOT, env=environment_for(hub, tmp_path / "cache", TOKEN)
    )
    try:
        assert hub.upload_stalled.wait(timeout=120), f"no upload began; exit code {pushing.poll()}"
    finally:
        pushing.kill()
        pushing.wait()
        hub.stall_uploads.clear()
    assert hub.files(published) == before
    assert len(hub.repositories[published].commits) == commits

    assert run(*command(changed, published)).returncode == 0
    assert hub.files(published)["model.safetensors"] == bytes(flipped)


def test_private_branch(run, hub: HubServer, saved_model: Path) -> None:
    repo = "zoo/private"
    pushed = run(*command(saved_model, repo, "--private", "--revision", "trial", "--commit_message", "a trial"))
    assert pushed.returncode == 0, pushed.stderr
    assert "model.safetensors" in hub.files(repo, "trial")
    assert set(hub.files(repo)) == {".gitattributes"}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{hub.endpoint}/api/models/{repo}")


def without(directory: Path, name: str) -> None:
    (directory / name).unlink()


def truncated(directory: Path, name: str) -> None:
    (directory / name).write_bytes((directory / name).read_bytes()[:-100])


def with_pickle(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"\x80\x04N.")


def renamed(directory: Path, name: str) -> None:
    """The first byte of the name of one of the encoder's weights is another one: still a sound safetensors file."""
    content = (directory / name).read_bytes()
    with safe_open(directory / name, framework="pt") as weights:
        first = min(key for key in weights.keys() if "embeddings" in key).encode()  # noqa: SIM118 - not a mapping
    quoted, length = b'"' + first + b'"', int.from_bytes(content[:8], "little")
    assert content[: 8 + length].count(quoted) == 1
    (directory / name).write_bytes(content.replace(quoted, b'"_' + first[1:] + b'"', 1))


def resized(directory: Path, name: str) -> None:
    config = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))


def of_another_family(directory: Path, name: str) -> None:
    (directory / name).write_text('{"model_type": "bert"}')


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (without, "config.json", "no saved model"),
        (without, "tokenizer_config.json", "no saved tokenizer"),
        (without, "tokenizer.json", "holds no tokenizer"),
        (without, "model.safetensors", "no saved model"),
        (truncated, "config.json", "No usable model configuration"),
        (truncated, "tokenizer.json", "damaged"),
        (truncated, "tokenizer_config.json", "damaged"),
        (truncated, "model.safetensors", "weights are damaged"),
        (renamed, "model.safetensors", "not in the file"),
        (resized, "config.json", "vocabulary does not fit"),
        (with_pickle, "pytorch_model.bin", "never published"),
        (with_pickle, "optimizer.pt", "never published"),
        (of_another_family, "config.json", "no configuration of this package"),
    ],
)
def test_refuses_before_any_request(saved_model: Path, tmp_path: Path, damage, name: str, message: str) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    damage(directory, name)
    with pytest.raises(CtxError, match=message) as raised:
        repository_files(directory, REPO)
    assert "to mend:" in str(raised.value)


def test_checkpoints_and_trainer_arguments_stay_at_home(saved_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    with_pickle(directory, "training_args.bin")
    (directory / "checkpoint-10").mkdir()
    with_pickle(directory / "checkpoint-10", "optimizer.pt")
    files = repository_files(directory, REPO)
    assert not [name for name in files if name.endswith(PICKLES) or "checkpoint" in name]


def test_own_readme_is_kept(saved_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved_model, tmp_path / "model")
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    files = repository_files(directory, REPO)
    assert "# Mine" in files["README.md"].decode()


def test_auto_map_covers_the_registry_row(saved_model: Path, family: Family) -> None:
    files = repository_files(saved_model, REPO)
    auto_map = json.loads(files["config.json"])["auto_map"]
    assert set(auto_map) == {"AutoConfig", *family.models}
    (module,) = {reference.split(".")[0] for reference in auto_map.values()}
    assert "from hf_ctxmodels import" in files[f"{module}.py"].decode()
