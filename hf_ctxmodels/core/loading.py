"""Loading of models, configurations and tokenizers."""

from os import PathLike
from typing import Any

from hf_ctxmodels.core.errors import CtxError


def load_pretrained(auto_class: Any, source: str | PathLike[str] | None, description: str) -> Any:
    """Call `auto_class.from_pretrained(source)`, and convert all errors to `CtxError`.

    Args:
        auto_class: An Auto class of transformers.
        source: Directory or Hub id; None or empty if missing.
        description: Description of the object for the error message.

    Raises:
        CtxError: It cannot be loaded.
    """
    try:
        if not source:
            raise OSError("the directory or Hub id is missing.")
        return auto_class.from_pretrained(source)
    except CtxError:
        raise
    except Exception as error:  # damaged files raise errors of any class
        raise CtxError(
            f"Cannot load {description}: {error}",
            location=str(source) if source else None,
            hint="use the directory or Hub id to which it was saved.",
        ) from error
