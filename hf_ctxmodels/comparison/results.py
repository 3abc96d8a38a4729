"""Files of a comparison: `results.jsonl`, `costs.jsonl`, `table.md`, figures, and `report.html`."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

from hf_ctxmodels.analysis.figures import DotPlot, Figure, LineChart
from hf_ctxmodels.analysis.report.page import render_report
from hf_ctxmodels.analysis.results import AnalysisResult, Table, mean_and_std
from hf_ctxmodels.comparison.measures import COST, Measure
from hf_ctxmodels.comparison.plan import BUDGETS, Plan
from hf_ctxmodels.comparison.runner import Comparison, Record
from hf_ctxmodels.core.output_files import wrap_write_errors, write_text_file

RESULTS_FILE, COSTS_FILE = "results.jsonl", "costs.jsonl"
TABLE_FILE, REPORT_FILE = "table.md", "report.html"
_BUDGET_TITLES = {"words": "Equal words", "flops": "Equal FLOPs", "minutes": "Equal time"}
_MOST_FREQUENT = "most_frequent"
_MAX_LINES = 8  # of a figure, in addition to baselines
_MAX_PANELS = 4  # of a figure
_AXES = {"words": "words", "flops": "FLOPs", "seconds": "seconds of training"}


def write_results(comparison: Comparison) -> list[AnalysisResult]:
    """Write all files from the finished parts, and return a result for each budget with a finished run."""
    folder, plan = comparison.folder, comparison.plan
    records, costs = list(comparison.records()), list(comparison.cost_records())
    write_text_file(folder / RESULTS_FILE, "".join(record.line() for record in records))
    write_text_file(folder / COSTS_FILE, "".join(record.line() for record in costs))
    results = []
    for budget in plan.budget:
        if any(record.budget == budget for record in records):
            result = budget_result(comparison, budget, records, costs)
            result.save(folder)
            results.append(result)
    tables = [f"## {table.title}\n\n{table.markdown()}" for result in results for table in result.tables]
    write_text_file(folder / TABLE_FILE, "\n\n".join(tables) + "\n")
    if results:
        write_text_file(folder / REPORT_FILE, render_report(results, title="Controlled comparison"))
    _remove_other_results(folder, results)
    return results


def _remove_other_results(folder: Path, results: Sequence[AnalysisResult]) -> None:
    """Remove the results and figures of a previous plan with other budgets or measures."""
    names = {f"{result.analysis}-{figure.name}" for result in results for figure in result.figures}
    names |= {result.analysis for result in results}
    with wrap_write_errors(folder):
        for file in chain.from_iterable(folder.glob(f"comparison-{budget}*") for budget in BUDGETS):
            if file.suffix in (".json", ".md", ".svg", ".png") and file.stem not in names:
                file.unlink(missing_ok=True)  # another process may remove it


class Scores:
    """Values by variant, step, measure and metric, one for each seed.

    The seeds of a variant differ in the number of steps if machines of different speed ran them with a budget in
    minutes. Their checkpoints are then aligned from the last one backwards, and labeled with the steps of the longest
    run.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        records = list(records)
        self._values: dict[tuple, list[float]] = defaultdict(list)
        self.steps: dict[str, set[int]] = defaultdict(set)
        matched_steps = _match_checkpoints(records)
        for record in records:
            # a baseline has a record for each tokenizer, which are averaged
            variant = record.variant if record.budget is not None else record.variant.partition(" (")[0]
            step = matched_steps.get((record.variant, record.seed, record.step), record.step)
            self._values[variant, step, record.measure, record.metric].append(record.value)
            if step is not None:
                self.steps[record.variant].add(step)

    def values(self, variant: str, step: int | None, measure: str, metric: str) -> list[float]:
        """The values of all seeds."""
        return self._values.get((variant, step, measure, metric), [])

    def names(self, measures: Collection[str]) -> list[str]:
        """The variants or baselines with values of some measures."""
        return list(dict.fromkeys(name for name, _, measure, _ in self._values if measure in measures))

    def statistics(self, variant: str, step: int | None, measure: str, metric: str) -> tuple[Any, Any]:
        """Mean and standard deviation; None for none."""
        values = self.values(variant, step, measure, metric)
        return mean_and_std(values) if values else (None, None)


