"""The table of recurrent layers: every case has a row, and the peers compute the same."""

import pytest
import torch
from zoo import TINY, randomised

from hf_ctxmodels import CtxElmoConfig, CtxElmoModel, CtxElmoTokenizer, CtxError
from hf_ctxmodels.benchmarks import recurrent
from hf_ctxmodels.benchmarks.recurrent import Case

FIELDS = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
SMALL = {**FIELDS, "num_characters": 262, "max_characters_per_token": 50}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    family = recurrent.get_family("elmo")
    monkeypatch.setitem(family.sizes, "base", SMALL)
    monkeypatch.setattr(recurrent, "SIZES", {"input_size": 5, "cell_size": 8, "projection_size": 6})
    stack = {"hidden_size": 6, "cell_size": 8, "num_hidden_layers": 3}
    monkeypatch.setitem(recurrent.get_family("ulmfit").sizes, "base", stack)
    kinds = ("lstm", "encoder", "stack", "sentences")
    cases = [Case(what, 3, 9, trains, 1.0) for what in kinds for trains in (False, True)]
    monkeypatch.setattr(recurrent, "CASES", cases)


def test_every_case_has_a_row() -> None:
    results = list(recurrent.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa"))
    rows = recurrent.table(results).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + 8
    chosen = list(recurrent.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa", only="encoder, inf"))
    assert [result.case.what for result in chosen] == ["encoder"]


def test_word_by_word_gives_the_models_output() -> None:
    """Also where something is clipped."""
    config = CtxElmoConfig(**{**SMALL, "cell_clip": 0.2, "projection_clip": 0.1})
    torch.manual_seed(0)
    model = randomised(CtxElmoModel(config), 0).eval()
    texts = ["One cat sat.", "Two", "The old red cat slept under a tree."]
    batch = CtxElmoTokenizer.from_words([])(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    got = recurrent.word_by_word(model, **batch)
    torch.testing.assert_close(got[mask], model(**batch).last_hidden_state[mask])
    assert float(got[mask].abs().max()) > 0.1


def test_a_peer_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "word_by_word", lambda model, input_ids, **_: torch.ones(*input_ids.shape[:2], 32))
    with pytest.raises(CtxError, match="outputs differ"):
        list(recurrent.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa", only="encoder"))
