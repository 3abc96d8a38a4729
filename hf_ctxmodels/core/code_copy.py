"""What keeps the classes of this package in this package."""

from typing import Any


class InstalledCode:
    """A class that is always imported from the installed package.

    transformers marks the classes that `trust_remote_code=True` opened as code of that repository, and from then on
    `save_pretrained` copies their modules beside the weights. Such a copy needs this package all the same, so it is not
    made; the stub that `hf_ctxmodels.hub` publishes imports the package instead.
    """

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Leave the class unmarked."""
