"""Base class of the figures, which are data: they are saved as JSON, and drawn as SVG or PNG."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def plain(value: Any, digits: int | None = None) -> Any:
    """Convert to JSON-compatible values: tensors, arrays and scalars of NumPy become (nested lists of) numbers, tuples
    become lists, and NaN and infinities None; lone surrogates of texts become "?"; with `digits`, floats are
    rounded."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(entry, digits) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, digits) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else round(value, digits)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"A {type(value).__name__} is not a value of JSON: {value!r}.")


def require_equal_lengths(description: str, *values: Any) -> None:
    """Raise ValueError if lists differ in length."""
    if len({len(value) for value in values}) > 1:
        raise ValueError(f"The lengths of {description} differ: {', '.join(str(len(value)) for value in values)}.")


def require_shape(description: str, values: Any, rows: int, columns: int) -> None:
    """Raise ValueError unless a nested list has `rows` rows of `columns` values."""
    lengths = [len(row) for row in values]
    if lengths != [columns] * rows:
        raise ValueError(f"{description}: expected {rows} rows of {columns} values, got rows of {lengths} values.")


def same_type(values: Sequence[Any]) -> list[Any]:
    """Numbers as floats if one of them is a float, so that all are written with the same digits; None stays None."""
    if not any(isinstance(value, float) for value in values):
        return list(values)
    return [None if value is None else float(value) for value in values]


@dataclass
class Figure:
    """A figure of an analysis.

    Tensors and arrays are accepted for all lists of numbers; NaN becomes None, which is drawn as a gap.

    Args:
        name: Name of its files, unique in an analysis: letters, digits, `_`, `-` and `.`.
        title: One line.
        caption: What is shown, and how to read it.
    """

    classes: ClassVar[dict[str, type["Figure"]]] = {}
    name: str
    title: str
    caption: str = field(default="", kw_only=True)

    def __init_subclass__(cls) -> None:
        Figure.classes[cls.__name__] = cls

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not a name of a figure, which consists of letters, digits, '_' and '-'."
            )
        for entry in dataclasses.fields(self):
            setattr(self, entry.name, plain(getattr(self, entry.name)))
        self.validate()

    def validate(self) -> None:
        """Raise ValueError if the shapes of the fields do not match."""
        raise NotImplementedError

    def svg(self, *, embedded: bool = False) -> str:
        """The figure as an SVG document, or as an SVG element for a page that has the style of `figure_style`."""
        raise NotImplementedError

    def png(self) -> bytes | None:
        """The figure as PNG with two pixels per unit, in light colors; None without the package resvg_py."""
        if not can_write_png():
            return None
        import resvg_py

        return bytes(resvg_py.svg_to_bytes(svg_string=self.svg(), zoom=2, font_family="DejaVu Sans"))

    def to_json(self) -> dict[str, Any]:
        """The fields and the name of the class, as `type`."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {"type": type(self).__name__, **values}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Figure":
        """The figure of `to_json`; raises KeyError, TypeError or ValueError for other values."""
        fields = dict(values)
        name = fields.pop("type")
        if name not in Figure.classes:
            raise ValueError(f"{name!r} is not a figure; figures are {', '.join(sorted(Figure.classes))}")
        return Figure.classes[name](**fields)


def can_write_png() -> bool:
    """Whether the package that draws PNG is installed."""
    return find_spec("resvg_py") is not None
