"""An HTTP server on 127.0.0.1 that implements the Hub endpoints that huggingface_hub 2.4 calls for models.

Repositories are in memory, as in git: a branch is the name of a commit, and a commit maps paths to blobs. Large files
are uploaded by the LFS protocol to a separate store, and are in a repository only after a commit that contains them, so
that an interrupted upload does not change the repository. Clients find the server by `HF_ENDPOINT`.

No package on PyPI serves repositories locally: hf-local-hub 3.0 is a client of a Go program that it does not contain.
"""

import base64
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from hub_repository import Blob, HubError, Repository, git_blob_id, metadata_errors

ROOT = Path(__file__).parents[2]
TOKEN = "hf_thisTokenMayWrite"
_LFS_ENDINGS = (".safetensors", ".png", ".bin", ".pt", ".pkl")


class HubServer:
    """The server and its state; a context manager.

    Reading a public repository and uploading a large file to its URL, which the Hub signs, need no token; all other
    writes need `TOKEN`.

    Attributes:
        endpoint: Value of `HF_ENDPOINT`.
        repositories: "org/name" -> repository.
        stall_uploads: While it is set, the server stops reading an upload after the first half.
        upload_stalled: Set by the server when it has stopped reading.
        requests: "METHOD path -> status" of each request, for error messages and assertions.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.stall_uploads = threading.Event()
        self.upload_stalled = threading.Event()
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        # Large files have another host name, as on the Hub: if a redirect stays on the same host, the client follows it
        # and loses the headers of the first response.
        self.large_file_host = f"http://localhost:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, name="hub", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stall_uploads.clear()
        self._http.shutdown()
        self._http.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Paths and contents of a revision."""
        repository = self.repositories[repo_id]
        return {path: blob.content for path, blob in repository.commits[repository.resolve(revision)].items()}


