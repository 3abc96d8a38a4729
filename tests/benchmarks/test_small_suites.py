"""Suites `adapters`, `bands`, `compression`, `features`, `serving`, `sharing` and `vocabulary-loss` at tiny sizes, and
their tables; the table of scripts/compare_compression.py."""

from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks import (
    adapters,
    bands,
    compression,
    encoders,
    features,
    serving,
    serving_processes,
    sharing,
    vocabulary_loss,
)
from benchmarks.cases import Case
from benchmarks.serving_processes import RUNTIMES, installed_runtimes
from benchmarks.settings import Settings
from commands import command_output, save, tiny_pair

CPU = torch.device("cpu")
# Lan et al. 2019, table 3, in millions: all parameters shared, none shared.
PUBLISHED = {64: (10, 87), 128: (12, 89), 256: (16, 93), 768: (31, 108)}


def rows_of(table: str) -> list[str]:
    """Body rows of a table; asserts that all rows have the same number of cells."""
    header, _, *rows = table.splitlines()
    assert {row.count("|") for row in rows} == {header.count("|")}
    return rows


def test_adapters_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(adapters.CASES[0], layers=2, width=64, length=9, batch=2, config={"vocab_size": 300})
    monkeypatch.setattr(adapters, "CASES", [tiny, replace(tiny, fill=1.0)])
    results = list(adapters.run(Settings(repeats=2)))
    assert len(rows_of(adapters.table(results))) == 2
    assert {result.parameters for result in results} == {2 * (2 * 64 * 4 + 4 + 64)}


def test_bands_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "WINDOW", 40)
    monkeypatch.setattr(bands, "TARGETS", {150: (None, 1.0), 200: (3.0, None)})
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        torch.manual_seed(0)
        outputs = {name: step() for name, step in bands.steps(200, CPU, dtype).items()}
        torch.testing.assert_close(outputs["band"], outputs["mask"], atol=tolerance, rtol=tolerance)
        assert not torch.allclose(outputs["band"], outputs["causal"], atol=1e-2)
    rows = rows_of(bands.table(list(bands.run(Settings(repeats=2)))))
    assert [row.split("|")[1].strip() for row in rows] == ["150", "200"]
    (result,) = bands.run(Settings(repeats=1, only="T=150"))
    assert result.length == 150


def test_compare_compression_script(tmp_path: Path) -> None:
    """One row per compression method; low-rank factors have fewer parameters."""
    texts = [f"the {color} {animal} sleeps" for color in ("red", "old", "small") for animal in ("cat", "dog", "bird")]
    folder = save(tmp_path / "model", *tiny_pair("bert", "AutoModel", texts))
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    pairs = [f"{first}\t{second}\t{len(first) - len(second)}" for first, second in pairwise(texts)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["a\tb\tscore", *pairs]), encoding="utf-8")
    flags = {"model": folder, "texts": tmp_path / "texts.txt", "output_file": tmp_path / "table.md", "repeats": 1}
    command_output(
        Path(__file__).parents[2] / "scripts" / "compare_compression.py",
        *("--pooling", "mean", "--ranks", 4, "--energies", 0.5, "--int8_rank", 4),
        *(argument for name, value in flags.items() for argument in (f"--{name}", value)),
        *("--similarity", f"{tmp_path / 'pairs.tsv'}=a,b,score"),
    )
    rows = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in rows_of((tmp_path / "table.md").read_text())}
    assert list(rows) == [
        *("float32", "bfloat16", "int8", "rank 4, plain", "rank 4, activations"),
        *("energy 0.5, plain", "energy 0.5, activations", "rank 4, activations, int8"),
    ]
    parameters = {name: int(cells[0].replace(",", "")) for name, cells in rows.items()}
    assert parameters["rank 4, plain"] == parameters["rank 4, activations"] < parameters["float32"]
    assert all(-1 <= float(cells[-1]) <= 1 for cells in rows.values())


