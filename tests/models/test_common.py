"""All families and Auto classes: configurations, saving and loading, tied weights, resizing, parameter counts.

Cases and fixtures: tests/zoo/matrix.py, tests/models/conftest.py.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from zoo import (
    CASES,
    TIED_HEADS,
    Case,
    as_subtests,
    assert_close,
    assert_same_outputs,
    assert_same_weights,
    load_strict,
    make_batch,
    make_targets,
    parametrize_forwards,
    tiny_config,
)

from hf_ctxmodels.core.auto_classes import get_auto_class
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.spec import FamilySpec


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> FamilySpec:
    return request.param


class TestConfig:
    def test_round_trip(self, family: FamilySpec, tmp_path: Path) -> None:
        """Includes attributes set later: special tokens by Trainer, `quantization_config` by quantizers, and others."""
        config = tiny_config(family, unpad=False)
        config.save_pretrained(tmp_path)
        loaded = family.config.from_pretrained(tmp_path)
        assert loaded.to_dict() == config.to_dict()
        assert loaded.unpad is False
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family.config.model_type
        attributes = {"bos_token_id": 7, "eos_token_id": 8, "sep_token_id": 9, "note": "x"}
        attributes["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        for name, value in attributes.items():
            setattr(config, name, value)
        config.save_pretrained(tmp_path)
        for loaded in (family.config.from_pretrained(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)):
            assert type(loaded) is family.config
            assert {name: getattr(loaded, name) for name in attributes} == attributes
            assert loaded.to_diff_dict() == config.to_diff_dict()
        assert family.config.from_pretrained(tmp_path, note="y").note == "y"

    def test_invalid_field_raises(self, family: FamilySpec, tmp_path: Path) -> None:
        """A field of the wrong type, and a misspelled field, for which the error suggests the correct name; also in a
        file without the correct field."""
        with pytest.raises(StrictDataclassError, match="hidden_size"):
            family.config(hidden_size="wide")
        with pytest.raises(ValueError, match=r"no field 'hiden_size' \(did you mean 'hidden_size'"):
            family.config(hiden_size=3)
        tiny_config(family).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        fields = json.loads(path.read_text())
        fields["hiden_size"] = fields.pop("hidden_size")
        path.write_text(json.dumps(fields))
        for load_config in (family.config.from_pretrained, transformers.AutoConfig.from_pretrained):
            with pytest.raises(ValueError, match=r"no field 'hiden_size' \(did you mean 'hidden_size'"):
                load_config(tmp_path)
        with pytest.raises(ValueError, match="no field 'hiden_size'"):
            family.config.from_json_file(path)

    def test_extra_field_similar_to_existing_field_warns(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not an error: it may be an attribute that was set before saving."""
        family = next(iter(FAMILIES.values()))
        monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
        config = tiny_config(family)
        config.hiden_size = 3
        config.save_pretrained(tmp_path)
        loaded = family.config.from_pretrained(tmp_path)
        assert loaded.hiden_size == 3
        assert loaded.hidden_size == config.hidden_size
        assert "'hiden_size' in addition to 'hidden_size'" in caplog.text

    @pytest.mark.parametrize("name", ["to_dict", "head_input_size", "from_pretrained"])
    def test_field_named_like_method_raises(self, name: str, tmp_path: Path) -> None:
        family = next(iter(FAMILIES.values()))
        tiny_config(family).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: 3}))
        with pytest.raises(ValueError, match=f"method named '{name}'"):
            family.config.from_pretrained(tmp_path)

    def test_config_of_different_architecture_raises(self, family: FamilySpec, tmp_path: Path) -> None:
        """Including a `model_type` equal to the family's name: transformers' CvT is a vision model."""
        reference_types = family.config.reference_model_types
        assert reference_types[:1] == ((family.reference,) if family.reference else ())
        names = ", ".join(map(repr, (family.config.model_type, *reference_types)))
        for model_type in {"vit", family.name} - {*reference_types}:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
            with pytest.raises(ValueError, match=rf"type '{model_type}', which \w+ does not load; it loads {names}\."):
                family.config.from_pretrained(tmp_path)

    def test_all_sizes_are_valid_configurations(self) -> None:
        for family in FAMILIES.values():
            assert set(family.sizes) >= {"tiny", "base"}, family.name
            for name, values in family.sizes.items():
                config = family.config(**values)
                assert {key: getattr(config, key) for key in values} == values, (family.name, name)
            default = family.config()
            for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # None where unused
                assert isinstance(getattr(default, name), int | None), (family.name, name)

    def test_get_family_by_name_type_config_and_model(self) -> None:
        """Unknown names and configurations of transformers raise."""
        with pytest.raises(ValueError, match=rf"(?s)'bret'.*\b{next(iter(FAMILIES))}\b"):
            get_family("bret")
        for family in FAMILIES.values():
            model = next(Case(family, name) for name in family.models).model()
            for key in (family.name, family.config.model_type, tiny_config(family), model):
                assert get_family(key) is family
            if family.reference:
                reference = transformers.CONFIG_MAPPING[family.reference]()
                with pytest.raises(CtxError, match=type(reference).__name__):
                    get_family(reference)


