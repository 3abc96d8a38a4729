"""All families and Auto classes: opening checkpoints of transformers, and export to transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.testing_utils import CaptureLogger, LoggingLevel
from transformers.utils import logging
from zoo import (
    REFERENCE_CASES,
    REPRESENTATIVES,
    TIED_HEADS,
    Case,
    assert_close,
    assert_same_outputs,
    assert_same_weights,
    feed_source_to_decoder,
    grouped_by_family,
    make_batch,
)

# Runs in a separate process: opens all exported directories without this package.
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

REFERENCE_BASE_CASES = [case for case in REFERENCE_CASES if case.is_base]


@pytest.fixture(params=REFERENCE_BASE_CASES, ids=str)
def base_case(request: pytest.FixtureRequest) -> Case:
    """The base models with a reference in transformers."""
    return request.param


@pytest.fixture(params=[case for case in REPRESENTATIVES if case.has_reference], ids=str)
def head(request: pytest.FixtureRequest) -> Case:
    """The representative heads with a reference in transformers."""
    return request.param


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each case, a directory with a reference checkpoint, its export, and the report of opening the export."""
    root = tmp_path_factory.mktemp("exports")
    for case in REFERENCE_CASES:
        folder = root / str(case)
        case.reference_model(seed=3).save_pretrained(folder / "reference")
        case.model_class.from_pretrained(folder / "reference").export_reference(folder / "export")
        wanted = {"class": case.reference_class.__name__, "auto": case.auto_name}
        (folder / "wanted.json").write_text(json.dumps(wanted))
    done = subprocess.run([sys.executable, "-c", OPEN_EXPORTS, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root


class TestOpening:
    @grouped_by_family(REFERENCE_CASES)
    def test_every_key_and_the_outputs(self, cases: list[Case], exports: Path, subtests: pytest.Subtests) -> None:
        for case in cases:
            with subtests.test(str(case)):
                folder = exports / str(case) / "reference"
                model, report = case.model_class.from_pretrained(folder, output_loading_info=True)
                assert not any(report.values()), report
                batch = make_batch(case)
                expected = case.reference_model(seed=3)(**batch)
                assert_same_outputs(model.eval()(**batch), expected, batch["attention_mask"])

    def test_configuration(self, base_case: Case, exports: Path, tmp_path: Path) -> None:
        """All common fields are equal, without a warning; a configuration of another architecture is a warning."""
        reference = base_case.reference_config().to_dict()
        logger = logging.get_logger("transformers.configuration_utils")
        with LoggingLevel(logging.WARNING), CaptureLogger(logger) as shown:
            config = base_case.family.config.from_pretrained(exports / str(base_case) / "reference")
        assert (shown.out, config.model_type) == ("", base_case.family.config.model_type)
        fields = config.to_dict()
        differing = {"model_type", "architectures", "dtype", "transformers_version", *config.non_reference_fields}
        names = {name: config.reference_name(name) for name in fields.keys() - differing}
        names = {name: reference_name for name, reference_name in names.items() if reference_name in reference}
        assert {"vocab_size", "hidden_size", "num_hidden_layers"} <= names.keys()
        for name, reference_name in names.items():
            assert fields[name] == reference[reference_name], name
        (tmp_path / "config.json").write_text(json.dumps(reference | {"model_type": "xmod"}))
        with LoggingLevel(logging.WARNING), CaptureLogger(logger) as shown:
            base_case.family.config.from_pretrained(tmp_path)
        assert "model of type `xmod`" in shown.out, "of another architecture"

    def test_heads_and_encoders_open_each_other(self, head: Case, exports: Path, tmp_path: Path) -> None:
        encoder_class = head.family.models["AutoModel"]
        encoder = encoder_class.from_pretrained(exports / str(head) / "reference").eval()
        reference = head.reference_model(seed=3).base_model
        if encoder.config.is_encoder_decoder:  # the reference's head may have no base model
            opened = Case(head.family, "AutoModel").reference_class.from_pretrained(exports / str(head) / "reference")
            reference = feed_source_to_decoder(opened).eval()
        batch = {name: tensor.flatten(0, -2) for name, tensor in make_batch(head).items()}
        batch.pop("decoder_input_ids", None)  # an encoder-decoder derives them from the input
        tokens = batch["attention_mask"] == 1
        got, expected = encoder(**batch).last_hidden_state, reference(**batch).last_hidden_state
        assert_close(got[tokens], expected[tokens], "the encoder in the reference's head")

        model = head.model()
        model.save_pretrained(tmp_path)
        _, report = encoder_class.from_pretrained(tmp_path, output_loading_info=True)
        assert set(report["unexpected_keys"]) <= model.state_dict().keys()  # none is converted as if from the reference
        assert not [name for name in report["missing_keys"] if "pooler" not in name]

        bare = exports / str(Case(head.family, "AutoModel")) / "reference"
        model, report = head.model_class.from_pretrained(bare, output_loading_info=True)
        prefix = model.base_model_prefix + "."
        own = {name for name, _ in model.named_parameters() if not name.startswith(prefix)}  # none if the head is tied
        assert bool(report["missing_keys"]) == bool(own)
        assert not [name for name in report["missing_keys"] if name.startswith(prefix)]
        assert not report["unexpected_keys"]

    def test_half_precision_and_several_files(self, base_case: Case, tmp_path: Path) -> None:
        """Query, key and value projections of a layer may be in different files."""
        for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"max_shard_size": "5KB"})):
            folder = tmp_path / str(dtype)
            reference = base_case.reference_model().to(dtype)
            reference.save_pretrained(folder / "reference", **options)
            assert (len(list((folder / "reference").glob("*.safetensors"))) > 3) == bool(options)
            model, report = base_case.model_class.from_pretrained(folder / "reference", output_loading_info=True)
            assert not any(report.values()), report
            assert model.dtype is dtype
            model.export_reference(folder / "export")
            again, expected = (
                base_case.reference_class.from_pretrained(folder / name) for name in ("export", "reference")
            )
            assert again.dtype is expected.dtype
            assert_same_weights(again, expected)


