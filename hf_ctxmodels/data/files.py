"""Data files on the local disk or behind an fsspec URL (`s3://`, `gs://`, `hf://`, `https://`, ...): matching, sizes
and decompressed reading."""

import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape, glob, has_magic
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from hf_ctxmodels.core.errors import CtxError, describe_error
from hf_ctxmodels.core.flags import join_choice, split_choice
from hf_ctxmodels.core.paths import is_url, local_path

COMPRESSION_SUFFIXES = (".gz", ".zst")
DATA_SUFFIXES = (".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".json", ".conll", ".conllu", ".xml", ".html", ".tar")
# Bytes at both ends of a file, and of all files together, that identify a corpus without reading it completely.
_DIGESTED_BYTES, _ALL_DIGESTED_BYTES = 1 << 20, 256 << 20
_BUFFER_SIZE = 1 << 20
_OPTIONS = r"\w+=[^=,]*(?:,\w+=[^=,]*)*"  # of a dataset
# checksums and dates of remote files, the first of which identifies a version
_VERSION_KEYS = (
    *("ETag", "etag", "md5Hash", "content_md5", "blob_id", "sha256"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created"),
)
_REMOTE_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class DataFile(NamedTuple):
    """A file: its path or URL, its size in bytes (None if unknown), and whether ranges of bytes can be read."""

    path: str
    size: int | None
    has_ranges: bool = True


def same_file(path: str | Path, other: str | Path) -> bool:
    """Whether two sources refer to the same local file, or are equal."""
    path, other = local_path(path), local_path(other)
    return path == other or (os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other))


def file_name(path: str | Path) -> str:
    """The last component of a path or URL, without the query of a URL."""
    text = str(path)
    return PurePosixPath(text.partition("?")[0]).name if is_url(text) else Path(text).name


def compression_suffix(path: str | Path) -> str:
    """ ".gz", ".zst" or an empty string."""
    suffix = PurePosixPath(file_name(path)).suffix
    return suffix if suffix in COMPRESSION_SUFFIXES else ""


def file_suffix(path: str | Path) -> str:
    """The suffix of a file without `.gz` or `.zst`, such as ".txt", ".jsonl" or ".parquet"."""
    return PurePosixPath(file_name(path).removesuffix(compression_suffix(path))).suffix.lower()


def split_dataset_options(source: str | Path) -> tuple[str, dict[str, str]]:
    """The name of a dataset `NAME[:config=NAME,split=NAME]`, and its options; a source without options, or a file or
    directory of this name, is unchanged. Raises CtxError for an unknown option, or options of a file."""
    source = str(source)
    match = re.fullmatch(f"([^?]+?):({_OPTIONS})", source)  # after `?` it is a parameter of a URL
    if match is None or os.path.exists(local_path(source)):
        return source, {}
    _, options = split_choice(f":{match[2]}")
    if unknown := options.keys() - {"config", "split"}:
        raise CtxError(
            f"Unknown option {min(unknown)!r} of a dataset.", location=source, hint="write NAME:config=NAME,split=NAME."
        )
    if os.path.isfile(local_path(match[1])):
        raise CtxError("A file has no configurations and splits.", location=source, hint=f"write {match[1]}.")
    return match[1], options


def split_columns(source: str) -> tuple[str, list[str]]:
    """The file or dataset of a source `FILE=COLUMN,...` or `NAME:split=NAME=COLUMN,...`, and the columns; the path, URL
    or dataset and no columns if there is no such equals sign, because it belongs to the name of a file or directory, to
    a parameter of a URL, or to an option of a dataset."""
    path = local_path(source)
    if not os.path.exists(path) and (match := re.fullmatch(f"([^?]+?:{_OPTIONS})(?:=(.*))?", str(source))):
        return match[1], match[2].split(",") if match[2] else []
    file, equals, columns = path.rpartition("=")
    is_parameter = is_url(path) and re.search(r"\?(.*&)?[^=&]*$", file)
    is_file = compression_suffix(columns) or file_suffix(columns) in DATA_SUFFIXES or os.path.exists(path)
    if not equals or not file_suffix(file) or is_parameter or is_file:
        return path, []
    return file, columns.split(",")


def source_path(source: str) -> str:
    """The path, URL or Hub id of a source, without columns and options."""
    return split_dataset_options(split_columns(source)[0])[0]


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it; raises CtxError for an unknown protocol or without its
    package."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _REMOTE_PACKAGES.get(protocol) or error.name or "the package of the protocol"
        raise CtxError(
            f"The protocol {protocol}:// needs the package {package}, which is not installed.",
            location=url,
            hint=f"pip install {package}",
        ) from error
    except Exception as error:
        raise CtxError(
            f"The URL cannot be opened: {describe_error(error)}.", location=url, hint="check the URL and the access."
        ) from error


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Convert errors of reading a file to CtxError: a missing or damaged file, or one that cannot be read."""
    try:
        yield
    except CtxError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise missing_file_error(path) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CtxError(
            f"The gzip file is damaged: {error}.", location=path, hint="download or compress it again."
        ) from error
    except OSError as error:
        if compression_suffix(path) == ".zst" and error.errno is None:  # pyarrow's decompressor
            raise CtxError(
                f"The Zstandard file is damaged: {error}.", location=path, hint="download or compress it again."
            ) from error
        raise CtxError(
            f"The file cannot be read: {error.strerror or error}.", location=path, hint="check its permissions."
        ) from error
    except Exception as error:
        if not is_url(path):
            raise
        raise CtxError(  # the clients of remote file systems have exceptions of their own
            f"The file cannot be read: {describe_error(error)}.", location=path, hint="check the URL and the access."
        ) from error


def missing_file_error(path: str) -> CtxError:
    """The error for a path without a file."""
    if not is_url(path) and os.path.isdir(path):
        return CtxError(
            "The path is a directory, expected a file.", location=path, hint="use the path of a file in the directory."
        )
    return CtxError("No such file.", location=path, hint="use the path of a data file, or `demo`.")


def require_file(path: str | Path) -> DataFile:
    """A file with its size; raises CtxError if there is none."""
    path = local_path(path)
    file = file_info(path)
    if file is None:
        raise missing_file_error(path)
    return file


def file_info(path: str) -> DataFile | None:
    """A file with its size; None if there is no such file. Raises CtxError if a URL cannot be opened."""
    if not is_url(path):
        return DataFile(path, os.stat(path).st_size) if os.path.isfile(path) else None
    files, location = file_system(path)
    try:
        with file_errors(path):
            info = files.info(location)
    except CtxError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    return _remote_file(path, info) if info["type"] == "file" else None


def _remote_file(url: str, info: dict[str, Any]) -> DataFile:
    size = info.get("size")
    return DataFile(url, size, has_ranges=size is not None and info.get("partial", True))


def is_directory(path: str) -> bool:
    """Whether a path or URL is a directory."""
    if not is_url(path):
        return os.path.isdir(path)
    if path.startswith(("http://", "https://")):
        return False
    files, location = file_system(path)
    with file_errors(path):
        return bool(files.isdir(location))


def is_pattern(path: str) -> bool:
    """Whether a path or URL is a pattern of files; `?` in a web address begins a query."""
    return has_magic(path) and not path.startswith(("http://", "https://")) and not os.path.exists(path)


def match_files(path: str) -> list[DataFile]:
    """The file of a path or URL, or the files of a pattern ordered by their names, nested directories included with
    `**`; raises CtxError if there is none."""
    if not is_pattern(path):
        files = [file_info(path)]
    elif not is_url(path):
        files = [file_info(str(match)) for match in sorted(map(Path, glob(path, recursive=True)))]
    else:
        system, location = file_system(path)
        with file_errors(path):
            infos = system.glob(location, detail=True).values()
        files = [
            _remote_file(system.unstrip_protocol(info["name"]), info)
            for info in sorted(infos, key=lambda info: PurePosixPath(info["name"]))
            if info["type"] == "file"
        ]
    matches = [file for file in files if file is not None]
    if not matches:
        raise missing_file_error(path)
    return matches


def local_files(path: str) -> list[str]:
    """The local file of a path, or the files of a pattern or a directory, nested directories included, ordered by
    their names; none for a path without files."""
    if os.path.isfile(path):
        return [path]
    pattern = os.path.join(escape(path), "**") if os.path.isdir(path) else path
    return sorted(filter(os.path.isfile, glob(pattern, recursive=True)))


def open_file(path: str) -> BinaryIO:
    """Open a file for reading bytes, of the decompressed text if its name ends in `.gz` or `.zst`. Call it within
    `file_errors`."""
    suffix = compression_suffix(path)
    file: Any = path
    if is_url(path):
        files, location = file_system(path)
        file = files.open(location, "rb")
    if suffix == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), _BUFFER_SIZE)
    return io.BufferedReader(file, _BUFFER_SIZE) if is_url(path) else open(path, "rb")


def describe_content(source: str) -> str:
    """A description of files or a directory that does not depend on their location: name, size and a digest of both
    ends of each local file, or of the checksum (or size and date) of each remote file; other sources are described by
    their names. Options of a dataset are kept."""
    path, columns = split_columns(source)
    if columns:
        return f"{describe_content(path)}={','.join(columns)}"
    path, options = split_dataset_options(path)
    if options:
        return join_choice(describe_content(path), options)
    digest, size = hashlib.sha256(), 0
    if is_url(path):
        files, location = file_system(path)
        with file_errors(path):
            matches = files.glob(location, detail=True) if is_pattern(path) else files.find(location, detail=True)
            for name in sorted(matches):
                info = matches[name] if matches[name].get("size") is not None else files.info(name)
                size += info.get("size") or 0
                version = next((info[key] for key in _VERSION_KEYS if info.get(key)), "")
                digest.update(f"{info.get('size')} {version}".encode())
        if not matches:
            return source
    else:
        local = local_files(path)
        if not local:
            return source
        step = min(_DIGESTED_BYTES, _ALL_DIGESTED_BYTES // (2 * len(local)))
        for name in local:
            length = os.stat(name).st_size
            size += length
            with open(name, "rb") as content:
                digest.update(content.read(step))
                content.seek(max(content.tell(), length - step))
                digest.update(content.read(step))
    return f"{file_name(path.rstrip('/'))} ({size} bytes, SHA-256 {digest.hexdigest()[:12]})"
