"""Encoder-decoders from two models: parity with `EncoderDecoderModel`, layouts, shared weights, checkpoints."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import save, tiny_pair
from forked import run_forked
from huggingface_hub.errors import StrictDataclassError
from training_runs import trainer_arguments, unbatch
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    PreTrainedConfig,
    RobertaConfig,
    Trainer,
)
from zoo import tiny_config

from hf_ctxmodels import (
    CtxEncoderDecoderConfig,
    CtxEncoderDecoderForConditionalGeneration,
    CtxError,
    inspection_mode,
)
from hf_ctxmodels.registry import FAMILIES, get_family

START, END, PAD = 2, 3, 1
BERT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 64, "max_position_embeddings": 40, "pad_token_id": PAD}
GPT2 = {"vocab_size": 60, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 40}
GPT2 |= {"bos_token_id": START, "eos_token_id": END}
DECODER = {"is_decoder": True, "add_cross_attention": True}
REFERENCE_CONFIGS: dict[str, tuple[PreTrainedConfig, PreTrainedConfig]] = {
    "bert2bert": (BertConfig(**BERT), BertConfig(**BERT, **DECODER)),
    "bert2gpt2": (BertConfig(**BERT), GPT2Config(**GPT2, add_cross_attention=True)),
    "roberta2roberta": (RobertaConfig(**BERT, type_vocab_size=1), RobertaConfig(**BERT, type_vocab_size=1, **DECODER)),
}
RELOAD = """
import sys, torch, hf_ctxmodels
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]).eval()
batch = torch.load(f"{sys.argv[1]}/batch.pt")
with torch.no_grad():
    torch.save(model(**batch).loss, f"{sys.argv[1]}/loss.pt")
"""


def make_reference(name: str) -> EncoderDecoderModel:
    """A model of transformers with random weights large enough for the outputs to depend on all of them."""
    encoder, decoder = REFERENCE_CONFIGS[name]
    config = EncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict())
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = START, PAD, END
    torch.manual_seed(0)
    model = EncoderDecoderModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_pair(encoder: str, decoder: str, **fields: Any) -> CtxEncoderDecoderForConditionalGeneration:
    """A new model with a tiny encoder and a tiny decoder of two families."""
    sides = {
        name: tiny_config(FAMILIES[family], vocab_size=50, pad_token_id=PAD, initializer_range=0.2)
        for name, family in (("encoder", encoder), ("decoder", decoder))
    }
    fields = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": PAD, **fields}
    torch.manual_seed(0)
    return CtxEncoderDecoderForConditionalGeneration(CtxEncoderDecoderConfig(**sides, **fields)).eval()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(4, 50, (4, 9), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 6:] = attention_mask[3, 2:] = 0
    labels = torch.randint(4, 50, (4, 7), generator=generator)
    labels[2, 4:] = labels[3, 1:] = -100
    return {
        "input_ids": input_ids.masked_fill(attention_mask == 0, PAD),
        "attention_mask": attention_mask,
        "labels": labels,
    }


@pytest.mark.filterwarnings("ignore:Version v4.12.0")
@pytest.mark.parametrize("name", REFERENCE_CONFIGS)
class TestReference:
    def test_loss_gradients_and_logits(self, name: str, batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
        reference = make_reference(name)
        reference.save_pretrained(tmp_path)
        model = CtxEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path)
        expected, loss = reference(**batch), model(**batch).loss
        torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)
        logits = model(**batch, return_logits=True).logits
        has_label = batch["labels"] != -100
        torch.testing.assert_close(logits[has_label], expected.logits[has_label], rtol=0, atol=1e-5)
        loss.backward()
        expected.loss.backward()
        for layer, reference_layer in (
            (model.get_input_embeddings(), reference.get_input_embeddings()),
            (model.get_output_embeddings(), reference.get_output_embeddings()),
        ):
            rows = slice(PAD + 1, None)  # transformers also trains the padding embedding
            torch.testing.assert_close(layer.weight.grad[rows], reference_layer.weight.grad[rows], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("num_beams", [1, 3])
    def test_generation(self, name: str, num_beams: int, batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
        reference = make_reference(name)
        reference.save_pretrained(tmp_path)
        model = CtxEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path)
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        options = {"max_new_tokens": 8, "num_beams": num_beams, "do_sample": False}
        generated = model.generate(**inputs, **options)
        assert torch.equal(generated, reference.generate(**inputs, **options))
        assert torch.equal(generated, model.generate(**inputs, **options, use_cache=False))

    def test_unsupported_loading_option(self, name: str, tmp_path: Path) -> None:
        make_reference(name).save_pretrained(tmp_path)
        with pytest.raises(CtxError, match=r"Not supported for a checkpoint of transformers: dtype"):
            CtxEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)

    def test_export(self, name: str, batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
        reference = make_reference(name)
        reference.save_pretrained(tmp_path / "reference")
        model = CtxEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path / "reference")
        model.export_reference(tmp_path / "exported")
        exported, report = EncoderDecoderModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
        assert {name for name in report["missing_keys"] if "pooler" not in name} == set()
        assert not report["unexpected_keys"]
        weights = reference.state_dict()
        for key, value in exported.state_dict().items():
            assert "pooler" in key or torch.equal(value, weights[key]), key
        assert exported.config.decoder_start_token_id == START

    def test_encoder_in_reference_class(self, name: str, batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
        """transformers' `EncoderDecoderModel` runs an encoder of this package."""
        reference = make_reference(name)
        reference.save_pretrained(tmp_path)
        encoder = CtxEncoderDecoderForConditionalGeneration.from_pretrained(tmp_path).get_encoder()
        mixed = EncoderDecoderModel(encoder=encoder, decoder=copy.deepcopy(reference.decoder)).eval()
        mixed.config.decoder_start_token_id, mixed.config.pad_token_id = START, PAD
        if hasattr(reference, "enc_to_dec_proj"):
            mixed.enc_to_dec_proj = reference.enc_to_dec_proj
        torch.testing.assert_close(mixed(**batch).loss, reference(**batch).loss, rtol=0, atol=1e-5)


