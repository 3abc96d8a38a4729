"""Probing runs: all families, the command, and resuming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import command_output, save, tiny_pair

from hf_ctxmodels.analysis.probing import probing_run
from hf_ctxmodels.analysis.probing.layer_scores import ProbingOptions
from hf_ctxmodels.analysis.probing.layer_tables import probing_result
from hf_ctxmodels.analysis.probing.probes import EdgeOptions, LinearOptions
from hf_ctxmodels.analysis.probing.probing_run import (
    ProbingData,
    ProbingRun,
    TaskResult,
    build_data,
    untrained_model,
)
from hf_ctxmodels.analysis.probing.training import ProbeTraining
from hf_ctxmodels.analysis.results import AnalysisResult, PartialResults
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.treebanks import read_treebank
from hf_ctxmodels.registry import FAMILIES

FAST = ProbeTraining(epochs=1, min_steps=2, evaluations=1)


@pytest.fixture(scope="module")
def texts(treebank_files: dict[str, str]) -> list[str]:
    return [" ".join(sentence.words) for sentence in read_treebank(treebank_files["train"])][:20]


@pytest.fixture(scope="module")
def data(treebank_files: dict[str, str]) -> ProbingData:
    return build_data(["pos", "arc", "distance", "sentlen"], treebank_files, [0], train_sample=10)


def test_score_table_of_two_seeds() -> None:
    """The control task is at the layer with the best mean score; the best untrained layer may be another one."""
    layers = {0: {"score": [0.4, 0.8], "control": [0.5, 0.5]}, 1: {"score": [0.7, 0.7], "control": [0.1, 0.3]}}
    untrained = {"pos": TaskResult({0: {"score": [0.3, 0.5]}, 1: {"score": [0.2, 0.2]}})}
    result = probing_result(
        "bert", {}, {"pos": TaskResult(layers)}, untrained, {"pos": {"majority": 0.25}}, name="probe",
        metrics={"pos": "accuracy"},
    )  # fmt: skip
    table = result.tables[0]
    assert table.columns == ["pos (accuracy)"]
    assert dict(zip(table.rows, [row[0] for row in table.cells])) == {
        "layer 0": pytest.approx(0.6),
        "layer 1": pytest.approx(0.7),
        "control task, best layer": "0.200",
        "untrained, best layer": "0.400",
        "most frequent label": "0.250",
    }
    assert table.spreads[:2] == [[pytest.approx(0.08**0.5)], [pytest.approx(0)]]


def test_all_tables_and_figures(tmp_path: Path) -> None:
    """Means and sample standard deviations of two seeds; a tree is directed as the gold tree where they agree."""
    rows = ["1 I 2 nsubj", "2 saw 0 root", "3 her 2 obj", "4 . 2 punct"]
    columns = [(*row.split()[:2], "_", "PUNCT" if "." in row else "X", "_", "_", *row.split()[2:]) for row in rows]
    (tmp_path / "one.conllu").write_text("\n".join("\t".join([*row, "_", "_"]) for row in columns) + "\n\n")
    (example,) = read_treebank(tmp_path / "one.conllu")
    pos_layers = {
        0: {"score": [0.5, 0.75], "selectivity": [0.25, 0.5], "bits": [2000, 4000], "compression": [2, 1]},
        1: {"score": [0.75, 1], "selectivity": [0.5, 0.5], "bits": [1000, 1000], "compression": [4, 4]},
    }
    mix = {
        "scores": [[0.5, 0.75], [0.75, 0.75], [0.25, 1]], "weights": [[0.5, 0.25], [0.25, 0.25], [0.25, 0.5]],
        "center_of_gravity": [0.75, 1.25], "expected_layer": [0.5, 1.5],
    }  # fmt: skip
    distance_layers = {0: {"score": [0.25, 0.5]}, 1: {"score": [0.5, 0.75]}}
    trees = {0: [[0, 2], [1, 2]], 1: [[0, 1], [0, 2]]}
    trained = {"pos": TaskResult(pos_layers, mix), "distance": TaskResult(distance_layers, trees=trees)}
    untrained = {"pos": TaskResult({0: {"score": [0.25, 0.5]}, 1: {"score": [0.125, 0.125]}})}
    result = probing_result(
        "bert", {}, trained, untrained, {"pos": {"majority": 0.25}, "distance": {}}, name="probe",
        metrics={"pos": "accuracy", "distance": "UUAS"}, example=example,
    )  # fmt: skip
    deviation = 0.125 * 2**0.5  # of two values with a difference of 0.25
    expected = [
        ("Selectivity", [[0.375], [0.5]], [[deviation], [0]], "max"),
        ("Gain", [[0.25], [0.75]], [[None], [None]], "max"),
        ("Compression", [[1.5], [4]], [[0.5**0.5], [0]], "max"),
        ("Online code length", [[3], [1]], [[2**0.5], [0]], "min"),
    ]
    *tables, mix_table = result.tables[1:]
    for table, (title, cells, spreads, best) in zip(tables, expected, strict=True):
        assert table.title.startswith(title)
        assert (table.columns, table.rows, table.best) == (["pos"], ["layer 0", "layer 1"], best)
        assert np.array(table.cells, float) == pytest.approx(np.array(cells, float))
        assert np.array(table.spreads, float) == pytest.approx(np.array(spreads, float), nan_ok=True)
    assert mix_table.rows == ["pos"]
    assert mix_table.cells == [pytest.approx([1, 1, 0.625, 0.25])]  # headroom: 0.75 - 0.5 and 1 - 0.75
    assert mix_table.spreads == [pytest.approx([0.5 * 0.5**0.5, 0.5**0.5, 0.75 * 0.5**0.5, 0])]
    figures: dict[str, Any] = {figure.name: figure for figure in result.figures}
    assert list(figures) == ["layers-pos", "layers-distance", "tasks", "mix-pos", "tree"]
    curves = figures["layers-pos"]
    assert curves.series == {"trained": [0.625, 0.875], "untrained": [0.375, 0.125], "most frequent label": [0.25] * 2}
    assert curves.bands == {"trained": [[0.5, 0.75], [0.75, 1]], "untrained": [[0.25, 0.5], [0.125, 0.125]]}
    assert figures["layers-distance"].series == {"trained": [0.375, 0.625]}
    assert (figures["tasks"].rows, figures["tasks"].values) == (["pos", "distance"], [[0, 0.25], [0, 0.25]])
    assert figures["tasks"].low == 0
    mix_series = {"mixing weight": [0.375, 0.25, 0.375], "gain of the layer": [None, 0.125, -0.125]}
    assert figures["mix-pos"].series == mix_series
    assert figures["tree"].arcs_above == [[1, 0, "nsubj"], [1, 2, "obj"]]
    assert figures["tree"].arcs_below == [[1, 0, ""], [0, 2, ""]]


@pytest.mark.fast_families("bert", "gpt2", "elmo")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_all_families(family: str, texts: list[str], data: ProbingData) -> None:
    """All layers, with trained and untrained weights; static embeddings have only layer 0."""
    model, tokenizer = tiny_pair(family, "AutoModel", texts)
    run = ProbingRun(model, tokenizer, data, ProbingOptions(training=FAST, rank=4), seeds=[0])
    for weights in ("trained", "untrained"):
        results = run.results(weights)  # type: ignore[arg-type]
        assert list(results) == ["pos", "arc", "sentlen", "distance"]
        layers = list(results["pos"].layers)
        assert layers == list(range(len(layers)))
        for result in results.values():
            scores = torch.tensor([numbers["score"][0] for numbers in result.layers.values()])
            assert (scores.isfinite() & (scores >= 0) & (scores <= 1)).all()
        assert results["pos"].layers[0]["compression"][0] > 0
        assert "control" not in results["sentlen"].layers[0]
    assert len(layers) == 1 or family not in ("word2vec", "glove")


def test_untrained_weights_depend_only_on_seed(texts: list[str]) -> None:
    """The random state is restored."""
    model, _ = tiny_pair("bert", "AutoModel", texts, seed=5)
    state = torch.get_rng_state()
    weights, same_seed, other_seed = (untrained_model(model, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name in weights if name.endswith("attention.qkv_proj.weight") or "attention" in name)
    assert torch.equal(weights[name], same_seed[name])
    assert not torch.equal(weights[name], other_seed[name])
    assert not torch.equal(weights[name], model.state_dict()[name])


def test_probe_command(tmp_path: Path, texts: list[str], treebank_files: dict[str, str], monkeypatch: Any) -> None:
    """Tables, figures and values; a resumed run computes only missing results."""
    folder = save(tmp_path / "bert", *tiny_pair("bert", "AutoModel", texts))
    flags: dict[str, Any] = {
        **{f"{split}_file": file for split, file in treebank_files.items()},
        "model": folder, "tasks": ["deprel", "distance", "tense"], "seeds": [0, 1], "mix": True,
        "epochs": 1, "min_steps": 2, "train_sample": 20, "rank": 4, "output_dir": tmp_path / "out",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(probing_run, "untrained_model", lambda model: (_ for _ in ()).throw(CtxError("Interrupted.")))
        assert "Interrupted" in command_output("analyze probe", **flags, fails=True)
    partial_file = tmp_path / "out/probe-partial.json"
    partial = json.loads(partial_file.read_text())
    tasks = {key.partition(",")[0]: result for key, result in partial["results"].items()}
    assert [*tasks] == ["deprel", "tense", "distance"]
    tasks["deprel"]["layers"]["1"]["score"] = [0.125, 0.375]
    partial_file.write_text(json.dumps(partial))

    output = command_output("analyze probe", **flags)
    assert not partial_file.exists()
    result = AnalysisResult.load(tmp_path / "out/probe.json")
    assert result.values["trained"]["deprel"]["layers"]["1"]["score"] == [0.125, 0.375], "read from the partial result"
    assert result.settings["examples"]["tense"]["labels"] == 2
    titles = [table.title.partition(":")[0] for table in result.tables]
    assert titles[:4] == ["Scores by layer", "Selectivity", "Gain", "Compression"]
    assert titles[-1] == "Learned mixes of layers"
    assert "distance (UUAS)" in result.tables[0].columns
    assert "untrained, best layer" in result.tables[0].rows
    assert "most frequent label of the word" in output
    figure_names = {figure.name for figure in result.figures}
    assert {"layers-tense", "tasks", "mix-deprel", "tree"} <= figure_names
    assert (tmp_path / "out/probe-tree.svg").exists()
    assert "--overwrite" in command_output("analyze probe", **flags, fails=True)
    for options, message in (
        ({"layers": "top"}, "Layers are numbers"),
        ({"layers": 9, "mix": False}, "has the layers 0 to"),
        ({"layers": [0, 1]}, "Mixes need all layers"),
        ({"name": "a/b"}, "use letters"),
        ({"probe": "edge", "controls": "code-length"}, "have no code length"),
        ({"tasks": "pso"}, "did you mean"),
        ({"probe": "bilinear", "tasks": "pos"}, "needs pairs"),
        ({"controls": ["none", "untrained"]}, "none cannot be combined"),
    ):
        assert message in command_output("analyze probe", **{"name": "other"} | flags | options, fails=True)


def test_missing_layers_are_added(tmp_path: Path, texts: list[str], treebank_files: dict[str, str]) -> None:
    """Only layers missing in the partial result are trained, with the scores of a joint run; a run with fewer layers
    returns only these, without mixes."""
    data = build_data(["pos", "distance"], treebank_files, [0], train_sample=20)
    model, tokenizer = tiny_pair("bert", "AutoModel", texts)
    options = ProbingOptions(training=FAST, code_length=False)

    def results(layers: list[int] | None, file: Path | None, **run_options: Any) -> Any:
        partial = None if file is None else PartialResults(file, "probe")
        run = ProbingRun(model, tokenizer, data, options, layers, [0], partial=partial, **run_options)
        return run.results("trained")

    def run(layers: list[int] | None, file: Path | None) -> Any:
        return results(layers, file)["pos"].layers

    file = tmp_path / "probe-partial.json"
    partial = run([1], file)
    extended, joint = run(None, file), run(None, None)
    assert set(extended) == set(joint)
    assert extended[1] == partial[1]
    for layer, numbers in joint.items():
        assert extended[layer]["score"] == pytest.approx(numbers["score"], abs=0.02)
    assert results(None, file, mix=True)["pos"].mix is not None
    for result in results([1], file).values():
        assert (list(result.layers), result.mix, set(result.trees) <= {1}) == ([1], None, True)


def test_edge_probe_of_spans_and_multiple_labels(tmp_path: Path, texts: list[str]) -> None:
    """Examples with one or several labels and two spans."""
    record = {
        "text": texts[0],
        "targets": [
            {"span1": [0, 2], "span2": [1, 4], "label": ["a", "b"]},
            {"span1": [2, 3], "span2": [0, 1], "label": "c"},
        ],
    }
    file = tmp_path / "spans.jsonl"
    file.write_text("\n".join(json.dumps(record | {"text": text}) for text in texts))
    data = build_data(["spans"], dict.fromkeys(("train", "dev", "test"), str(file)), [0])
    model, tokenizer = tiny_pair("bert", "AutoModel", texts)
    training = ProbeTraining(learning_rate=0.01, epochs=20, min_steps=60)
    run = ProbingRun(
        model, tokenizer, data, ProbingOptions(EdgeOptions(hidden_size=16), training), layers=[0], seeds=[0]
    )
    scores = run.results("trained")["spans"].layers[0]
    assert scores["score"][0] > 0.9
    assert "bits" not in scores
    assert run.baselines()["spans"]["majority"] == pytest.approx(2 * 2 / (4 + 3))


def test_baselines_use_score_of_probe(texts: list[str], data: ProbingData) -> None:
    """Balanced arcs, all predicted as no arc: F1 of arcs is 0, and micro F1 of all labels 0.5 for edge probes."""
    model, tokenizer = tiny_pair("bert", "AutoModel", texts)
    data = ProbingData({"arc": [replace(data.tasks["arc"][0], positive_label="1")]})
    for probe, score in ((LinearOptions(), 0.0), (EdgeOptions(), 0.5)):
        run = ProbingRun(model, tokenizer, data, ProbingOptions(probe), seeds=[0])
        assert run.baselines()["arc"]["majority"] == pytest.approx(score)
