"""Behavioral tests: perturbations, suite files, failure rates and the command."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from commands import command_output, save, save_summary, tiny_pair

from hf_ctxmodels import CtxError
from hf_ctxmodels.analysis.behavior.outcomes import (
    Case,
    Failure,
    evaluate_test,
    make_cases,
    rates_by_capability,
)
from hf_ctxmodels.analysis.behavior.perturbations import perturb
from hf_ctxmodels.analysis.behavior.suite import fill_templates, read_suite
from hf_ctxmodels.core.command_line import packaged_folder


@pytest.mark.parametrize(
    ("name", "value", "text", "expected"),
    [
        ("punctuation", None, "So it is!", ["So it is", "So it is."]),
        ("contractions", None, "It is not his.", ["It's not his."]),
        ("contractions", None, "I'm sure they aren't. Can't we?", ["I am sure they are not. Cannot we?"]),
        ("negation", None, "The film was good and is long.", ["The film was not good and is long."]),
        ("negation", None, "It isn't good, I cannot stay.", ["It is good, I cannot stay."]),
        ("negation", None, "No verb here.", []),
        ("negation", None, "Let's go in May.", []),
        ("negation", None, "Good. Will she come?", ["Good. Will not she come?"]),
        ("names", ["Anna", "Ben"], "Anna saw Anna's banana.", ["Ben saw Ben's banana."]),
        ("places", ["Rome", "Oslo"], "From Rome to Oslo.", []),
        ("replace", {"film": "movie"}, "Film or films, a film.", ["Movie or films, a movie."]),
        ("append", ["Yes.", "No."], "Well. ", ["Well. Yes.", "Well. No."]),
        ("prepend", ["Yes."], "Well.", ["Yes. Well."]),
        ("numbers", None, "Version 1.5 and x2.", []),
    ],
)
def test_perturbations(name: str, value: Any, text: str, expected: list[str]) -> None:
    assert perturb((text,), name, value, Random(0)) == [(variant,) for variant in expected]


def test_random_perturbations() -> None:
    """A typo swaps two adjacent letters; a number keeps its digit count; only the last text of a pair changes."""
    for seed in range(20):
        ((premise, typo),) = perturb(("a premise", "ab 12 hello"), "typos", 1, Random(seed))
        assert premise == "a premise"
        differences = [index for index, (a, b) in enumerate(zip("ab 12 hello", typo, strict=True)) if a != b]
        assert differences[1] == differences[0] + 1
        assert sorted(typo) == sorted("ab 12 hello")
        ((number,),) = perturb(("In 10 of 7 cases",), "numbers", None, Random(seed))
        words = number.split()
        assert (len(words[1]), len(words[3])) == (2, 1)
        assert (words[1], words[3]) != ("10", "7")
    numbers = {perturb(("7 10",), "numbers", None, Random(seed))[0][0] for seed in range(2000)}
    digits, tens = ({int(number.split()[i]) for number in numbers} for i in range(2))
    assert digits == {*range(10)} - {7}
    assert tens == {*range(11, 100)}
    assert perturb(("x x", "1"), "typos", 1, Random(0)) == []
    assert perturb(("a", "b"), "order", None, Random(0)) == [("b", "a")]
    assert perturb(("a", "a"), "order", None, Random(0)) == []


def test_fill_templates() -> None:
    lexicons = {"name": ["Ann", "Bo", "Cy"], "word": ["x", "y"]}
    texts = fill_templates([("{name1} and {name2}",), ("{word} {word}", "{name}")], lexicons, 100, Random(0))
    assert len(texts) == 3 * 2 + 2 * 3
    assert ("x x", "Bo") in texts
    assert ("Ann and Ann",) not in texts
    sample = fill_templates([("{word} of {name}",)], {**lexicons, "name": [str(i) for i in range(90)]}, 7, Random(1))
    assert len(set(sample)) == 7
    # four in five combinations repeat a name
    lexicons["number"] = [str(number) for number in range(90)]
    names = "{name1} {name2} {name3} {number}"
    assert len(set(fill_templates([(names,)], lexicons, 100, Random(0)))) == 100
    assert len(set(fill_templates([(names,)], lexicons, 1000, Random(0)))) == 6 * 90
    assert fill_templates([("{word1} {word2} {word3} {number}",)], lexicons, 10, Random(0)) == []


SUITE = """
lexicons: {good: [good, fine], name: [Anna, Ben]}
tests:
  - {name: words, capability: vocabulary, kind: MFT, templates: ["{name} is {good}.", "bad"], label: pos}
  - {name: names, capability: names, kind: INV, templates: ["{name} is {good}."], perturbation: {names: [Anna, Ben]}}
  - name: additions
    capability: vocabulary
    kind: DIR
    templates: ["It is {good}."]
    perturbation: {append: [Yes., No.]}
    label: pos
    change: decrease
    tolerance: 0.1