class TestAutoClasses:
    def test_auto_classes_create_family_models(self) -> None:
        """All classes are exported by the package."""
        import hf_ctxmodels

        for family in FAMILIES.values():
            for name, model_class in family.models.items():
                assert type(get_auto_class(name).from_config(tiny_config(family))) is model_class
            for cls in (*family.models.values(), *family.reference_heads.values(), family.config, family.tokenizer):
                assert getattr(hf_ctxmodels, cls.__name__) is cls
                assert cls.__name__ in hf_ctxmodels.__all__

    def test_from_pretrained(self, base_case: Case, tmp_path: Path) -> None:
        """From one file, from several files, and with a different dtype."""
        model = base_case.model()
        model.save_pretrained(tmp_path / "whole")
        model.save_pretrained(tmp_path / "parts", max_shard_size="1KB")
        assert len(list((tmp_path / "parts").glob("*.safetensors"))) >= min(2, len(list(model.parameters())))
        for folder in ("whole", "parts"):
            loaded = load_strict(base_case.auto_class, tmp_path / folder)
            assert type(loaded) is base_case.model_class
            assert_same_weights(loaded, model)
        model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
        assert base_case.model_class.from_pretrained(tmp_path / "half").dtype is torch.bfloat16
        float32_model = base_case.model_class.from_pretrained(tmp_path / "half", dtype=torch.float32)
        assert {parameter.dtype for parameter in float32_model.parameters()} == {torch.float32}
        assert_same_weights(float32_model, model.float())


class TestSaving:
    @pytest.mark.fast_families("bert", "gpt2")
    @pytest.mark.parametrize("variant", [None, "fp16"])
    def test_weights_of_earlier_save_are_replaced(self, base_case: Case, tmp_path: Path, variant: str | None) -> None:
        """In one file, in several files, and in one file again."""
        for seed, size in enumerate(["1GB", "1KB", "1GB"]):
            model = base_case.model(seed=seed)
            model.save_pretrained(tmp_path, max_shard_size=size, variant=variant)
            loaded = load_strict(base_case.auto_class, tmp_path, variant=variant)
            assert_same_weights(loaded, model)
            if size == "1GB":
                assert len([*tmp_path.glob("model*")]) == 1, "no index"
            else:
                assert len([*tmp_path.glob("model*.safetensors")]) >= min(2, len([*model.parameters()]))

    @pytest.mark.fast_families("bert", "gpt2", "t5", "elmo", "cove")
    @as_subtests(CASES)
    def test_saved_model_has_same_outputs(self, case: Case, tmp_path: Path) -> None:
        """The file contains native names, and tied weights once."""
        model = case.model()
        model.save_pretrained(tmp_path / str(case))
        with safe_open(tmp_path / str(case) / "model.safetensors", "pt") as file:
            names = set(file.keys())
        assert names == {name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors}
        loaded = case.model_class.from_pretrained(tmp_path / str(case)).eval()
        batch = make_batch(case)
        # matrix products with few rows are rounded differently depending on the memory alignment of the weights
        assert_same_outputs(loaded(**batch), model(**batch), tolerance=1e-6 if case.is_recurrent else 0)

    @pytest.mark.parametrize("case", TIED_HEADS, ids=str)
    def test_weight_tying(self, case: Case, tmp_path: Path) -> None:
        model = case.model()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        model.save_pretrained(tmp_path)
        loaded = case.model_class.from_pretrained(tmp_path)
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        untied = case.model(tie_word_embeddings=False)
        assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
        untied.save_pretrained(tmp_path / "untied")
        loaded = case.model_class.from_pretrained(tmp_path / "untied")
        assert torch.equal(loaded.get_output_embeddings().weight, untied.get_output_embeddings().weight)
        assert not torch.equal(loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight)

    @parametrize_forwards
    def test_loading_encoder_from_head_and_vice_versa(self, head_case: Case, tmp_path: Path) -> None:
        """Weights of the base model are loaded; missing head parameters are initialized as in a new model."""
        model = head_case.model()
        model.save_pretrained(tmp_path / "head")
        encoder_class = head_case.family.models["AutoModel"]
        encoder, report = encoder_class.from_pretrained(tmp_path / "head", output_loading_info=True)
        weights, encoder_weights = model.base_model.state_dict(), encoder.state_dict()
        assert report["missing_keys"] == encoder_weights.keys() - weights.keys()
        shared_names = weights.keys() & encoder_weights.keys()
        assert shared_names
        assert all(torch.equal(weights[name], encoder_weights[name]) for name in shared_names)

        Case(head_case.family, "AutoModel").model(initializer_range=0.02).save_pretrained(tmp_path / "encoder")
        model, report = head_case.model_class.from_pretrained(tmp_path / "encoder", output_loading_info=True)
        parameters = dict(model.named_parameters())
        new_names = report["missing_keys"] & parameters.keys()
        prefix = model.base_model_prefix + "."
        assert bool(new_names) == any(not name.startswith(prefix) for name in parameters)  # otherwise the head is tied
        torch.manual_seed(1)
        expected = dict(head_case.model_class(head_case.config(initializer_range=0.02)).named_parameters())
        for name in new_names:
            std, expected_std = parameters[name].std(correction=0), expected[name].std(correction=0)
            if expected[name].numel() < 16:  # too few samples to compare standard deviations
                assert bool(std) == bool(expected_std), name
            else:
                assert 0.5 * expected_std <= std <= 2 * expected_std, name
            if not expected_std and expected[name].numel() > 1:
                assert torch.equal(parameters[name], expected[name]), name


