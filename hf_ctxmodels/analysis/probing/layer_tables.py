"""Tables and figures of probes by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from hf_ctxmodels.analysis.figures import ArcDiagram, BarChart, Figure, Heatmap, LineChart
from hf_ctxmodels.analysis.probing.layer_scores import Scores
from hf_ctxmodels.analysis.probing.probing_run import TaskResult
from hf_ctxmodels.analysis.results import AnalysisResult, Table, mean_and_std
from hf_ctxmodels.data.treebanks import TreebankSentence

Results = Mapping[str, TaskResult]
_Column = tuple[list[float], list[float | None]]  # means and standard deviations
_METRICS = {"distance": "UUAS", "depth": "root accuracy"}
_BASELINE_NAMES = {
    "majority": "most frequent label",
    "word_majority": "most frequent label of the word",
    "chain": "neighbors, or first word",
}


def probing_result(
    model: str,
    settings: dict[str, Any],
    trained: Results,
    untrained: Results,
    baselines: Mapping[str, Mapping[str, float]],
    *,
    name: str,
    metrics: Mapping[str, str],
    example: TreebankSentence | None = None,
) -> AnalysisResult:
    """Tables and figures of the results of all tasks.

    Args:
        model: Name of the model.
        settings: Settings of the run.
        trained, untrained: Results with the weights of the model, and with initial weights, which may be empty.
        baselines: Task -> scores without a model.
        name: Name of the result and its files.
        metrics: Task -> its score.
        example: The sentence whose predicted trees the results of `distance` hold.
    """
    layers = sorted(next(iter(trained.values())).layers)
    tables = [_score_table(layers, trained, untrained, baselines, metrics)]
    tables += _difference_tables(layers, trained, untrained)
    mixed = {task: result.mix for task, result in trained.items() if result.mix is not None}
    figures: list[Figure] = [
        _layer_chart(task, layers, result, untrained.get(task), baselines[task], metrics[task])
        for task, result in trained.items()
    ]
    if len(trained) > 1:
        figures.append(_task_heatmap(layers, trained))
    if mixed:
        tables.append(_mix_table(mixed))
        figures += [_mix_chart(task, mix) for task, mix in mixed.items()]
    if example is not None and trained["distance"].trees:
        figures.append(_arc_diagram(example, layers, trained["distance"]))
    values = {
        "layers": layers,
        "metrics": dict(metrics),
        "baselines": {task: dict(scores) for task, scores in baselines.items()},
        "trained": {task: asdict(result) for task, result in trained.items()},
        "untrained": {task: asdict(result) for task, result in untrained.items()},
    }
    return AnalysisResult(name, [model], settings, tables, figures, values)


def _column(layers: Sequence[int], result: TaskResult, number: str, unit: float = 1.0) -> _Column | None:
    """Means and standard deviations of a number for each layer, in a unit; None if the result lacks it."""
    if number not in result.layers[layers[0]]:
        return None
    return mean_and_std(np.transpose([result.layers[layer][number] for layer in layers]) / unit)


def _score_table(
    layers: Sequence[int],
    trained: Results,
    untrained: Results,
    baselines: Mapping[str, Mapping[str, float]],
    metrics: Mapping[str, str],
) -> Table:
    """Layers in rows, tasks in columns; below, the scores of the controls."""
    columns, values, references = [], [], []
    for task, result in trained.items():
        for number in ("score", "spearman"):
            column = _column(layers, result, number)
            if column is None:
                continue
            columns.append(f"{task} ({metrics[task] if number == 'score' else 'Spearman'})")
            values.append(column)
            reference: dict[str, str] = {}
            control = _column(layers, result, "control") if number == "score" else None
            if control is not None:
                reference["control task, best layer"] = f"{control[0][int(np.argmax(column[0]))]:.3f}"
            if task in untrained:
                scores = _column(layers, untrained[task], number)
                assert scores is not None
                reference["untrained, best layer"] = f"{max(scores[0]):.3f}"
            if number == "score":
                reference |= {_BASELINE_NAMES[baseline]: f"{score:.3f}" for baseline, score in baselines[task].items()}
            references.append(reference)
    names = list(dict.fromkeys(name for reference in references for name in reference))
    cells: list[Sequence[Any]] = list(zip(*(means for means, _ in values)))
    spreads: list[Sequence[float | None]] = list(zip(*(deviations for _, deviations in values)))
    cells += [[reference.get(name) for reference in references] for name in names]
    spreads += [[None] * len(columns) for _ in names]
    note = "Mean ± standard deviation over the seeds of the probes. Layer 0: embeddings."
    rows = [*(f"layer {layer}" for layer in layers), *names]
    return Table("Scores by layer", columns, rows, cells, spreads, best="max", note=note)


def _difference_tables(layers: Sequence[int], trained: Results, untrained: Results) -> list[Table]:
    """Selectivity, gain over untrained weights and compression."""
    rows = [f"layer {layer}" for layer in layers]

    def columns(results: Results, number: str, unit: float = 1.0) -> dict[str, _Column]:
        by_task = {task: _column(layers, result, number, unit) for task, result in results.items()}
        return {task: column for task, column in by_task.items() if column is not None}

    references = columns(untrained, "score")
    gains: dict[str, _Column] = {
        task: (np.subtract(means, references[task][0]).tolist(), [None] * len(layers))
        for task, (means, _) in columns(trained, "score").items()
        if task in references
    }
    entries: list[tuple[str, Literal["max", "min"], dict[str, _Column]]] = [
        ("Selectivity: score minus score of the control task", "max", columns(trained, "selectivity")),
        ("Gain: score minus score of the same layer with untrained weights", "max", gains),
        ("Compression: uniform code length over online code length", "max", columns(trained, "compression")),
        ("Online code length in kilobits (1,000 bits)", "min", columns(trained, "bits", 1000)),
    ]
    tables = []
    for title, best, by_task in entries:
        if by_task:
            cells, spreads = (list(zip(*(column[i] for column in by_task.values()))) for i in range(2))
            tables.append(Table(title, list(by_task), rows, cells, spreads, best=best))
    return tables


def _layer_chart(
    task: str,
    layers: Sequence[int],
    result: TaskResult,
    untrained: TaskResult | None,
    baselines: Mapping[str, float],
    metric: str,
) -> LineChart:
    series: dict[str, Sequence[float | None]] = {}
    bands: dict[str, Sequence[Any]] = {}

    def add(label: str, scores: Mapping[int, Scores], number: str) -> None:
        if number in scores[layers[0]]:
            series[label] = [mean_and_std(scores[layer][number])[0] for layer in layers]
            bands[label] = [(min(scores[layer][number]), max(scores[layer][number])) for layer in layers]

    add("trained", result.layers, "score")
    add("control task", result.layers, "control")
    if untrained is not None:
        add("untrained", untrained.layers, "score")
    for baseline, score in baselines.items():
        series[_BASELINE_NAMES[baseline]] = [score] * len(layers)
    caption = (
        "Bands: lowest and highest of the seeds. Compare with the control task, the untrained model and the majority "
        "baselines."
    )
    return LineChart(
        f"layers-{_file_name(task)}",
        f"{task} by layer",
        list(layers),
        series,
        bands,
        "layer",
        metric,
        caption=caption,
    )


def _task_heatmap(layers: Sequence[int], trained: Results) -> Heatmap:
    rows = []
    for result in trained.values():
        scores = [mean_and_std(result.layers[layer]["score"])[0] for layer in layers]
        rows.append([score - min(scores) for score in scores])
    caption = "Score minus the lowest score of the task over the layers: where each task is easiest to read."
    return Heatmap(
        "tasks", "Gain of each task by layer", list(trained), [str(layer) for layer in layers], rows, low=0.0,
        row_label="task", column_label="layer", caption=caption,
    )  # fmt: skip


def _mix_table(mixed: Mapping[str, Mapping[str, Any]]) -> Table:
    """Center of gravity, expected layer and headroom of each task (Tenney et al. 2019, section 3)."""
    columns = ["center of gravity", "expected layer", "mix of all layers", "contextual headroom"]
    cells, spreads = [], []
    for mix in mixed.values():
        scores = np.array(mix["scores"])  # (layers, seeds)
        numbers = (mix["center_of_gravity"], mix["expected_layer"], scores[-1], scores.max(0) - scores[0])
        pairs = [mean_and_std(values) for values in numbers]
        cells.append([None if np.isnan(mean) else mean for mean, _ in pairs])
        spreads.append([None if spread is None or np.isnan(spread) else spread for _, spread in pairs])
    note = "Headroom: best mix minus layer 0."
    return Table("Learned mixes of layers", columns, list(mixed), cells, spreads, note=note)


def _mix_chart(task: str, mix: Mapping[str, Any]) -> BarChart:
    weights = np.array(mix["weights"])  # (layers, seeds)
    gains = np.diff(np.mean(mix["scores"], 1)).tolist()
    return BarChart(
        f"mix-{_file_name(task)}",
        f"Layers of the mix: {task}",
        [f"layer {layer}" for layer in range(len(weights))],
        {"mixing weight": weights.mean(1).tolist(), "gain of the layer": [None, *gains]},
        "weight, or gain in score",
        caption="Softmax weights of the mix of all layers, and the gain of a mix from adding a layer.",
    )


def _arc_diagram(sentence: TreebankSentence, layers: Sequence[int], result: TaskResult) -> ArcDiagram:
    """Gold arcs without punctuation, and the undirected tree of the best layer, directed as the gold arcs it shares."""
    best = max(layers, key=lambda layer: mean_and_std(result.layers[layer]["score"])[0])
    is_punctuation = sentence.is_punctuation()
    gold = [
        (head, word, relation)
        for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True))
        if head >= 0 and not (is_punctuation[word] or is_punctuation[head])
    ]
    directions = {frozenset((head, word)): (head, word, "") for head, word, _ in gold}
    predicted = [directions.get(frozenset(edge), (edge[0], edge[1], "")) for edge in result.trees[best]]
    return ArcDiagram(
        "tree",
        f"Tree of a sentence from layer {best}",
        sentence.words,
        gold,
        predicted,
        caption="Above, the treebank; below, the minimum spanning tree of the distances of the structural probe.",
    )


def _file_name(task: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in task)


def metric_of(task: str, positive_label: str | None, is_edge: bool) -> str:
    """Name of a task's score."""
    if task in _METRICS:
        return _METRICS[task]
    if is_edge:
        return "micro F1"
    return "accuracy" if positive_label is None else f"F1 of {positive_label}"
