"""Suite `recurrent`: the table has one row per case, and references have equal outputs and gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks import recurrent, recurrent_pretraining, sentence_encoders
from benchmarks.settings import Settings
from zoo import TINY, tiny_config, with_random_parameters

from hf_ctxmodels import CtxElmoConfig, CtxElmoModel, CtxElmoTokenizer, CtxError
from hf_ctxmodels.registry import FAMILIES

CPU = torch.device("cpu")
TINY_FIELDS = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
ELMO_SIZES = {**TINY_FIELDS, "num_characters": 262, "max_characters_per_token": 50}
# At 20 words some sentences are shorter than the batch; the step-by-step encoder is slow.
CASES = [replace(case, batch_size=4, length=9 if case.architecture == "encoder" else 20) for case in recurrent.CASES]
REFERENCES = [
    (sentence_encoders, "reference_encoder"),
    (recurrent_pretraining, "reference_autoencoder"),
    (recurrent_pretraining, "reference_translator"),
]
FAMILY_CASES = {case.architecture: case for case in CASES if case.architecture in FAMILIES}


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    family = recurrent.get_family("elmo")
    monkeypatch.setitem(family.sizes, "base", ELMO_SIZES)
    monkeypatch.setattr(recurrent, "SIZES", {"input_size": 5, "cell_size": 8, "projection_size": 6})
    ulmfit_sizes = {"hidden_size": 6, "cell_size": 8, "num_hidden_layers": 3}
    monkeypatch.setitem(recurrent.get_family("ulmfit").sizes, "base", ulmfit_sizes)
    for name, case in FAMILY_CASES.items():
        family = FAMILIES[name]
        field_names = family.config.__dataclass_fields__.keys()
        options = dict.fromkeys({"train_pretrained_embeddings"} & field_names, True)
        config = tiny_config(family, **options)
        fields = {field: getattr(config, field) for field in {*TINY, *options} & field_names}
        monkeypatch.setitem(family.sizes, case.size, fields)
    monkeypatch.setattr(recurrent, "CASES", CASES)


@pytest.mark.slow
def test_table_has_one_row_per_case() -> None:
    results = list(recurrent.run(Settings(repeats=2)))
    rows = recurrent.table(results).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + len(CASES)
    results = list(recurrent.run(Settings(repeats=2, only="encoder, inf")))
    assert [result.case.architecture for result in results] == ["encoder"]


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_references_equal_models_in_outputs_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of the word embeddings, which depend on all layers, with all weights random."""
    models: list[Any] = []

    def with_random_weights(build_reference: Any) -> Any:
        def build(model: Any, *args: Any, **kwargs: Any) -> Any:
            models.append(with_random_parameters(model, 0))
            return build_reference(model, *args, **kwargs)

        return build

    for module, function in REFERENCES:
        monkeypatch.setattr(module, function, with_random_weights(getattr(module, function)))
    torch.manual_seed(0)
    forwards = recurrent._BUILDERS[name](FAMILY_CASES[name], CPU, torch.float32)
    embeddings = [module.weight for module in models[0].modules() if isinstance(module, torch.nn.Embedding)]
    results = []
    for forward in forwards:
        output = forward()
        results.append((output, *torch.autograd.grad(output.square().sum(), embeddings)))
    for actual, expected in zip(*results, strict=True):
        assert float(actual.detach().abs().max()) > 1e-3
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_stepwise_encoder_equals_elmo() -> None:
    """The clipping limits are low enough to be active."""
    config = CtxElmoConfig(**{**ELMO_SIZES, "cell_clip": 0.2, "projection_clip": 0.1})
    torch.manual_seed(0)
    model = with_random_parameters(CtxElmoModel(config), 0).eval()
    texts = ["One cat sat.", "Two", "The old red cat slept under a tree."]
    batch = CtxElmoTokenizer.from_words([])(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    output = recurrent.stepwise_encoder(model, **batch)
    torch.testing.assert_close(output[mask], model(**batch).last_hidden_state[mask])
    assert float(output[mask].abs().max()) > 0.1


def test_different_outputs_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "stepwise_encoder", lambda _, input_ids, **__: torch.ones(*input_ids.shape[:2], 32))
    with pytest.raises(CtxError, match="outputs differ"):
        list(recurrent.run(Settings(repeats=2, only="encoder")))