def test_initialization_is_seeded_and_zero_for_padding(base_case: Case) -> None:
    """The padding embedding is zero if there is a `padding_idx`, as in the reference."""
    model_1, model_2 = base_case.model(seed=1), base_case.model(seed=2)
    assert_same_weights(base_case.model(seed=1), model_1)
    assert not torch.equal(next(model_1.parameters()), next(model_2.parameters()))
    model = base_case.model_class(base_case.config())
    embeddings = model.get_input_embeddings()
    if base_case.has_reference:
        reference = base_case.reference_class(base_case.reference_config()).get_input_embeddings()
        assert embeddings.padding_idx == reference.padding_idx
    if getattr(embeddings, "padding_idx", None) is not None:
        assert not embeddings.weight[base_case.config().pad_token_id].any()


@torch.no_grad()
def test_first_layers_of_a_model(attention_case: Case) -> None:
    """Without the last layer, as in bert-score, the states of the remaining layers are unchanged."""
    model = attention_case.model()
    if attention_case.is_encoder_decoder:
        pytest.skip("encoder-decoders have two stacks")
    batch = make_batch(attention_case)
    expected = model(**batch, output_hidden_states=True).hidden_states
    stack = model if hasattr(model, "layers") else model.encoder
    stack.layers = stack.layers[:2]
    states = model(**batch, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert_close(states[:2], expected[:2])


class TestResizing:
    @as_subtests([case for case in CASES if case.is_base or case.computes_logits_of_labels_only])
    def test_resizing_vocabulary_preserves_embeddings_and_ties(self, case: Case) -> None:
        size_change = 5 if case.is_base else -4
        model = case.model()
        get_embeddings = model.get_output_embeddings if case.token_id_axes else model.get_input_embeddings
        if get_embeddings() is None:
            pytest.skip(f"in {case} no embeddings have the size of the vocabulary")
        if not isinstance(get_embeddings(), torch.nn.Embedding | torch.nn.Linear):
            with pytest.raises(CtxError, match="cannot be resized"):
                model.resize_token_embeddings(case.config().vocab_size + size_change)
            return
        old_weight = get_embeddings().weight.detach().clone()
        size = old_weight.shape[0] + size_change
        model.resize_token_embeddings(size)
        new_weight = get_embeddings().weight
        assert model.config.vocab_size == size == new_weight.shape[0]
        num_common = min(size, len(old_weight))
        assert torch.equal(new_weight[:num_common], old_weight[:num_common])
        if size_change > 0:  # default of transformers: `mean_resizing=True`
            assert_close(new_weight[num_common:].mean(0), old_weight.mean(0), "mean of the new rows", tolerance=1e-3)
        if model.get_output_embeddings() is not None:
            is_tied = bool(case.token_id_axes or case.model_class._tied_weights_keys)
            assert (model.get_output_embeddings().weight is new_weight) == is_tied
            bias = model.get_output_embeddings().bias
            assert bias is None or bias.shape == (size,)
        batch = make_batch(case)
        if not case.token_id_axes:
            batch["input_ids"] = batch["input_ids"].clamp(max=size - 1)
        targets = {} if case.is_base else make_targets(case, batch)
        if case.computes_logits_of_labels_only:
            targets = {name: target.clamp(max=size - 1) for name, target in targets.items()}
        outputs = model(**batch, **targets)
        if not case.is_base:
            outputs.loss.backward()
            assert outputs.loss.isfinite()
            assert new_weight.grad is not None or not new_weight.requires_grad


@pytest.mark.fast_families("bert", "gpt2", "electra")
def test_parameter_counts_of_published_models(family: FamilySpec) -> None:
    assert any("AutoModel" in published.counts for published in family.published.values())
    classes = {case.name: case.model_class for case in CASES if case.family is family} | family.models
    for size, published in family.published.items():
        for name, count in published.counts.items():
            with torch.device("meta"):
                model = classes[name](family.config(**published.fields))
            assert sum(parameter.numel() for parameter in model.parameters()) == count, f"{name} {size}"
