"""All families and Auto classes: loading checkpoints of transformers, and export to transformers.

Cases and fixtures: tests/zoo/matrix.py, tests/models/conftest.py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.testing_utils import CaptureLogger, LoggingLevel
from transformers.utils import logging
from zoo import (
    REFERENCE_CASES,
    REPRESENTATIVES,
    TIED_HEADS,
    Case,
    as_subtests,
    assert_close,
    assert_same_outputs,
    assert_same_weights,
    feed_source_to_decoder,
    make_batch,
)

# Runs in a process without this package: loads the exports of the directories given on standard input.
LOAD_EXPORTS = """
import json, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file

torch.set_num_threads(1)
for line in sys.stdin:
    folder = Path(line.strip())
    class_name, auto_name = json.loads((folder / "class_names.json").read_text())
    model, report = getattr(transformers, class_name).from_pretrained(folder / "export", output_loading_info=True)
    auto = getattr(transformers, auto_name).from_pretrained(folder / "export")
    encoder, encoder_report = transformers.AutoModel.from_pretrained(folder / "export", output_loading_info=True)
    opened = {
        "class": type(auto).__name__,
        "encoder": type(encoder).__name__,
        "problems": {key: sorted(map(str, value)) for key, value in report.items() if value},
        "encoder_missing": sorted(map(str, encoder_report["missing_keys"])),
        "config": model.config.to_dict(),
    }
    (folder / "opened.json").write_text(json.dumps(opened))
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "opened.safetensors")
    assert not [name for name in sys.modules if name.startswith("hf_ctxmodels")]
    print("opened", flush=True)
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


