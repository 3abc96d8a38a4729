"""Errors and interruptions of `push`, branches, and the selection of files."""

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands import run_command
from fork_server import ForkServer
from httpx2 import Request, Response
from hub_repository import PICKLES, REPO, push_command
from hub_server import TOKEN, HubServer
from huggingface_hub import HfApi, RepoUrl, constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors import safe_open
from transformers import AutoModel, AutoModelForPreTraining

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.adapters import add_adapter
from hf_ctxmodels.hub.repository import push_files, repository_files
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.summary import TrainingSummary

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


@pytest.fixture(scope="module")
def family() -> FamilySpec:
    """One family: publishing does not depend on the model."""
    return next(iter(FAMILIES.values()))


@pytest.fixture
def directory(saved_model: Path, tmp_path: Path) -> Path:
    """A copy of the saved model."""
    return shutil.copytree(saved_model, tmp_path / "model")


@pytest.fixture(scope="module")
def published(hub: HubServer, hub_process: ForkServer, saved_model: Path) -> str:
    """Name of a repository with the saved model."""
    repo_id = f"zoo/{saved_model.name}"
    result = hub_process.run(*push_command(saved_model, repo_id))
    assert result.returncode == 0, result.stderr
    assert repo_id in result.stdout
    return repo_id


def test_error_without_package_names_install_command(process_without_package: ForkServer, published: str) -> None:
    result = process_without_package.run("-c", OPEN_WITHOUT_PACKAGE, published, HF_TOKEN="")
    assert result.returncode != 0
    assert "pip install hf_ctxmodels" in result.stderr


def test_invalid_token_is_refused(hub_process: ForkServer, hub: HubServer, saved_model: Path) -> None:
    """`--token` takes precedence over the valid token of the environment."""
    result = hub_process.run(*push_command(saved_model, "zoo/refused", "--token", "hf_wrong"))
    assert result.returncode == 2
    assert "refused the token" in result.stderr
    assert "--token" in result.stderr
    assert "Traceback" not in result.stderr
    assert "zoo/refused" not in hub.repositories


