"""Suites of behavioral tests in YAML: templates filled from lexicons, and three kinds of tests.

Ribeiro et al. 2020 (arXiv 2005.04118), section 2: a minimum functionality test (MFT) has an expected label, an
invariance test (INV) expects the prediction not to change under a perturbation, and a directional expectation test
(DIR) expects the probability of a label to move in one direction only.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from hf_ctxmodels.analysis.behavior.perturbations import ORDER, PERTURBATIONS, Texts
from hf_ctxmodels.core.flags import did_you_mean
from hf_ctxmodels.core.loading import matches_type
from hf_ctxmodels.core.yaml_mapping import YamlMapping

Kind = Literal["MFT", "INV", "DIR"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_CASES = 100
_MAX_COMBINATIONS = 1_000_000  # of lexicon entries to try
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


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
        CtxError: The file cannot be read, or a key is unknown, missing or has a wrong value; the message names file,
            line and key.
    """
    root = YamlMapping.from_file(file, "suite", ("lexicons", "tests"))
    root.require("tests")
    suite = Suite([], _read_lexicons(root))
    for entry in root.mappings("tests", "a test", _TEST_KEYS):
        test = _read_test(entry, suite.lexicons)
        if test.name in (previous.name for previous in suite.tests):
            raise entry.error("name", f"Two tests have the name {test.name!r}.", "use unique names.")
        suite.tests.append(test)
    if not suite.tests:
        raise root.error("tests", "The file has no tests.", "write at least one test.")
    return suite


def _read_lexicons(root: YamlMapping) -> dict[str, list[str]]:
    if "lexicons" not in root.nodes:
        return {}
    mapping = root.mapping("lexicons", "the lexicons")
    lexicons = {name: mapping.text(name) for name in mapping.nodes}
    for name, entries in lexicons.items():
        if not entries or not matches_type(entries, list[str]) or not all(entries):
            raise mapping.error(name, "Expected a list of words.", "write at least one word.", "lexicons.")
    return lexicons


_REQUIRED_KEYS = {
    "MFT": ("templates", "label"),
    "INV": ("perturbation",),
    "DIR": ("perturbation", "label", "change"),
}
_OPTIONAL_KEYS = {"MFT": ("cases",), "INV": ("templates", "cases"), "DIR": ("templates", "cases", "tolerance")}
_TEST_KEYS = ("name", "capability", "kind", *dict.fromkeys(chain(*_REQUIRED_KEYS.values(), *_OPTIONAL_KEYS.values())))


def _read_test(entry: YamlMapping, lexicons: Mapping[str, Sequence[str]]) -> BehavioralTest:
    entry.require("name", "capability", "kind")
    kind: Kind = entry.value("kind", str)
    if kind not in KINDS:
        raise entry.error("kind", f"Unknown kind {kind!r}.", f"use one of: {', '.join(KINDS)}.")
    entry.require(*_REQUIRED_KEYS[kind])
    for key in entry.nodes:
        if key not in ("name", "capability", "kind", *_REQUIRED_KEYS[kind], *_OPTIONAL_KEYS[kind]):
            raise entry.error(key, f"A test of the kind {kind} does not read {key}.", "remove the line.")
    labels: tuple[str, ...] = ()
    if "label" in entry.nodes:
        label = entry.text("label")
        labels = tuple(label) if matches_type(label, list[str]) else (label,)
        if not labels or not all(isinstance(text, str) for text in labels) or (kind == "DIR" and len(labels) > 1):
            raise entry.error("label", "Expected a label.", "write one label.")
    change, tolerance = entry.value("change", str), entry.value("tolerance", float, 0.0)
    if change not in ("increase", "decrease", None):
        raise entry.error("change", f"Unknown change {change!r}.", "use increase or decrease.")
    if not 0 <= tolerance <= 1:
        raise entry.error("tolerance", f"tolerance={tolerance} is out of range.", "use a value from 0 to 1.")
    cases = entry.value("cases", int, DEFAULT_CASES)
    if cases < 1:
        raise entry.error("cases", f"cases={cases} is out of range.", "use a value that is at least 1.")
    return BehavioralTest(
        name=entry.value("name", str),
        capability=entry.value("capability", str),
        kind=kind,
        templates=_read_templates(entry, lexicons) if "templates" in entry.nodes else (),
        labels=labels,
        perturbation=_read_perturbation(entry) if "perturbation" in entry.nodes else None,
        change=change,
        tolerance=tolerance,
        cases=cases,
    )


def _read_templates(entry: YamlMapping, lexicons: Mapping[str, Sequence[str]]) -> tuple[Texts, ...]:
    values = entry.text("templates")
    if not values or not isinstance(values, list):
        raise entry.error("templates", f"Expected a list of templates, got {values!r}.", "write at least one template.")
    templates: list[Texts] = []
    for value in values:
        texts = tuple(value) if isinstance(value, list) else (value,)
        if len(texts) not in (1, 2) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise entry.error("templates", f"Expected a text or a pair of texts, got {value!r}.", "write it in quotes.")
        for name in _placeholders(texts):
            if _lexicon_name(name, lexicons) is None:
                hint = f"{did_you_mean(name, lexicons)}use one of: {', '.join(lexicons) or 'none; add lexicons'}."
                raise entry.error("templates", f"There is no lexicon {name!r}.", hint)
        templates.append(texts)
    return tuple(templates)


def _read_perturbation(entry: YamlMapping) -> tuple[str, Any]:
    """Name and value of a perturbation: a name, or a mapping of one name to a value."""
    perturbations = {**PERTURBATIONS, ORDER: (None, None, None)}
    if isinstance(name := entry.text("perturbation"), str):
        if name not in perturbations:
            hint = f"{did_you_mean(name, perturbations)}use one of: {', '.join(perturbations)}."
            raise entry.error("perturbation", f"Unknown perturbation {name!r}.", hint)
        _, annotation, default = perturbations[name]
        if annotation is not None and default is None:
            hint = f"write perturbation: {{{name}: ...}}."
            raise entry.error("perturbation", f"The perturbation {name} needs a value.", hint)
        return name, default
    mapping = entry.mapping("perturbation", "the perturbation", list(perturbations))
    if len(mapping.nodes) != 1:
        message = f"Expected one perturbation, got {len(mapping.nodes)}."
        raise entry.error("perturbation", message, "write a test for each of them.")
    (name,) = mapping.nodes
    _, annotation, _ = perturbations[name]
    if annotation is None:
        message = f"The perturbation {name} has no value."
        raise entry.error("perturbation", message, f"write perturbation: {name}.")
    value = mapping.value(name, int) if annotation is int else mapping.text(name)
    if not matches_type(value, annotation) or not value or (isinstance(value, int) and value < 1):
        message = f"Expected at least one value of {annotation}, got {value!r}."
        raise mapping.error(name, message, "write a value.", "perturbation.")
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

    def fill(numbers: Sequence[int]) -> list[Texts]:
        """The different texts of combinations of a template and entries, without those that repeat an entry."""
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
        return list(filled)

    total, num_sampled = sum(sizes), 4 * count  # more than `count`, since combinations may repeat an entry
    while True:
        filled = fill(range(total) if total <= num_sampled else generator.sample(range(total), num_sampled))
        if len(filled) >= count or num_sampled >= min(total, _MAX_COMBINATIONS):
            return filled if len(filled) <= count else generator.sample(filled, count)
        num_sampled *= 4
