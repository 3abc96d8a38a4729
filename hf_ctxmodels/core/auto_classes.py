"""Auto classes: transformers' own, and one for a task that transformers lacks."""

from collections import OrderedDict
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping


class AutoModelForCoreference(_BaseAutoModelClass):
    """Opens a network that finds the coreferent spans of a text, as transformers' Auto classes do.

    Example:
        >>> model = AutoModelForCoreference.from_pretrained("runs/coreference")  # doctest: +SKIP
    """

    _model_mapping = _LazyAutoMapping(OrderedDict(), OrderedDict())


def has_class(name: str, config_class: type[PreTrainedConfig]) -> bool:
    """Whether the Auto class of a name has a model class for a configuration class."""
    return config_class in get_auto_class(name)._model_mapping


def get_auto_class(name: str) -> Any:
    """The Auto class of a name, such as "AutoModelForTokenClassification"; raises AttributeError if there is none."""
    return AutoModelForCoreference if name == AutoModelForCoreference.__name__ else getattr(transformers, name)
