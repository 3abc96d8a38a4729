"""The local Hub answers as the real one does where the client depends on it."""

import json
import urllib.error
import urllib.request

import pytest
from hub_repository import Blob, Repository, git_blob_id
from hub_server import TOKEN, HubServer


@pytest.fixture(scope="module")
def repository(hub: HubServer) -> Repository:
    repository = Repository("zoo/files", private=False)
    small, large = b"0123456789", b"abcdefghij"
    hub.large_files["e" * 64] = large
    files = {"a.txt": Blob(small, git_blob_id(small), False), "b.safetensors": Blob(large, "e" * 64, True)}
    repository.commit("main", files, "files")
    hub.repositories[repository.name] = repository
    return repository


def get(hub: HubServer, path: str, method: str = "GET", **headers: str):
    return urllib.request.urlopen(urllib.request.Request(hub.endpoint + path, headers=headers, method=method))


def test_file_with_etag_commit_and_range(hub: HubServer, repository: Repository) -> None:
    path = "/zoo/files/resolve/main/a.txt"
    head = get(hub, path, "HEAD")
    assert head.headers["ETag"] == f'"{git_blob_id(b"0123456789")}"'
    assert head.headers["X-Repo-Commit"] == repository.branches["main"]
    assert head.headers["Content-Length"] == "10"
    assert get(hub, path).read() == b"0123456789"
    part = get(hub, path, Range="bytes=4-6")
    assert part.status == 206
    assert part.read() == b"456"
    assert part.headers["Content-Range"] == "bytes 4-6/10"


def test_large_file_is_redirected(hub: HubServer, repository: Repository) -> None:
    answer = get(hub, "/zoo/files/resolve/main/b.safetensors", Range="bytes=7-")
    assert answer.url.endswith("/large-files/" + "e" * 64)
    assert answer.read() == b"hij"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/zoo/files/resolve/main/missing", 404, "EntryNotFound"),
        ("/zoo/files/resolve/nowhere/a.txt", 404, "RevisionNotFound"),
        ("/api/models/zoo/nothing", 401, "RepoNotFound"),
    ],
)
def test_errors_carry_the_code_the_client_reads(hub, repository, path: str, status: int, code: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(hub, path)
    assert raised.value.code == status
    assert raised.value.headers["X-Error-Code"] == code


def test_tree_lists_sizes_and_large_files(hub: HubServer, repository: Repository) -> None:
    entries = json.load(get(hub, "/api/models/zoo/files/tree/main?recursive=true"))
    assert [(entry["path"], entry["size"], "lfs" in entry) for entry in entries] == [
        ("a.txt", 10, False),
        ("b.safetensors", 10, True),
    ]


def test_commit_on_a_stale_parent_is_refused(hub: HubServer, repository: Repository) -> None:
    line = json.dumps({"key": "header", "value": {"summary": "late", "parentCommit": "0" * 40}}).encode()
    request = urllib.request.Request(
        f"{hub.endpoint}/api/models/zoo/files/commit/main", line, {"Authorization": f"Bearer {TOKEN}"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    assert raised.value.code == 412
    assert len(repository.commits) == 1
