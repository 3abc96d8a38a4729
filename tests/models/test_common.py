"""Every family, every Auto class: configurations, classes, saving and loading, ties, parameter counts."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from zoo import CASES, PEERED, Case, assert_same_outputs, make_batch, make_targets, tiny_config

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.spec import FamilySpec

LISTED = [case for case in CASES if case.has_auto_class]

_ENCODER_AND_HEADS = ("AutoModel", "AutoModelForPreTraining", "AutoModelForMaskedLM")
# Parameter counts of published models, tied weights once: changes to the defaults -> {class: count}.
# Counted with the reference classes of transformers 5.23; the base models have their pooler.
PUBLISHED = {
    "bert": {
        "base uncased": (
            {"vocab_size": 30522},
            {"AutoModel": 109_482_240, "AutoModelForPreTraining": 110_106_428, "AutoModelForMaskedLM": 109_514_298},
        ),
        "base cased": (
            {"vocab_size": 28996},
            {"AutoModel": 108_310_272, "AutoModelForPreTraining": 108_932_934, "AutoModelForMaskedLM": 108_340_804},
        ),
        "large uncased": (
            FAMILIES["bert"].sizes["large"] | {"vocab_size": 30522},
            {"AutoModel": 335_141_888, "AutoModelForPreTraining": 336_226_108, "AutoModelForMaskedLM": 335_174_458},
        ),
        "large cased": (
            FAMILIES["bert"].sizes["large"] | {"vocab_size": 28996},
            {"AutoModel": 333_579_264, "AutoModelForPreTraining": 334_661_958, "AutoModelForMaskedLM": 333_610_308},
        ),
        "multilingual cased": (
            {"vocab_size": 119547},
            {"AutoModel": 177_853_440, "AutoModelForMaskedLM": 177_974_523},
        ),
        "multilingual uncased": (
            {"vocab_size": 105879},
            {"AutoModel": 167_356_416, "AutoModelForMaskedLM": 167_463_831},
        ),
    },
    "albert": {
        size: (FAMILIES["albert"].sizes[size], dict(zip(_ENCODER_AND_HEADS, counts, strict=True)))
        for size, counts in {
            "base": (11_683_584, 11_813_810, 11_221_680),
            "large": (17_683_968, 17_847_474, 16_795_824),
            "xlarge": (58_724_864, 59_021_490, 54_821_040),
            "xxlarge": (222_595_584, 223_158_450, 206_368_944),
            "base-v1": (11_683_584, 11_813_810, 11_221_680),
        }.items()
    },
    "electra": {
        "small": (
            {},
            {
                "AutoModel": 13_483_008,
                "AutoModelForMaskedLM": 13_546_682,  # as a generator: the one released with the small discriminator
                "CtxElectraForReplacedTokenDetection": 13_549_057,
                # the discriminator and the generator below, less the tables and the LayerNorm they share
                "AutoModelForPreTraining": 13_549_057 + 4_620_026 - (30522 + 512 + 2 + 2) * 128,
            },
        ),
        "base": (
            FAMILIES["electra"].sizes["base"],
            {
                "AutoModel": 108_891_648,
                "CtxElectraForReplacedTokenDetection": 109_483_009,
                "AutoModelForPreTraining": 109_483_009 + 33_740_602 - (30522 + 512 + 2 + 2) * 768,
            },
        ),
        "large": (
            FAMILIES["electra"].sizes["large"],
            {
                "AutoModel": 334_092_288,
                "CtxElectraForReplacedTokenDetection": 335_142_913,
                "AutoModelForPreTraining": 335_142_913 + 51_295_290 - (30522 + 512 + 2 + 2) * 1024,
            },
        ),
        "generator of small": (
            {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256},
            {"AutoModel": 4_580_928, "AutoModelForMaskedLM": 4_620_026},
        ),
        "generator of base": (
            {"embedding_size": 768},
            {"AutoModel": 33_511_168, "AutoModelForMaskedLM": 33_740_602},
        ),
        "generator of large": (
            {"embedding_size": 1024, "num_hidden_layers": 24},
            {"AutoModel": 50_999_552, "AutoModelForMaskedLM": 51_295_290},
        ),
    },
    "elmo": {
        name: (FAMILIES["elmo"].sizes[size], {"AutoModel": count})
        for name, size, count in (
            ("small", "small", 13_593_312),
            ("medium", "medium", 28_027_744),
            ("original", "base", 93_600_864),
        )
    },
    # No count is published: the arithmetic of section 4.1. Characters 262 * 50; filters 100 * (50 * 9 + 3), 300
    # to 1024; each layer and direction 4 * 1024 * (1024 + 512 + 1) + 1024 * 512.
    "cvt": {"section 4.1": ({}, {"AutoModel": 13_100 + 45_300 + 308_224 + 4 * 6_819_840})},
    "cove": {  # the released encoder has 3,609,600; the vectors of its words are those of GloVe
        "released": ({"vocab_size": 1000}, {"AutoModel": 3_609_600 + 1000 * 300}),
    },
    "infersent": {  # the released encoders have 38,502,400; the vectors of words are those of GloVe or fastText
        "released": ({"vocab_size": 1000}, {"AutoModel": 38_502_400 + 1000 * 300}),
    },
    "laser": {  # the layers of the released encoder, and 50,000 subwords
        "93 languages": ({}, {"AutoModel": 28_614_656 + 50_000 * 320}),
    },
    "gensen": {  # no count is published: a GRU of both directions, 512 to 1024 each, and 80,000 words
        "the larger of the paper": ({}, {"AutoModel": 80_000 * 512 + 2 * 3 * 1024 * (512 + 1024 + 2)}),
    },
    "word2vec": {  # 3 million words and phrases of news; the table alone is published
        "news": ({"vocab_size": 3_000_000, "hidden_size": 300}, {"AutoModel": 900_000_000}),
    },
    "glove": {  # 400,000 words; the sum of the two tables alone is published
        f"6B, {width}": (
            {"vocab_size": 400_000, "hidden_size": width, "context_vectors": False},
            {"AutoModel": 400_000 * width},
        )
        for width in (50, 100, 200, 300)
    },
    "xlnet": {
        size: (
            FAMILIES["xlnet"].sizes[size],
            {"AutoModel": encoder, "AutoModelForPreTraining": head, "AutoModelForCausalLM": head},
        )
        for size, encoder, head in (
            ("base", 116_718_336, 116_750_336),
            ("large", 360_268_800, 360_300_800),
        )
    },
    # No count is published for these widths: layers of 4 * 1024 * (512 + 1024 + 2) and 4 * 1024 * (1024 + 1024 + 2), in
    # the decoder too, a query of 1024 * 1025, a combination of 3072 * 1024 + 1024, and each language's vectors.
    "lmseq2seq": {
        "of 30,000 words": (
            {},
            {
                "AutoModel": 6_299_648 + 2 * 8_396_800 + 30_000 * 512,
                "AutoModelForSeq2SeqLM": 2 * (6_299_648 + 2 * 8_396_800 + 30_000 * 512)
                + (1_049_600 + 3_146_752 + 30_000 * 1025),
            },
        )
    },
    # No count is published: the arithmetic of section 4, an LSTM of 4 * 1024 * (512 + 1024 + 2), vectors of 512 and a
    # softmax of 1024 and a bias for each word.
    "seqae": {
        "section 4": (
            {"vocab_size": 30_000},
            {
                "AutoModel": 6_299_648 + 30_000 * 512,
                "AutoModelForPreTraining": 6_299_648 + 30_000 * (512 + 1024 + 1),
                "AutoModelForCausalLM": 6_299_648 + 30_000 * (512 + 1024 + 1),
            },
        )
    },
    "ulmfit": {  # of an AWD-LSTM with a tied softmax (Merity et al. 2017), by vocabulary
        f"{words} words": (
            {**FAMILIES["ulmfit"].sizes["base"], "vocab_size": words},
            {"AutoModel": 20_211_600 + 400 * words, "AutoModelForPreTraining": head, "AutoModelForCausalLM": head},
        )
        for words, head in ((10_000, 24_221_600), (33_278, 33_556_078), (60_000, 44_271_600))
    },
}


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> FamilySpec:
    return request.param


class TestConfig:
    def test_round_trip(self, family: FamilySpec, tmp_path: Path) -> None:
        config = tiny_config(family, unpad=False)
        config.save_pretrained(tmp_path)
        again = family.config.from_pretrained(tmp_path)
        assert again.to_dict() == config.to_dict()
        assert again.unpad is False
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family.config.model_type
        assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is family.config

    def test_misspelt_field_raises_and_names_the_right_one(self, family: FamilySpec) -> None:
        with pytest.raises(ValueError, match=r"no field 'hiden_size' \(did you mean 'hidden_size'"):
            family.config(hiden_size=3)

    def test_misspelt_field_in_a_file_raises(self, family: FamilySpec, tmp_path: Path) -> None:
        tiny_config(family).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"hiden_size": 3}))
        with pytest.raises(ValueError, match="hiden_size"):
            family.config.from_pretrained(tmp_path)

    def test_wrong_type_raises(self, family: FamilySpec) -> None:
        with pytest.raises(Exception, match="hidden_size"):
            family.config(hidden_size="wide")

    def test_every_size_is_a_valid_configuration(self, family: FamilySpec) -> None:
        assert set(family.sizes) >= {"tiny", "base"}
        for name, values in family.sizes.items():
            config = family.config(**values)
            assert {key: getattr(config, key) for key in values} == values, name

    def test_family_is_found_by_name_type_config_and_model(self, family: FamilySpec) -> None:
        model = next(Case(family, name) for name in family.models).model()
        for key in (family.name, family.config.model_type, tiny_config(family), model):
            assert get_family(key) is family

    def test_a_reference_configuration_is_of_no_family(self, family: FamilySpec) -> None:
        if family.reference is None:
            pytest.skip(f"transformers has no {family.name}")
        reference = transformers.CONFIG_MAPPING[family.reference]()
        with pytest.raises(CtxError, match=type(reference).__name__):
            get_family(reference)

    def test_unknown_family_lists_the_known(self) -> None:
        with pytest.raises(ValueError, match=rf"(?s)'bret'.*\b{next(iter(FAMILIES))}\b"):
            get_family("bret")


class TestAutoClasses:
    @pytest.mark.parametrize("case", LISTED, ids=str)
    def test_from_config(self, case: Case) -> None:
        assert type(case.auto_class.from_config(case.config())) is case.model_class

    @pytest.mark.parametrize("case", LISTED, ids=str)
    def test_from_pretrained(self, case: Case, tmp_path: Path) -> None:
        case.model().save_pretrained(tmp_path)
        model, report = case.auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert type(model) is case.model_class
        assert not any(report.values()), report

    def test_importable_from_the_package(self, case: Case) -> None:
        import hf_ctxmodels

        for part in (case.model_class, case.family.config, case.family.tokenizer):
            assert getattr(hf_ctxmodels, part.__name__) is part
            assert part.__name__ in hf_ctxmodels.__all__


class TestSaving:
    def test_saved_model_gives_the_same_outputs(self, case: Case, tmp_path: Path) -> None:
        model = case.model()
        model.save_pretrained(tmp_path)
        again = case.model_class.from_pretrained(tmp_path).eval()
        batch = make_batch(case)
        # products of a few rows, as of one step, round differently by where the weights lie in memory
        assert_same_outputs(again(**batch), model(**batch), tolerance=1e-6 if case.recurs else 0)

    def test_file_holds_the_native_names_and_tied_weights_once(self, case: Case, tmp_path: Path) -> None:
        model = case.model()
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            saved = set(file.keys())
        assert saved == {name for part in (model.named_parameters(), model.named_buffers()) for name, _ in part}

    @pytest.mark.parametrize("case", PEERED, ids=str)
    def test_native_file_also_after_opening_a_reference_checkpoint(self, case: Case, tmp_path: Path) -> None:
        """Trainer resumes with `load_state_dict`, which knows no conversion."""
        case.reference_model().save_pretrained(tmp_path / "reference")
        model = case.model_class.from_pretrained(tmp_path / "reference")
        model.save_pretrained(tmp_path / "native")
        with safe_open(tmp_path / "native" / "model.safetensors", "pt") as file:
            assert set(file.keys()) == {name for name, _ in model.named_parameters()}

    def test_ties(self, tied_head: Case, tmp_path: Path) -> None:
        case = tied_head
        model = case.model()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        model.save_pretrained(tmp_path)
        again = case.model_class.from_pretrained(tmp_path)
        assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
        untied = case.model(tie_word_embeddings=False)
        assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
        untied.save_pretrained(tmp_path / "untied")
        again = case.model_class.from_pretrained(tmp_path / "untied")
        assert torch.equal(again.get_output_embeddings().weight, untied.get_output_embeddings().weight)
        assert not torch.equal(again.get_output_embeddings().weight, again.get_input_embeddings().weight)

    def test_dtype(self, case: Case, tmp_path: Path) -> None:
        model = case.model().to(torch.bfloat16)
        model.save_pretrained(tmp_path)
        assert case.model_class.from_pretrained(tmp_path).dtype is torch.bfloat16
        widened = case.model_class.from_pretrained(tmp_path, dtype=torch.float32)
        assert {parameter.dtype for parameter in widened.parameters()} == {torch.float32}
        for (name, got), expected in zip(widened.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(got, expected.float()), name

    def test_sharded(self, case: Case, tmp_path: Path) -> None:
        model = case.model()
        model.save_pretrained(tmp_path, max_shard_size="1KB")
        assert len(list(tmp_path.glob("*.safetensors"))) >= min(2, len(list(model.parameters())))
        again = case.model_class.from_pretrained(tmp_path)
        for (name, got), expected in zip(again.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(got, expected), name

    def test_loading_one_head_from_another_keeps_the_encoder(self, head: Case, tmp_path: Path) -> None:
        model = head.model()
        model.save_pretrained(tmp_path)
        encoder, report = head.family.models["AutoModel"].from_pretrained(tmp_path, output_loading_info=True)
        kept = model.base_model.state_dict()
        assert report["missing_keys"] == set(encoder.state_dict()) - set(kept)
        for name, tensor in encoder.state_dict().items():
            assert name not in kept or torch.equal(kept[name], tensor), name
        assert kept.keys() & encoder.state_dict().keys()


class TestInitialisation:
    def test_meta_loading_leaves_no_parameter_uninitialised(self, head: Case, tmp_path: Path) -> None:
        """A head absent from the checkpoint is initialised like a fresh one."""
        Case(head.family, "AutoModel").model(initializer_range=0.02).save_pretrained(tmp_path)
        model, report = head.model_class.from_pretrained(tmp_path, output_loading_info=True)
        parameters = dict(model.named_parameters())
        fresh = set(report["missing_keys"]) & set(parameters)
        assert fresh
        torch.manual_seed(1)
        expected = dict(head.model_class(head.config(initializer_range=0.02)).named_parameters())
        for name in fresh:
            spread, wanted = parameters[name].std(correction=0), expected[name].std(correction=0)
            assert 0.5 * wanted <= spread <= 2 * wanted, name
            if not wanted:
                assert torch.equal(parameters[name], expected[name]), name

    def test_seed_decides_the_weights(self, case: Case) -> None:
        same, other = case.model(seed=1), case.model(seed=2)
        for (name, got), expected in zip(case.model(seed=1).named_parameters(), same.parameters(), strict=True):
            assert torch.equal(got, expected), name
        assert not torch.equal(next(same.parameters()), next(other.parameters()))

    def test_padding_embedding_starts_at_zero(self, base: Case) -> None:
        """Where the reference has it so; elsewhere padding is random, and seen by none."""
        model = base.model_class(base.config())
        embeddings = model.get_input_embeddings()
        if base.has_peer:
            reference = base.reference_class(base.reference_config()).get_input_embeddings()
            assert embeddings.padding_idx == reference.padding_idx
        if embeddings.padding_idx is not None:
            assert not embeddings.weight[base.config().pad_token_id].any()


class TestResizing:
    @pytest.mark.parametrize("change", [5, -4])
    def test_resizing_the_vocabulary_keeps_ties_and_words(self, case: Case, change: int) -> None:
        model = case.model()

        def table() -> torch.nn.Module:
            return model.get_output_embeddings() if case.id_axes else model.get_input_embeddings()

        if table() is None:
            pytest.skip(f"nothing in {case} is as large as the vocabulary")
        old = table().weight.detach().clone()
        size = old.shape[0] + change
        model.resize_token_embeddings(size)
        new = table().weight
        assert model.config.vocab_size == size == new.shape[0]
        kept = min(size, len(old))
        assert torch.equal(new[:kept], old[:kept])
        if model.get_output_embeddings() is not None:
            is_table = bool(case.id_axes or case.model_class._tied_weights_keys)
            assert (model.get_output_embeddings().weight is new) == is_table
            assert model.get_output_embeddings().bias.shape == (size,)
        batch = make_batch(case)
        if not case.id_axes:
            batch["input_ids"] = batch["input_ids"].clamp(max=size - 1)
        targets = {} if case.is_base else make_targets(case, batch)
        if case.predicts_where_labelled:
            targets = {name: target.clamp(max=size - 1) for name, target in targets.items()}
        outputs = model(**batch, **targets)
        if not case.is_base:
            outputs.loss.backward()
            assert outputs.loss.isfinite()
            assert new.grad is not None or not new.requires_grad


def _published_rows() -> list:
    rows = []
    for case in CASES:
        for name, (changes, counts) in PUBLISHED.get(case.family.name, {}).items():
            if case.name in counts:
                rows.append(pytest.param(case, changes, counts[case.name], id=f"{case} {name}"))
    return rows


@pytest.mark.parametrize(("case", "changes", "count"), _published_rows())
def test_parameter_count_of_published_models(case: Case, changes: dict, count: int) -> None:
    with torch.device("meta"):
        model = case.model_class(case.family.config(**changes))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_every_family_has_published_counts(family: FamilySpec) -> None:
    assert PUBLISHED.get(family.name), f"add the parameter counts of a published {family.name} to PUBLISHED"
