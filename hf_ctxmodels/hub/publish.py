"""Push a trained model to a Hub: weights, configuration, tokenizer, card and stub, in one commit."""

import json
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import PreTrainedConfig

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.hub.card import CURVE_FILE, auto_class_of, loss_curve_png, model_card
from hf_ctxmodels.hub.stub import stub_files
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import check_fit
from hf_ctxmodels.training.loading import load_config, load_model, load_tokenizer
from hf_ctxmodels.training.metrics.summary import SUMMARY_FILE, TrainingSummary

_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_TRAINER_ARGUMENTS = "training_args.bin"  # transformers' Trainer leaves it beside the weights; it is never pushed
_OPTIONAL = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json", SUMMARY_FILE)


def publish(
    directory: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Push the model in `directory` to the Hub that `HF_ENDPOINT` names (huggingface.co by default).

    The repository is created where it does not exist. Everything is checked before the first request, and everything
    arrives in one commit: until that commit the repository stays as it was. (`HfApi.upload_folder` may spread a folder
    over several commits.) A README.md in `directory` is pushed as it is; without one the card is filled from the run.

    Args:
        directory: written by `save_pretrained` of the model and its tokenizer, or by the scripts.
        repo_id: "org/name".
        private: create the repository private; an existing one keeps its visibility.
        revision: branch, created from main where it does not exist; main by default.
        commit_message: first line of the commit.
        token: with the right to write; by default the one `hf auth login` stored, or `HF_TOKEN`.

    Raises:
        CtxError: something is missing, damaged or a pickle; the Hub refused the token or could not be reached.
    """
    directory = Path(directory)
    files = repository_files(directory, repo_id)
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message or f"Upload {directory.resolve().name} with hf_ctxmodels",
            revision=revision,
        )
    except HFValidationError as error:
        raise CtxError(str(error), location=f"--repo_id {repo_id}", hint='give "organisation/name".') from error
    except HfHubHTTPError as error:
        raise _refusal(error, repo_id, api.endpoint) from error
    except (HTTPError, OSError, RuntimeError) as error:  # HTTPError: what the client of huggingface_hub raises
        raise CtxError(
            f"The Hub was not reached, or the upload broke off: {error}",
            location=f"{repo_id} on {api.endpoint}",
            hint="see to the connection and run the same command again; the repository is unchanged, and finished "
            "files are not sent twice.",
        ) from error


def repository_files(directory: Path, repo_id: str) -> dict[str, str | bytes]:
    """What belongs into the repository: path -> a local file's path, or the content of a generated file.

    Raises:
        CtxError: `directory` does not hold one complete model in safetensors with its tokenizer.
    """
    _refuse_incomplete(directory)
    _refuse_pickles(directory)
    config = load_config(directory)
    family = get_family(config)
    _open_all(directory, family, config)
    files: dict[str, str | bytes] = {str(path.name): str(path) for path in _weights(directory)}
    for name in (*_OPTIONAL, *family.tokenizer.vocab_files_names.values()):
        if (directory / name).exists():
            files[name] = str(directory / name)
    files |= stub_files(directory, family)
    if (directory / "README.md").exists():
        card = ModelCard.load(directory / "README.md")
    else:
        curve = loss_curve_png(TrainingSummary.load(directory)) if (directory / SUMMARY_FILE).exists() else None
        if curve is not None:
            files[CURVE_FILE] = curve
        card = model_card(directory, repo_id, curve_image=CURVE_FILE if curve else None)
    files["README.md"] = str(card).encode()
    return files


def _refuse_incomplete(directory: Path) -> None:
    parts = (("config.json", "model"), ("*.safetensors", "model"), ("tokenizer_config.json", "tokenizer"))
    for pattern, call in parts:
        if not any(directory.glob(pattern)):
            raise CtxError(
                f"{pattern} is missing, so this is no saved {call}.",
                location=str(directory),
                hint=f"write it with {call}.save_pretrained({str(directory)!r}).",
            )


def _refuse_pickles(directory: Path) -> None:
    pickles = [path.name for path in directory.iterdir() if path.suffix in _PICKLES and path.name != _TRAINER_ARGUMENTS]
    if pickles:
        raise CtxError(
            f"Pickles are never published, since opening one runs its code: {', '.join(sorted(pickles))}.",
            location=str(directory),
            hint="save the weights as safetensors (model.save_pretrained does) and remove these files.",
        )


def _open_all(directory: Path, family: FamilySpec, config: PreTrainedConfig) -> None:
    """Open tokenizer and model once, so that nothing damaged is pushed."""
    check_fit(load_tokenizer(directory), config, location=str(directory))
    load_model(directory, auto_class_of(family, config)[1], config)


def _weights(directory: Path) -> list[Path]:
    """The safetensors files and their index."""
    indices = sorted(directory.glob("*.safetensors.index.json"))
    named = {name for index in indices for name in json.loads(index.read_text())["weight_map"].values()}
    return ([directory / name for name in sorted(named)] or sorted(directory.glob("*.safetensors"))) + indices


def _refusal(error: HfHubHTTPError, repo_id: str, endpoint: str) -> CtxError:
    where = f"{repo_id} on {endpoint}"
    if error.response is not None and error.response.status_code in (401, 403):
        return CtxError(
            f"The Hub refused the token: {error.server_message or 'no right to write there'}.",
            location=where,
            hint="give --token one with the right to write to this name, set HF_TOKEN, or run `hf auth login`.",
        )
    return CtxError(f"The Hub refused the push: {error}", location=where, hint="see the Hub's own words above.")