class TestExport:
    def _found(self, case: Case, exports: Path) -> dict[str, Any]:
        return json.loads((exports / str(case) / "found.json").read_text())

    @grouped_by_family(REFERENCE_CASES)
    def test_opens_without_this_package_bit_exact(
        self, cases: list[Case], exports: Path, subtests: pytest.Subtests
    ) -> None:
        from safetensors.torch import load_file

        for case in cases:
            with subtests.test(str(case)):
                found = self._found(case, exports)
                assert found["class"] == case.reference_class.__name__
                assert found["encoder"] == Case(case.family, "AutoModel").reference_class.__name__
                assert found["problems"] == {}
                absent = ("pooler",) if hasattr(case.model().base_model, "decoder") else ("pooler", "decoder.")
                assert not [name for name in found["encoder_missing"] if not any(part in name for part in absent)]
                weights = load_file(exports / str(case) / "found.safetensors")
                expected = case.reference_model(seed=3).state_dict()
                assert weights.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(weights[name], tensor), name

    def test_configuration(self, base_case: Case, exports: Path, tmp_path: Path) -> None:
        """The reference's configuration, and one with changed fields."""
        found = self._found(base_case, exports)["config"]
        expected = base_case.reference_config(architectures=[base_case.reference_class.__name__]).to_dict()
        non_reference_fields = base_case.family.config.non_reference_fields
        for name in expected.keys() - {"_name_or_path", "dtype", "transformers_version", *non_reference_fields}:
            assert json.loads(json.dumps(found[name])) == json.loads(json.dumps(expected[name])), name
        labels = {number: f"label {number}" for number in range(base_case.num_labels)}
        changes: dict[str, Any] = {
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu",
            "hidden_dropout_prob": 0.25,
            "pad_token_id": 3,
            "id2label": labels,
            "label2id": {label: number for number, label in labels.items()},
        }
        changes = {name: value for name, value in changes.items() if name not in non_reference_fields}
        model = base_case.model(unpad=False, **changes)
        model.export_reference(tmp_path)
        assert "unpad" not in json.loads((tmp_path / "config.json").read_text())
        config = base_case.reference_class.from_pretrained(tmp_path).config
        assert {name: getattr(config, model.config.reference_name(name)) for name in changes} == changes

    def test_model_without_reference_checkpoint(self, base_case: Case, tmp_path: Path) -> None:
        """The export of a new model can be opened by both packages, with bitwise equal weights."""
        model = base_case.model(seed=5)
        _assert_export_opens(base_case, model, tmp_path)
        assert_same_weights(base_case.model_class.from_pretrained(tmp_path), model)

    def test_leaves_the_model_as_it_was(self, base_case: Case, exports: Path, tmp_path: Path) -> None:
        """`save_pretrained` writes the native names after an export, also for a model from a reference checkpoint:
        Trainer resumes with `load_state_dict`, without conversion."""
        opened = base_case.model_class.from_pretrained(exports / str(base_case) / "reference")
        for name, model in {"own": base_case.model(), "opened": opened}.items():
            model.export_reference(tmp_path / name / "export")
            model.save_pretrained(tmp_path / name / "native")
            with safe_open(tmp_path / name / "native" / "model.safetensors", "pt") as file:
                assert set(file.keys()) == {name for name, _ in model.named_parameters()}
            again, report = base_case.model_class.from_pretrained(tmp_path / name / "native", output_loading_info=True)
            assert not any(report.values()), report
            assert again.config.model_type == model.config.model_type == base_case.family.config.model_type


@pytest.mark.parametrize("case", [case for case in TIED_HEADS if case.has_reference], ids=str)
def test_untied_heads_are_opened_and_exported(case: Case, tmp_path: Path) -> None:
    reference = case.reference_model(tie_word_embeddings=False)
    reference.save_pretrained(tmp_path / "reference")
    model, report = case.model_class.from_pretrained(tmp_path / "reference", output_loading_info=True)
    assert not any(report.values()), report
    batch = make_batch(case)
    assert_same_outputs(model.eval()(**batch), reference(**batch), batch["attention_mask"])
    _assert_export_opens(case, case.model(seed=5, tie_word_embeddings=False), tmp_path / "export")


def _assert_export_opens(case: Case, model: PreTrainedModel, folder: Path) -> None:
    """The reference loads the export of `model` without missing or unexpected keys, and gives the same outputs."""
    model.export_reference(folder)
    reference, report = case.reference_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    batch = make_batch(case)
    reference = reference if case.is_seq2seq else feed_source_to_decoder(reference)
    assert_same_outputs(model(**batch), reference.eval()(**batch), batch["attention_mask"])
