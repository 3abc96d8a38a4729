"""Tables and figures of a comparison, from records."""

from pathlib import Path
from typing import Any

import pytest

from hf_ctxmodels.comparison.plan import read_plan
from hf_ctxmodels.comparison.results import Scores, initial_table, measure_figures, result_table, score_figures
from hf_ctxmodels.comparison.runner import Record

MEASURES = ("first", "second", "third", "fourth", "fifth")
VARIANTS = [f"gpt2-{number}" for number in range(9)]


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    (tmp_path / "text.txt").write_text("a cat sat on a mat\n" * 20)
    (tmp_path / "pairs.txt").write_text("a cat sit .\na cat sits .\n")
    measures = "".join(f"  {name}: {{kind: pairs, files: pairs.txt}}\n" for name in MEASURES)
    measures += "  final: {kind: pairs, files: pairs.txt, checkpoints: last}\n"
    variants = "".join(f"  {name}: {{family: gpt2}}\n" for name in VARIANTS)
    (tmp_path / "plan.yaml").write_text(
        "dataset: text.txt\nvocab_size: 300\nbudget: {words: 1000}\nseeds: [0]\n"
        f"pretraining: {{config: tiny, max_length: 32}}\nvariants:\n{variants}measures:\n{measures}"
    )
    return read_plan(tmp_path / "plan.yaml", tmp_path)


def scores(values: dict[tuple[str, int, str, str], float]) -> Scores:
    """Scores of a seed by variant, step, measure and metric."""
    return Scores(
        Record(variant, variant, "words", 0, step, None, None, measure, metric, value, "")
        for (variant, step, measure, metric), value in values.items()
    )


def test_score_figures_have_up_to_four_panels(plan):
    values = {("gpt2-0", step, measure, "accuracy"): 0.1 * step for step in (0, 8) for measure in MEASURES}
    metrics = {measure: ["accuracy"] for measure in MEASURES}
    arguments = (["gpt2-0"], scores(values), scores({}))
    first, second = score_figures(plan, metrics, *arguments)
    assert [first.name, second.name] == ["scores-1", "scores-2"]
    titles = ["Scores before and after training (1)", "Scores before and after training (2)"]
    assert [first.title, second.title] == titles
    assert [*first.panels, *second.panels] == list(MEASURES)
    assert second.panels == {"fifth": {"random weights": [[0.0]], "trained": [[0.8]]}}
    metrics.pop("fifth")
    (figure,) = score_figures(plan, metrics, *arguments)
    assert (figure.name, figure.title) == ("scores", "Scores before and after training")


def test_curves_of_many_variants_are_several_figures(plan):
    values = {(variant, 8, "first", "accuracy"): 0.5 for variant in VARIANTS}
    values |= {(variant, 8, "cost", "words"): 1000.0 for variant in VARIANTS}
    figures = measure_figures(plan.measures[0], "accuracy", VARIANTS, scores(values), scores({}))
    assert [figure.name for figure in figures] == ["first-words-1", "first-words-2"]
    assert [figure.title for figure in figures] == ["first (accuracy) by words (1)", "first (accuracy) by words (2)"]
    assert [[name for name in figure.series if name in VARIANTS] for figure in figures] == [VARIANTS[:4], VARIANTS[4:]]
    (figure,) = measure_figures(plan.measures[0], "accuracy", VARIANTS[:8], scores(values), scores({}))
    assert (figure.name, figure.title) == ("first-words", "first (accuracy) by words")


def test_most_frequent_sense_is_a_baseline_of_the_first_metric(plan):
    metrics = {"first": ["f1", "accuracy"]}
    values = {"f1": 0.7, "accuracy": 0.6, "most_frequent": 0.5}
    final = scores({("gpt2-0", 8, "first", metric): value for metric, value in values.items()})
    table = result_table(plan, "title", metrics, ["gpt2-0"], final, scores({}), "")
    cells = dict(zip(table.rows, table.cells, strict=True))
    assert cells["gpt2-0"] == [0.7, 0.6]
    assert cells["most_frequent"] == [0.5, None]


def test_table_of_random_weights_has_no_measures_of_the_last_checkpoint(plan):
    values = {("gpt2-0", step, "first", "accuracy"): 0.25 for step in (0, 8)}
    values["gpt2-0", 8, "final", "accuracy"] = 0.75
    metrics = {"first": ["accuracy"], "final": ["accuracy"]}
    table = initial_table(plan, "title", metrics, ["gpt2-0"], scores(values))
    assert (table.columns, table.rows, table.cells) == (["first"], ["gpt2-0"], [[0.25]])


def test_seeds_of_different_length_are_matched_by_checkpoint(plan):
    """A budget in minutes has other numbers of steps on another machine."""
    values = {0: {0: 0.1, 4: 0.3, 8: 0.5}, 1: {0: 0.3, 5: 0.5, 10: 0.7}}  # by seed and step
    matched = Scores(
        Record("gpt2-0", "gpt2", "minutes", seed, step, 100 * step, None, measure, metric, value, "")
        for seed, scores_by_step in values.items()
        for step, score in scores_by_step.items()
        for measure, metric, value in (("first", "accuracy", score), ("cost", "words", 100.0 * step))
    )
    table = result_table(plan, "title", {"first": ["accuracy"]}, ["gpt2-0"], matched, scores({}), "")
    assert table.cells[0] == [pytest.approx(0.6)]
    (figure,) = score_figures(plan, {"first": ["accuracy"]}, ["gpt2-0"], matched, scores({}))
    assert figure.panels["first"] == {"random weights": [[0.1, 0.3]], "trained": [[0.5, 0.7]]}
    (curve, *_) = measure_figures(plan.measures[0], "accuracy", ["gpt2-0"], matched, scores({}))
    assert (curve.x, curve.series["gpt2-0"]) == ([450.0, 900.0], [pytest.approx(0.4), pytest.approx(0.6)])