class Exports:
    """Reference checkpoints, their exports, and the exports as loaded by transformers in a process without this
    package; created on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process: subprocess.Popen[str] | None = None

    def reference(self, case: Case) -> Path:
        """The reference checkpoint."""
        folder = self._root / str(case) / "reference"
        if not folder.exists():
            case.reference_model(seed=3).save_pretrained(folder)
        return folder

    def folder(self, case: Case) -> Path:
        """Directory with `reference`, `export`, `opened.json` and `opened.safetensors`."""
        folder = self.reference(case).parent
        if not (folder / "export").exists():
            case.model_class.from_pretrained(folder / "reference").export_reference(folder / "export")
            (folder / "class_names.json").write_text(json.dumps([case.reference_class.__name__, case.auto_name]))
            if self._process is None:
                command = [sys.executable, "-c", LOAD_EXPORTS]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "opened\n", f"the export of {case} cannot be loaded"
        return folder

    def loading_report(self, case: Case) -> dict[str, Any]:
        """The report of transformers on loading the export."""
        return json.loads((self.folder(case) / "opened.json").read_text())

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exports]:
    exports = Exports(tmp_path_factory.mktemp("exports"))
    yield exports
    exports.close()


class TestLoading:
    """Keys and outputs are compared in tests/parity/test_random_configurations.py."""

    @pytest.mark.all_families
    def test_configuration(self, base_case: Case, exports: Exports, tmp_path: Path) -> None:
        """All common fields are equal, without a warning; a configuration of a different architecture raises."""
        reference = base_case.reference_config().to_dict()
        logger = logging.get_logger("transformers.configuration_utils")
        with LoggingLevel(logging.WARNING), CaptureLogger(logger) as captured:
            config = base_case.family.config.from_pretrained(exports.reference(base_case))
        # UniLM's default query token, 103, is outside the tiny vocabulary; the warning appears once per process
        warnings = [line for line in captured.out.splitlines() if "query_token_id" not in line]
        assert (warnings, config.model_type) == ([], base_case.family.config.model_type)
        fields = config.to_dict()
        excluded = {"model_type", "architectures", "dtype", "transformers_version", *config.non_reference_fields}
        names = {name: config.reference_name(name) for name in fields.keys() - excluded}
        names = {name: reference_name for name, reference_name in names.items() if reference_name in reference}
        assert {"vocab_size", "hidden_size", "num_hidden_layers"} <= names.keys()
        for name, reference_name in names.items():
            assert fields[name] == reference[reference_name], name
        (tmp_path / "config.json").write_text(json.dumps(reference | {"model_type": "xmod"}))
        with pytest.raises(ValueError, match="of type 'xmod'"):
            base_case.family.config.from_pretrained(tmp_path)

    def test_loading_encoder_from_head_and_vice_versa(self, head: Case, exports: Exports, tmp_path: Path) -> None:
        encoder_class = head.family.models["AutoModel"]
        encoder = encoder_class.from_pretrained(exports.reference(head)).eval()
        reference = head.reference_model(seed=3).base_model
        if encoder.config.is_encoder_decoder:  # the reference's head may have no base model
            encoder_decoder = Case(head.family, "AutoModel").reference_class.from_pretrained(exports.reference(head))
            reference = feed_source_to_decoder(encoder_decoder).eval()
        batch = {name: tensor.flatten(0, -2) for name, tensor in make_batch(head).items()}
        batch.pop("decoder_input_ids", None)  # an encoder-decoder derives them from the input
        token_mask = batch["attention_mask"] == 1
        states, expected = encoder(**batch).last_hidden_state, reference(**batch).last_hidden_state
        assert_close(states[token_mask], expected[token_mask], "the encoder in the reference's head")

        model = head.model()
        model.save_pretrained(tmp_path)
        _, report = encoder_class.from_pretrained(tmp_path, output_loading_info=True)
        assert set(report["unexpected_keys"]) <= model.state_dict().keys()  # no key is converted as a reference key
        assert not [name for name in report["missing_keys"] if "pooler" not in name]

        encoder_checkpoint = exports.reference(Case(head.family, "AutoModel"))
        model, report = head.model_class.from_pretrained(encoder_checkpoint, output_loading_info=True)
        prefix = model.base_model_prefix + "."
        head_weights = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]  # none if tied
        assert bool(report["missing_keys"]) == bool(head_weights)
        assert not [name for name in report["missing_keys"] if name.startswith(prefix)]
        assert not report["unexpected_keys"]

    def test_half_precision_and_sharded_checkpoints(self, base_case: Case, tmp_path: Path) -> None:
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
            exported, expected = (
                base_case.reference_class.from_pretrained(folder / name) for name in ("export", "reference")
            )
            assert exported.dtype is expected.dtype
            assert_same_weights(exported, expected)


class TestExport:
    @pytest.mark.fast_families("bert", "gpt2", "t5")
    @as_subtests(REFERENCE_CASES)
    def test_transformers_loads_export_bit_exact(self, case: Case, exports: Exports) -> None:
        report = exports.loading_report(case)
        assert report["class"] == case.reference_class.__name__
        assert report["encoder"] == Case(case.family, "AutoModel").reference_class.__name__
        assert report["problems"] == {}
        optional = ("pooler",) if hasattr(case.model().base_model, "decoder") else ("pooler", "decoder.")
        assert not [name for name in report["encoder_missing"] if not any(module in name for module in optional)]
        weights = load_file(exports.folder(case) / "opened.safetensors")
        expected = case.reference_model(seed=3).state_dict()
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name

    def test_configuration(self, base_case: Case, exports: Exports, tmp_path: Path) -> None:
        """The reference's configuration, and one with overridden fields."""
        report = exports.loading_report(base_case)["config"]
        expected = base_case.reference_config(architectures=[base_case.reference_class.__name__]).to_dict()
        non_reference_fields = base_case.family.config.non_reference_fields
        for name in expected.keys() - {"_name_or_path", "dtype", "transformers_version", *non_reference_fields}:
            assert json.loads(json.dumps(report[name])) == json.loads(json.dumps(expected[name])), name
        labels = {number: f"label {number}" for number in range(base_case.num_labels)}
        overrides: dict[str, Any] = {
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu",
            "hidden_dropout_prob": 0.25,
            "pad_token_id": 3,
            "id2label": labels,
            "label2id": {label: number for number, label in labels.items()},
        }
        overrides = {name: value for name, value in overrides.items() if name not in non_reference_fields}
        model = base_case.model(unpad=False, **overrides)
        model.export_reference(tmp_path)
        fields = json.loads((tmp_path / "config.json").read_text())
        assert "unpad" not in fields
        # fields that transformers 5 omits have no default in other tools, such as CTranslate2
        assert model.config.supported_reference_values.keys() <= fields.keys()
        config = base_case.reference_class.from_pretrained(tmp_path).config
        assert {name: getattr(config, model.config.reference_name(name)) for name in overrides} == overrides

    def test_export_of_new_model(self, base_case: Case, tmp_path: Path) -> None:
        """Both packages load the export of a new model, with bitwise equal weights."""
        model = base_case.model(seed=5)
        _assert_export_loads(base_case, model, tmp_path)
        assert_same_weights(base_case.model_class.from_pretrained(tmp_path), model)

    def test_export_does_not_change_model(self, base_case: Case, exports: Exports, tmp_path: Path) -> None:
        """`save_pretrained` writes native names after an export, even for a model loaded from a reference checkpoint:
        Trainer resumes with `load_state_dict`, without conversion."""
        from_reference = base_case.model_class.from_pretrained(exports.reference(base_case))
        for name, model in {"new": base_case.model(), "from reference": from_reference}.items():
            model.export_reference(tmp_path / name / "export")
            model.save_pretrained(tmp_path / name / "native")
            with safe_open(tmp_path / name / "native" / "model.safetensors", "pt") as file:
                assert set(file.keys()) == {name for name, _ in model.named_parameters()}
            reloaded, report = base_case.model_class.from_pretrained(
                tmp_path / name / "native", output_loading_info=True
            )
            assert not any(report.values()), report
            assert reloaded.config.model_type == model.config.model_type == base_case.family.config.model_type


@pytest.mark.parametrize("case", [case for case in TIED_HEADS if case.has_reference], ids=str)
def test_untied_heads_are_loaded_and_exported(case: Case, tmp_path: Path) -> None:
    reference = case.reference_model(tie_word_embeddings=False)
    reference.save_pretrained(tmp_path / "reference")
    model, report = case.model_class.from_pretrained(tmp_path / "reference", output_loading_info=True)
    assert not any(report.values()), report
    batch = make_batch(case)
    assert_same_outputs(model.eval()(**batch), reference(**batch), batch["attention_mask"])
    _assert_export_loads(case, case.model(seed=5, tie_word_embeddings=False), tmp_path / "export")


def _assert_export_loads(case: Case, model: PreTrainedModel, folder: Path) -> None:
    """The reference loads the export of `model` without missing or unexpected keys, and gives the same outputs."""
    model.export_reference(folder)
    reference, report = case.reference_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    batch = make_batch(case)
    reference = reference if case.is_seq2seq else feed_source_to_decoder(reference)
    assert_same_outputs(model(**batch), reference.eval()(**batch), batch["attention_mask"])
