"""The table of recurrent layers: every case has a row, and the peers compute the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks import recurrent, recurrent_pretraining, sentence_encoders
from zoo import TINY, randomised, tiny_config

from hf_ctxmodels import CtxElmoConfig, CtxElmoModel, CtxElmoTokenizer, CtxError
from hf_ctxmodels.registry import FAMILIES

CPU = torch.device("cpu")
FIELDS = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
SMALL = {**FIELDS, "num_characters": 262, "max_characters_per_token": 50}
# of 20 words, some rows are shorter; the peer that goes word by word is slow
CASES = [replace(case, rows=4, length=9 if case.what == "encoder" else 20) for case in recurrent.CASES]
PLAIN = [
    (sentence_encoders, "plain_encoder"),
    (recurrent_pretraining, "plain_autoencoder"),
    (recurrent_pretraining, "plain_translator"),
]
OF_FAMILIES = {case.what: case for case in CASES if case.what in FAMILIES}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    family = recurrent.get_family("elmo")
    monkeypatch.setitem(family.sizes, "base", SMALL)
    monkeypatch.setattr(recurrent, "SIZES", {"input_size": 5, "cell_size": 8, "projection_size": 6})
    stack = {"hidden_size": 6, "cell_size": 8, "num_hidden_layers": 3}
    monkeypatch.setitem(recurrent.get_family("ulmfit").sizes, "base", stack)
    for name, case in OF_FAMILIES.items():
        family = FAMILIES[name]
        own = (
            {"train_pretrained_embeddings": True}
            if "train_pretrained_embeddings" in family.config.__dataclass_fields__
            else {}
        )
        tiny = tiny_config(family, **own)
        fields = {field: getattr(tiny, field) for field in {*TINY, *own} & {*family.config.__dataclass_fields__}}
        monkeypatch.setitem(family.sizes, case.size, fields)
    monkeypatch.setattr(recurrent, "CASES", CASES)


def test_every_case_has_a_row() -> None:
    results = list(recurrent.run(CPU, torch.float32, repeats=2, attention="sdpa"))
    rows = recurrent.table(results).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + len(CASES)
    chosen = list(recurrent.run(CPU, torch.float32, repeats=2, attention="sdpa", only="encoder, inf"))
    assert [result.case.what for result in chosen] == ["encoder"]


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_a_familys_peer_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose every weight matters; and the gradient of the words' vectors, which come through all layers."""
    models: list[Any] = []

    def with_noise(plain: Any) -> Any:
        def build(model: Any, *args: Any, **kwargs: Any) -> Any:
            models.append(randomised(model, 0))
            return plain(model, *args, **kwargs)

        return build

    for module, function in PLAIN:
        monkeypatch.setattr(module, function, with_noise(getattr(module, function)))
    torch.manual_seed(0)
    sides = recurrent._BUILDERS[name](OF_FAMILIES[name], CPU, torch.float32)
    tables = [module.weight for module in models[0].modules() if isinstance(module, torch.nn.Embedding)]
    found = []
    for side in sides:
        output = side()
        found.append((output, *torch.autograd.grad(output.square().sum(), tables)))
    for ours, peers in zip(*found, strict=True):
        assert float(ours.detach().abs().max()) > 1e-3
        torch.testing.assert_close(ours, peers, atol=1e-5, rtol=1e-4)


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
        list(recurrent.run(CPU, torch.float32, repeats=2, attention="sdpa", only="encoder"))