@pytest.mark.slow
def test_features_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run itself checks that both implementations compute the same vectors."""
    monkeypatch.setattr(features, "NUM_SENTENCES", 40)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setattr(features, "SHAPE", sizes)
    results = list(features.run(Settings(repeats=1)))
    assert [row.split("|")[1].strip() for row in rows_of(features.table(results))] == ["last", "all"]


def test_compression_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "TARGETS", {128: (1e9, None)})
    case = Case("bert", "inference", 1, 128, 16, 2, 1.0, None, None, config={"vocab_size": 2000})
    (result,) = compression.run(Settings(repeats=2), cases=[case])
    sizes = result.sizes
    float32, bfloat16, int8 = (sizes[f"hf_ctxmodels, {name}"] for name in ("float32", "bfloat16", "int8 by token"))
    assert float32 > 1.9 * bfloat16 > 1.9 * 1.8 * int8
    assert result.cosines["transformers, float32"] == pytest.approx(1, abs=1e-5)
    assert 0.99 < result.cosines["hf_ctxmodels, int8 by token"] < 0.999999
    rows = rows_of(compression.table([result]))
    assert [row.split("|")[2].strip() for row in rows] == [*result.measurements]
    assert [("missed" in row) for row in rows] == [("int8" in name) for name in result.measurements]
    assert not [*compression.run(Settings(repeats=2, only="no such"), cases=[case])]


@pytest.mark.slow
def test_serving_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(serving, "_PAUSE", 0)
    case = Case("bert", "inference", 1, 64, 16, 2, 0.5, None, None, config={"vocab_size": 200})
    results = list(serving.run(Settings(repeats=2), cases=[case]))
    assert [result.name for result in results] == [
        "batches in random order",
        "batches sorted by length",
        "one sentence",
    ]
    runtimes = installed_runtimes()
    for result in results:
        assert [*result.measurements] == [*result.differences] == runtimes
        assert all(1e-5 < result.differences[name] < 0.1 for name in runtimes if "int8" in name)
        assert max(result.differences[name] for name in runtimes if "int8" not in name) < 1e-5
    assert len(rows_of(serving.table(results))) == 3 * len(runtimes)


@pytest.mark.parametrize("nncf", [None, ModuleSpec("nncf", None)])
def test_serving_suite_has_openvino_int8_only_with_nncf(monkeypatch: pytest.MonkeyPatch, nncf: ModuleSpec) -> None:
    monkeypatch.setattr(serving_processes, "find_spec", {"nncf": nncf}.get)
    assert [name for name in RUNTIMES if name not in installed_runtimes()] == ([] if nncf else ["OpenVINO int8"])


def test_sharing_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(sharing.CASE, layers=3, width=64, length=25, batch=2, config={"vocab_size": 300})
    monkeypatch.setattr(sharing, "CASE", tiny)
    results = list(sharing.run(Settings(repeats=2)))
    assert len(rows_of(sharing.table(results))) == 4 * len(sharing.EMBEDDING_SIZES)
    for start in range(0, len(results), 4):
        parameters = {result.case.config["parameter_sharing"]: result.parameters for result in results[start:][:4]}
        assert parameters["all"] < parameters["ffn"] < parameters["attention"] < parameters["none"]
        assert all(result.encoder_parameters < result.parameters for result in results)
    selected = list(sharing.run(Settings(repeats=1, only="E=128")))
    assert {result.case.config["embedding_size"] for result in selected} == {128}


@pytest.mark.parametrize("width", sharing.EMBEDDING_SIZES)
def test_parameter_counts_of_sharing_match_paper(width: int) -> None:
    """Excluded: the pooler, and the projection if E = H, which the paper does not have."""
    for scope, expected in zip(("all", "none"), PUBLISHED[width], strict=True):
        config = {"embedding_size": width, "parameter_sharing": scope}
        with torch.device("meta"):
            model = encoders.build_model(replace(sharing.CASE, workload="inference", config=config))
        excluded = ["pooler", "projection"] if width == sharing.CASE.width else ["pooler"]
        parameters = [p for name, p in model.named_parameters() if not any(part in name for part in excluded)]
        assert abs(sum(parameter.numel() for parameter in parameters) / 1e6 - expected) < 1


def test_vocabulary_loss_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_loss, "SHAPES", ((8, 16, 50), (9, 16, 50)))
    results = list(vocabulary_loss.run(Settings(repeats=2)))
    assert max(result.difference for result in results) < 1e-6
    rows = rows_of(vocabulary_loss.table(results))
    assert [row.split("|")[1].strip() for row in rows] == ["8", "9"]
