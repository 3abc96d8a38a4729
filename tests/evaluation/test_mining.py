"""Mining of translations, against loops over all pairs and on real sentences."""

import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from commands import command_output, save, tiny_pair
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels import CtxError
from hf_ctxmodels.cli.evaluate_mining import SentenceFile, read_gold
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.evaluation.mining import (
    Candidates,
    ExactSearch,
    FaissSearch,
    Margin,
    MinedPair,
    best_threshold,
    lexical_vectors,
    mine_pairs,
    score_pairs,
)

NEIGHBORS = 3


def noisy_translations(num_sources: int = 14, num_targets: int = 17, num_shared: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randn(size, 6, generator=generator) for size in (num_sources, num_targets))
    target[:num_shared] = source[:num_shared] + 0.4 * torch.randn(num_shared, 6, generator=generator)
    return source, target


def mined_by_loops(source: Tensor, target: Tensor, margin: Margin, candidates: Candidates) -> list[MinedPair]:
    """Equations 2 to 4 and the strategies of Artetxe & Schwenk 2019, sections 3.1 and 3.2, pair by pair."""
    cosine = [[float(F.cosine_similarity(x, y, dim=0)) for y in target] for x in source]

    def nearest(values: Sequence[float]) -> list[int]:
        return sorted(range(len(values)), key=lambda index: -values[index])[:NEIGHBORS]

    columns = [list(column) for column in zip(*cosine, strict=True)]
    combine: Callable[[float, float], float] = {
        "ratio": lambda a, b: a / b,
        "distance": lambda a, b: a - b,
        "absolute": lambda a, b: a,
    }[margin]

    def score(x: int, y: int) -> float:
        sums = sum(cosine[x][z] for z in nearest(cosine[x])), sum(columns[y][z] for z in nearest(columns[y]))
        return combine(cosine[x][y], (sums[0] + sums[1]) / (2 * NEIGHBORS))

    forward = {(x, max(nearest(cosine[x]), key=lambda y: score(x, y))) for x in range(len(source))}
    backward = {(max(nearest(columns[y]), key=lambda x: score(x, y)), y) for y in range(len(target))}
    pairs = {
        "forward": forward,
        "backward": backward,
        "intersection": forward & backward,
        "max": forward | backward,
    }[candidates]
    mined: list[MinedPair] = []
    for x, y in sorted(pairs, key=lambda pair: -score(*pair)):
        if all(x != pair.source and y != pair.target for pair in mined):
            mined.append(MinedPair(x, y, score(x, y)))
    return mined


@pytest.mark.parametrize(("margin", "candidates"), list(product(get_args(Margin), get_args(Candidates))))
def test_mined_pairs_match_loops(margin: Margin, candidates: Candidates) -> None:
    source, target = noisy_translations()
    expected = mined_by_loops(source, target, margin, candidates)
    options = {"neighbors": NEIGHBORS, "margin": margin, "candidates": candidates}
    mined = mine_pairs(source, 3 * target, **options)
    assert [(pair.source, pair.target) for pair in mined] == [(pair.source, pair.target) for pair in expected]
    assert [pair.score for pair in mined] == pytest.approx([pair.score for pair in expected], abs=1e-5)
    faiss_mined = mine_pairs(source, target, search=FaissSearch("Flat"), **options)
    assert [(pair.source, pair.target) for pair in faiss_mined] == [(pair.source, pair.target) for pair in mined]


def test_fewer_sentences_than_neighbors() -> None:
    source, target = noisy_translations(num_sources=2, num_targets=1, num_shared=1)
    (pair,) = mine_pairs(source, target, neighbors=4)
    assert (pair.source, pair.target) == (0, 0)
    with pytest.raises(CtxError, match="no target sentences"):
        mine_pairs(source, target[:0])
    with pytest.raises(CtxError, match="neighbors=0 is out of range"):
        mine_pairs(source, target, neighbors=0)