@pytest.mark.parametrize(
    ("status", "message"), [(401, "refused the token"), (403, "refused the token"), (429, "refused the push")]
)
def test_refused_pushes_name_the_reason(status: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    response = Response(status, request=Request("POST", "https://hub"))

    def refuse(*args: object, **options: object) -> None:
        raise HfHubHTTPError("The server said no.", response=response)

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(CtxError, match=message):
        push_files({}, REPO, token=TOKEN)


@pytest.mark.parametrize(("create_pr", "status"), [(False, 403), (True, 403), (True, 500)])
def test_pull_request_to_branch_that_cannot_be_created(
    create_pr: bool, status: int, saved_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModel.from_pretrained(saved_model)
    add_adapter(model, "task")
    uploads = []

    def refuse(*args: object, **options: object) -> None:
        response = Response(status, request=Request("POST", "https://hub"))
        raise HfHubHTTPError("The server said no.", response=response)

    monkeypatch.setattr(HfApi, "create_repo", lambda *args, **options: RepoUrl(f"https://huggingface.co/{REPO}"))
    monkeypatch.setattr(HfApi, "create_branch", refuse)
    monkeypatch.setattr(HfApi, "upload_folder", lambda *args, **options: uploads.append(options["create_pr"]))
    is_tolerated = create_pr and status == 403
    with nullcontext() if is_tolerated else pytest.raises(HfHubHTTPError):
        model.push_to_hub(REPO, revision="trial", create_pr=create_pr)
    assert uploads == [True] * is_tolerated


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [(403, "refused the token", "--token"), (413, "File too large", "message of the Hub"), (502, "502", "again")],
)
def test_refused_large_file_names_the_reason(
    status: int, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub raises a RuntimeError without the reason, which is its cause."""
    response = Response(status, request=Request("PUT", "https://hub"))

    def refuse(*args: object, **options: object) -> None:
        reason = HfHubHTTPError(f"{status}: File too large", response=response, server_message="Storage is full.")
        raise RuntimeError("Error while uploading 'model.safetensors' to the Hub.") from reason

    monkeypatch.setattr(HfApi, "create_repo", lambda *args, **options: None)
    monkeypatch.setattr(HfApi, "create_commit", refuse)
    with pytest.raises(CtxError, match=message) as error:
        push_files({}, REPO, token=TOKEN)
    assert hint in error.value.hint


def test_empty_token_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example `--token "$TOKEN"` with an unset variable."""
    tokens: list[str | None] = []
    monkeypatch.setattr(HfApi, "create_repo", lambda api, *args, **options: tokens.append(api.token))
    monkeypatch.setattr(HfApi, "create_commit", lambda *args, **options: None)
    push_files({}, REPO, token="")
    assert tokens == [None]


def test_unreachable_hub_is_reported(
    saved_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert run_command("push", "--model", saved_model, "--repo_id", REPO, "--token", TOKEN) == 2
    errors = capsys.readouterr().err
    assert "could not be reached" in errors
    assert "Traceback" not in errors


def test_killed_upload_leaves_repository_unchanged(
    hub_process: ForkServer, hub: HubServer, published: str, saved_model: Path, tmp_path: Path
) -> None:
    """The next push publishes the changed weights."""
    files, num_commits = hub.files(published), len(hub.repositories[published].commits)
    changed_dir = shutil.copytree(saved_model, tmp_path / "changed")
    weights = bytearray((changed_dir / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed_dir / "model.safetensors").write_bytes(weights)

    hub.stall_uploads.set()
    pid = hub_process.start(*push_command(changed_dir, published))
    try:
        assert hub.upload_stalled.wait(timeout=120), "no upload began"
    finally:
        os.kill(pid, signal.SIGKILL)
        result = hub_process.finish()
        hub.stall_uploads.clear()
    assert result.returncode == -signal.SIGKILL
    assert hub.files(published) == files
    assert len(hub.repositories[published].commits) == num_commits

    result = hub_process.run(*push_command(changed_dir, published))
    assert result.returncode == 0, result.stderr
    assert hub.files(published)["model.safetensors"] == bytes(weights)


def test_push_to_branch_of_private_repository(hub_process: ForkServer, hub: HubServer, saved_model: Path) -> None:
    flags = ["--private", "--revision", "trial", "--commit_message", "a trial"]
    result = hub_process.run(*push_command(saved_model, "zoo/private", *flags))
    assert result.returncode == 0, result.stderr
    assert "model.safetensors" in hub.files("zoo/private", "trial")
    assert set(hub.files("zoo/private")) == {".gitattributes"}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{hub.endpoint}/api/models/zoo/private")


def remove(directory: Path, name: str) -> None:
    (directory / name).unlink()


def truncate(directory: Path, name: str) -> None:
    (directory / name).write_bytes((directory / name).read_bytes()[:-100])


def write_pickle(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"\x80\x04N.")


def rename_weight(directory: Path, name: str) -> None:
    """Change the first byte of the name of an encoder weight; the file stays a valid safetensors file."""
    content = (directory / name).read_bytes()
    with safe_open(directory / name, framework="pt") as weights:
        first = min(key for key in weights.keys() if "embeddings" in key).encode()  # noqa: SIM118 - not a mapping
    quoted, length = b'"' + first + b'"', int.from_bytes(content[:8], "little")
    assert content[: 8 + length].count(quoted) == 1
    (directory / name).write_bytes(content.replace(quoted, b'"_' + first[1:] + b'"', 1))


def reduce_vocab_size(directory: Path, name: str) -> None:
    config = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))


def swap_tokens(directory: Path, name: str) -> None:
    """Swap the ids of two tokens."""
    content = json.loads((directory / name).read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (directory / name).write_text(json.dumps(content))


def replace_model_type(directory: Path, name: str) -> None:
    (directory / name).write_text('{"model_type": "bert"}')


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (remove, "config.json", "no saved model"),
        (remove, "tokenizer_config.json", "no saved tokenizer"),
        (remove, "tokenizer.json", "contains no tokenizer"),
        (remove, "model.safetensors", "no saved model"),
        (truncate, "config.json", "No usable model configuration"),
        (truncate, "tokenizer.json", "damaged"),
        (truncate, "tokenizer_config.json", "damaged"),
        (truncate, "model.safetensors", "weights are damaged"),
        (rename_weight, "model.safetensors", "are missing"),
        (reduce_vocab_size, "config.json", "vocabulary does not fit"),
        (swap_tokens, "tokenizer.json", "not the tokenizer that the model was trained with"),
        (write_pickle, "pytorch_model.bin", "not published"),
        (write_pickle, "optimizer.pt", "not published"),
        (replace_model_type, "config.json", "not a configuration of this package"),
    ],
)
def test_invalid_directory_is_refused_before_any_request(directory: Path, damage, name: str, message: str) -> None:
    damage(directory, name)
    with pytest.raises(CtxError, match=message) as error:
        repository_files(directory, REPO)
    assert "Fix:" in str(error.value)


@pytest.mark.parametrize("repo_id", ["zoo/m\u00f6del", "zoo/my model", "zoo/a/b", "zoo"])
def test_invalid_repository_name_is_refused_before_any_request(saved_model: Path, repo_id: str) -> None:
    with pytest.raises(CtxError, match=r"(?s)--repo_id zoo.*organization/name"):
        repository_files(saved_model, repo_id)
    with pytest.raises(CtxError, match=r"(?s)--repo_id zoo.*organization/name"):
        push_files({}, repo_id)


def write_index(directory: Path, *names: str) -> None:
    weights = {f"weight{number}": name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "{tmp_path}/secret.safetensors", "gone.safetensors", "a.txt"]
)
def test_index_with_other_files_is_refused(directory: Path, tmp_path: Path, name: str) -> None:
    for secret in (tmp_path / "secret.safetensors", directory / "a.txt"):
        secret.write_text("secret")
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    write_index(directory, "part.safetensors", name.format(tmp_path=tmp_path))
    with pytest.raises(CtxError, match="The index names"):
        repository_files(directory, REPO)


