"""Opening of saved models, configurations and tokenizers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike
from typing import Any

from hf_ctxmodels.core.errors import CtxError

_FOLLOW = ContextVar("is_adapter_notice_suppressed", default=False)


@contextmanager
def suppress_adapter_notice() -> Iterator[None]:
    """Within it models are opened to which the adapters saved beside them are added: no line says that they are not."""
    token = _FOLLOW.set(True)
    try:
        yield
    finally:
        _FOLLOW.reset(token)


def is_adapter_notice_suppressed() -> bool:
    """Whether this is within `suppress_adapter_notice`."""
    return _FOLLOW.get()


def load_pretrained(auto_class: Any, source: str | PathLike[str] | None, what: str) -> Any:
    """`auto_class.from_pretrained(source)`.

    Args:
        auto_class: An Auto class of transformers.
        source: Directory or Hub id; None or empty if there is none.
        what: The object's name in the error message.

    Raises:
        CtxError: It cannot be opened.
    """
    try:
        if not source:
            raise OSError("no directory or Hub id is given.")
        return auto_class.from_pretrained(source)
    except CtxError:
        raise
    except Exception as error:  # whatever the files hold
        raise CtxError(
            f"Cannot open {what}: {error}",
            location=str(source) if source else None,
            hint="give a directory or Hub id to which it was saved.",
        ) from error
