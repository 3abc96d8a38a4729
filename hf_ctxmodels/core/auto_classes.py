"""Auto classes: transformers' own, and two for tasks that transformers lacks."""

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


class AutoModelForDependencyParsing(_BaseAutoModelClass):
    """Opens a model that scores the edges of dependency trees, as transformers' Auto classes do.

    Example:
        >>> model = AutoModelForDependencyParsing.from_pretrained("runs/parser")  # doctest: +SKIP
    """

    _model_mapping = _LazyAutoMapping(OrderedDict(), OrderedDict())


_AUTO_CLASSES = {cls.__name__: cls for cls in (AutoModelForCoreference, AutoModelForDependencyParsing)}


def has_auto_class(name: str) -> bool:
    """Whether there is an Auto class of a name."""
    return name in _AUTO_CLASSES or hasattr(transformers, name)


def has_class(name: str, config_class: type[PreTrainedConfig]) -> bool:
    """Whether the Auto class of a name has a model class for a configuration class."""
    return config_class in get_auto_class(name)._model_mapping


def get_auto_class(name: str) -> Any:
    """The Auto class of a name, such as "AutoModelForTokenClassification"; raises AttributeError if there is none."""
    return _AUTO_CLASSES[name] if name in _AUTO_CLASSES else getattr(transformers, name)