def _match_checkpoints(records: Sequence[Record]) -> dict[tuple[str, int | None, int | None], int]:
    """Variant, seed and step of a checkpoint -> step of the same checkpoint in the longest run of the variant."""
    runs: dict[str, dict[int | None, set[int]]] = defaultdict(lambda: defaultdict(set))
    for record in records:
        if record.step:  # the initial weights remain step 0
            runs[record.variant][record.seed].add(record.step)
    matched_steps: dict[tuple[str, int | None, int | None], int] = {}
    for variant, seeds in runs.items():
        checkpoints = {seed: sorted(steps, reverse=True) for seed, steps in seeds.items()}
        longest = max(checkpoints.values(), key=lambda steps: (len(steps), steps[0]))
        for seed, steps in checkpoints.items():
            for step, matched in zip(steps, longest):
                matched_steps[variant, seed, step] = matched
    return matched_steps


def budget_result(
    comparison: Comparison, budget: str, records: Sequence[Record], costs: Sequence[Record]
) -> AnalysisResult:
    """Tables and figures of the runs of a budget."""
    plan = comparison.plan
    scores = Scores(record for record in (*records, *costs) if record.budget == budget)
    baselines = Scores(record for record in records if record.budget is None)
    metrics = main_metrics(comparison)
    variants = [variant.name for variant in plan.variants if scores.steps[variant.name]]
    figures: list[Figure] = [*score_figures(plan, metrics, variants, scores, baselines)]
    for measure in plan.measures:
        if measure.name in metrics:
            figures += measure_figures(measure, metrics[measure.name][0], variants, scores, baselines)
    title = f"{_BUDGET_TITLES[budget]}: {plan.budget[budget]:,.10g} {budget}"
    notes = [
        f"{measure.name} {method}: {', '.join(names)}."
        for measure in plan.measures
        for method, names in comparison.methods(measure).items()
    ]
    if non_finite := comparison.non_finite_values(budget):
        notes.append(f"Infinite or not a number, and left out: {'; '.join(non_finite)}.")
    tables = [
        result_table(plan, title, metrics, variants, scores, baselines, " ".join(notes)),
        *contrast_tables(plan, f"{title}, differences", metrics, [r for r in records if r.budget == budget]),
        initial_table(plan, f"{title}, random weights", metrics, variants, scores),
        cost_table(f"{title}, costs", variants, scores),
    ]
    settings = {
        "dataset": plan.dataset,
        "budget": {budget: plan.budget[budget]},
        "seeds": plan.seeds,
        "variants": {variant.name: {"family": variant.family, **variant.recipe} for variant in plan.variants},
        "excluded": plan.excluded,
    }
    return AnalysisResult(f"comparison-{budget}", variants, settings, tables, figures)


def main_metrics(comparison: Comparison) -> dict[str, list[str]]:
    """Measure -> its metrics in the table: the first one, and the selectivity of a probe or the accuracy of a
    generator."""
    metrics = {}
    for measure in comparison.plan.measures:
        if names := comparison.metric_names(measure):
            further = [name for name in ("selectivity", "generator") if name in names[1:]]
            metrics[measure.name] = [names[0], *further]
    return metrics


def result_table(
    plan: Plan,
    title: str,
    metrics: dict[str, list[str]],
    variants: Sequence[str],
    scores: Scores,
    baselines: Scores,
    notes: str,
) -> Table:
    """The final scores of the variants, and rows for random weights, baselines and chance."""
    columns = [(measure, metric) for measure, names in metrics.items() for metric in names]
    cells: list[list[Any]] = []
    spreads: list[list[Any]] = []
    steps = {variant: max(scores.steps[variant]) for variant in variants}
    for variant in variants:
        statistics = [scores.statistics(variant, steps[variant], *column) for column in columns]
        cells.append([value for value, _ in statistics])
        spreads.append([deviation for _, deviation in statistics])
    rows = list(variants)
    initial, most_frequent = [], []
    for measure, metric in columns:
        values = [value for variant in variants for value in scores.values(variant, 0, measure, metric)]
        initial.append(mean(values) if values else None)
        # a baseline that `Senses` reports with the score of each model
        values = [value for name in variants for value in scores.values(name, steps[name], measure, _MOST_FREQUENT)]
        most_frequent.append(mean(values) if values and metric == metrics[measure][0] else None)
    rows.append("random weights, mean")
    cells.append(initial)
    for name in baselines.names(metrics):
        rows.append(name)
        cells.append([baselines.statistics(name, None, *column)[0] for column in columns])
    if any(value is not None for value in most_frequent):
        rows.append(_MOST_FREQUENT)
        cells.append(most_frequent)
    chances = {measure.name: measure.chance for measure in plan.measures}
    if any(chances[measure] is not None for measure, _ in columns):
        rows.append("chance")
        cells.append([chances[measure] if metric == metrics[measure][0] else None for measure, metric in columns])
    spreads += [[None] * len(columns) for _ in rows[len(variants) :]]
    seeds = f"Mean and standard deviation of up to {len(plan.seeds)} seeds. " if len(plan.seeds) > 1 else ""
    return Table(
        title,
        _column_titles(columns, metrics),
        rows,
        cells,
        spreads if len(plan.seeds) > 1 else None,
        note=f"{seeds}Empty cells: the measure is not defined for the family, or not finished. Probes and senses: the "
        f"best layer. {notes}",
    )


