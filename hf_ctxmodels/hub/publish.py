"""Push a trained model to a Hub: weights, configuration, tokenizer, card and stub, in one commit."""

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
    """Push what `repository_files` gave in one commit; see `publish`."""
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    api = HfApi(token=token)
    commit_message = commit_message or f"Upload {repo_id.split('/')[-1]} with hf_ctxmodels"
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
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


def _refusal(error: HfHubHTTPError, repo_id: str, endpoint: str) -> CtxError:
    location = f"{repo_id} on {endpoint}"
    if error.response is not None and error.response.status_code in (401, 403):
        return CtxError(
            f"The Hub refused the token: {error.server_message or 'no right to write there'}.",
            location=location,
            hint="give --token one with the right to write to this name, set HF_TOKEN, or run `hf auth login`.",
        )
    return CtxError(f"The Hub refused the push: {error}", location=location, hint="see the Hub's own words above.")
