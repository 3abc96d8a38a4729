"""XLM: languages, causal and bidirectional attention, initialization, sinusoidal positions, released configurations."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from zoo import Case, assert_close, assert_same_gradients, assert_same_outputs, gradients, make_batch, models_by_path

from hf_ctxmodels import CtxError, CtxXLMConfig, CtxXLMForCausalLM, CtxXLMForMaskedLM, CtxXLMModel
from hf_ctxmodels.inference import decode_generated, generate_texts
from hf_ctxmodels.registry import FAMILIES

SPEC = FAMILIES["xlm"]
ENCODER, MASKED, CAUSAL, CHOICE = (
    Case(SPEC, name)
    for name in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForMultipleChoice")
)
REFERENCE_CASES = [
    Case(SPEC, name) for name in SPEC.models if name not in ("AutoModelForCausalLM", "AutoModelForPreTraining")
]
LANGS = {"n_langs": 3}


def with_langs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return batch | {"langs": torch.randint(3, batch["input_ids"].shape, generator=generator)}


def load_reference_and_model(case: Case, folder: Path, **overrides: Any) -> tuple[Any, Any]:
    reference = case.reference_model(1, **overrides)
    reference.save_pretrained(folder)
    return reference, case.model_class.from_pretrained(folder).eval()


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=str)
def test_language_embeddings_match_transformers(case: Case, tmp_path: Path) -> None:
    """Including an exported model and a model without language embeddings."""
    reference, model = load_reference_and_model(case, tmp_path / "reference", **LANGS)
    batch = with_langs(make_batch(case))
    assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])
    model.export_reference(tmp_path / "export")
    exported = case.reference_class.from_pretrained(tmp_path / "export").eval()
    assert_same_outputs(exported(**batch), reference(**batch), tolerance=0)
    other_languages = batch | {"langs": (batch["langs"] + 1) % 3}
    assert (next(iter(model(**other_languages).values())) - next(iter(model(**batch).values()))).abs().max() > 1e-3
    reference, model = load_reference_and_model(case, tmp_path / "none", **LANGS, use_lang_emb=False)
    del batch["langs"]
    assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])


def test_language_embeddings_on_all_attention_paths(tmp_path: Path) -> None:
    """Equal gradients; hidden states at padding are 0 in all layers."""
    for case in (MASKED, CAUSAL):
        batch = with_langs(make_batch(case, side="left"))
        batch |= {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
        models = models_by_path(case, **LANGS)
        expected = gradients(models["eager"], models["eager"](**batch).loss)
        for path in ("padded", "unpadded"):
            assert_same_gradients(gradients(models[path], models[path](**batch).loss), expected, where=path)
        del batch["labels"]
        for model in models.values():
            hidden_states = model(**batch, output_hidden_states=True).hidden_states
            assert not any(states[batch["attention_mask"] == 0].any() for states in hidden_states)


def test_invalid_languages() -> None:
    batch = make_batch(ENCODER)
    model = ENCODER.model(**LANGS, lang2id={"de": 0, "en": 1, "fr": 2})
    with pytest.raises(CtxError, match=r"(?s)3 languages.*langs is missing.*0 de, 1 en, 2 fr"):
        model(**batch)
    with pytest.raises(CtxError, match=r"langs\[.*outside \[0, n_langs=3\)"):
        model(**batch, langs=torch.full_like(batch["input_ids"], 3))
    with pytest.raises(CtxError, match="langs is"):
        model(**batch, langs=batch["input_ids"][:, :1])
    with pytest.raises(CtxError, match="token_type_ids"):
        model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]))
    expected = model(**batch, langs=torch.full_like(batch["input_ids"], 1)).last_hidden_state
    model.config.default_lang = 1
    assert torch.equal(model(**batch).last_hidden_state, expected)


def test_langs_argument_of_all_heads() -> None:
    for model in SPEC.models.values():
        assert "langs" in inspect.signature(model.forward).parameters, model
    batch = with_langs(make_batch(CHOICE))
    logits = CHOICE.model(**LANGS)(**batch).logits
    first_choice = {name: tensor[:, :1] for name, tensor in batch.items()}
    assert_close(CHOICE.model(**LANGS)(**first_choice).logits, logits[:, :1])


def test_causal_model_matches_transformers(tmp_path: Path) -> None:
    """transformers does not shift the labels."""
    reference, model = load_reference_and_model(MASKED, tmp_path, causal=True)
    batch = make_batch(MASKED)
    assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])
    causal = CtxXLMForCausalLM.from_pretrained(tmp_path).eval()
    assert causal.config.causal
    assert_same_outputs(causal(**batch), reference(**batch), batch["attention_mask"])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    shifted = torch.nn.functional.pad(ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100), (0, 1), value=-100)
    labels = ids.masked_fill(mask == 0, -100)
    assert_close(causal(**batch, labels=labels).loss, reference(**batch, labels=shifted).loss)


def test_causal_and_bidirectional_attention() -> None:
    """Only a bidirectional model attends to later tokens; it has no cache."""
    config = MASKED.config()
    assert CtxXLMForCausalLM(config).config.causal
    assert not config.causal
    ids = make_batch(MASKED, (8,))["input_ids"]
    changed = ids.clone()
    changed[0, -1] = ids[0, -1] % 50 + 6
    for case, is_causal in ((MASKED, False), (CAUSAL, True)):
        model = case.model()
        logits, changed_logits = (model(input_ids).logits[0, :-1] for input_ids in (ids, changed))
        assert torch.allclose(logits, changed_logits, atol=1e-6) == is_causal
    with pytest.raises(CtxError, match="cache"):
        ENCODER.model()(ids, use_cache=True)


@pytest.mark.filterwarnings("ignore")
def test_generation_in_language_of_prompt() -> None:
    """New tokens have the language of the prompt's last token, for all decoding modes and padded prompts."""
    model = CAUSAL.model(**LANGS, tie_word_embeddings=False)
    torch.nn.init.normal_(model.lm_head.weight)  # so that generated tokens are distinct
    batch = with_langs(make_batch(CAUSAL, (7, 4)))
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    single = {name: batch[name][1:, :4] for name in ("input_ids", "langs")}
    ids, langs = single["input_ids"], single["langs"]
    for _ in range(6):
        token = model(ids, langs=langs).logits[:, -1].argmax(-1, keepdim=True)
        ids, langs = torch.cat([ids, token], 1), torch.cat([langs, langs[:, -1:]], 1)
    assert len(ids[:, 4:].unique()) > 1, "the generated text has a single token"
    for mode in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(**single, **options, **mode), ids), mode
    batched = model.generate(**batch, **options)
    assert torch.equal(batched[1, -6:], ids[0, -6:])
    beams = model.generate(**batch, **options, num_beams=3)
    assert torch.equal(model.generate(**single, **options, num_beams=3)[0, -6:], beams[1, -6:])
    other_language = model.generate(**single | {"langs": (single["langs"] + 1) % 3}, **options)
    assert not torch.equal(other_language, ids)
    with pytest.raises(CtxError, match="langs is missing"):
        model.generate(single["input_ids"], **options)
    tokenizer = SPEC.tokenizer.train(["<de> wa wb wc", "<en> wd we", "<fr> wf wg"] * 4, vocab_size=61)
    model.config.lang2id = {"fr": 0, "en": 1, "de": 2}
    prompt = torch.tensor([tokenizer("wa wd").input_ids[:-1]])
    for name, number in model.config.lang2id.items():
        generated = model.generate(prompt, langs=torch.full_like(prompt, number), **options)[0, prompt.shape[1] :]
        text_options = {"max_new_tokens": 6, "eos_token_id": None, "language": name}
        texts = generate_texts(model, tokenizer, ["wa wd", "wa"], **text_options)
        assert texts[:1] == decode_generated(tokenizer, [generated])
    with pytest.raises(CtxError, match=r"(?s)(source|target) language is missing.*one of fr, en, de"):
        generate_texts(model, tokenizer, ["wa"])


