"""Publish a model on the Hub: weights, configuration, tokenizer, card and stub in one commit."""

from collections.abc import Mapping
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.hub.files import repository_files


def publish(
    directory: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Publish a saved model on the Hub of `HF_ENDPOINT` (huggingface.co by default).

    The repository is created if it does not exist. All files are checked before the first request and uploaded in a
    single commit (`HfApi.upload_folder` may need several). A README.md in the directory is published unchanged;
    otherwise a card is generated from the training run.

    Args:
        directory: Directory of the saved model and tokenizer.
        repo_id: Repository, "org/name".
        private: Create a private repository; the visibility of an existing one does not change.
        revision: Branch, created from main if it does not exist; None for main.
        commit_message: Title of the commit.
        token: Token with write access; by default `HF_TOKEN` or the token stored by `hf auth login`.

    Raises:
        CtxError: A file is missing, damaged or a pickle; the Hub refused the token or could not be reached.
    """
    files = repository_files(Path(directory), repo_id)
    return push_files(files, repo_id, private=private, revision=revision, commit_message=commit_message, token=token)


def push_files(
    files: Mapping[str, str | bytes],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Upload the result of `repository_files` in one commit, with the arguments of `publish`."""
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    api = HfApi(token=token)
    commit_message = commit_message or f"Upload {repo_id.split('/')[-1]} with hf_ctxmodels"
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    except HFValidationError as error:
        raise CtxError(str(error), location=f"--repo_id {repo_id}", hint='use the form "organization/name".') from error
    except HfHubHTTPError as error:
        raise _refusal_error(error, repo_id, api.endpoint) from error
    except (HTTPError, OSError, RuntimeError) as error:  # HTTPError is raised by the client of huggingface_hub
        raise CtxError(
            f"The Hub could not be reached, or the upload was interrupted: {error}",
            location=f"{repo_id} on {api.endpoint}",
            hint="check the connection and run the command again; the repository is unchanged, and uploaded files are "
            "not sent again.",
        ) from error


def _refusal_error(error: HfHubHTTPError, repo_id: str, endpoint: str) -> CtxError:
    location = f"{repo_id} on {endpoint}"
    if error.response is not None and error.response.status_code in (401, 403):
        return CtxError(
            f"The Hub refused the token: {error.server_message or 'no write access'}.",
            location=location,
            hint="set --token or HF_TOKEN to a token with write access to this repository, or run `hf auth login`.",
        )
    return CtxError(f"The Hub refused the push: {error}", location=location, hint="follow the message of the Hub.")