"""


def test_words_of_suites_are_texts(tmp_path: Path) -> None:
    """YAML's booleans and numbers are words as they are written; mappings can be merged."""
    text = """
lexicons: {answer: &words [no, 1.50], other: *words}
tests:
  - &test {name: a, capability: c, kind: MFT, templates: ["{answer} {other}"], label: [1, yes]}
  - {<<: *test, name: b}
"""
    (tmp_path / "suite.yaml").write_text(text)
    suite = read_suite(tmp_path / "suite.yaml")
    assert suite.lexicons == {"answer": ["no", "1.50"], "other": ["no", "1.50"]}
    assert suite.tests == [replace(suite.tests[1], name="a"), suite.tests[1]]
    assert suite.tests[1].labels == ("1", "yes")


def test_failures_of_constructed_model(tmp_path: Path) -> None:
    """The model prefers "good" and penalizes "Ben"; "Yes." changes its output within the tolerance, "No." beyond it."""

    def predict(texts: Sequence[tuple[str, ...]]) -> list[dict[str, float]]:
        values = []
        for (text,) in texts:
            value = 0.7 * ("good" in text) - 0.5 * ("Ben" in text) + 0.05 * ("Yes" in text) + 0.2 * ("No" in text)
            values.append({"pos": value, "neg": 1 - value})
        return values

    file = tmp_path / "suite.yaml"
    file.write_text(SUITE)
    suite = read_suite(file)
    outcomes = []
    for test in suite.tests:
        cases = make_cases(test, suite, [], seed=3)
        assert cases == make_cases(test, suite, [], seed=3)
        outcomes.append(evaluate_test(test, cases, predict))
    words, names, additions = outcomes
    assert words.cases == 5  # only "Anna is good." passes
    assert sorted(failure.texts[0] for failure in words.failures) == [
        "Anna is fine.",
        "Ben is fine.",
        "Ben is good.",
        "bad",
    ]
    assert words.failures[0].expected == "pos"
    assert names.failure_rate == 0.5  # with "good", the label depends on the name
    assert {failure.variant for failure in additions.failures} == {("It is good. No.",), ("It is fine. No.",)}
    assert rates_by_capability(outcomes) == {"vocabulary": {"MFT": 0.8, "DIR": 1.0}, "names": {"INV": 0.5}}
    relabeled = suite.with_labels({"pos": "1"})
    assert [test.labels for test in relabeled.tests] != [test.labels for test in suite.tests]
    unfillable = replace(suite.tests[0], templates=(("{name1} {name2}",),))
    with pytest.raises(CtxError, match="No combination of the lexicons"):
        make_cases(unfillable, replace(suite, lexicons={"name": ["Ann"]}), [], 0)
    without_templates = replace(suite.tests[1], templates=())
    with pytest.raises(CtxError, match="changes none of 1 texts"):
        make_cases(without_templates, suite, [("nobody",)], 0)


@pytest.mark.parametrize(
    ("change", "passing", "failing"), [("increase", [0.25, 1.0], [0.125]), ("decrease", [0.75, 0.0], [0.875])]
)
def test_tolerance_of_changes(change: str, passing: list[float], failing: list[float], tmp_path: Path) -> None:
    """A change against the direction of at most the tolerance passes; a failure names both probabilities."""
    (tmp_path / "suite.yaml").write_text(SUITE)
    test = replace(read_suite(tmp_path / "suite.yaml").tests[2], change=change, tolerance=0.25)
    probabilities = {("original",): 0.5, **{(str(value),): value for value in [*passing, *failing]}}

    def predict(texts: Sequence[tuple[str, ...]]) -> list[dict[str, float]]:
        return [{"neg": 1 - probabilities[text], "pos": probabilities[text]} for text in texts]

    variants = [(str(value),) for value in passing]
    assert evaluate_test(test, [Case(("original",), tuple(variants))], predict).failures == []
    variants += [(str(value),) for value in failing]
    outcome = evaluate_test(test, [Case(("original",), tuple(variants)), Case(variants[0])], predict)
    failure = Failure(("original",), variants[-1], f"{change} from pos (0.50)", f"pos ({failing[0]:.2f})")
    assert outcome.failures == [failure]
    assert outcome.failure_rate == 0.5