ENCODERS_AND_DECODERS = [
    *(("bert", name) for name in ("bert", "albert", "electra", "roberta", "gpt", "gpt2", "gpt3", "xlm")),
    *(("gpt2", "bert"), ("xlnet", "bert"), ("xlm_roberta", "xlm_roberta"), ("xlm", "xlm")),
]


@pytest.mark.parametrize("families", ENCODERS_AND_DECODERS, ids="2".join)
def test_packed_padded_and_cached_outputs_are_equal(families: tuple[str, str], batch: dict[str, torch.Tensor]) -> None:
    """The packed and the padded loss are equal; generation is the same with and without a cache."""
    model = make_pair(*families)
    packed = model(**batch)
    packed.loss.backward()
    unused = {name for name, value in model.named_parameters() if value.grad is None}
    assert not unused or families[0] == "xlnet", unused  # segment weights of XLNet
    with inspection_mode(model):
        padded = model(**batch)
    torch.testing.assert_close(packed.loss, padded.loss)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    for num_beams in (1, 2):
        options = {"max_new_tokens": 6, "num_beams": num_beams, "do_sample": False}
        cached, uncached = (model.generate(**inputs, **options, use_cache=use_cache) for use_cache in (True, False))
        assert torch.equal(cached, uncached), num_beams