def test_unused_index_is_ignored(directory: Path, tmp_path: Path) -> None:
    """`from_pretrained` ignores the index if there is a model.safetensors."""
    (tmp_path / "secret.txt").write_text("secret")
    (directory / "optimizer.safetensors").write_bytes(b"moments")
    write_index(directory, "../secret.txt")
    (directory / "stray.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": str(tmp_path / "secret.txt")}})
    )
    files = repository_files(directory, REPO)
    assert [name for name in files if "safetensors" in name or "secret" in name] == ["model.safetensors"]


def test_sharded_weights_are_published_with_their_index(directory: Path, tmp_path: Path) -> None:
    AutoModelForPreTraining.from_pretrained(directory).save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    (directory / "model.safetensors").unlink()
    for shard in (tmp_path / "shards").glob("*safetensors*"):
        shutil.copy(shard, directory)
    shards = {path.name for path in directory.glob("*safetensors*")}
    assert len(shards) > 2
    assert shards < {*repository_files(directory, REPO)}


@pytest.mark.parametrize("name", ["generation_config.json", "README.md", "tokenizer.json"])
def test_link_to_outside_file_is_refused(directory: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.copy(directory / name, outside) if (directory / name).exists() else outside.write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(outside)
    with pytest.raises(CtxError, match=f"{name} is not a file, or is a link out of the directory"):
        repository_files(directory, REPO)


def test_cache_snapshot_is_published(saved_model: Path, tmp_path: Path) -> None:
    """The files of a snapshot are links to `blobs`."""
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    shutil.copytree(saved_model, snapshot)
    blobs.mkdir()
    for path in snapshot.iterdir():
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert "model.safetensors" in repository_files(snapshot, REPO)


def test_unreadable_card_is_refused(directory: Path) -> None:
    for content in ("# Modèle".encode("latin-1"), b"---\na: [\n---\n# Mine\n"):
        (directory / "README.md").write_bytes(content)
        with pytest.raises(CtxError, match="The card cannot be read"):
            repository_files(directory, REPO)


def test_local_paths_are_not_published(directory: Path, tmp_path: Path) -> None:
    summary = TrainingSummary.load(directory)
    summary.command = f"pretrain.py --dataset '{tmp_path}/my text.txt' --output_dir={tmp_path}/run --learning_rate 1e-4"
    summary.dataset = f"{tmp_path}/one.txt, {tmp_path}/two.tsv=first,second,label, file://data/three.txt, org/name"
    summary.dataset += ", C:\\data\\four.txt"
    summary.hyperparameters |= {"output_dir": str(tmp_path / "run")}
    summary.save(directory)
    config = json.loads((directory / "config.json").read_text())
    local_fields = {"_name_or_path": str(tmp_path / "model")}
    local_fields |= {"encoder": {**local_fields, "id2label": {"0": "/label"}}}
    (directory / "config.json").write_text(json.dumps(config | local_fields))
    files = repository_files(directory, REPO)
    for name, content in files.items():
        text = content if isinstance(content, bytes) else Path(content).read_bytes()
        assert str(tmp_path).encode() not in text, name
    encoder = json.loads(files["config.json"])["encoder"]
    assert encoder == {"_name_or_path": "model", "id2label": {"0": "/label"}}
    summary = json.loads(files["training_summary.json"])
    assert summary["command"] == "pretrain.py --dataset 'my text.txt' --output_dir=run --learning_rate 1e-4"
    assert summary["dataset"] == "one.txt, two.tsv=first,second,label, three.txt, org/name, four.txt"
    assert "my text.txt" in files["README.md"].decode()


def test_dry_run_lists_the_files(saved_model: Path, monkeypatch, capsys) -> None:
    assert run_command("push", "--model", saved_model, "--repo_id", "zoo/dry", "--dry_run") == 0
    output = capsys.readouterr().out
    assert f"{(saved_model / 'model.safetensors').stat().st_size:,}  model.safetensors" in output
    assert {line.split()[1] for line in output.splitlines()[:-1]} == {*repository_files(saved_model, REPO)}
    assert "nothing was pushed" in output


def test_output_dir_holds_the_published_files(saved_model: Path, tmp_path: Path) -> None:
    assert run_command("push", "--model", saved_model, "--repo_id", REPO, "--output_dir", tmp_path / "files") == 0
    for name, content in repository_files(saved_model, REPO).items():
        expected = content if isinstance(content, bytes) else Path(content).read_bytes()
        assert (tmp_path / "files" / name).read_bytes() == expected, name


def test_checkpoints_and_training_arguments_are_not_published(directory: Path) -> None:
    write_pickle(directory, "training_args.bin")
    (directory / "checkpoint-10").mkdir()
    write_pickle(directory / "checkpoint-10", "optimizer.pt")
    files = repository_files(directory, REPO)
    assert not [name for name in files if name.endswith(PICKLES) or "checkpoint" in name]


def test_only_adapter_files_are_published(directory: Path) -> None:
    """From the adapter folder, only the files of saved adapters are published."""
    model = AutoModelForPreTraining.from_pretrained(directory)
    add_adapter(model, "task")
    model.save_pretrained(directory)
    adapter_files = {"adapters/stack.json", "adapters/task/adapter_config.json", "adapters/task/adapter.safetensors"}
    for name in ("credentials.json", "task/credentials.json", "task/optimizer.safetensors", "other/secret.json"):
        (directory / "adapters" / name).parent.mkdir(exist_ok=True)
        (directory / "adapters" / name).write_text("{}")
    files = repository_files(directory, REPO)
    assert {name for name in files if name.startswith("adapters/")} == adapter_files
    (directory / "adapters" / "task" / "adapter.safetensors").write_bytes(b"damaged")
    with pytest.raises(CtxError, match="damaged"):
        repository_files(directory, REPO)
    (directory / "adapters" / "stack.json").unlink()
    assert not [name for name in repository_files(directory, REPO) if name.startswith("adapters/")]


def test_existing_readme_is_published(directory: Path) -> None:
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    files = repository_files(directory, REPO)
    assert "# Mine" in files["README.md"].decode()
