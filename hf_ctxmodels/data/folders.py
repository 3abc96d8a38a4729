"""Folders of output files, on a local disk or behind an fsspec URL, such as of an object store."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.loading import file_digest
from hf_ctxmodels.core.output_files import replacing, wrap_write_errors
from hf_ctxmodels.data.files import file_errors, file_system, open_file

PARALLEL_READS = 8  # concurrent downloads, or files whose digests are computed
_HINT = "check the URL, the credentials and the free disk space, and run the same command again."
_CHANGED_HINT = "run `hf-ctxmodels data prepare` with --merge, which checks all files."


@dataclass(frozen=True)
class LocalFolder:
    """A folder of files, which are named by their paths relative to `directory`."""

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    def sizes(self) -> dict[str, int]:
        """File -> size in bytes, including nested folders."""
        sizes = {}
        for folder, _, names in os.walk(self.directory, followlinks=True):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):  # a temporary file of another process
                    sizes[path.relative_to(self.directory).as_posix()] = path.stat().st_size
        return dict(sorted(sizes.items()))

    def digest(self, name: str) -> str:
        """SHA-256 of a file."""
        return file_digest(self.directory / name)

    def download(self, names: Iterable[str]) -> None:
        """Copy files to `directory`, where local ones already are."""

    def upload(self, names: Iterable[str]) -> None:
        """Move files from `directory`, where local ones remain, in this order."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, in this order; raises CtxError if one cannot be deleted."""
        with wrap_write_errors(self.directory):
            for name in names:
                (self.directory / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class RemoteFolder(LocalFolder):
    """A folder behind an fsspec URL; files are written to the local `directory` and uploaded from there."""

    url: str

    def __str__(self) -> str:
        return self.url

    def sizes(self, folder: str = "") -> dict[str, int]:
        """File -> size in bytes, of the files in a nested folder or of all; raises CtxError without access."""
        files, root = file_system(self.url)
        with wrap_errors("The files cannot be listed", location=self.url, hint=_HINT), suppress(FileNotFoundError):
            files.invalidate_cache()  # other processes write files
            infos = files.find(f"{root}/{folder}".rstrip("/"), detail=True)
            return {name.removeprefix(f"{root}/"): info["size"] for name, info in infos.items()}
        return {}

    def digest(self, name: str) -> str:
        """SHA-256 of a file, which is read; raises CtxError if it cannot be read."""
        path = f"{self.url}/{name}"
        with file_errors(path), open_file(path) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]

    def download(
        self, names: Iterable[str], digests: Mapping[str, str] | None = None, show_progress: bool = False
    ) -> None:
        """Copy files to `directory`, each atomically; raises CtxError if one cannot be read or written, or has another
        SHA-256 than in `digests`."""
        files, root = file_system(self.url)

        def download(name: str) -> None:
            location = f"{self.url}/{name}"
            with replacing(self.directory / name) as temporary:
                with wrap_errors("The download failed", location=location, hint=_HINT):
                    files.get_file(f"{root}/{name}", str(temporary))
                if digests and file_digest(temporary) != digests[name]:
                    raise CtxError("The file was changed after it was written.", location=location, hint=_CHANGED_HINT)

        names = list(names)
        with ThreadPoolExecutor(PARALLEL_READS) as executor:
            results = executor.map(download, names)
            for _ in progress_bar(results, "downloading", unit="files", total=len(names), enabled=show_progress):
                pass

    def upload(self, names: Iterable[str]) -> None:
        """Move files from `directory`, in this order; raises CtxError if one cannot be written."""
        files, root = file_system(self.url)
        with wrap_errors("The upload failed", location=self.url, hint=_HINT):
            top_folder = re.match(r"/*[^/]*", root)[0]  # type: ignore[index]
            has_top_folder = files.exists(top_folder)  # `makedirs` would create the bucket of an object store
        for name in names:
            path = f"{root}/{name}"
            with wrap_errors("The upload failed", location=f"{self.url}/{name}", hint=_HINT):
                if has_top_folder:
                    with suppress(PermissionError):  # of an object store, which has no folders
                        files.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
                files.put_file(str(self.directory / name), path)
            (self.directory / name).unlink()

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, the first one before the others; raises CtxError if one cannot be deleted."""
        files, root = file_system(self.url)
        with wrap_errors("The files cannot be deleted", location=self.url, hint=_HINT):
            for group in (names[:1], names[1:]):
                if group:
                    files.rm([f"{root}/{name}" for name in group])
