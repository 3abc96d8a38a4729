"""XLM's own: languages, causal and bidirectional masks, initial weights, sinusoids, reference checkpoints of several
languages."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from zoo import Case, assert_close, assert_same_gradients, assert_same_outputs, by_path, gradients, make_batch

from hf_ctxmodels import CtxError, CtxXLMConfig, CtxXLMForCausalLM, CtxXLMForMaskedLM, CtxXLMModel
from hf_ctxmodels.inference import decode_generated, generate_texts
from hf_ctxmodels.registry import FAMILIES

SPEC = FAMILIES["xlm"]
ENCODER, MASKED, CAUSAL, CHOICE = (
    Case(SPEC, name)
    for name in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForMultipleChoice")
)
PEERED = [Case(SPEC, name) for name in SPEC.models if name not in ("AutoModelForCausalLM", "AutoModelForPreTraining")]
LANGS = {"n_langs": 3}


def with_langs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return batch | {"langs": torch.randint(3, batch["input_ids"].shape, generator=generator)}


def opened(case: Case, folder: Path, **changes: Any) -> tuple[Any, Any]:
    reference = case.reference_model(1, **changes)
    reference.save_pretrained(folder)
    return reference, case.model_class.from_pretrained(folder).eval()


@pytest.mark.parametrize("case", PEERED, ids=str)
def test_languages_are_those_of_the_reference(case: Case, tmp_path: Path) -> None:
    """Also exported, and without their embeddings."""
    reference, ours = opened(case, tmp_path / "reference", **LANGS)
    batch = with_langs(make_batch(case))
    assert_same_outputs(ours(**batch), reference(**batch), batch["attention_mask"])
    ours.export_reference(tmp_path / "export")
    again = case.reference_class.from_pretrained(tmp_path / "export").eval()
    assert_same_outputs(again(**batch), reference(**batch), tolerance=0)
    other = batch | {"langs": (batch["langs"] + 1) % 3}
    assert (next(iter(ours(**other).values())) - next(iter(ours(**batch).values()))).abs().max() > 1e-3
    reference, ours = opened(case, tmp_path / "none", **LANGS, use_lang_emb=False)
    del batch["langs"]
    assert_same_outputs(ours(**batch), reference(**batch), batch["attention_mask"])


def test_languages_by_every_path(tmp_path: Path) -> None:
    """Padding is 0 in all layers of each."""
    for case in (MASKED, CAUSAL):
        batch = with_langs(make_batch(case, side="left"))
        batch |= {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
        models = by_path(case, **LANGS)
        expected = gradients(models["eager"], models["eager"](**batch).loss)
        for path in ("padded", "unpadded"):
            assert_same_gradients(gradients(models[path], models[path](**batch).loss), expected, where=path)
        del batch["labels"]
        for model in models.values():
            states = model(**batch, output_hidden_states=True).hidden_states
            assert not any(each[batch["attention_mask"] == 0].any() for each in states)


def test_missing_and_wrong_languages_are_errors() -> None:
    batch = make_batch(ENCODER)
    model = ENCODER.model(**LANGS, lang2id={"de": 0, "en": 1, "fr": 2})
    with pytest.raises(CtxError, match=r"embeddings of 3 languages, but langs is missing(.|\n)*0 de, 1 en, 2 fr"):
        model(**batch)
    with pytest.raises(CtxError, match=r"langs\[.*outside \[0, n_langs=3\)"):
        model(**batch, langs=torch.full_like(batch["input_ids"], 3))
    with pytest.raises(CtxError, match="langs is"):
        model(**batch, langs=batch["input_ids"][:, :1])
    with pytest.raises(CtxError, match="no segments"):
        model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]))
    expected = model(**batch, langs=torch.full_like(batch["input_ids"], 1)).last_hidden_state
    model.config.default_lang = 1
    assert torch.equal(model(**batch).last_hidden_state, expected)
    for wrong in ({"default_lang": 3}, {"lang2id": {"de": 0}}, {"n_langs": 0}):
        with pytest.raises(Exception, match="n_langs"):
            CtxXLMConfig(**LANGS | wrong)


def test_heads_name_langs_for_trainer_and_choices_have_their_own() -> None:
    for model in SPEC.models.values():
        assert "langs" in inspect.signature(model.forward).parameters, model
    batch = with_langs(make_batch(CHOICE))
    logits = CHOICE.model(**LANGS)(**batch).logits
    one = {name: tensor[:, :1] for name, tensor in batch.items()}
    assert_close(CHOICE.model(**LANGS)(**one).logits, logits[:, :1])


def test_a_causal_model_is_that_of_the_reference(tmp_path: Path) -> None:
    """Whose labels are not shifted, and which sees padding on the left."""
    reference, ours = opened(MASKED, tmp_path, causal=True)
    batch = make_batch(MASKED)
    assert_same_outputs(ours(**batch), reference(**batch), batch["attention_mask"])
    writer = CtxXLMForCausalLM.from_pretrained(tmp_path).eval()
    assert writer.config.causal
    assert_same_outputs(writer(**batch), reference(**batch), batch["attention_mask"])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    shifted = torch.nn.functional.pad(ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100), (0, 1), value=-100)
    labels = ids.masked_fill(mask == 0, -100)
    assert_close(writer(**batch, labels=labels).loss, reference(**batch, labels=shifted).loss)


def test_directions() -> None:
    """A causal language model says so in its configuration; a bidirectional one sees later tokens, and has no cache."""
    config = MASKED.config()
    assert CtxXLMForCausalLM(config).config.causal
    assert not config.causal
    ids = make_batch(MASKED, (8,))["input_ids"]
    changed = ids.clone()
    changed[0, -1] = ids[0, -1] % 50 + 6
    for case, same in ((MASKED, False), (CAUSAL, True)):
        model = case.model()
        first, second = (model(each).logits[0, :-1] for each in (ids, changed))
        assert torch.allclose(first, second, atol=1e-6) == same
    with pytest.raises(CtxError, match="no cache"):
        ENCODER.model()(ids, use_cache=True)


@pytest.mark.filterwarnings("ignore")
def test_generation_in_a_language() -> None:
    """The language of the prompt's last token goes on: with a cache, without, by beams, padded on either side."""
    model = CAUSAL.model(**LANGS, tie_word_embeddings=False)
    torch.nn.init.normal_(model.lm_head.weight)  # else a text of one word
    batch = with_langs(make_batch(CAUSAL, (7, 4)))
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    row = {name: batch[name][1:, :4] for name in ("input_ids", "langs")}
    ids, langs = row["input_ids"], row["langs"]
    for _ in range(6):
        word = model(ids, langs=langs).logits[:, -1].argmax(-1, keepdim=True)
        ids, langs = torch.cat([ids, word], 1), torch.cat([langs, langs[:, -1:]], 1)
    assert len(ids[:, 4:].unique()) > 1, "too dull a text to tell anything"
    for mode in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(**row, **options, **mode), ids), mode
    together = model.generate(**batch, **options)
    assert torch.equal(together[1, -6:], ids[0, -6:])
    beams = model.generate(**batch, **options, num_beams=3)
    assert torch.equal(model.generate(**row, **options, num_beams=3)[0, -6:], beams[1, -6:])
    other = model.generate(**row | {"langs": (row["langs"] + 1) % 3}, **options)
    assert not torch.equal(other, ids)
    with pytest.raises(CtxError, match="langs is missing"):
        model.generate(row["input_ids"], **options)
    words = SPEC.tokenizer.train(["<de> wa wb wc", "<en> wd we", "<fr> wf wg"] * 4, vocab_size=61)
    model.config.lang2id = {"fr": 0, "en": 1, "de": 2}
    prompt = torch.tensor([words("wa wd").input_ids[:-1]])
    for name, number in model.config.lang2id.items():
        written = model.generate(prompt, langs=torch.full_like(prompt, number), **options)[0, prompt.shape[1] :]
        told = {"max_new_tokens": 6, "eos_token_id": None, "language": name}
        assert generate_texts(model, words, ["wa wd", "wa"], **told)[0] == decode_generated(words, [written])[0]
    with pytest.raises(CtxError, match=r"(?s)language of texts that are \w+ is missing.*one of fr, en, de"):
        generate_texts(model, words, ["wa"])


