"""Analysis results: files, Markdown, and invalid JSON."""

import json

import numpy as np
import pytest

from hf_ctxmodels.analysis.figures import Heatmap, can_write_png
from hf_ctxmodels.analysis.results import AnalysisResult, PartialResults, Table, mean_and_std
from hf_ctxmodels.core.errors import CtxError


@pytest.fixture
def result() -> AnalysisResult:
    cells, spreads = [[0.5, 3, "a|b"], [0.75, None, "<b>"]], [[0.01, None, None], [0.002, None, None]]
    table = Table("POS *by* layer", ["accuracy", "examples", "note"], ["layer 0", "layer 1"], cells, spreads, "max")
    figure = Heatmap("heat", "Scores", ["a"], ["b"], [[0.5]], caption="Accuracy.")
    return AnalysisResult(
        "probe-pos", ["bert"], {"seeds": (1, 2), "text": "Zoë"}, [table], [figure], {"accuracy": [0.5, float("nan")]}
    )


def test_mean_and_std():
    """Sample statistics over the first axis; no standard deviation for a single value."""
    assert mean_and_std([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_and_std(np.array([[1.0, 5.0], [3.0, 5.0]])) == ([2.0, 5.0], pytest.approx([2**0.5, 0]))
    assert mean_and_std([4.0]) == (4.0, None)
    assert mean_and_std([[4.0, 5.0]]) == ([4.0, 5.0], [None, None])


def test_partial_results(tmp_path):
    """Reloaded only with the same identity and data; not saved before the minimum interval."""
    file, data = tmp_path / "partial.json", tmp_path / "dev.tsv"
    data.write_text("a")
    partial = PartialResults(file, {"seeds": (1, 2)}, [data])
    partial.results["line"] = {"0": 0.5}
    partial.save(min_interval=60)
    assert not file.exists()
    partial.save()
    assert PartialResults(file, {"seeds": [1, 2]}, [data]).results == {"line": {"0": 0.5}}
    assert PartialResults(file, {"seeds": [1]}, [data]).results == {}
    data.write_text("b")
    assert PartialResults(file, {"seeds": [1, 2]}, [data]).results == {}
    file.write_text("{")
    assert PartialResults(file, {"seeds": [1, 2]}, [data]).results == {}


@pytest.mark.parametrize("source", ["texts", "texts/*.txt", "texts:split=train"])
def test_partial_results_depend_on_all_files(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    partial = PartialResults("partial.json", "lines", [source])
    partial.results["line"] = {"0": 0.5}
    partial.save()
    assert PartialResults("partial.json", "lines", [source]).results
    (tmp_path / "texts" / "a.txt").write_text("b")
    assert not PartialResults("partial.json", "lines", [source]).results


@pytest.mark.parametrize("has_package", [True, False])
def test_saved_files(result, tmp_path, capsys, monkeypatch, has_package):
    if not has_package:
        monkeypatch.setattr("hf_ctxmodels.analysis.figures.base.find_spec", lambda name: None)
    elif not can_write_png():
        pytest.skip("needs resvg_py (extra `figures`)")
    result.save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    images = {"probe-pos-heat.svg"} | ({"probe-pos-heat.png"} if has_package else set())
    assert names == {"probe-pos.json", "probe-pos.md"} | images
    assert has_package != ("hf_ctxmodels[figures]" in capsys.readouterr().err)
    assert AnalysisResult.load(tmp_path / "probe-pos.json") == result
    image = "probe-pos-heat.png" if has_package else "probe-pos-heat.svg"
    markdown = (tmp_path / "probe-pos.md").read_text()
    assert "| layer 0 | 0.500 ± 0.010 | 3 | a\\|b |" in markdown
    assert "| layer 1 | **0.750 ± 0.002** | – | \\<b\\> |" in markdown
    assert f"![Accuracy.]({image})" in markdown
    assert "## POS \\*by\\* layer" in markdown
    assert '"text": "Zoë"' in markdown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Cannot read the result of an analysis: Expecting property name"),
        ('{"a": 1}', "not the result of an analysis"),
        ('{"format": "hf_ctxmodels analysis", "version": 99}', "version 99"),
        ('{"format": "hf_ctxmodels analysis", "version": 1}', "damaged: KeyError"),
    ],
)
def test_invalid_result_raises(tmp_path, text, message):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(CtxError, match=message) as error:
        AnalysisResult.load(file)
    assert error.value.location == str(file)
    assert error.value.hint


def test_damaged_figure_or_table_raises(result, tmp_path):
    for section, damage in (
        ("figures", {"values": [[1, 2]]}),
        ("figures", {"title": None, "unknown": 1}),
        ("tables", {"rows": []}),
    ):
        result.save(tmp_path)
        values = json.loads((tmp_path / "probe-pos.json").read_text())
        values[section][0].update(damage)
        (tmp_path / "probe-pos.json").write_text(json.dumps(values))
        with pytest.raises(CtxError, match="The result of the analysis is damaged"):
            AnalysisResult.load(tmp_path / "probe-pos.json")
