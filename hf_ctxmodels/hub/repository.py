"""Repositories of models on the Hub: the checked files of a saved model, with the stub for `trust_remote_code=True` and
the card, and their upload in one commit."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_ctxmodels.core.adapter_support import suppress_adapter_notice
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.output_files import check_output_directory, replacing_files
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import add_saved_adapters
from hf_ctxmodels.downstream.adapters.adapter_files import saved_adapter_files
from hf_ctxmodels.downstream.networks.modeling import saved_tokenizer_files
from hf_ctxmodels.hub.card import (
    CURVE_FILE,
    auto_class_of,
    loss_curve_png,
    model_card,
    published_summary,
    without_local_paths,
)
from hf_ctxmodels.hub.specifications import get_spec
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import check_source, load_config, load_model, load_tokenizer
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary

CARD_FILE = "README.md"
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_TRAINER_ARGUMENTS = "training_args.bin"  # written by transformers' Trainer; never published
_OPTIONAL = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def describe_files(files: Mapping[str, str | bytes]) -> str:
    """List `repository_files`, one per line: size in bytes, path in the repository, and source."""
    lines = []
    for name, content in sorted(files.items()):
        size = len(content) if isinstance(content, bytes) else Path(content).stat().st_size
        lines.append(f"{size:>14,}  {name:<32}  {'generated' if isinstance(content, bytes) else content}")
    return "\n".join(lines)


def write_files(files: Mapping[str, str | bytes], output_dir: str, model: str, *, overwrite: bool = False) -> None:
    """Write `repository_files` of a model to a directory; raises CtxError as `check_output_directory`."""
    check_output_directory(output_dir, files, flag="--output_dir", overwrite=overwrite, model=model)
    with replacing_files(output_dir) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                shutil.copyfile(content, folder / name)


def check_repo_id(repo_id: str) -> None:
    """Raise CtxError for an invalid name of a repository, or a name without an organization."""
    try:
        validate_repo_id(repo_id)
        if "/" not in repo_id:
            raise HFValidationError("The name of the repository has no organization.")
    except HFValidationError as error:
        hint = 'use the form "organization/name"; the organization can be your user name.'
        raise CtxError(str(error), location=f"--repo_id {repo_id}", hint=hint) from error


def repository_files(directory: Path, repo_id: str) -> dict[str, str | bytes]:
    """Collect the files of a repository; model and tokenizer are opened, so that no damaged file is published.

    Weights and adapters are the files that `from_pretrained` and `load_saved_adapters` read; other files are not
    published. Files outside the directory are refused, also behind links.
    A README.md in the directory is published unchanged; otherwise a card is generated from the training run.

    Returns:
        Path in the repository -> path of a local file, or content of a generated file.

    Raises:
        CtxError: The directory does not contain a complete model in safetensors with its tokenizer, or `repo_id` is not
            the name of a repository.
    """
    check_repo_id(repo_id)
    check_source(directory)
    for name, saved_object in (("config.json", "model"), ("tokenizer_config.json", "tokenizer")):
        if not (directory / name).is_file():
            raise CtxError(
                f"{name} is missing; the directory has no saved {saved_object}.",
                location=str(directory),
                hint=f"run {saved_object}.save_pretrained({str(directory)!r}).",
            )
    pickles = [path.name for path in directory.iterdir() if path.suffix in _PICKLES and path.name != _TRAINER_ARGUMENTS]
    if pickles:
        raise CtxError(
            f"Pickle files are not published, because loading one runs its code: {', '.join(sorted(pickles))}.",
            location=str(directory),
            hint="save the weights with model.save_pretrained (safetensors) and remove these files.",
        )
    for name in ("config.json", "tokenizer_config.json", SUMMARY_FILE, CARD_FILE):
        if (directory / name).exists():
            _resolve_inside(directory, name)
    weights = _weight_files(directory)
    config = load_config(directory)
    family = get_spec(config)
    check_tokenizer_matches_model(load_tokenizer(directory), config, location=str(directory))
    with suppress_adapter_notice():
        model = load_model(directory, auto_class_of(family, config)[1], config)
    add_saved_adapters(model, directory)  # raises for damaged adapters
    optional = [
        name for name in (*_OPTIONAL, *family.tokenizer.vocab_files_names.values()) if (directory / name).exists()
    ]
    names = (*weights, *optional, *saved_adapter_files(directory), *saved_tokenizer_files(directory, config))
    files: dict[str, str | bytes] = {name: str(_resolve_inside(directory, name)) for name in names}
    files |= stub_files(directory, family)
    summary = published_summary(TrainingSummary.load(directory)) if (directory / SUMMARY_FILE).exists() else None
    if summary is not None:
        files[SUMMARY_FILE] = summary.as_json().encode()
    if (directory / CARD_FILE).exists():
        hint = "save it as UTF-8 with YAML metadata, or remove it to publish a generated card."
        with wrap_errors("The card cannot be read", location=str(directory / CARD_FILE), hint=hint):
            card = ModelCard.load(directory / CARD_FILE)
    else:
        curve = loss_curve_png(summary) if summary is not None else None
        if curve is not None:
            files[CURVE_FILE] = curve
        card = model_card(directory, repo_id, summary, curve_image=CURVE_FILE if curve else None)
    files[CARD_FILE] = str(card).encode()
    return files


def _weight_files(directory: Path) -> list[str]:
    """Names of the weight files that `from_pretrained` reads: one file, or an index and its shards."""
    if (directory / SAFE_WEIGHTS_NAME).exists():
        return [SAFE_WEIGHTS_NAME]
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        raise CtxError(
            f"{SAFE_WEIGHTS_NAME} and {SAFE_WEIGHTS_INDEX_NAME} are missing; the directory has no saved model.",
            location=str(directory),
            hint=f"run model.save_pretrained({str(directory)!r}).",
        )
    hint = "save the model again with save_pretrained."
    with wrap_errors("Not an index of sharded weights", location=str(index), hint=hint):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        invalid = [name for name in shards if Path(name).name != name or not name.endswith(".safetensors")]
    missing = [name for name in shards if name not in invalid and not (directory / name).is_file()]
    if invalid or missing or not shards:
        problem = f"names missing files: {', '.join(missing)}" if missing else "names no file"
        if invalid:
            problem = f"names {invalid[0]!r}, which is not a safetensors file of its directory"
        raise CtxError(f"The index {problem}.", location=str(index), hint=hint)
    return [*sorted(shards), SAFE_WEIGHTS_INDEX_NAME]


def _resolve_inside(directory: Path, name: str) -> Path:
    """Path of a file in the directory or a link into the blobs of the Hub's cache; raises CtxError for other links."""
    target, root = (directory / name).resolve(), directory.resolve()
    blobs = root.parent.parent / "blobs"  # links of <cache>/models--org--name/snapshots/<commit>/ lead there
    if not target.is_file() or not (target.is_relative_to(root) or target.parent == blobs):
        raise CtxError(
            f"{name} is not a file, or is a link out of the directory.",
            location=f"{directory / name} -> {target}",
            hint="copy the file into the directory to publish it.",
        )
    return directory / name


