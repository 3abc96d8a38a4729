"""Pushes that must not happen, that are interrupted, or that go to a branch; of one family, since none of it depends on
which."""

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from commands import run_command
from hub_repository import PICKLES, REPO, push_command
from hub_server import ROOT, TOKEN, HubServer, environment_for
from safetensors import safe_open
from transformers import AutoModelForPreTraining

from hf_ctxmodels import CtxError
from hf_ctxmodels.hub.repository import repository_files
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


@pytest.fixture(scope="module", params=[next(iter(FAMILIES))])
def family(request: pytest.FixtureRequest) -> FamilySpec:
    return FAMILIES[request.param]


@pytest.fixture
def directory(saved_model: Path, tmp_path: Path) -> Path:
    """A copy of the saved model."""
    return shutil.copytree(saved_model, tmp_path / "model")


# Runs several scripts, each in a process forked from this one when the package is imported.
FORKING = """
import json, os, sys
import hf_ctxmodels_cli
from hf_ctxmodels.cli import push
for name, command in json.loads(sys.argv[1]).items():
    if not os.fork():
        for stream, number in (("output", 1), ("errors", 2)):
            os.dup2(os.open(os.path.join(sys.argv[2], f"{name}.{stream}"), os.O_WRONLY | os.O_CREAT), number)
        sys.argv = command[1:]
        hf_ctxmodels_cli.main()
    with open(os.path.join(sys.argv[2], f"{name}.code"), "w") as file:
        print(os.waitstatus_to_exitcode(os.wait()[1]), file=file)
"""


@pytest.fixture(scope="module")
def pushes(run, saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """name -> (exit code, output, errors) of `hf-ctxmodels push` to a new repository, by a wrong token, to a branch."""
    folder = tmp_path_factory.mktemp("pushes")
    commands = {
        "new": push_command(saved_model, f"zoo/{saved_model.name}"),
        "refused": push_command(saved_model, "zoo/refused", "--token", "hf_wrong"),
        "private": push_command(
            saved_model, "zoo/private", "--private", "--revision", "trial", "--commit_message", "a trial"
        ),
    }
    ran = run("-c", FORKING, json.dumps(commands), str(folder))
    assert ran.returncode == 0, ran.stderr
    return {
        name: (
            int((folder / f"{name}.code").read_text()),
            *((folder / f"{name}.{stream}").read_text() for stream in ("output", "errors")),
        )
        for name in commands
    }


@pytest.fixture(scope="module")
def published(pushes: dict[str, tuple[int, str, str]], saved_model: Path) -> str:
    """The name of a repository that holds `saved_model`."""
    repo_id = f"zoo/{saved_model.name}"
    code, output, errors = pushes["new"]
    assert code == 0, errors
    assert repo_id in output
    return repo_id


def test_without_the_package_the_error_names_it(run, published: str) -> None:
    failed = run("-c", OPEN_WITHOUT_PACKAGE, published, token=None)
    assert failed.returncode != 0
    assert "pip install hf_ctxmodels" in failed.stderr


def test_wrong_token_is_refused_and_changes_nothing(pushes: dict[str, tuple[int, str, str]], hub: HubServer) -> None:
    """Though the environment holds the right one."""
    code, _, errors = pushes["refused"]
    assert code == 2
    assert "refused the token" in errors
    assert "--token" in errors
    assert "Traceback" not in errors
    assert "zoo/refused" not in hub.repositories


def test_a_hub_that_cannot_be_reached_is_one_screen(hub: HubServer, saved_model: Path, tmp_path: Path) -> None:
    environment = environment_for(hub, tmp_path / "cache", TOKEN) | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    failed = subprocess.run(
        [sys.executable, *push_command(saved_model, REPO)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "could not be reached" in failed.stderr
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
    environment = environment_for(hub, tmp_path / "cache", TOKEN)
    pushing = subprocess.Popen([sys.executable, *push_command(changed, published)], cwd=ROOT, env=environment)
    try:
        assert hub.upload_stalled.wait(timeout=120), f"no upload began; exit code {pushing.poll()}"
    finally:
        pushing.kill()
        pushing.wait()
        hub.stall_uploads.clear()
    assert hub.files(published) == before
    assert len(hub.repositories[published].commits) == commits

    assert run(*push_command(changed, published)).returncode == 0
    assert hub.files(published)["model.safetensors"] == bytes(flipped)


def test_private_branch(pushes: dict[str, tuple[int, str, str]], hub: HubServer) -> None:
    repo = "zoo/private"
    code, _, errors = pushes["private"]
    assert code == 0, errors
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


def of_other_words(directory: Path, name: str) -> None:
    """Two words of the vocabulary have each other's ids."""
    content = json.loads((directory / name).read_text())
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (directory / name).write_text(json.dumps(content))


def of_another_family(directory: Path, name: str) -> None:
    (directory / name).write_text('{"model_type": "bert"}')


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (without, "config.json", "no saved model"),
        (without, "tokenizer_config.json", "no saved tokenizer"),
        (without, "tokenizer.json", "contains no tokenizer"),
        (without, "model.safetensors", "no saved model"),
        (truncated, "config.json", "No usable model configuration"),
        (truncated, "tokenizer.json", "damaged"),
        (truncated, "tokenizer_config.json", "damaged"),
        (truncated, "model.safetensors", "weights are damaged"),
        (renamed, "model.safetensors", "are missing"),
        (resized, "config.json", "vocabulary does not fit"),
        (of_other_words, "tokenizer.json", "not the tokenizer that the model was trained with"),
        (with_pickle, "pytorch_model.bin", "not published"),
        (with_pickle, "optimizer.pt", "not published"),
        (of_another_family, "config.json", "no configuration of this package"),
    ],
)
def test_refuses_before_any_request(directory: Path, damage, name: str, message: str) -> None:
    damage(directory, name)
    with pytest.raises(CtxError, match=message) as raised:
        repository_files(directory, REPO)
    assert "Fix:" in str(raised.value)


def index_of(directory: Path, *names: str) -> None:
    weights = {f"weight{number}": name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "{tmp_path}/secret.safetensors", "gone.safetensors", "a.txt"]
)
def test_an_index_names_files_beside_it_alone(directory: Path, tmp_path: Path, name: str) -> None:
    for secret in (tmp_path / "secret.safetensors", directory / "a.txt"):
        secret.write_text("secret")
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    index_of(directory, "part.safetensors", name.format(tmp_path=tmp_path))
    with pytest.raises(CtxError, match="The index names"):
        repository_files(directory, REPO)