def test_initialization_matches_released_code() -> None:
    """Embeddings N(0, 1 / width), zero for padding; linear layers as in torch."""
    torch.manual_seed(0)
    model = CtxXLMForMaskedLM(
        CtxXLMConfig(vocab_size=2000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, **LANGS)
    )
    word_embeddings = model.xlm.word_embeddings.weight
    assert word_embeddings.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert not word_embeddings[model.config.pad_token_id].any()
    assert model.xlm.position_embeddings.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert model.xlm.language_embeddings.weight.any()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            default = torch.nn.Linear(module.in_features, 1000)
            for parameter, expected in ((module.weight, default.weight), (module.bias, default.bias)):
                assert parameter.abs().max() <= module.in_features**-0.5
                assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.15), name


def test_sinusoidal_positions_match_transformers(tmp_path: Path) -> None:
    reference, model = load_reference_and_model(ENCODER, tmp_path, sinusoidal_embeddings=True)
    batch = make_batch(ENCODER)
    assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])
    new_model = CtxXLMModel(ENCODER.config(sinusoidal_embeddings=True))
    positions = new_model.position_embeddings.weight
    angles = torch.arange(len(positions))[:, None] / 10000 ** (torch.arange(0, 32, 2) / 32)
    assert_close(positions.detach(), torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
    assert not positions.requires_grad
    assert not model.position_embeddings.weight.requires_grad
    new_model.save_pretrained(tmp_path / "native")
    assert torch.equal(CtxXLMModel.from_pretrained(tmp_path / "native").position_embeddings.weight, positions)


def test_released_configuration_files(tmp_path: Path) -> None:
    """Former and current field names; `lang_id` is ignored."""
    legacy = {"n_words": 77, "pad_index": 4, "eos_index": 3, "bos_index": 5, "gelu_activation": False, "emb_dim": 24}
    config = CtxXLMConfig.from_dict({"model_type": "xlm", "lang_id": 0, "n_langs": 2, "n_heads": 2, **legacy})
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id) == (77, 4, 3, 5)
    assert (config.hidden_act, config.hidden_size, config.feed_forward_size) == ("relu", 24, 96)
    assert config.default_lang is None
    for fields in ({"asm": True}, {"summary_type": "mean"}, {"is_encoder": False}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            CtxXLMConfig.from_dict({"model_type": "xlm", **fields})
    with pytest.raises(CtxError, match="gelu or relu"):
        ENCODER.model(hidden_act="tanh").export_reference(tmp_path)
    ENCODER.model(**LANGS, default_lang=2).export_reference(tmp_path)
    assert transformers.XLMConfig.from_pretrained(tmp_path).lang_id == 2
