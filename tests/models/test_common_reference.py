"""Every family, every Auto class: opens reference checkpoints, and writes ones the reference opens by itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from zoo import PEERED, REPRESENTATIVES, Case, assert_same_outputs, make_batch

# Runs in a process of its own: opens every exported folder as a user without this package would.
OPEN_EXPORTS = """
import json, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file

torch.set_num_threads(1)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    wanted = json.loads((folder / "wanted.json").read_text())
    model, report = getattr(transformers, wanted["class"]).from_pretrained(folder / "export", output_loading_info=True)
    auto = getattr(transformers, wanted["auto"]).from_pretrained(folder / "export")
    encoder, encoder_report = transformers.AutoModel.from_pretrained(folder / "export", output_loading_info=True)
    found = {
        "class": type(auto).__name__,
        "encoder": type(encoder).__name__,
        "problems": {key: sorted(map(str, value)) for key, value in report.items() if value},
        "encoder_missing": sorted(map(str, encoder_report["missing_keys"])),
        "config": model.config.to_dict(),
    }
    (folder / "found.json").write_text(json.dumps(found))
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "found.safetensors")
assert not [name for name in sys.modules if name.startswith("hf_ctxmodels")]
"""

PEERED_BASES = [case for case in PEERED if case.is_base]


@pytest.fixture(params=PEERED, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Every model class that transformers has too."""
    return request.param


@pytest.fixture(params=[case for case in REPRESENTATIVES if case.has_peer], ids=str)
def head(request: pytest.FixtureRequest) -> Case:
    """One of each forward, and every head that pretrains a family."""
    return request.param


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every case: a reference checkpoint, ours opened from it, its export, and what the reference finds there."""
    root = tmp_path_factory.mktemp("exports")
    for case in PEERED:
        folder = root / str(case)
        case.reference_model(seed=3).save_pretrained(folder / "reference")
        case.model_class.from_pretrained(folder / "reference").export_reference(folder / "export")
        wanted = {"class": case.reference_class.__name__, "auto": case.auto_name}
        (folder / "wanted.json").write_text(json.dumps(wanted))
    done = subprocess.run([sys.executable, "-c", OPEN_EXPORTS, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root


class TestOpening:
    def test_every_key_and_the_outputs(self, case: Case, exports: Path) -> None:
        folder = exports / str(case) / "reference"
        model, report = case.model_class.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        batch = make_batch(case)
        assert_same_outputs(model.eval()(**batch), case.reference_model(seed=3)(**batch), batch["attention_mask"])

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_configuration(self, case: Case, exports: Path) -> None:
        """Every field the two have in common."""
        ours = case.family.config.from_pretrained(exports / str(case) / "reference").to_dict()
        reference = case.reference_config().to_dict()
        own = ("model_type", "architectures", "dtype", "transformers_version")
        shared = {name: case.config().reference_name(name) for name in ours.keys() - set(own)}
        shared = {name: other for name, other in shared.items() if other in reference}
        assert {"vocab_size", "hidden_size", "num_hidden_layers"} <= shared.keys()
        for name, other in shared.items():
            assert ours[name] == reference[other], name

    def test_the_encoder_opens_every_head(self, head: Case, exports: Path) -> None:
        encoder = head.family.models["AutoModel"].from_pretrained(exports / str(head) / "reference").eval()
        reference = head.reference_model(seed=3).base_model
        batch = {name: tensor.flatten(0, -2) for name, tensor in make_batch(head).items()}
        got, expected = encoder(**batch), reference(**batch)
        tokens = batch["attention_mask"] == 1
        torch.testing.assert_close(
            got.last_hidden_state[tokens], expected.last_hidden_state[tokens], atol=1e-5, rtol=1e-5
        )

    def test_the_encoder_opens_every_native_head(self, head: Case, tmp_path: Path) -> None:
        """No name of ours is taken for one of the reference's."""
        model = head.model()
        model.save_pretrained(tmp_path)
        _, report = head.family.models["AutoModel"].from_pretrained(tmp_path, output_loading_info=True)
        assert set(report["unexpected_keys"]) <= model.state_dict().keys()
        assert not [name for name in report["missing_keys"] if "pooler" not in name]

    def test_heads_open_a_bare_encoder(self, head: Case, exports: Path) -> None:
        """Only the head is missing."""
        base = exports / str(Case(head.family, "AutoModel")) / "reference"
        model, report = head.model_class.from_pretrained(base, output_loading_info=True)
        prefix = model.base_model_prefix + "."
        own = {name for name, _ in model.named_parameters() if not name.startswith(prefix)}  # none where it is tied
        assert bool(report["missing_keys"]) == bool(own)
        assert not [name for name in report["missing_keys"] if name.startswith(prefix)]
        assert not report["unexpected_keys"]

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_half_precision(self, case: Case, tmp_path: Path) -> None:
        case.reference_model().to(torch.bfloat16).save_pretrained(tmp_path / "reference")
        model = case.model_class.from_pretrained(tmp_path / "reference")
        assert model.dtype is torch.bfloat16
        model.export_reference(tmp_path / "export")
        again = case.reference_class.from_pretrained(tmp_path / "export")
        expected = case.reference_class.from_pretrained(tmp_path / "reference")
        assert again.dtype is expected.dtype
        _assert_same_weights(again, expected)

    def test_untied(self, tied_head: Case, tmp_path: Path) -> None:
        if not tied_head.has_peer:
            pytest.skip(f"transformers has no {tied_head}")
        reference = tied_head.reference_model(tie_word_embeddings=False)
        reference.save_pretrained(tmp_path)
        model, report = tied_head.model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        batch = make_batch(tied_head)
        assert_same_outputs(model.eval()(**batch), reference(**batch), batch["attention_mask"])

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_sharded(self, case: Case, tmp_path: Path) -> None:
        """Queries, keys and values of one layer may lie in different files."""
        reference = case.reference_model()
        reference.save_pretrained(tmp_path / "reference", max_shard_size="5KB")
        assert len(list((tmp_path / "reference").glob("*.safetensors"))) > 3
        model, report = case.model_class.from_pretrained(tmp_path / "reference", output_loading_info=True)
        assert not any(report.values()), report
        model.export_reference(tmp_path / "export")
        _assert_same_weights(case.reference_class.from_pretrained(tmp_path / "export"), reference)


