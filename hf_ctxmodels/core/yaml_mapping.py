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
    """`SafeLoader` would use the last value of a repeated key."""

    has_typed_keys = True  # `1` and `'1'` are different keys

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_keys: dict[tuple[str | None, str], yaml.ScalarNode] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            first_key = first_keys.setdefault((key.tag if self.has_typed_keys else None, key.value), key)
            if first_key is not key:
                raise RepeatedKeyError(key, first_key)
        return node


class _UniqueTextKeyLoader(_UniqueKeyLoader):
    """For `YamlMapping`, whose keys are texts."""

    has_typed_keys = False


def load_unique_keys(text: str) -> Any:
    """`yaml.safe_load`, which also raises `RepeatedKeyError`."""
    return yaml.load(text, Loader=_UniqueKeyLoader)


class YamlMapping:
    """A YAML mapping, whose errors name the file, line and key.

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
        self._file, self._lines = file, dict[str, int]()
        self.nodes: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            self.nodes[key], self._lines[key] = value_node, line
            if keys and key not in keys:
                raise CtxError(
                    f"Unknown key {key!r} in {description}.",
                    location=self.location(key),
                    hint=f"{did_you_mean(key, keys)}Use one of {', '.join(sorted(keys))}.",
                )

    @classmethod
    def from_file(cls, file: str | Path, description: str, keys: Collection[str] = ()) -> "YamlMapping":
        """The mapping of a file; raises CtxError if it cannot be read, is not valid YAML, or has other keys.

        Args:
            description: The kind of file without an article, "task list".
            keys: The allowed keys, or empty for any.
        """
        try:
            root = yaml.compose(read_utf8(file), Loader=_UniqueTextKeyLoader)
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

    def mapping(self, key: str, description: str, keys: Collection[str] = ()) -> "YamlMapping":
        """The value of a key, which must be a mapping; for the arguments see the class."""
        return YamlMapping(self._file, self.nodes[key], description, keys)

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
            raise CtxError(
                f"{key} is {value!r}, expected type {type_names}.",
                location=self.location(key),
                hint="write a value of this type.",
            )
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