def test_decoder_is_causal_and_attends_to_full_source(batch: dict[str, torch.Tensor]) -> None:
    model = make_pair("bert", "bert")
    ids = batch["labels"].clamp(min=4)

    def logits(**overrides: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": batch["input_ids"][:1], "decoder_input_ids": ids[:1], **overrides}
        return model(**inputs).logits[0]

    original = logits()
    changed_target, changed_source = ids[:1].clone(), batch["input_ids"][:1].clone()
    changed_target[0, 4], changed_source[0, -1] = 5, 5
    torch.testing.assert_close(logits(decoder_input_ids=changed_target)[:4], original[:4])
    assert not torch.allclose(logits(decoder_input_ids=changed_target)[4], original[4])
    assert not torch.allclose(logits(input_ids=changed_source)[0], original[0])


def test_packed_pairs_match_separate_rows(batch: dict[str, torch.Tensor]) -> None:
    model = make_pair("bert", "gpt2")
    sources, targets = batch["input_ids"][:1], batch["labels"][:1]
    packed = model(
        input_ids=torch.cat([sources[:, :4], sources[:, 4:]], 1),
        sequence_ids=torch.tensor([[1] * 4 + [2] * 5]),
        labels=targets,
        decoder_sequence_ids=torch.tensor([[1] * 3 + [2] * 4]),
    ).loss
    losses = [
        model(input_ids=source, labels=target).loss * target.numel()
        for source, target in ((sources[:, :4], targets[:, :3]), (sources[:, 4:], targets[:, 3:]))
    ]
    torch.testing.assert_close(packed, sum(losses) / targets.numel())


class TestSharedWeights:
    @pytest.mark.parametrize("family", ["roberta", "bert", "albert", "xlm"])
    def test_shared_weights_match_copies(self, family: str, batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
        """Outputs equal those of a model with copied weights; the model is smaller, also after saving and loading."""
        shared, separate = make_pair(family, family, share_weights=True), make_pair(family, family)
        encoder = shared.model.encoder
        separate.load_state_dict(shared.state_dict())
        torch.testing.assert_close(shared(**batch).loss, separate(**batch).loss)
        assert separate.num_parameters() - shared.num_parameters() == encoder.num_parameters()
        shared.save_pretrained(tmp_path)
        reloaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
        assert reloaded.num_parameters() == shared.num_parameters()
        torch.testing.assert_close(reloaded(**batch).loss, shared(**batch).loss, rtol=0, atol=0)

    def test_gradients_of_both_sides_are_added(self, batch: dict[str, torch.Tensor]) -> None:
        shared, separate = make_pair("bert", "bert", share_weights=True), make_pair("bert", "bert")
        separate.load_state_dict(shared.state_dict())
        for model in (shared, separate):
            model(**batch).loss.backward()
        stacks = [separate.model.encoder, separate.model.decoder.base_model]
        expected = sum(stack.layers[0].attention.qkv_proj.weight.grad for stack in stacks)
        torch.testing.assert_close(shared.model.encoder.layers[0].attention.qkv_proj.weight.grad, expected)

    def test_sharing_requires_equal_configurations(self) -> None:
        with pytest.raises(StrictDataclassError, match=r"same configuration; these fields differ: .*model_type"):
            make_pair("bert", "roberta", share_weights=True)


class TestPair:
    @pytest.fixture
    def checkpoints(self, tmp_path: Path) -> Path:
        """Checkpoints of BERT and GPT-2 with the tokenizer of BERT."""
        model, tokenizer = tiny_pair(
            "bert", "AutoModelForMaskedLM", ["a cat sat", "the dog ran"], initializer_range=0.2
        )
        save(tmp_path / "bert", model, tokenizer)
        fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        gpt2 = FAMILIES["gpt2"].models["AutoModelForCausalLM"](tiny_config(FAMILIES["gpt2"], **fields))
        save(tmp_path / "gpt2", gpt2, tokenizer)
        model.export_reference(tmp_path / "reference")
        tokenizer.save_pretrained(tmp_path / "reference")
        self.tokenizer = tokenizer
        return tmp_path

    @pytest.mark.parametrize(("encoder", "decoder"), [("bert", "gpt2"), ("bert", "bert"), ("reference", "gpt2")])
    def test_weights_are_loaded_from_both_checkpoints(self, checkpoints: Path, encoder: str, decoder: str) -> None:
        model = CtxEncoderDecoderForConditionalGeneration.from_pretrained_pair(
            checkpoints / encoder, checkpoints / decoder, tokenizer=self.tokenizer
        )
        expected = AutoModel.from_pretrained(checkpoints / "bert", add_pooling_layer=False).state_dict()
        weights = model.model.encoder.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        auto_class = "AutoModelForCausalLM" if decoder == "gpt2" else "AutoModelForMaskedLM"
        expected = FAMILIES[decoder].models[auto_class].from_pretrained(checkpoints / decoder).state_dict()
        weights = model.model.decoder.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        new_modules = {name for name in model.newly_initialized_modules if "cross_attention" not in name}
        assert new_modules == ({"model.source_projection"} if model.model.source_projection is not None else set())
        assert model.config.decoder_start_token_id == self.tokenizer.cls_token_id
        assert model.generation_config.eos_token_id == self.tokenizer.sep_token_id

    def test_shared_weights(self, checkpoints: Path, batch: dict[str, torch.Tensor]) -> None:
        model = CtxEncoderDecoderForConditionalGeneration.from_pretrained_pair(
            checkpoints / "bert", checkpoints / "bert", tokenizer=self.tokenizer, share_weights=True
        )
        decoder = model.model.decoder
        assert (
            decoder.bert.layers[0].feed_forward.up_proj.weight
            is model.model.encoder.layers[0].feed_forward.up_proj.weight
        )
        assert decoder.mlm_head.decoder.weight is model.get_input_embeddings().weight

    @pytest.mark.parametrize(
        ("encoder", "decoder", "message"),
        [
            ("missing", "bert", "there is no such directory"),
            ("bert", "xlnet", "do not support cross-attention"),
            ("bart", "bert", "cannot be the encoder"),
        ],
    )
    def test_invalid_pairs(self, checkpoints: Path, encoder: str, decoder: str, message: str) -> None:
        for name in {encoder, decoder} - {"bert", "missing"}:
            config = tiny_config(FAMILIES[name])
            FAMILIES[name].models["AutoModel"](config).save_pretrained(checkpoints / name)
        with pytest.raises(CtxError, match=message):
            CtxEncoderDecoderForConditionalGeneration.from_pretrained_pair(checkpoints / encoder, checkpoints / decoder)


def test_saved_model_loads_in_new_process(batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = make_pair("bert", "gpt2")
    model.save_pretrained(tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    result = run_forked("-c", RELOAD, tmp_path)
    assert result.returncode == 0, result.stderr
    with torch.no_grad():  # as in the new process: the kernels of some processors differ with gradients
        torch.testing.assert_close(torch.load(tmp_path / "loss.pt"), model(**batch).loss, rtol=0, atol=0)
    spec = get_family(model.config)
    assert spec.tokenizer is FAMILIES["bert"].tokenizer
    assert "CtxEncoderDecoderConfig" in (tmp_path / "ctx_encoder_decoder_auto.py").read_text()


def test_token_types_apply_to_encoder(batch: dict[str, torch.Tensor]) -> None:
    model = make_pair("bert", "bert")
    segments = torch.ones_like(batch["input_ids"])
    assert not torch.allclose(model(**batch).loss, model(**batch, token_type_ids=segments).loss)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    model.generate(**inputs, token_type_ids=segments, max_new_tokens=3)
    decoder_ids = {"decoder_input_ids": batch["labels"].clamp(min=4)}
    states = [model.model(**inputs, **decoder_ids, token_type_ids=ids).last_hidden_state for ids in (None, segments)]
    assert not torch.allclose(*states)


class TestLanguages:
    @pytest.fixture
    def model(self) -> CtxEncoderDecoderForConditionalGeneration:
        fields = {"vocab_size": 50, "n_langs": 2, "lang2id": {"en": 0, "fr": 1}, "pad_token_id": PAD}
        config = tiny_config(FAMILIES["xlm"], **fields)
        decoder = copy.deepcopy(config)
        decoder.causal = True
        sides = {"encoder": config, "decoder": decoder, "decoder_start_token_id": START, "eos_token_id": END}
        torch.manual_seed(0)
        return CtxEncoderDecoderForConditionalGeneration(CtxEncoderDecoderConfig(**sides, pad_token_id=PAD)).eval()

    def test_loss_depends_on_both_languages(
        self, model: CtxEncoderDecoderForConditionalGeneration, batch: dict[str, torch.Tensor]
    ) -> None:
        langs, decoder_langs = torch.zeros_like(batch["input_ids"]), torch.ones_like(batch["labels"])
        losses = {
            (source, target): float(model(**batch, langs=langs + source, decoder_langs=decoder_langs * target).loss)
            for source in (0, 1)
            for target in (0, 1)
        }
        assert len(set(losses.values())) == 4
        with pytest.raises(CtxError, match="langs is missing"):
            model(**batch, langs=langs)

    def test_generated_tokens_use_target_language(
        self, model: CtxEncoderDecoderForConditionalGeneration, batch: dict[str, torch.Tensor]
    ) -> None:
        """Greedy search matches the argmax of a forward pass with the target language."""
        langs = torch.zeros_like(batch["input_ids"])
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "langs": langs}
        generated = model.generate(**inputs, decoder_langs=torch.ones(4, 1).long(), max_new_tokens=5, min_new_tokens=5)
        languages = torch.ones_like(generated)
        logits = model(**inputs, decoder_input_ids=generated, decoder_langs=languages).logits[:, :-1]
        logits[..., END] = -torch.inf
        assert torch.equal(logits.argmax(-1), generated[:, 1:])

    def test_language_configuration(self, model: CtxEncoderDecoderForConditionalGeneration) -> None:
        config = model.config
        assert config.needs_languages
        assert config.lang2id == {"en": 0, "fr": 1}
        assert config.default_lang is None
        config.default_lang = 1
        assert config.encoder.default_lang == 1
        assert "default_lang" not in config.to_dict()


class TestTraining:
    def test_accumulated_gradients_match_single_batch(self, tmp_path: Path, batch: dict[str, torch.Tensor]) -> None:
        """16 examples of different lengths: one batch, or four microbatches of four."""
        rows = unbatch({name: value.repeat(4, 1) for name, value in batch.items()})
        weights = []
        for batch_size, accumulation_steps in ((16, 1), (4, 4)):
            model = make_pair("bert", "bert")
            for config in (model.config.encoder, model.config.decoder):
                config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
            for module in model.modules():
                if isinstance(getattr(module, "p", None), float):
                    module.p = 0.0
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.0
            arguments = trainer_arguments(
                tmp_path,
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation_steps,
                max_steps=1,
                learning_rate=0.1,
                optim="sgd",
                max_grad_norm=0.0,
            )
            Trainer(model=model, args=arguments, train_dataset=rows).train()
            weights.append(model.state_dict())
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-6, msg=name)

    def test_gradient_checkpointing(self, batch: dict[str, torch.Tensor]) -> None:
        gradients = []
        for is_enabled in (False, True):
            model = make_pair("bert", "gpt2").train()
            if is_enabled:
                model.activation_checkpointing_enable({"use_reentrant": False})
            torch.manual_seed(0)
            model(**batch).loss.backward()
            gradients.append({name: value.grad for name, value in model.named_parameters()})
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0, msg=name)

    def test_resizing_shared_embeddings(self, batch: dict[str, torch.Tensor]) -> None:
        model = make_pair("bert", "bert", share_weights=True)
        model.resize_token_embeddings(60)
        assert (model.config.vocab_size, model.config.target_vocab_size) == (60, 60)
        batch["input_ids"][0, 0] = batch["labels"][0, 0] = 59
        assert model(**batch).loss.isfinite()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_transformers_decoder_raises() -> None:
    with pytest.raises(CtxError, match="not a configuration of this package"):
        CtxEncoderDecoderConfig(encoder=BertConfig(), decoder=GPT2Config())