def test_index_with_missing_neighbors() -> None:
    """An approximate index may return no neighbor of a query, or too few."""

    def search(queries: Tensor, vectors: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
        cosines, indices = ExactSearch()(queries, vectors, neighbors)
        indices[0], cosines[0] = -1, -3e38
        indices[1, 1:], cosines[1, 1:] = -1, -3e38
        return cosines, indices

    vectors = torch.eye(4) + 0.1
    assert {(pair.source, pair.target) for pair in mine_pairs(vectors, vectors)} == {(i, i) for i in range(4)}
    mined = mine_pairs(vectors, vectors, candidates="forward", search=search)
    assert {(pair.source, pair.target) for pair in mined} == {(i, i) for i in range(1, 4)}


def test_faiss_indices_approximate_exact_search() -> None:
    vectors = F.normalize(torch.randn(500, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    exact = ExactSearch()(vectors[:50], vectors, 5)
    assert torch.equal(exact[1][:, 0], torch.arange(50))
    for search in (FaissSearch("HNSW32", "efSearch=64"), FaissSearch("IVF8,Flat", "nprobe=8")):
        cosines, indices = search(vectors[:50], vectors, 5)
        assert (indices == exact[1]).float().mean() > 0.95
        torch.testing.assert_close(cosines[:, 0], exact[0][:, 0])
    for search in (FaissSearch("Tree"), FaissSearch("Flat", "depth=2")):
        with pytest.raises(CtxError, match="faiss does not accept the index"):
            search(vectors, vectors, 1)


def test_missing_faiss_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(CtxError, match=r"hf_ctxmodels\[mining\]"):
        FaissSearch()(torch.eye(2), torch.eye(2), 1)


def test_best_threshold_maximizes_f1() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        scores = torch.randint(0, 8, (12,), generator=generator).sort(descending=True).values.tolist()
        mined = [MinedPair(index, index, float(score)) for index, score in enumerate(scores)]
        gold = {(index, index + int(index % 3 == 2)) for index in torch.randperm(15, generator=generator)[:9].tolist()}
        threshold = best_threshold(mined, gold)
        best = max(score_pairs(mined, gold, limit).f1 for limit in (-1, *(score + 0.5 for score in range(8))))
        assert score_pairs(mined, gold, threshold).f1 == best > 0
    scores = score_pairs([MinedPair(0, 0, 1.0), MinedPair(1, 2, 0.5)], {(0, 0), (1, 1), (2, 2)})
    assert (scores.precision, scores.recall, scores.f1) == pytest.approx((1 / 2, 1 / 3, 2 / 5))
    assert best_threshold([MinedPair(0, 0, 1.0)], {(1, 1)}) == float("inf"), "no pair is accepted"


@pytest.mark.parametrize("language", ["de", "fr", "es"])
def test_lexical_baseline_on_real_sentences(shared_data: Path, language: str) -> None:
    """Without a model: names, numbers and cognates find some of the translations."""
    folder = shared_data / "multilingual" / "mining"
    source, target = (SentenceFile.read(str(folder / f"{language}-en.{side}.gz")) for side in (language, "en"))
    gold = read_gold(str(folder / f"{language}-en.gold"), source, target)
    assert (len(source.sentences), len(target.sentences), len(gold)) == (700, 2000, 400)
    mined = mine_pairs(*lexical_vectors([*source.sentences.values()], [*target.sentences.values()]))
    scores = score_pairs(mined, gold, best_threshold(mined, gold))
    assert 0.1 < scores.f1 < 0.6
    shuffled = {(first, (second + 1) % 2000) for first, second in gold}
    assert score_pairs(mined, shuffled).f1 < 0.02


def write_mining_files(folder: Path, with_ids: bool) -> dict[str, Path]:
    """Write ten sentences and their copies as translations, in another order and among other sentences."""
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu") for b in ("ra", "se", "ti", "vo")]
    generator = torch.Generator().manual_seed(0)
    sentences = [
        " ".join(words[index] for index in torch.randperm(16, generator=generator)[:5].tolist()) for _ in range(30)
    ]
    source, target = sentences[:20], [*sentences[20:], *sentences[9::-1]]
    files = {name: folder / name for name in ("source", "target", "gold")}
    for name, lines in (("source", source), ("target", target)):
        ids = [f"{name}-{number}\t" if with_ids else "" for number in range(1, len(lines) + 1)]
        files[name].write_text("".join(f"{key}{line}\n" for key, line in zip(ids, lines, strict=True)))
    keys = ("source-{}", "target-{}") if with_ids else ("{}", "{}")
    rows = [(keys[0].format(index + 1), keys[1].format(20 - index)) for index in range(10)]
    files["gold"].write_text("".join("\t".join(row) + "\n" for row in rows))
    return files


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mining")
    text = write_mining_files(folder, with_ids=False)["source"].read_text()
    return save(folder / "bert", *tiny_pair("bert", "AutoModel", [text], vocab_size=90, initializer_range=0.2))


@pytest.mark.parametrize("with_ids", [True, False])
def test_mining_command(encoder: Path, tmp_path: Path, with_ids: bool) -> None:
    files, output = write_mining_files(tmp_path, with_ids), tmp_path / "pairs.tsv"
    flags = {**files, "model": encoder, "pooling": "mean", "tuning_share": 0.4, "output_file": output}
    printed = command_output("evaluate mining", **flags)
    (model_line,) = (line for line in printed.splitlines() if line.startswith("model"))
    assert "recall 1.0000" in model_line
    assert float(model_line.split("f1 ")[1].split()[0]) > 0.8
    assert "baseline" in printed
    gold = {tuple(line.split()) for line in files["gold"].read_text().splitlines()}
    rows = [row.values for row in read_table(output, ["margin", "source_id", "target_id", "source", "target"])]
    assert gold <= {(row["source_id"], row["target_id"]) for row in rows}
    assert all((row["source"] == row["target"]) == ((row["source_id"], row["target_id"]) in gold) for row in rows)
    threshold = float(model_line.split("threshold ")[1].split()[0])
    assert min(float(row["margin"]) for row in rows) >= threshold
    assert "--overwrite" in command_output("evaluate mining", **flags, fails=True)
    del flags["gold"], flags["tuning_share"], flags["output_file"]
    printed = command_output("evaluate mining", **flags, threshold=threshold, search="faiss:factory=Flat")
    assert f"{len(rows)} pairs with a margin" in printed


def test_invalid_files_raise(encoder: Path, tmp_path: Path) -> None:
    files = write_mining_files(tmp_path, with_ids=True)
    flags = {"model": encoder, "pooling": "mean", **files}
    without_gold = {name: value for name, value in flags.items() if name != "gold"}
    assert "No threshold" in command_output("evaluate mining", **without_gold, fails=True)
    for name, text, message in (
        ("gold", "source-1\tsource-1\n", "not a pair of ids"),
        ("gold", "\n", "no pairs"),
        ("source", "source-1\tka\nsource-1\tlo\n", "Two sentences have the id 'source-1'"),
        ("source", "source-1\tka\nlo\n", "Expected an id and a sentence, got 'lo'"),
        ("target", "\n", "no sentences"),
    ):
        write_mining_files(tmp_path, with_ids=True)
        files[name].write_text(text)
        assert message in command_output("evaluate mining", **flags, fails=True)


def test_unknown_margins_and_candidates_raise() -> None:
    vectors = torch.eye(3)
    for options, message in (
        ({"margin": "Ratio"}, "margin='Ratio' is unknown"),
        ({"candidates": "best"}, "candidates="),
    ):
        with pytest.raises(CtxError, match=message):
            mine_pairs(vectors, vectors, **options)
