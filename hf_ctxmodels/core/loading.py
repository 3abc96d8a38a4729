"""Loading of JSON, models, configurations and tokenizers; every failure is a `CtxError`."""

import difflib
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from httpx2 import TransportError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

from hf_ctxmodels.core.errors import CtxError, hint_for_error, wrap_errors


def parse_json(text: str, *, location: object, hint: str = "write valid JSON.") -> Any:
    """Parse a JSON text.

    Raises:
        CtxError: It is not JSON, is nested too deeply, has a number of thousands of digits, or has a string with a lone
            surrogate, which cannot be encoded.
    """
    with wrap_errors("Invalid JSON", location=location, hint=hint):
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    return value


def read_utf8(file: str | Path, *, hint: str = "check the path, or copy the file again from its source.") -> str:
    """Read a text file; raises CtxError if it cannot be opened or is not UTF-8."""
    with wrap_errors("The file cannot be read", location=str(file), hint=hint):
        return Path(file).read_text(encoding="utf-8")


def read_json(file: str | Path, *, hint: str = "write valid JSON.") -> Any:
    """Parse a JSON file; raises CtxError as in `read_utf8` and `parse_json`."""
    return parse_json(read_utf8(file, hint=hint), location=str(file), hint=hint)


def matches_type(value: Any, annotation: Any) -> bool:
    """Whether a JSON value matches an annotation such as `int`, `dict[str, float] | None` or `Literal["a", "b"]`.

    An int is also a float; a bool is not a number. A tuple annotation has one type for all items.
    """
    if annotation is Any:
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(argument) and value == argument for argument in arguments)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(matches_type(item, arguments[1]) for item in value.values())
    if origin in (list, tuple):
        return isinstance(value, origin) and all(matches_type(item, arguments[0]) for item in value)
    if annotation is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is annotation or (annotation in (None, type(None)) and value is None)


def check_json_type(value: Any, annotation: Mapping[str, Any], *, location: str, content: str) -> None:
    """Raise CtxError unless a JSON value is an object with these types (see `matches_type`) and no other keys."""
    if isinstance(value, dict):
        unknown = [f"an unknown entry {name!r}" for name in value if name not in annotation]
        errors = unknown or [
            f"{name} is {str(item)[:80]!r}, expected {annotation[name]}"
            for name, item in value.items()
            if not matches_type(item, annotation[name])
        ]
    else:
        errors = [f"{type(value).__name__}, expected an object"]
    if errors:
        raise CtxError(f"Not {content}: {errors[0]}.", location=location, hint="copy or create the file again.")


def require_existing_path(
    source: str | PathLike[str], repo_type: str = "model", message: str = "There is no such directory."
) -> None:
    """Raise CtxError if a source is neither a path nor the id of a repository on the Hub.

    A name with one slash, as in "runs/bert", is a path if its parent directory exists, unless it is the Hub id of a
    repository in the cache. Other names are paths if the Hub does not allow them, as "my model"; if they are allowed,
    and not in the cache, one request shows whether the Hub answers, since the libraries repeat a request without
    connection for half a minute.
    """
    text, path = str(source), Path(source)
    is_path = isinstance(source, Path) or not is_repo_id(text)
    if path.exists():
        return
    if not is_path and Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=text, repo_type=repo_type)).is_dir():
        return
    if is_path or ("/" in text and path.parent.is_dir()):
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        similar = " or ".join(str(path.with_name(name)) for name in difflib.get_close_matches(path.name, names))
        download = "" if is_path else f"; if it is a Hub id, download it first: hf download {text}"
        hint = (f"did you mean {similar}? " if similar else "") + f"check the path{download}."
    elif constants.HF_HUB_OFFLINE or _hub_answers(text, repo_type):
        return
    else:
        message = message.removesuffix(".") + ", and the Hub cannot be reached."
        hint = (
            "check the path; if it is a Hub id, check the connection, or download it elsewhere and pass its directory."
        )
    raise CtxError(message, location=text, hint=hint)


def is_repo_id(text: str) -> bool:
    """Whether the Hub allows this id of a repository."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _hub_answers(repo_id: str, repo_type: str) -> bool:
    try:
        HfApi().repo_info(repo_id, repo_type=repo_type, timeout=10)
    except TransportError:
        return False
    except (HfHubHTTPError, ValueError):
        pass  # such as a private repository, about which the libraries raise clear errors
    return True


def load_pretrained(auto_class: Any, source: str | PathLike[str] | None, description: str, **options: Any) -> Any:
    """Call `auto_class.from_pretrained(source, **options)`; all errors become a `CtxError`, in which `description`
    names the object."""
    try:
        if not source:
            raise OSError("the directory or Hub id is missing.")
        require_existing_path(source, message=f"Cannot load {description}: there is no such directory.")
        return auto_class.from_pretrained(source, **options)
    except CtxError:
        raise
    except Exception as error:  # damaged files raise errors of any class; the first line may not state the field
        raise CtxError(
            f"Cannot load {description}: {error}",
            location=str(source) if source else None,
            hint=hint_for_error(error, "use the directory or Hub id to which it was saved."),
        ) from error


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def describe_differences(
    values: Mapping[str, Any], saved: Mapping[str, Any], names: Iterable[str] | None = None
) -> list[str]:
    """ "NAME is VALUE, was SAVED" for each of the names, by default all, with different values."""
    absent = object()
    return [
        f"{name} is {values.get(name)}, was {saved.get(name)}"
        for name in (sorted({*values, *saved}) if names is None else names)
        if values.get(name, absent) != saved.get(name, absent)
    ]
