"""XLM with separate lower layers for each language: outputs, saving, generation, compression and adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from zoo import Case, assert_close, assert_same_gradients, assert_same_outputs, gradients, make_batch, models_by_path

from hf_ctxmodels import CtxError, CtxXLMModel
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.core.attention_heads import prune_heads
from hf_ctxmodels.downstream.adapters import add_adapter, load_adapter, save_adapter, set_active_adapters, train_adapter
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningMethodArguments
from hf_ctxmodels.models.encoder_decoder.modeling_encoder_decoder import build_decoder
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.freezing import freeze_language_layers

SPEC = FAMILIES["xlm"]
ENCODER, MASKED, CAUSAL, TAGGER = (
    Case(SPEC, f"AutoModel{name}") for name in ("", "ForMaskedLM", "ForCausalLM", "ForTokenClassification")
)
SHARED = {"n_langs": 3, "num_hidden_layers": 3}
SEPARATE = {**SHARED, "num_language_layers": 2}


def monolingual_batch(case: Case) -> dict[str, Tensor]:
    """A padded batch of sequences in the languages 0, 1, 2, 0, ..., with labels."""
    batch = make_batch(case, (7, 4, 6, 5), side="left")
    langs = (torch.arange(4) % 3)[:, None].expand_as(batch["input_ids"])
    return batch | {"langs": langs, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def shared_name(name: str) -> str:
    """The shared model's name of a language-specific weight."""
    return name if ".languages." not in name else name.split(".languages.")[0] + name.split(".languages.")[1][1:]


def copy_shared(model: Any, shared: Any) -> Any:
    weights = shared.state_dict()
    model.load_state_dict({name: weights[shared_name(name)] for name in model.state_dict()})
    return model


def monolingual_model(separate: Any, language: int) -> Any:
    """A model with shared layers, whose lower layers are copies of a language's layers."""
    model = MASKED.model(**SHARED, unpad=False, attn_implementation="eager")
    names = [name for name in separate.state_dict() if f".languages.{language}." in name or ".languages." not in name]
    model.load_state_dict({shared_name(name): separate.state_dict()[name] for name in names})
    return model


def test_equal_language_layers_match_shared_layers() -> None:
    """Outputs, hidden states and losses; the gradients of the languages sum to the shared gradient."""
    shared = MASKED.model(**SHARED)
    batch = monolingual_batch(MASKED)
    generator = torch.Generator().manual_seed(0)
    mixed = batch | {"langs": torch.randint(3, batch["input_ids"].shape, generator=generator)}
    for path, model in models_by_path(MASKED, **SEPARATE).items():
        copy_shared(model, shared)
        for inputs in (batch, mixed):
            expected = shared(**inputs, output_hidden_states=True)
            outputs = model(**inputs, output_hidden_states=True)
            assert_close(outputs.loss, expected.loss)
            for state, expected_state in zip(outputs.hidden_states, expected.hidden_states, strict=True):
                assert_close(state, expected_state)
            summed_gradients: dict[str, Tensor] = {}
            for name, gradient in gradients(model, outputs.loss).items():
                summed_gradients[shared_name(name)] = summed_gradients.get(shared_name(name), 0) + gradient
            assert_same_gradients(summed_gradients, gradients(shared, expected.loss), where=path)


def test_language_layers_match_monolingual_models() -> None:
    """Outputs equal those of a model with the language's layers; gradients of other languages' layers are zero."""
    for path, model in models_by_path(MASKED, **SEPARATE).items():
        batch = monolingual_batch(MASKED)
        logits = model(**batch, return_logits=True).logits
        for row in range(4):
            language = row % 3
            sequence = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            expected = monolingual_model(model, language)(**sequence, return_logits=True)
            mask = sequence["attention_mask"].bool()
            assert_close(logits[row : row + 1][mask], expected.logits[mask])
            actual_gradients = gradients(model, model(**sequence).loss)
            expected_gradients = gradients(
                expected_model := monolingual_model(model, language), expected_model(**sequence).loss
            )
            for name, gradient in actual_gradients.items():
                if ".languages." not in name or f".languages.{language}." in name:
                    assert_close(gradient, expected_gradients[shared_name(name)])
                else:
                    assert not gradient.any(), (path, name)
    assert not torch.allclose(
        logits[0, -1], monolingual_model(model, 1)(**batch, return_logits=True).logits[0, -1], atol=1e-3
    )


def test_attention_weights_of_each_language() -> None:
    batch = monolingual_batch(MASKED)
    model = MASKED.model(**SEPARATE, attn_implementation="eager")
    attentions = model(**batch, output_attentions=True).attentions
    for language in range(3):
        expected = monolingual_model(model, language)(**batch, output_attentions=True).attentions
        for weights, expected_weights in zip(attentions, expected, strict=True):
            assert_close(weights[language], expected_weights[language])