@pytest.mark.parametrize(
    ("path", "value", "message", "location"),
    [
        ((), [1], "Expected keys and values in a suite", ""),
        (("tests",), [], "The file has no tests", ", tests"),
        (("tests",), {"name": "t"}, "tests is not a list", ", tests"),
        (("lexicons", "good"), [], "Expected a list of words", ", lexicons.good"),
        (("tests", 0, "kind"), "mft", "Unknown kind 'mft'", ", kind"),
        (("tests", 0, "labels"), "pos", "did you mean label", ", labels"),
        (("tests", 0, "perturbation"), "typos", "does not read perturbation", ", perturbation"),
        (("tests", 0, "templates", 1), "{god}", "no lexicon 'god'", ", templates"),
        (("tests", 0, "templates", 1), {"a": "b"}, "Expected a text or a pair", ", templates"),
        (("tests", 1, "name"), "words", "Two tests have the name", ", name"),
        (("tests", 1, "perturbation"), "typo", "did you mean typos", ", perturbation"),
        (("tests", 1, "perturbation"), {"typos": 0}, "Expected at least one", ", perturbation.typos"),
        (("tests", 1, "perturbation"), {"append": "Yes."}, "Expected at least one", ", perturbation.append"),
        (("tests", 1, "perturbation"), {"order": 1}, "has no value", ", perturbation"),
        (("tests", 1, "perturbation"), "append", "needs a value", ", perturbation"),
        (("tests", 1, "cases"), 0, "out of range", ", cases"),
        (("tests", 2, "change"), "up", "use increase or decrease", ", change"),
        (("tests", 2, "tolerance"), "much", "expected type float", ", tolerance"),
        (("tests", 2), {"kind": "DIR"}, "A test has no name and no capability", ""),
        (("tests", 2), {"name": "n", "capability": "c", "kind": "MFT"}, "A test has no templates and no label", ""),
    ],
)
def test_invalid_suite_raises(path: tuple, value: Any, message: str, location: str, tmp_path: Path) -> None:
    content = yaml.safe_load(SUITE)
    if path:
        target = content
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    file = tmp_path / "suite.yaml"
    file.write_text(yaml.safe_dump(content if path else value))
    with pytest.raises(CtxError, match=f"(?s){message}|where.*{message}") as error:
        read_suite(file)
    assert re.search(rf"suite\.yaml:\d+{location}\n", f"{error.value}")
    repeated_key = SUITE.replace("label: pos}", "label: pos, label: neg}")
    for text, problem in (("tests: [", "is not valid YAML"), (repeated_key, "'label' occurs twice")):
        file.write_text(text)
        with pytest.raises(CtxError, match=problem):
            read_suite(file)


def test_behavior_command(tmp_path: Path) -> None:
    """The packaged suite on two models, and a test on texts of a file."""
    suite = read_suite(packaged_folder("behavior") / "sentiment.yaml")
    template_texts = [template for test in suite.tests for texts in test.templates for template in texts]
    template_texts += [" ".join(entries) for entries in suite.lexicons.values()]
    for family in ("word2vec", "glove"):
        fields = {"id2label": {0: "0", 1: "1", 2: "2"}, "max_position_embeddings": 64}
        save(tmp_path / family, *tiny_pair(family, "AutoModelForSequenceClassification", template_texts, **fields))
    flags = {"model": [tmp_path / "word2vec", tmp_path / "glove"], "suite": "sentiment", "max_length": 32}
    error = command_output("analyze behavior", **flags, output_dir=tmp_path / "a", fails=True)
    assert "has no label 'positive'" in error
    flags["label_names"] = ["positive=1", "negative=0"]
    output = command_output("analyze behavior", **flags, output_dir=tmp_path / "a")
    assert "glove: failure rate by capability and kind of test" in output
    joint_values = json.loads((tmp_path / "a" / "behavior.json").read_text())["values"]
    flags["model"] = tmp_path / "glove"
    command_output("analyze behavior", **flags, output_dir=tmp_path / "b")
    assert json.loads((tmp_path / "b" / "behavior.json").read_text())["values"]["glove"] == joint_values["glove"]
    assert {test["cases"] for test in joint_values["glove"].values()} <= set(range(40, 101))
    (tmp_path / "own.yaml").write_text("tests: [{name: t, capability: c, kind: INV, perturbation: typos}]")
    flags |= {"suite": tmp_path / "own.yaml", "output_dir": tmp_path / "c"}
    assert "The test 't' has no templates" in command_output("analyze behavior", **flags, fails=True)
    (tmp_path / "texts.txt").write_text("one text\nanother text\n")
    command_output("analyze behavior", **flags, text=tmp_path / "texts.txt")
    assert json.loads((tmp_path / "c" / "behavior.json").read_text())["values"]["glove"]["t"]["cases"] == 2


def test_default_max_length_is_the_length_of_fine_tuning(tmp_path: Path) -> None:
    texts = ["so it is good", "so it is bad", "so it was"]
    fields = {"id2label": {0: "neg", 1: "pos", 2: "none"}, "initializer_range": 0.5}
    save(tmp_path / "bert", *tiny_pair("bert", "AutoModelForSequenceClassification", texts, **fields))
    save_summary(tmp_path / "bert", "sequence-classification", max_length=4)
    fields = {"perturbation": {"append": ["bad", "good", "was"]}, "label": "pos", "change": "increase"}
    suite = {"tests": [{"name": "t", "capability": "c", "kind": "DIR", **fields}]}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(suite))
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    flags = {"model": tmp_path / "bert", "suite": tmp_path / "own.yaml", "text": tmp_path / "texts.txt"}
    command_output("analyze behavior", **flags, output_dir=tmp_path / "a")
    assert json.loads((tmp_path / "a" / "behavior.json").read_text())["values"]["bert"]["t"]["failure_rate"] == 0
    command_output("analyze behavior", **flags, max_length=16, output_dir=tmp_path / "b")
    assert json.loads((tmp_path / "b" / "behavior.json").read_text())["values"]["bert"]["t"]["failure_rate"] > 0