def environment_for(hub: HubServer, cache: Path, token: str | None) -> dict[str, str]:
    """The environment of this process, with the local Hub as endpoint."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    # Xet needs a second server; without Xet the client uses the LFS protocol.
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost"}
    if token:
        environment["HF_TOKEN"] = token
    return environment


Route = Callable[["_Handler", re.Match[str]], None]
_ROUTES: list[tuple[str, re.Pattern[str], Route]] = []
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+?)"


def _route(method: str, pattern: str) -> Callable[[Route], Route]:
    def add(function: Route) -> Route:
        _ROUTES.append((method, re.compile(pattern), function))
        return function

    return add


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing; `HubServer.requests` is the log."""

    def do_GET(self) -> None:
        self._respond()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - names that http.server looks up

    def _respond(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        method = "GET" if self.command == "HEAD" else self.command
        try:
            user_may_write = self._authorize()
            for route_method, pattern, handler in _ROUTES:
                match = pattern.fullmatch(url.path)
                if route_method == method and match:
                    if route_method == "POST" and not user_may_write and url.path != "/api/validate-yaml":
                        raise HubError(401, "Invalid username or password.")
                    self.user_may_write = user_may_write
                    handler(self, match)
                    return
            raise HubError(404, f"This hub has no {self.command} {url.path}")
        except HubError as error:
            self._read_body()
            headers = {"X-Error-Message": error.message}
            if error.code:
                headers["X-Error-Code"] = error.code
            self.send(json.dumps({"error": error.message}).encode(), error.status, headers)
        except ConnectionError:
            self.close_connection = True

    def _authorize(self) -> bool:
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            raise HubError(401, "Invalid credentials in Authorization header")
        return authorization is not None

    def repository(self, match: re.Match[str]) -> Repository:
        """The repository of a URL; without a token a private repository is not found."""
        repository = self.hub.repositories.get(match["repo"])
        if repository is None or (repository.private and not self.user_may_write):
            raise HubError(401, "Repository not found", "RepoNotFound")
        return repository

    def chunks(self) -> list[bytes]:
        """The body of the request in chunks; reading stops after the first half while `stall_uploads` is set."""
        chunks, remaining = [], int(self.headers.get("Content-Length", 0))
        total = remaining
        while remaining:
            if self.hub.stall_uploads.is_set() and self.command == "PUT" and remaining <= total // 2:
                self.hub.upload_stalled.set()
                while self.hub.stall_uploads.is_set():
                    time.sleep(0.02)
            chunk = self.rfile.read(min(remaining, max(1, total // 4), 1 << 14))
            if not chunk:
                raise ConnectionError("the client closed the connection")
            chunks.append(chunk)
            remaining -= len(chunk)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
        self._body_read = True
        return chunks

    def _read_body(self) -> bytes:
        return b"".join(self.chunks()) if not getattr(self, "_body_read", False) else b""

    def json_body(self) -> Any:
        return json.loads(self._read_body())

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.hub.requests.append(f"{self.command} {self.path} -> {status}")
        self._body_read = False
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_file(self, content: bytes, headers: dict[str, str]) -> None:
        self.send(content, 200, {"Content-Type": "application/octet-stream", **headers})


@_route("GET", r"/api/whoami-v2")
def _whoami(request: _Handler, match: re.Match[str]) -> None:
    if not request.headers.get("Authorization"):
        raise HubError(401, "Invalid username or password.")
    request.send_json({"type": "user", "name": "tester", "auth": {"accessToken": {"role": "write"}}, "orgs": []})


@_route("POST", r"/api/validate-yaml")
def _validate(request: _Handler, match: re.Match[str]) -> None:
    errors = metadata_errors(request.json_body()["content"])
    response = {"errors": [{"message": error} for error in errors], "warnings": []}
    request.send_json(response, 400 if errors else 200)


@_route("POST", r"/api/repos/create")
def _create(request: _Handler, match: re.Match[str]) -> None:
    body = request.json_body()
    name = f"{body.get('organization') or 'tester'}/{body['name']}"
    response = {"url": f"{request.hub.endpoint}/{name}", "name": name}
    with request.hub.lock:
        if name in request.hub.repositories:
            request.send_json({**response, "error": "You already created this model repo"}, 409)
            return
        repository = Repository(name, private=body.get("visibility") == "private")
        rules = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        repository.commit("main", {".gitattributes": Blob(rules, git_blob_id(rules), False)}, "initial commit")
        request.hub.repositories[name] = repository
    request.send_json(response)


@_route("POST", rf"/api/models/{_REPO}/branch/(?P<revision>[^/]+)")
def _branch(request: _Handler, match: re.Match[str]) -> None:
    repository, branch = request.repository(match), unquote(match["revision"])
    start = json.loads(request._read_body() or b"{}").get("startingPoint", "main")
    if branch in repository.branches:
        raise HubError(409, f"Reference already exists: {branch}")
    repository.branches[branch] = repository.resolve(start)
    request.send_json({})


@_route("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)")
def _preupload(request: _Handler, match: re.Match[str]) -> None:
    repository = request.repository(match)
    files = repository.commits[repository.resolve(unquote(match["revision"]))]
    entries = []
    for file in request.json_body()["files"]:
        mode = "lfs" if file["path"].endswith(_LFS_ENDINGS) else "regular"
        blob = files.get(file["path"])
        response = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
        entries.append({**response, "oid": blob.oid if blob else None})
    request.send_json({"files": entries})


@_route("POST", rf"/{_REPO}\.git/info/lfs/objects/batch")
def _lfs_batch(request: _Handler, match: re.Match[str]) -> None:
    request.repository(match)
    objects = []
    for file in request.json_body()["objects"]:
        response = {"oid": file["oid"], "size": file["size"]}
        if file["oid"] not in request.hub.large_files:
            href = f"{request.hub.endpoint}/large-files/{file['oid']}"
            response["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
        objects.append(response)
    request.send_json({"transfer": "basic", "objects": objects})


@_route("POST", r"/large-files/(?P<oid>[0-9a-f]{64})/verify")
def _lfs_verify(request: _Handler, match: re.Match[str]) -> None:
    expected = request.json_body()
    content = request.hub.large_files.get(match["oid"])
    if content is None or len(content) != expected["size"]:
        raise HubError(404, "The large file was not uploaded")
    request.send_json({})


@_route("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)")
def _commit(request: _Handler, match: re.Match[str]) -> None:
    repository, branch = request.repository(match), unquote(match["revision"])
    lines = [json.loads(line) for line in request._read_body().splitlines()]
    with request.hub.lock:
        parent = repository.resolve(branch)
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, parent):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[parent])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
                files[value["path"]] = Blob(content, git_blob_id(content), False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in request.hub.large_files:
                    raise HubError(400, f"The large file {value['path']} was not uploaded")
                files[value["path"]] = Blob(request.hub.large_files[value["oid"]], value["oid"], True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repository.commit(branch, files, header["summary"])
    url = f"{request.hub.endpoint}/{repository.name}/commit/{oid}"
    request.send_json({"success": True, "commitUrl": url, "commitOid": oid, "pullRequestUrl": None})


@_route("GET", rf"/api/models/{_REPO}(/revision/(?P<revision>[^/]+))?")
def _info(request: _Handler, match: re.Match[str]) -> None:
    repository = request.repository(match)
    commit = repository.resolve(unquote(match["revision"] or "main"))
    response = {"_id": "0", "id": repository.name, "modelId": repository.name, "sha": commit, "tags": []}
    response |= {"private": repository.private, "downloads": 0, "likes": 0}
    response["siblings"] = [{"rfilename": path} for path in sorted(repository.commits[commit])]
    request.send_json(response)


@_route("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?")
def _tree(request: _Handler, match: re.Match[str]) -> None:
    repository = request.repository(match)
    files = repository.commits[repository.resolve(unquote(match["revision"]))]
    folder = unquote(match["folder"]) + "/" if match["folder"] else ""
    entries = []
    for path, blob in sorted(files.items()):
        if path.startswith(folder):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.oid, "size": len(blob.content), "pointerSize": 134}
            entries.append(entry)
    if folder and not entries:
        raise HubError(404, f"{match['folder']} does not exist", "EntryNotFound")
    request.send_json(entries)


@_route("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def _resolve(request: _Handler, match: re.Match[str]) -> None:
    repository = request.repository(match)
    commit = repository.resolve(unquote(match["revision"]))
    blob = repository.commits[commit].get(unquote(match["path"]))
    headers = {"X-Repo-Commit": commit}
    if blob is None:
        headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
        request.send(b"Entry not found", 404, headers)
    elif blob.lfs:
        headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.content))}
        request.send(b"", 302, {**headers, "Location": f"{request.hub.large_file_host}/large-files/{blob.oid}"})
    else:
        request.send_file(blob.content, {**headers, "ETag": f'"{blob.oid}"'})


@_route("PUT", r"/large-files/(?P<oid>[0-9a-f]{64})")
def _lfs_put(request: _Handler, match: re.Match[str]) -> None:
    content = request._read_body()
    if hashlib.sha256(content).hexdigest() != match["oid"]:
        raise HubError(400, "The content does not have the announced sha256")
    request.hub.large_files[match["oid"]] = content
    request.send(b"")


@_route("GET", r"/large-files/(?P<oid>[0-9a-f]{64})")
def _lfs_get(request: _Handler, match: re.Match[str]) -> None:
    content = request.hub.large_files.get(match["oid"])
    if content is None:
        raise HubError(404, "No such large file", "EntryNotFound")
    request.send_file(content, {"ETag": f'"{match["oid"]}"'})
