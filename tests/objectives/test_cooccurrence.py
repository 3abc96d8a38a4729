"""Co-occurrence counts against a reference loop, in memory and with temporary files."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hf_ctxmodels import CtxGloveTokenizer, DataCollatorForCooccurrence
from hf_ctxmodels.objectives import Cooccurrence
from hf_ctxmodels.objectives.cooccurrence import CooccurrenceCounter

DOCUMENTS = [np.random.default_rng(seed).integers(0, 12, size=size) for seed, size in enumerate([200, 1, 2, 57, 130])]


def reference_counts(window: int, symmetric: bool, weighted: bool) -> dict[tuple[int, int], float]:
    cells: Counter[tuple[int, int]] = Counter()
    for ids in DOCUMENTS:
        for position, word in enumerate(ids.tolist()):
            for distance in range(1, window + 1):
                if position - distance >= 0:
                    context_word, value = int(ids[position - distance]), 1 / distance if weighted else 1
                    cells[word, context_word] += value
                    if symmetric:
                        cells[context_word, word] += value
    return cells


def read_counts(counter: CooccurrenceCounter, seed: int = 0) -> dict[tuple[int, int], float]:
    counts: dict[tuple[int, int], float] = {}
    for words, contexts, values in counter.cells(np.random.default_rng(seed)):
        for word, context, value in zip(words.tolist(), contexts.tolist(), values.tolist(), strict=True):
            assert (word, context) not in counts
            counts[word, context] = value
    return counts


@pytest.mark.parametrize("memory_cells", [1_000_000, 20], ids=["memory", "files"])
@pytest.mark.parametrize(("window", "symmetric", "weighted"), [(4, True, True), (3, False, True), (500, True, False)])
def test_counts_match_reference_loop(
    window: int, symmetric: bool, weighted: bool, memory_cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ctxmodels.objectives.cooccurrence._PAIRS_PER_SORT", 100)
    counter = CooccurrenceCounter(
        12, window=window, symmetric=symmetric, weighted=weighted, memory_cells=memory_cells, directory=tmp_path
    )
    for document in DOCUMENTS:
        counter.add(document)
    counts = read_counts(counter)
    assert (counter.spills > 1) == (memory_cells == 20)
    assert not list(tmp_path.iterdir()), "temporary files were not deleted"
    expected = reference_counts(window, symmetric, weighted)
    assert counts.keys() == expected.keys()
    for cell, value in expected.items():
        assert counts[cell] == pytest.approx(value, rel=1e-5), cell
    assert read_counts(counter) == {}


def test_cell_order_depends_on_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        counter = CooccurrenceCounter(12)
        for document in DOCUMENTS:
            counter.add(document)
        orders.append(list(read_counts(counter, seed).items()))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


class TestObjective:
    TEXT = [["a b a c.", "b unheard a"], ["c"], ["a b"]]

    @pytest.fixture
    def tokenizer(self) -> CtxGloveTokenizer:
        return CtxGloveTokenizer.from_words(["a", "b", "c"], [4, 3, 2], split_punctuation=True)

    def test_rows_contain_each_cell_once(self, tokenizer) -> None:
        rows = list(Cooccurrence(tokenizer, max_length=4, seed=1, window=2).examples(self.TEXT))
        assert [len(row["input_ids"]) for row in rows[:-1]] == [4] * (len(rows) - 1)
        cells = {}
        for row in rows:
            for word, context, value in zip(row["input_ids"], row["context_ids"], row["cooccurrences"], strict=True):
                words = tuple(tokenizer.convert_ids_to_tokens([int(word), int(context)]))
                assert words not in cells
                cells[words] = value
        # documents `a b a c b a` and `a b`: unknown words are dropped, and windows cross sentences
        expected = {("a", "b"): 1 + 1 + 0.5 + 1 + 1, ("a", "a"): 2 * 0.5, ("a", "c"): 1 + 0.5, ("b", "c"): 1 + 0.5}
        expected |= {(second, first): value for (first, second), value in expected.items()}
        assert cells == pytest.approx(expected)

    def test_collator_pads(self, tokenizer) -> None:
        row = {"input_ids": np.array([2, 3]), "context_ids": np.array([3, 4]), "cooccurrences": np.array([1.5, 0.5])}
        short = {name: value[:1] for name, value in row.items()}
        batch = DataCollatorForCooccurrence(tokenizer)([row, short])
        assert batch["input_ids"].tolist() == [[2, 3], [2, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
        assert batch["labels"].tolist() == [[3, 4], [3, -100]]
        assert batch["cooccurrences"].tolist() == [[1.5, 0.5], [1.5, 1.0]]