def test_initial_weights_are_those_of_the_released_code() -> None:
    """Embeddings N(0, 1 / width), padding zero; linear maps as torch makes them."""
    torch.manual_seed(0)
    model = CtxXLMForMaskedLM(
        CtxXLMConfig(vocab_size=2000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, **LANGS)
    )
    words = model.xlm.word_embeddings.weight
    assert words.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert not words[model.config.pad_token_id].any()
    assert model.xlm.position_embeddings.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert model.xlm.language_embeddings.weight.any()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            usual = torch.nn.Linear(module.in_features, 1000)
            for ours, expected in ((module.weight, usual.weight), (module.bias, usual.bias)):
                assert ours.abs().max() <= module.in_features**-0.5
                assert ours.std().item() == pytest.approx(expected.std().item(), rel=0.15), name


def test_sinusoids_are_fixed_and_those_of_the_reference(tmp_path: Path) -> None:
    reference, ours = opened(ENCODER, tmp_path, sinusoidal_embeddings=True)
    batch = make_batch(ENCODER)
    assert_same_outputs(ours(**batch), reference(**batch), batch["attention_mask"])
    new = CtxXLMModel(ENCODER.config(sinusoidal_embeddings=True))
    table = new.position_embeddings.weight
    for position in (0, 3, 17):
        for column in range(32):
            angle = position / 10000 ** (2 * (column // 2) / 32)
            expected = np.sin(angle) if column % 2 == 0 else np.cos(angle)
            assert table[position, column].item() == pytest.approx(expected, abs=1e-6)
    assert not table.requires_grad
    assert not ours.position_embeddings.weight.requires_grad
    new.save_pretrained(tmp_path / "own")
    assert torch.equal(CtxXLMModel.from_pretrained(tmp_path / "own").position_embeddings.weight, table)


def test_configuration_of_released_files(tmp_path: Path) -> None:
    """Both generations of names; the language of generation, which every file has, is not taken for a choice."""
    old = {"n_words": 77, "pad_index": 4, "eos_index": 3, "bos_index": 5, "gelu_activation": False, "emb_dim": 24}
    config = CtxXLMConfig.from_dict({"model_type": "xlm", "lang_id": 0, "n_langs": 2, "n_heads": 2, **old})
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id) == (77, 4, 3, 5)
    assert (config.hidden_act, config.hidden_size, config.feed_forward_size, config.default_lang) == (
        "relu",
        24,
        96,
        None,
    )
    for wrong in ({"asm": True}, {"summary_type": "mean"}, {"is_encoder": False}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CtxXLMConfig.from_dict({"model_type": "xlm", **wrong})
    with pytest.raises(CtxError, match="gelu or relu"):
        ENCODER.model(hidden_act="tanh").export_reference(tmp_path)
    ENCODER.model(**LANGS, default_lang=2).export_reference(tmp_path)
    assert transformers.XLMConfig.from_pretrained(tmp_path).lang_id == 2
