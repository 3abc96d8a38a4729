"""YAML files of keys and values, with errors that name the file, the line and the key."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import did_you_mean
from hf_ctxmodels.core.loading import read_utf8

_LINES_HINT = "write `key: value`, one per line."


class RepeatedKeyError(yaml.MarkedYAMLError):
    """A mapping has a key twice; `line` is the line of the second one."""

    def __init__(self, key: yaml.ScalarNode, first_key: yaml.ScalarNode) -> None:
        self.line = key.start_mark.line + 1
        problem = f"{key.value!r} occurs twice, first in line {first_key.start_mark.line + 1}"
        super().__init__(problem=problem, problem_mark=key.start_mark)


class _UniqueKeyLoader(yaml.SafeLoader):
    """`SafeLoader` would use the last value of a repeated key; keys are texts, so that `1` and `'1'` are the same."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_keys: dict[str, yaml.ScalarNode] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            first_key = first_keys.setdefault(key.value, key)
            if first_key is not key:
                raise RepeatedKeyError(key, first_key)
        return node


class YamlMapping:
    """A YAML mapping, whose errors name the file, line and key; merged mappings (`<<`) are part of it.

    Args:
        file: For error messages.
        node: The mapping.
        description: For error messages, "the task rte".
        keys: The allowed keys, or empty for any.
    """

    def __init__(self, file: str | Path, node: yaml.Node, description: str, keys: Collection[str] = ()) -> None:
        if not isinstance(node, yaml.MappingNode):
            raise CtxError(
                f"Expected keys and values in {description}.",
                location=f"{file}:{node.start_mark.line + 1}",
                hint="write `key: value`.",
            )
        yaml.SafeLoader("").flatten_mapping(node)
        self._file, self._lines = file, dict[str, int]()
        self._description, self._location = description, f"{file}:{node.start_mark.line + 1}"
        self.nodes: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            self.nodes[key], self._lines[key] = value_node, line
            if keys and key not in keys:
                hint = f"{did_you_mean(key, keys)}Use one of {', '.join(sorted(keys))}."
                raise self.error(key, f"Unknown key {key!r} in {description}.", hint)

    @classmethod
    def from_file(cls, file: str | Path, description: str, keys: Collection[str] = ()) -> "YamlMapping":
        """The mapping of a file; raises CtxError if it cannot be read, is not valid YAML, or has other keys.

        Args:
            description: The kind of file without an article, "task list".
            keys: The allowed keys, or empty for any.
        """
        try:
            root = yaml.compose(read_utf8(file), Loader=_UniqueKeyLoader)
        except RepeatedKeyError as error:
            raise CtxError(f"{error.problem}.", location=f"{file}:{error.line}", hint="remove one of them.") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise CtxError(
                f"The {description} is not valid YAML: {error}.", location=str(file), hint=_LINES_HINT
            ) from error
        if root is None:
            raise CtxError(f"The {description} file is empty.", location=str(file), hint=_LINES_HINT)
        return cls(file, root, f"a {description}", keys)

    def location(self, key: str, prefix: str = "") -> str:
        """`file:line, key` of a key."""
        return f"{self._file}:{self._lines[key]}, {prefix}{key}"

    def error(self, key: str, message: str, hint: str, prefix: str = "") -> CtxError:
        """A CtxError about the value of a key; for the prefix see `location`."""
        return CtxError(message, location=self.location(key, prefix), hint=hint)

    def require(self, *keys: str) -> None:
        """Raise CtxError if a key is missing."""
        if missing := [key for key in keys if key not in self.nodes]:
            message = f"{self._description[:1].upper()}{self._description[1:]} has no {' and no '.join(missing)}."
            raise CtxError(message, location=self._location, hint="add it.")

    def mapping(self, key: str, description: str, keys: Collection[str] = ()) -> "YamlMapping":
        """The value of a key, which must be a mapping; for the arguments see the class."""
        mapping = YamlMapping(self._file, self.nodes[key], description, keys)
        mapping._location = self.location(key)
        return mapping

    def mappings(self, key: str, description: str, keys: Collection[str] = ()) -> "list[YamlMapping]":
        """The value of a key, which must be a list of mappings; for the arguments see the class."""
        node = self.nodes[key]
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(key, f"{key} is not a list.", "write `- key: value` entries.")
        return [YamlMapping(self._file, item, description, keys) for item in node.value]

    def value(self, key: str, hint: Any, default: Any = None) -> Any:
        """The value of a key, converted to a type; raises CtxError if it has another type."""
        if key not in self.nodes:
            return default
        value = self._construct(yaml.SafeLoader(""), key)
        types = {type_ for type_ in getattr(hint, "__args__", (hint,)) if type_ is not type(None)}
        if str in types and not isinstance(value, bool) and value is not None:
            value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if float in types and isinstance(value, int | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                value = float(value)  # YAML reads 1e-4 as a string
        if type(value) not in types and not (value is None and types != {hint}):
            type_names = " or ".join(sorted(type_.__name__ for type_ in types))
            raise self.error(key, f"{key} is {value!r}, expected type {type_names}.", "write a value of this type.")
        return value

    def text(self, key: str) -> Any:
        """The value of a key with its numbers and booleans as they are written: a text, or lists and mappings of
        texts."""
        return self._construct(yaml.BaseLoader(""), key)

    def _construct(self, loader: Any, key: str) -> Any:
        """The value of a key; raises CtxError for a value that cannot be read, such as `{{name}}` or an impossible
        date."""
        with wrap_errors(f"The value of {key} is not valid YAML", location=self.location(key), hint="quote it."):
            return loader.construct_object(self.nodes[key], deep=True)