def test_an_index_that_is_not_in_use_names_nothing(directory: Path, tmp_path: Path) -> None:
    """`from_pretrained` reads model.safetensors, and no index where that is."""
    (tmp_path / "secret.txt").write_text("secret")
    (directory / "optimizer.safetensors").write_bytes(b"moments")
    index_of(directory, "../secret.txt")
    (directory / "stray.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": str(tmp_path / "secret.txt")}})
    )
    files = repository_files(directory, REPO)
    assert [name for name in files if "safetensors" in name or "secret" in name] == ["model.safetensors"]


def test_weights_in_parts_are_published_with_their_index(directory: Path, tmp_path: Path) -> None:
    AutoModelForPreTraining.from_pretrained(directory).save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    (directory / "model.safetensors").unlink()
    for part in (tmp_path / "parts").glob("*safetensors*"):
        shutil.copy(part, directory)
    parts = {path.name for path in directory.glob("*safetensors*")}
    assert len(parts) > 2
    assert parts < {*repository_files(directory, REPO)}


@pytest.mark.parametrize("name", ["generation_config.json", "README.md", "tokenizer.json"])
def test_a_link_out_of_the_directory_is_not_followed(directory: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.copy(directory / name, outside) if (directory / name).exists() else outside.write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(outside)
    with pytest.raises(CtxError, match=f"{name} is not a file, or is a link out of the directory"):
        repository_files(directory, REPO)


def test_a_snapshot_of_the_hubs_cache_is_published(saved_model: Path, tmp_path: Path) -> None:
    """Whose files are links to blobs beside it."""
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    shutil.copytree(saved_model, snapshot)
    blobs.mkdir()
    for path in snapshot.iterdir():
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert "model.safetensors" in repository_files(snapshot, REPO)


def test_a_card_that_is_not_utf_8_is_one_screen(directory: Path) -> None:
    for content in ("# Modèle".encode("latin-1"), b"---\na: [\n---\n# Mine\n"):
        (directory / "README.md").write_bytes(content)
        with pytest.raises(CtxError, match="The card cannot be read"):
            repository_files(directory, REPO)


def test_no_local_path_is_published(directory: Path, tmp_path: Path) -> None:
    summary = TrainingSummary.load(directory)
    summary.command = f"pretrain.py --dataset '{tmp_path}/my text.txt' --output_dir={tmp_path}/run --learning_rate 1e-4"
    summary.dataset = f"{tmp_path}/one.txt, {tmp_path}/two.tsv=first,second,label, org/name"
    summary.hyperparameters |= {"output_dir": str(tmp_path / "run")}
    summary.save(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"_name_or_path": str(tmp_path / "model")}))
    files = repository_files(directory, REPO)
    for name, content in files.items():
        text = content if isinstance(content, bytes) else Path(content).read_bytes()
        assert str(tmp_path).encode() not in text, name
    published = json.loads(files["training_summary.json"])
    assert published["command"] == "pretrain.py --dataset 'my text.txt' --output_dir=run --learning_rate 1e-4"
    assert published["dataset"] == "one.txt, two.tsv=first,second,label, org/name"
    assert "my text.txt" in files["README.md"].decode()


def test_a_dry_run_lists_the_files_and_pushes_none(saved_model: Path, monkeypatch, capsys) -> None:
    assert run_command("push", "--model", saved_model, "--repo_id", "zoo/dry", "--dry_run") == 0
    shown = capsys.readouterr().out
    assert f"{(saved_model / 'model.safetensors').stat().st_size:,}  model.safetensors" in shown
    assert {line.split()[1] for line in shown.splitlines()[:-1]} == {*repository_files(saved_model, REPO)}
    assert "nothing was pushed" in shown


def test_checkpoints_and_trainer_arguments_stay_at_home(directory: Path) -> None:
    with_pickle(directory, "training_args.bin")
    (directory / "checkpoint-10").mkdir()
    with_pickle(directory / "checkpoint-10", "optimizer.pt")
    files = repository_files(directory, REPO)
    assert not [name for name in files if name.endswith(PICKLES) or "checkpoint" in name]


def test_own_readme_is_kept(directory: Path) -> None:
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    files = repository_files(directory, REPO)
    assert "# Mine" in files["README.md"].decode()
