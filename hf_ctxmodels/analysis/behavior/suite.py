"""Suites of behavioral tests in YAML: templates filled from lexicons, and three kinds of tests.

Ribeiro et al. 2020 (arXiv 2005.04118), section 2: a minimum functionality test (MFT) has an expected label, an
invariance test (INV) expects the prediction not to change under a perturbation, and a directional expectation test
(DIR) expects the probability of a label to move in one direction only.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import yaml

from hf_ctxmodels.analysis.behavior.perturbations import ORDER, PERTURBATIONS, Texts
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import did_you_mean
from hf_ctxmodels.core.loading import matches_type, read_utf8
from hf_ctxmodels.core.yaml_mapping import load_unique_keys

Kind = Literal["MFT", "INV", "DIR"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_CASES = 100
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_HINT = "see the file that `hf-ctxmodels recipes` lists under behavioral tests."


@dataclass(frozen=True)
class BehavioralTest:
    """One test of a suite.

    Attributes:
        name, capability: What is tested, and the row of the summary that it belongs to.
        kind: MFT, INV or DIR.
        templates: Texts or pairs with placeholders; empty for the texts of a file.
        labels: MFT: the expected labels. DIR: the label whose probability is compared.
        perturbation: INV and DIR: name and value, see `PERTURBATIONS`.
        change: DIR: "increase" or "decrease", the allowed change of the probability.
        tolerance: DIR: largest change in the other direction that is not a failure.
        cases: Largest number of cases.
    """

    name: str
    capability: str
    kind: Kind
    templates: tuple[Texts, ...] = ()
    labels: tuple[str, ...] = ()
    perturbation: tuple[str, Any] | None = None
    change: str | None = None
    tolerance: float = 0.0
    cases: int = DEFAULT_CASES


@dataclass(frozen=True)
class Suite:
    """Tests of a file, and its lexicons: name -> entries."""

    tests: list[BehavioralTest]
    lexicons: dict[str, list[str]] = field(default_factory=dict)

    def with_labels(self, model_labels: Mapping[str, str]) -> "Suite":
        """The suite with the labels of a model; `model_labels` maps names in the file to them."""
        tests = [
            replace(test, labels=tuple(model_labels.get(label, label) for label in test.labels)) for test in self.tests
        ]
        return replace(self, tests=tests)

    @property
    def needs_texts(self) -> bool:
        """Whether a test has no templates, and takes the texts of a file."""
        return any(not test.templates for test in self.tests)


def read_suite(file: str | Path) -> Suite:
    """Read a suite from a YAML file.

    Raises:
        CtxError: The file cannot be read, or a key is unknown, missing or has a wrong value; the location names the
            file and the path of the key, such as `tests[2].perturbation`.
    """
    text = read_utf8(file, hint=_HINT)
    try:
        content = load_unique_keys(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CtxError(f"Not valid YAML: {error}.", location=file, hint=_HINT) from error
    reader = _Reader(file)
    root = reader.mapping(content, "", ("lexicons", "tests"))
    lexicons = reader.value(root, "lexicons", "", dict[str, list], {})
    for name, entries in lexicons.items():
        if not entries or not all(isinstance(entry, str | int | float) and entry != "" for entry in entries):
            reader.fail("Expected a list of words.", f"lexicons.{name}", "write at least one word, in quotes.")
    suite = Suite([], {name: [str(entry) for entry in entries] for name, entries in lexicons.items()})
    entries = reader.value(root, "tests", "", list)
    if not entries:
        reader.fail("The file has no tests.", "tests", "write at least one test.")
    for index, entry in enumerate(entries):
        test = _read_test(reader, entry, f"tests[{index}]", suite.lexicons)
        if test.name in (previous.name for previous in suite.tests):
            reader.fail(f"Two tests have the name {test.name!r}.", f"tests[{index}].name", "use unique names.")
        suite.tests.append(test)
    return suite


@dataclass(frozen=True)
class _Reader:
    """Typed access to the content of a file, with errors that name the path of a key."""

    file: str | Path

    def fail(self, message: str, path: str, hint: str = _HINT) -> Any:
        raise CtxError(message, location=f"{self.file}: {path or 'the whole file'}", hint=hint)

    def mapping(self, value: Any, path: str, keys: Sequence[str]) -> dict[str, Any]:
        """A mapping with some of these keys."""
        if not isinstance(value, dict):
            self.fail(f"Expected a mapping, got {_type_name(value)}.", path, f"write some of: {', '.join(keys)}.")
        for key in value:
            if key not in keys:
                hint = f"{did_you_mean(str(key), keys)}use some of: {', '.join(keys)}."
                self.fail(f"Unknown key {key!r}.", _join(path, str(key)), hint)
        return value

    def value(self, mapping: Mapping[str, Any], key: str, path: str, annotation: Any, default: Any = ...) -> Any:
        """The value of a key, checked against a type; without a default it is required."""
        if key not in mapping:
            return self.fail(f"The key {key!r} is missing.", path, "add it.") if default is ... else default
        value = mapping[key]
        if not matches_type(value, annotation):
            expected = getattr(annotation, "__name__", str(annotation)) if isinstance(annotation, type) else annotation
            self.fail(f"Expected {expected}, got {value!r}.", _join(path, key))
        return value


def _type_name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


_KEYS = {
    "MFT": ("label",),
    "INV": ("perturbation",),
    "DIR": ("perturbation", "label", "change", "tolerance"),
}


def _read_test(reader: _Reader, entry: Any, path: str, lexicons: Mapping[str, Sequence[str]]) -> BehavioralTest:
    common = ("name", "capability", "kind", "templates", "cases")
    mapping = reader.mapping(entry, path, (*common, *dict.fromkeys(key for keys in _KEYS.values() for key in keys)))
    kind: Kind = reader.value(mapping, "kind", path, str)
    if kind not in KINDS:
        reader.fail(f"Unknown kind {kind!r}.", f"{path}.kind", f"use one of: {', '.join(KINDS)}.")
    reader.mapping(mapping, path, (*common, *_KEYS[kind]))
    labels: tuple[str, ...] = ()
    if "label" in _KEYS[kind]:
        label = reader.value(mapping, "label", path, str | int | list)
        labels = tuple(map(str, label)) if isinstance(label, list) else (str(label),)
        if not labels or (kind == "DIR" and len(labels) > 1):
            reader.fail("Expected a label.", f"{path}.label", "write one label.")
    change, tolerance = None, 0.0
    if kind == "DIR":
        change = reader.value(mapping, "change", path, str)
        tolerance = reader.value(mapping, "tolerance", path, float, 0.0)
        if change not in ("increase", "decrease"):
            reader.fail(f"Unknown change {change!r}.", f"{path}.change", "use increase or decrease.")
        if not 0 <= tolerance <= 1:
            reader.fail(f"tolerance={tolerance} is out of range.", f"{path}.tolerance", "use a value from 0 to 1.")
    cases = reader.value(mapping, "cases", path, int, DEFAULT_CASES)
    if cases < 1:
        reader.fail(f"cases={cases} is out of range.", f"{path}.cases", "use a value that is at least 1.")
    return BehavioralTest(
        name=reader.value(mapping, "name", path, str),
        capability=reader.value(mapping, "capability", path, str),
        kind=kind,
        templates=_read_templates(reader, mapping, path, lexicons, kind),
        labels=labels,
        perturbation=None if kind == "MFT" else _read_perturbation(reader, mapping, path),
        change=change,
        tolerance=tolerance,
        cases=cases,
    )


def _read_templates(
    reader: _Reader, mapping: Mapping[str, Any], path: str, lexicons: Mapping[str, Sequence[str]], kind: Kind
) -> tuple[Texts, ...]:
    """Templates of a test; without the key none, which only tests without an expected label may do."""
    values = reader.value(mapping, "templates", path, list, ... if kind == "MFT" else None)
    if values is None:
        return ()
    templates: list[Texts] = []
    for index, value in enumerate(values):
        item_path = f"{path}.templates[{index}]"
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
        if len(texts) not in (1, 2) or not all(isinstance(text, str) and text.strip() for text in texts):
            reader.fail(f"Expected a text or a pair of texts, got {value!r}.", item_path, "write it in quotes.")
        for name in _placeholders(texts):
            if _lexicon_name(name, lexicons) is None:
                hint = f"{did_you_mean(name, lexicons)}use one of: {', '.join(lexicons) or 'none; add lexicons'}."
                reader.fail(f"There is no lexicon {name!r}.", item_path, hint)
        templates.append(texts)
    if not templates:
        reader.fail("The list is empty.", f"{path}.templates", "write at least one template.")
    return tuple(templates)


def _read_perturbation(reader: _Reader, mapping: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """Name and value of a perturbation: a name, or a mapping of one name to a value."""
    perturbations, item_path = {**PERTURBATIONS, ORDER: (None, None, None)}, f"{path}.perturbation"
    entry = reader.value(mapping, "perturbation", path, str | dict)
    if isinstance(entry, str):
        if entry not in perturbations:
            hint = f"{did_you_mean(entry, perturbations)}use one of: {', '.join(perturbations)}."
            reader.fail(f"Unknown perturbation {entry!r}.", item_path, hint)
        _, annotation, default = perturbations[entry]
        if annotation is not None and default is None:
            reader.fail(f"The perturbation {entry} needs a value.", item_path, f"write perturbation: {{{entry}: ...}}.")
        return entry, default
    if len(reader.mapping(entry, item_path, list(perturbations))) != 1:
        reader.fail(f"Expected one perturbation, got {len(entry)}.", item_path, "write a test for each of them.")
    (name,) = entry
    _, annotation, _ = perturbations[name]
    if annotation is None:
        reader.fail(f"The perturbation {name} has no value.", item_path, f"write perturbation: {name}.")
    value = reader.value(entry, name, item_path, annotation)
    if not value or (isinstance(value, int) and value < 1):
        reader.fail(f"Expected at least one, got {value!r}.", f"{item_path}.{name}", "write a value.")
    return name, value


def _placeholders(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for text in texts for name in _PLACEHOLDER.findall(text)))


def _lexicon_name(placeholder: str, lexicons: Mapping[str, Any]) -> str | None:
    """The lexicon of a placeholder: of the same name, or without the digits at its end."""
    return next((name for name in (placeholder, placeholder.rstrip("0123456789")) if name in lexicons), None)


def fill_templates(
    templates: Sequence[Texts], lexicons: Mapping[str, Sequence[str]], count: int, generator: Random
) -> list[Texts]:
    """Up to `count` different texts or pairs: all that the templates have, or else a random sample.

    `{city}` is an entry of the lexicon `city`, the same one at all its places in a template; `{city1}` and `{city2}`
    are two different entries.
    """
    names = [_placeholders(texts) for texts in templates]
    entries = [[lexicons[str(_lexicon_name(name, lexicons))] for name in placeholders] for placeholders in names]
    sizes = [math.prod(map(len, lists)) for lists in entries]
    total = sum(sizes)
    # some combinations are dropped, which repeat an entry
    numbers = list(range(total)) if total <= 4 * count else generator.sample(range(total), 4 * count)
    filled: dict[Texts, None] = {}
    for number in numbers:
        template = 0
        while number >= sizes[template]:
            number, template = number - sizes[template], template + 1
        values: dict[str, str] = {}
        for name, choices in zip(names[template], entries[template], strict=True):
            number, index = divmod(number, len(choices))
            values[name] = choices[index]
        lexicon_names = [_lexicon_name(name, lexicons) for name in values]
        if len(set(zip(lexicon_names, values.values(), strict=True))) == len(values):
            texts = (_PLACEHOLDER.sub(lambda match: values[match[1]], text) for text in templates[template])  # noqa: B023
            filled[tuple(texts)] = None
    texts_or_pairs = list(filled)
    return texts_or_pairs if len(texts_or_pairs) <= count else generator.sample(texts_or_pairs, count)