def _column_titles(columns: Sequence[tuple[str, str]], metrics: dict[str, list[str]]) -> list[str]:
    """Title of each column, a measure and one of its metrics: the measure, and the metric unless it is the first."""
    return [measure if metric == metrics[measure][0] else f"{measure}, {metric}" for measure, metric in columns]


def _compared_columns(metrics: dict[str, list[str]]) -> list[tuple[str, str]]:
    """The measures with their first metric, and with the selectivity of a probe."""
    return [
        (measure, metric)
        for measure, names in metrics.items()
        for metric in names
        if metric in (names[0], "selectivity")
    ]


def contrast_tables(plan: Plan, title: str, metrics: dict[str, list[str]], records: Sequence[Record]) -> list[Table]:
    """A table of the differences between two variants at their last checkpoints; none without contrasts that have a
    finished run of both variants with the same seed."""
    last_steps: dict[tuple[str, int | None], int] = defaultdict(int)
    for record in records:
        run = record.variant, record.seed
        last_steps[run] = max(last_steps[run], record.step or 0)
    final: dict[tuple[str, str, str], dict[int | None, float]] = defaultdict(dict)  # seed -> score
    for record in records:
        # a run may have no score of its last checkpoint: not measured yet, or not finite
        if (record.step or 0) == last_steps[record.variant, record.seed]:
            final[record.variant, record.measure, record.metric][record.seed] = record.value
    columns = _compared_columns(metrics)
    rows = {}
    for description, pair in plan.contrasts.items():
        cells = []
        for column in columns:
            first, second = (final[name, *column] for name in pair)
            cells.append(_difference_text([first[seed] - second[seed] for seed in first if seed in second]))
        if any(cells):
            rows[f"{description}: {pair[0]} - {pair[1]}"] = cells
    if not rows:
        return []
    note = (
        "Mean difference of the scores of both variants with the same seed, and the lowest and the highest difference. "
        "An asterisk marks differences of at least three seeds that all have the same sign."
    )
    return [Table(title, _column_titles(columns, metrics), list(rows), list(rows.values()), note=note)]


def _difference_text(differences: Sequence[float]) -> str | None:
    """The mean of the differences, and their range if there are several."""
    if not differences:
        return None
    text, low, high = f"{mean(differences):+.3f}", min(differences), max(differences)
    if len(differences) > 1:
        text += f" [{low:+.3f}, {high:+.3f}]"
    return text + ("*" if len(differences) >= 3 and low * high > 0 else "")


def initial_table(
    plan: Plan, title: str, metrics: dict[str, list[str]], variants: Sequence[str], scores: Scores
) -> Table:
    """The scores of the initial weights."""
    measures = [measure.name for measure in plan.measures if measure.name in metrics and measure.checkpoints != "last"]
    cells = [
        [scores.statistics(variant, 0, measure, metrics[measure][0])[0] for measure in measures] for variant in variants
    ]
    return Table(title, measures, variants, cells)


def cost_table(title: str, variants: Sequence[str], scores: Scores) -> Table:
    """Parameters, words, FLOPs, time and memory of the runs."""
    columns = {
        "million parameters": ("parameters", 1e-6),
        "million words": ("words", 1e-6),
        "TFLOPs": ("flops", 1e-12),
        "minutes": ("seconds", 1 / 60),
        "peak MB": ("peak_bytes", 1e-6),
    }
    cells = []
    for variant in variants:
        last = max(scores.steps[variant])
        values = [scores.values(variant, last, COST, metric) for metric, _ in columns.values()]
        scales = [scale for _, scale in columns.values()]
        cells.append([median(numbers) * scale if numbers else None for numbers, scale in zip(values, scales)])
    note = (
        "Words: steps times the mean number of words of a step. FLOPs: steps times the FLOPs of a step, counted by "
        "torch. Minutes: training without evaluation. Peak: highest resident memory of the training process. Minutes "
        "and peak: the median over the seeds."
    )
    return Table(title, list(columns), variants, cells, digits=2, note=note)


