"""Cases of behavioral tests, and failures of models.

A case fails if one of its texts fails (CheckList's aggregation `all`); the failure rate is the share of the cases that
fail.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from hf_ctxmodels.analysis.behavior.perturbations import Texts, perturb
from hf_ctxmodels.analysis.behavior.suite import BehavioralTest, Suite, fill_templates
from hf_ctxmodels.core.errors import CtxError

Probabilities = Mapping[str, float]
"""Label -> probability."""
Predict = Callable[[Sequence[Texts]], list[Probabilities]]
"""Probabilities of the labels of texts or pairs."""


@dataclass(frozen=True)
class Case:
    """A text or a pair, and its variants; an MFT has none."""

    texts: Texts
    variants: tuple[Texts, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A failed case: its texts, the variant that failed (None for an MFT), and what was expected and predicted."""

    texts: Texts
    variant: Texts | None
    expected: str
    predicted: str


@dataclass(frozen=True)
class BehaviorOutcome:
    """The number of cases of a test, and the failures of a model."""

    test: BehavioralTest
    cases: int
    failures: list[Failure]

    @property
    def failure_rate(self) -> float:
        """Share of the cases that fail."""
        return len(self.failures) / self.cases


def make_cases(test: BehavioralTest, suite: Suite, texts: Sequence[Texts], seed: int) -> list[Case]:
    """The cases of a test, which depend on the seed and the name of the test only.

    Args:
        texts: Texts or pairs of a file, for tests without templates.

    Raises:
        CtxError: The perturbation changes none of the texts, or the lexicons do not fill the templates.
    """
    generator = Random(f"{seed} {test.name}")
    if test.perturbation is None:
        filled_templates = fill_templates(test.templates, suite.lexicons, test.cases, generator)
        if not filled_templates:
            raise CtxError(
                "No combination of the lexicons fills the templates.",
                location=f"test {test.name!r}",
                hint="add entries to the lexicons.",
            )
        return [Case(filled) for filled in filled_templates]
    pool = list(dict.fromkeys(texts))
    if test.templates:
        pool = fill_templates(test.templates, suite.lexicons, 10 * test.cases, generator)
    generator.shuffle(pool)
    cases: list[Case] = []
    for filled in pool:
        if variants := perturb(filled, *test.perturbation, generator):
            cases.append(Case(filled, tuple(variants)))
        if len(cases) == test.cases:
            break
    if not cases:
        raise CtxError(
            f"The perturbation {test.perturbation[0]} changes none of {len(pool):,} texts.",
            location=f"test {test.name!r}",
            hint="use other texts or templates, or remove the test.",
        )
    return cases


def evaluate_test(test: BehavioralTest, cases: Sequence[Case], predict: Predict) -> BehaviorOutcome:
    """Run a test on a model."""
    distinct = list(dict.fromkeys(texts for case in cases for texts in (case.texts, *case.variants)))
    predictions = dict(zip(distinct, predict(distinct), strict=True))
    failures = []
    for case in cases:
        original = predictions[case.texts]
        if test.kind == "MFT":
            label = _best(original)
            if label not in test.labels:
                failures.append(Failure(case.texts, None, " or ".join(test.labels), _describe(label, original)))
            continue
        for variant in case.variants:
            expected = _violated(test, original, predictions[variant])
            if expected is not None:
                label = test.labels[0] if test.kind == "DIR" else _best(predictions[variant])
                failures.append(Failure(case.texts, variant, expected, _describe(label, predictions[variant])))
                break
    return BehaviorOutcome(test, len(cases), failures)


def _violated(test: BehavioralTest, original: Probabilities, changed: Probabilities) -> str | None:
    """Description of the expected prediction if the prediction for a variant fails the test; None if it passes."""
    if test.kind == "INV":
        label = _best(original)
        return None if label == _best(changed) else _describe(label, original)
    label = test.labels[0]
    difference = changed[label] - original[label]
    moves_back = difference < -test.tolerance if test.change == "increase" else difference > test.tolerance
    return f"{test.change} from {_describe(label, original)}" if moves_back else None


def _best(probabilities: Probabilities) -> str:
    return max(probabilities, key=lambda label: probabilities[label])


def _describe(label: str, probabilities: Probabilities) -> str:
    return f"{label} ({probabilities[label]:.2f})"


def rates_by_capability(outcomes: Sequence[BehaviorOutcome]) -> dict[str, dict[str, float]]:
    """Capability -> kind -> failure rate over the cases of all its tests."""
    failures, cases = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for outcome in outcomes:
        key = outcome.test.capability, outcome.test.kind
        failures[key] += len(outcome.failures)
        cases[key] += outcome.cases
    rates: dict[str, dict[str, float]] = {}
    for capability, kind in cases:
        rates.setdefault(capability, {})[kind] = failures[capability, kind] / cases[capability, kind]
    return rates