def test_saving_and_loading(tmp_path: Path) -> None:
    """Including models without language embeddings and taggers; transformers has no such layers, so export raises."""
    batch = monolingual_batch(MASKED)
    for fields in (SEPARATE, {**SEPARATE, "use_lang_emb": False}):
        model = MASKED.model(**fields)
        model.save_pretrained(tmp_path)
        reloaded = MASKED.model_class.from_pretrained(tmp_path).eval()
        assert_same_outputs(reloaded(**batch), model(**batch), tolerance=0)
        assert len(reloaded.xlm.language_layers) == 2
        states = TAGGER.model_class.from_pretrained(tmp_path).eval().xlm(batch["input_ids"], langs=batch["langs"])
        assert_close(states.last_hidden_state, model.xlm(batch["input_ids"], langs=batch["langs"]).last_hidden_state)
        with pytest.raises(CtxError, match=r"no separate layers of each language.*num_language_layers=2"):
            model.export_reference(tmp_path / "export")
        with pytest.raises(CtxError, match=r"3 languages, but langs is missing"):
            model(batch["input_ids"])
    assert not CtxXLMModel(ENCODER.config(num_language_layers=1)).language_layers, "one language"
    for number in (-1, 3):
        with pytest.raises(StrictDataclassError, match=r"num_language_layers=-?\d must be 0 or more, and less than"):
            ENCODER.config(**SHARED, num_language_layers=number)


@pytest.mark.filterwarnings("ignore")
def test_cached_generation_requires_one_language() -> None:
    model = CAUSAL.model(**SEPARATE, tie_word_embeddings=False)
    torch.nn.init.normal_(model.lm_head.weight)
    ids = make_batch(CAUSAL, (6, 6))["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for language in range(3):
        langs = torch.full_like(ids, language)
        cached = model.generate(ids, langs=langs, **options)
        assert torch.equal(cached, model.generate(ids, langs=langs, use_cache=False, **options))
    langs = torch.tensor([[0], [1]]).expand_as(ids)
    with pytest.raises(CtxError, match=r"a cache needs one language"):
        model.generate(ids, langs=langs, **options)
    mixed = model.generate(ids, langs=langs, use_cache=False, **options)
    assert torch.equal(mixed[0], model.generate(ids[:1], langs=langs[:1], **options)[0])


def prepare(model: Any) -> None:
    model.prepare_for_inference()


def quantize(model: Any) -> None:
    quantize_model(model, CtxInt8Config())


def test_prepacked_and_quantized_models() -> None:
    """Prepacked layers have equal outputs, int8 layers close outputs; head pruning and cross-attention raise."""
    batch = monolingual_batch(MASKED)
    del batch["labels"]
    with torch.no_grad():
        for transform, tolerance in ((prepare, 1e-5), (quantize, 0.1)):
            model = MASKED.model(**SEPARATE)
            expected = model(**batch).logits
            transform(model)
            assert_close(model(**batch).logits, expected, tolerance=tolerance)
    with pytest.raises(CtxError, match="no attention in a layer '0'"):
        prune_heads(MASKED.model(**SEPARATE), {0: [1]})
    with pytest.raises(CtxError, match="its layers do not support cross-attention"):
        build_decoder(CAUSAL.config(**SEPARATE))


def test_adapters_in_language_layers(tmp_path: Path) -> None:
    batch = monolingual_batch(MASKED)
    model, reloaded = MASKED.model(**SEPARATE), MASKED.model(**SEPARATE)
    reloaded.load_state_dict(model.state_dict())
    add_adapter(model, "task", "houlsby")
    train_adapter(model, "task")
    adapters = {name: parameter for name, parameter in model.xlm.named_parameters() if parameter.requires_grad}
    for parameter in adapters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    adapted = model(**batch).loss
    assert all(gradient.any() for gradient in torch.autograd.grad(adapted, [*adapters.values()], retain_graph=True))
    assert {name.split(".languages.")[1][0] for name in adapters if ".languages." in name} == {"0", "1", "2"}
    save_adapter(model, "task", tmp_path)
    assert (adapted - reloaded(**batch).loss).abs() > 1e-4
    set_active_adapters(reloaded, load_adapter(reloaded, tmp_path))
    assert_close(reloaded(**batch).loss, adapted)


def test_frozen_language_layers() -> None:
    model = TAGGER.model(**SEPARATE)
    freeze_language_layers(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name in dict(model.named_parameters()) if ".languages." in name}
    assert frozen
    options: Any = FinetuningMethodArguments(freeze="language-layers:embeddings=true").freeze
    assert options.embeddings
    with pytest.raises(CtxError, match=r"(?s)no separate layers.*--freeze language-layers.*num_language_layers=N"):
        freeze_language_layers(TAGGER.model(**SHARED))