class TestExport:
    def _found(self, case: Case, exports: Path) -> dict[str, Any]:
        return json.loads((exports / str(case) / "found.json").read_text())

    def test_opens_without_this_package_bit_exact(self, case: Case, exports: Path) -> None:
        from safetensors.torch import load_file

        found = self._found(case, exports)
        assert found["class"] == case.reference_class.__name__
        assert found["encoder"] == Case(case.family, "AutoModel").reference_class.__name__
        assert found["problems"] == {}
        assert not [name for name in found["encoder_missing"] if "pooler" not in name]
        weights = load_file(exports / str(case) / "found.safetensors")
        expected = case.reference_model(seed=3).state_dict()
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_configuration(self, case: Case, exports: Path) -> None:
        found = self._found(case, exports)["config"]
        expected = case.reference_config(architectures=[case.reference_class.__name__]).to_dict()
        for name in expected.keys() - {"_name_or_path", "dtype", "transformers_version"}:
            assert json.loads(json.dumps(found[name])) == json.loads(json.dumps(expected[name])), name

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_changed_configuration_survives(self, case: Case, tmp_path: Path) -> None:
        changes: dict[str, Any] = {
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu",
            "hidden_dropout_prob": 0.25,
            "pad_token_id": 3,
            "id2label": {number: f"kind {number}" for number in range(case.num_labels)},
            "label2id": {f"kind {number}": number for number in range(case.num_labels)},
        }
        changes = {name: value for name, value in changes.items() if name not in case.family.config.own_fields}
        model = case.model(unpad=False, **changes)
        model.export_reference(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert "unpad" not in written
        config = case.reference_class.from_pretrained(tmp_path).config
        assert {name: getattr(config, model.config.reference_name(name)) for name in changes} == changes

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_of_a_model_trained_here(self, case: Case, tmp_path: Path) -> None:
        """Never opened from a reference checkpoint."""
        _assert_export_opens(case, case.model(seed=5), tmp_path)

    def test_of_an_untied_model(self, tied_head: Case, tmp_path: Path) -> None:
        if not tied_head.has_peer:
            pytest.skip(f"transformers has no {tied_head}")
        _assert_export_opens(tied_head, tied_head.model(seed=5, tie_word_embeddings=False), tmp_path)

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_leaves_the_model_as_it_was(self, case: Case, tmp_path: Path) -> None:
        model = case.model()
        model.export_reference(tmp_path / "export")
        model.save_pretrained(tmp_path / "native")
        again, report = case.model_class.from_pretrained(tmp_path / "native", output_loading_info=True)
        assert not any(report.values()), report
        assert again.config.model_type == model.config.model_type == case.family.config.model_type

    @pytest.mark.parametrize("case", PEERED_BASES, ids=str, indirect=True)
    def test_there_and_back(self, case: Case, tmp_path: Path) -> None:
        model = case.model(seed=6)
        model.export_reference(tmp_path)
        _assert_same_weights(case.model_class.from_pretrained(tmp_path), model)


def _assert_export_opens(case: Case, model: PreTrainedModel, folder: Path) -> None:
    """The reference finds every key in the export of `model`, and computes the same."""
    model.export_reference(folder)
    reference, report = case.reference_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    batch = make_batch(case)
    assert_same_outputs(model(**batch), reference.eval()(**batch), batch["attention_mask"])


def _assert_same_weights(got: PreTrainedModel, expected: PreTrainedModel) -> None:
    found, wanted = got.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", PEERED_BASES, ids=str)
def test_a_reference_configuration_opens_without_a_warning(case: Case, tmp_path: Path) -> None:
    case.reference_model(seed=0).config.save_pretrained(tmp_path)
    logger = logging.get_logger("transformers.configuration_utils")
    with CaptureLogger(logger) as shown:
        config = case.family.config.from_pretrained(tmp_path)
    assert (shown.out, config.model_type) == ("", case.family.config.model_type)
    values = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "xmod"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with CaptureLogger(logger) as shown:
        case.family.config.from_pretrained(tmp_path)
    assert "model of type `xmod`" in shown.out, "of another architecture"