def _without_local_paths(value: Any) -> Any:
    """A value of a configuration, or a configuration, without the local directories of other models; labels are
    unchanged."""
    if isinstance(value, dict):
        return {name: entry if name == "id2label" else _without_local_paths(entry) for name, entry in value.items()}
    return without_local_paths(value) if isinstance(value, str) else value


def stub_files(directory: Path, family: FamilySpec) -> dict[str, bytes]:
    """File name -> content of the stub, and of config.json and tokenizer_config.json, which refer to it."""
    stub, tokenizer = family.stub, json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = _without_local_paths(config)
    contents = {
        "config.json": config | {"auto_map": stub.auto_map(config.get("architectures"))},
        "tokenizer_config.json": tokenizer | {"auto_map": stub.tokenizer_auto_map},
    }
    files = {name: f"{json.dumps(value, indent=2, ensure_ascii=False)}\n" for name, value in contents.items()}
    return {name: text.encode() for name, text in {f"{stub.module}.py": stub.source, **files}.items()}


def push_files(
    files: Mapping[str, str | bytes],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Upload `repository_files` in a single commit to the Hub of `HF_ENDPOINT` (huggingface.co by default).

    Args:
        files: Path in the repository -> path of a local file, or content.
        repo_id: Repository, "org/name", created if it does not exist.
        private: Create a private repository; the visibility of an existing one does not change.
        revision: Branch, created from main if it does not exist; None for main.
        token: Token with write access; by default (None or "") `HF_TOKEN` or the token stored by `hf auth login`.

    Raises:
        CtxError: The Hub refused the token or could not be reached, or `repo_id` is not the name of a repository.
    """
    check_repo_id(repo_id)
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    api = HfApi(token=token or None)
    commit_message = commit_message or f"Upload {repo_id.split('/')[-1]} with hf_ctxmodels"
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError) as error:  # HTTPError: the client of huggingface_hub
        message, hint = _push_failure(error)
        raise CtxError(message, location=f"{repo_id} on {api.endpoint}", hint=hint) from error


def _push_failure(error: Exception) -> tuple[str, str]:
    """Message and hint for a failed push; the upload of a large file raises a RuntimeError with the cause."""
    retry_hint = "run the command again; the repository is unchanged, and uploaded files are not sent again."
    cause = error if isinstance(error, HfHubHTTPError) else error.__cause__
    if not isinstance(cause, HfHubHTTPError):
        message = f"The Hub could not be reached, or the upload was interrupted: {error}"
        return message, f"check the connection and {retry_hint}"
    status = cause.response.status_code if cause.response is not None else 0
    if status in (401, 403):
        reason = (cause.server_message or "no write access").rstrip(".")
        hint = "set --token or HF_TOKEN to a token with write access to this repository, or run `hf auth login`."
        return f"The Hub refused the token: {reason}.", hint
    prefix = "" if cause is error else f"{error} "
    hint = retry_hint if status >= 500 else "follow the message of the Hub."
    return f"The Hub refused the push: {prefix}{cause}", hint
