r"""Test the behavior of text classifiers: typing errors, negation, names, order, and what a YAML file adds.

    hf-ctxmodels analyze behavior --model runs/sst2-bert runs/sst2-gpt2 --suite sentiment \
        --label_names positive=1 negative=0 --text SST-2/dev.tsv --text_columns sentence --output_dir analyses

A suite has tests of three kinds (CheckList, Ribeiro et al. 2020): an expected label (MFT), a prediction that a
perturbation must not change (INV), and a probability that it may move in one direction only (DIR). The table shows
failure rates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_ctxmodels.analysis.behavior.outcomes import (
    BehaviorOutcome,
    Predict,
    Probabilities,
    evaluate_test,
    make_cases,
    rates_by_capability,
)
from hf_ctxmodels.analysis.behavior.perturbations import Texts
from hf_ctxmodels.analysis.behavior.suite import KINDS, Suite, read_suite
from hf_ctxmodels.analysis.figures import Heatmap
from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.results import AnalysisResult, Table
from hf_ctxmodels.analysis.word_arguments import short_names
from hf_ctxmodels.core.command_line import find_packaged, parse_arguments
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.downstream.tasks import SequenceClassification, TaskArguments
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceExample
from hf_ctxmodels.inference import Predictor
from hf_ctxmodels.training.model_loading import check_sources

SHOWN_FAILURES = 3


@dataclass
class BehaviorArguments(OutputArguments):
    """Models and tests."""

    model: list[str] = flag(REQUIRED, "Directories or Hub ids of text classifiers with the same labels.")
    suite: str = flag(REQUIRED, "YAML file of tests, or a name that `hf-ctxmodels recipes` lists.")
    label_names: list[str] = flag((), "NAME=LABEL: the model's label for a name in the suite, if they differ.")
    text: str | None = flag(None, "Texts for the tests without templates: a table, or a .txt file of one per line.")
    max_length: int | None = flag(None, "Longest input in tokens; by default as in the fine-tuning of each model.")
    batch_size: int = flag(64, "Texts per batch.")
    seed: int = flag(0, "Seed of the sampled templates and of the perturbations.")

    def __post_init__(self) -> None:
        check_range(self, "max_length", "batch_size", at_least=1)
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)
        for text in self.label_names:
            if not all(text.partition("=")):
                raise CtxError(f"Invalid value {text!r}.", location="--label_names", hint="write NAME=LABEL.")


def main() -> None:
    """Run the suite on all models, and save the tables."""
    arguments, task_arguments, placement = parse_arguments(
        BehaviorArguments,
        (TaskArguments, ("text_columns",)),
        DeviceArguments,
        description=__doc__,
        essential=("model", "suite", "output_dir"),
    )
    arguments.check_output("behavior")
    check_sources(arguments.model)
    aliases = dict(text.split("=", 1) for text in arguments.label_names)
    suite = read_suite(find_packaged(arguments.suite, "behavior", "suite", "--suite")).with_labels(aliases)
    texts = _read_texts(arguments, task_arguments, suite)
    cases = [make_cases(test, suite, texts, arguments.seed) for test in suite.tests]
    names = short_names(arguments.model)
    outcomes: dict[str, list[BehaviorOutcome]] = {}
    for name, source in zip(names, arguments.model, strict=True):
        predictor = Predictor.open(source, task_arguments, max_length=arguments.max_length)
        placement.place(predictor.model)
        check_labels(suite, predictor, arguments.suite)
        predict = _predict_function(predictor, arguments.batch_size)
        tests = progress_bar(list(zip(suite.tests, cases, strict=True)), name, unit="tests")
        outcomes[name] = [evaluate_test(test, test_cases, predict) for test, test_cases in tests]
    arguments.save(behavior_result(outcomes, arguments.model, {**asdict(arguments), "text_examples": len(texts)}))


def _read_texts(arguments: BehaviorArguments, task_arguments: TaskArguments, suite: Suite) -> list[Texts]:
    if arguments.text is None:
        if suite.needs_texts:
            test = next(test for test in suite.tests if not test.templates)
            raise CtxError(
                f"The test {test.name!r} has no templates.",
                location=arguments.suite,
                hint="pass --text FILE, or add templates.",
            )
        return []
    task = SequenceClassification(task_arguments)
    task.labels = ["any"]  # of the placeholder of unlabeled examples
    return [example.texts for example in task.read_unlabeled(arguments.text)]


def check_labels(suite: Suite, predictor: Predictor, location: str) -> None:
    """Raise CtxError if a model is not a classifier, or a label of the suite is not one of its labels."""
    if not isinstance(predictor.task, SequenceClassification):
        raise CtxError(
            f"The task {predictor.task.name} has no labels of texts.",
            location=predictor.model.name_or_path,
            hint="use a model of the task sequence-classification.",
        )
    for test in suite.tests:
        for label in test.labels:
            if label not in predictor.task.labels:
                raise CtxError(
                    f"The model has no label {label!r}, which the test {test.name!r} uses.",
                    location=f"{location}, {predictor.model.name_or_path}",
                    hint=f"pass --label_names NAME=LABEL with one of: {', '.join(predictor.task.labels)}.",
                )


def _predict_function(predictor: Predictor, batch_size: int) -> Predict:
    """Probabilities of the labels of the model."""

    def predict(texts: Sequence[Texts]) -> list[Probabilities]:
        examples = [SequenceExample(pair, predictor.task.labels[0], "") for pair in texts]
        return [result["probabilities"] for result in predictor.predict(examples, batch_size)]

    return predict


def behavior_result(
    outcomes: Mapping[str, Sequence[BehaviorOutcome]], sources: Sequence[str], settings: dict[str, Any]
) -> AnalysisResult:
    """Failure rates by capability and kind and by test, and three failures of each test."""
    tables, failures, values = [], [], {}
    for name, tests in outcomes.items():
        rates = rates_by_capability(tests)
        cells = [[rates[capability].get(kind) for kind in KINDS] for capability in rates]
        tables.append(Table(f"{name}: failure rate by capability and kind of test", KINDS, list(rates), cells))
        shown = [(outcome, failure) for outcome in tests for failure in outcome.failures[:SHOWN_FAILURES]]
        failures.append(
            Table(
                f"{name}: failures, at most {SHOWN_FAILURES} of each test",
                ["text", "changed text", "expected", "predicted"],
                [outcome.test.name for outcome, _ in shown],
                [
                    [
                        " / ".join(item.texts),
                        " / ".join(item.variant) if item.variant else None,
                        item.expected,
                        item.predicted,
                    ]
                    for _, item in shown
                ],
            )
        )
        values[name] = {
            outcome.test.name: {
                "capability": outcome.test.capability,
                "kind": outcome.test.kind,
                "cases": outcome.cases,
                "failure_rate": outcome.failure_rate,
                "failures": [asdict(failure) for failure in outcome.failures],
            }
            for outcome in tests
        }
    names, first = list(outcomes), next(iter(outcomes.values()))
    rows = [outcome.test.name for outcome in first]
    by_test = [[outcomes[name][index].failure_rate for name in names] for index in range(len(rows))]
    cells_by_test = [[o.test.kind, o.cases, *rates] for o, rates in zip(first, by_test, strict=True)]
    tables.append(Table("Failure rate by test", ["kind", "cases", *names], rows, cells_by_test))
    figure = Heatmap(
        "tests", "Failure rate of each test", rows, names, by_test, low=0.0, high=1.0,
        row_label="test", column_label="model", caption="Share of the cases that fail; 0 is best.",
    )  # fmt: skip
    return AnalysisResult("behavior", sources, settings, [*tables, *failures], [figure], values)
