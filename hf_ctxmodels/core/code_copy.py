"""Classes that are never copied into checkpoints."""

from typing import Any


class InstalledCode:
    """A class that is always imported from the installed package.

    transformers registers classes opened with `trust_remote_code=True` as code of that repository, and then
    `save_pretrained` copies their modules beside the weights. Such a copy would still need this package, so these
    classes are not registered; the stub of `core.remote_code` imports the package instead.
    """

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do not register the class."""