def reference_values(measure: Measure, metric: str, baselines: Scores) -> dict[str, float]:
    """Baselines of a metric, and chance if the measure has it."""
    values = {
        name: mean(numbers)
        for name in baselines.names([measure.name])
        if (numbers := baselines.values(name, None, measure.name, metric))
    }
    return values if measure.chance is None else {**values, "chance": measure.chance}


def score_figures(
    plan: Plan, metrics: dict[str, list[str]], variants: Sequence[str], scores: Scores, baselines: Scores
) -> list[DotPlot]:
    """The scores of the initial weights and of the last checkpoints, in figures of up to four panels: one for each
    measure, and one for the selectivity of a probe."""
    measures = {measure.name: measure for measure in plan.measures}
    columns = _compared_columns(metrics)
    panels, references = {}, {}
    for title, (measure, metric) in zip(_column_titles(columns, metrics), columns):
        panels[title] = {
            "random weights": [scores.values(name, 0, measure, metric) for name in variants],
            "trained": [scores.values(name, max(scores.steps[name]), measure, metric) for name in variants],
        }
        references[title] = reference_values(measures[measure], metric, baselines)
    caption = "Circles: initial weights. Squares: the last checkpoint of each seed. Lines: baselines."
    figures = []
    for start in range(0, len(panels), _MAX_PANELS):
        titles = list(panels)[start : start + _MAX_PANELS]
        number = start // _MAX_PANELS + 1
        figures.append(
            DotPlot(
                f"scores-{number}" if len(panels) > _MAX_PANELS else "scores",
                "Scores before and after training" + (f" ({number})" if len(panels) > _MAX_PANELS else ""),
                variants,
                {title: panels[title] for title in titles},
                {title: references[title] for title in titles},
                caption=caption,
            )
        )
    return figures


def measure_figures(
    measure: Measure, metric: str, variants: Sequence[str], scores: Scores, baselines: Scores
) -> list[Figure]:
    """The score against words, FLOPs and time, with bands from the lowest to the highest seed; several figures for many
    variants."""
    baseline_values = reference_values(measure, metric, baselines)
    figures: list[Figure] = []
    for axis, axis_label in _AXES.items():
        curves = {variant: learning_curve(scores, variant, measure.name, metric, axis) for variant in variants}
        names = [variant for variant, curve in curves.items() if curve]
        num_figures = math.ceil(len(names) / _MAX_LINES)
        for number in range(num_figures):
            group = names[number * len(names) // num_figures : (number + 1) * len(names) // num_figures]
            x = sorted({position for variant in group for position in curves[variant]})
            series: dict[str, Sequence[float | None]] = {}
            bands: dict[str, Sequence[Any]] = {}
            for variant in group:
                points = [curves[variant].get(position) for position in x]
                series[variant] = [None if point is None else mean(point) for point in points]
                bands[variant] = [None if point is None else (min(point), max(point)) for point in points]
            series |= {name: [value] * len(x) for name, value in baseline_values.items()}
            suffix = f"-{number + 1}" if num_figures > 1 else ""
            caption = "Checkpoints of a run, each after twice the steps of the previous one."
            has_bands = any(len(numbers) > 1 for variant in group for numbers in curves[variant].values())
            figures.append(
                LineChart(
                    f"{measure.name}-{axis}{suffix}",
                    f"{measure.name} ({metric}) by {axis_label}" + (f" ({number + 1})" if suffix else ""),
                    x,
                    series,
                    bands if has_bands else None,
                    x_label=axis_label,
                    y_label=metric,
                    log_x=True,
                    join_gaps=True,
                    caption=f"{caption} Bands: lowest and highest seed." if has_bands else caption,
                )
            )
    return figures


def learning_curve(scores: Scores, variant: str, measure: str, metric: str, axis: str) -> dict[float, list[float]]:
    """Position of a checkpoint on an axis (mean over seeds) -> its values; without the initial weights, whose position
    0 a logarithmic axis cannot show."""
    curve: dict[float, list[float]] = {}
    for step in sorted(scores.steps[variant] - {0}):
        positions = scores.values(variant, step, COST, axis)
        values = scores.values(variant, step, measure, metric)
        if positions and values and mean(positions) > 0:
            curve[mean(positions)] = values
    return curve
