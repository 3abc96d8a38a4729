"""Token embeddings of a new vocabulary: re-initialized, trained, and replaced."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification
from zoo import HEADS, as_subtests, pretraining_auto_class, tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.token_embeddings import (
    EmbeddingTrainingArguments,
    freeze_token_embeddings,
    replace_token_embeddings,
    replace_vocabulary,
    vocabulary_parameters,
)

_TEXTS = {"en": "the cat saw a dog in the house", "de": "die Katze sah einen sehr alten Hund im Haus dort drüben"}
ENGLISH, GERMAN = (FAMILIES["bert"].tokenizer.train([text] * 20, vocab_size=60 + len(text)) for text in _TEXTS.values())
CASES = [case for case in HEADS if case.auto_name == pretraining_auto_class(case.family) and case.has_auto_class]


def tables_by_size(model: torch.nn.Module, size: int) -> set[str]:
    """Names of the parameters with `size` rows, the size of the vocabulary."""
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.shape[0] == size}


@as_subtests(CASES)
def test_vocabulary_parameters(case) -> None:
    size = 997 if case.family.name != "t5" else 7 * 128
    config = tiny_config(case.family, vocab_size=size)
    model = case.model_class(config)
    assert set(vocabulary_parameters(model)) == tables_by_size(model, size)


def test_replace_vocabulary(subtests) -> None:
    for name in ("bert", "albert", "electra"):
        with subtests.test(name):
            family = FAMILIES[name]
            torch.manual_seed(0)
            model = family.models["AutoModelForMaskedLM"](tiny_config(family, vocab_size=len(ENGLISH)))
            random_state = torch.get_rng_state()
            replaced = replace_vocabulary(model, ENGLISH, GERMAN, seed=3)
            assert torch.equal(torch.get_rng_state(), random_state)
            assert replaced.config.vocab_size == len(GERMAN) != len(ENGLISH)
            tables, old, new = set(vocabulary_parameters(model)), model.state_dict(), replaced.state_dict()
            assert all(torch.equal(old[key], new[key]) for key in old if key not in tables)
            embeddings, old_embeddings = replaced.get_input_embeddings().weight, model.get_input_embeddings().weight
            for token in ENGLISH.all_special_tokens:
                german_id, english_id = (tokenizer.convert_tokens_to_ids(token) for tokenizer in (GERMAN, ENGLISH))
                assert torch.equal(embeddings[german_id], old_embeddings[english_id])
            torch.manual_seed(3)
            initialized = type(model)(copy.deepcopy(replaced.config)).get_input_embeddings().weight
            words = [index for token, index in GERMAN.get_vocab().items() if token not in GERMAN.all_special_tokens]
            assert torch.equal(embeddings[words], initialized[words])
            assert replaced.get_output_embeddings().weight is embeddings
            unchanged = EmbeddingTrainingArguments(train_only="embeddings").apply(model, ENGLISH, ENGLISH, seed=3)
            assert unchanged is model
            trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
            assert trainable == {key for key, _ in model.named_parameters() if key in tables}
    elmo = FAMILIES["elmo"].models["AutoModelForTokenClassification"](tiny_config(FAMILIES["elmo"]))
    with pytest.raises(CtxError, match="no token embeddings"):
        freeze_token_embeddings(elmo)
    spec = FAMILIES["roberta"]
    roberta_model = spec.models["AutoModelForMaskedLM"](tiny_config(spec, vocab_size=len(ENGLISH), pad_token_id=1))
    with pytest.raises(CtxError, match="positions are counted"):
        replace_vocabulary(roberta_model, ENGLISH, GERMAN, seed=0)


def test_replace_token_embeddings(tmp_path: Path) -> None:
    """The tagger then equals the other checkpoint with the tagger's body and head."""
    family = FAMILIES["bert"]
    torch.manual_seed(0)
    config = tiny_config(family, vocab_size=len(ENGLISH), initializer_range=0.3)
    english = family.models["AutoModelForMaskedLM"](config)
    german = replace_vocabulary(english, ENGLISH, GERMAN, seed=1)
    german.save_pretrained(tmp_path / "de")
    english.save_pretrained(tmp_path / "en")
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path / "en", num_labels=3).eval()
    freeze_token_embeddings(tagger)
    for parameter in tagger.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)  # as after training

    expected = AutoModelForTokenClassification.from_pretrained(tmp_path / "de", num_labels=3).eval()
    tables, trained = set(vocabulary_parameters(expected)), tagger.state_dict()
    assert tables == {"bert.embeddings.word_embeddings.weight"}
    expected.load_state_dict({**expected.state_dict(), **{k: v for k, v in trained.items() if k not in tables}})
    ids = torch.tensor([[len(GERMAN) - 1, *range(5, 9)]])
    replace_token_embeddings(tagger, tmp_path / "de")
    assert torch.equal(tagger(ids).logits, expected(ids).logits)
    assert tagger.config.vocab_size == tagger.get_input_embeddings().num_embeddings == len(GERMAN)
    assert tagger.config.tokenizer_digest == german.config.tokenizer_digest
    tagger.save_pretrained(tmp_path / "exchanged")
    reloaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "exchanged").eval()
    assert torch.equal(reloaded(ids).logits, expected(ids).logits)

    with pytest.raises(CtxError, match="also predicts tokens"):
        replace_token_embeddings(AutoModelForMaskedLM.from_pretrained(tmp_path / "en"), tmp_path / "de")
    for name, changes, message in (
        ("bert", {"hidden_size": 64}, "hidden_size=64"),
        ("bert", {"num_hidden_layers": 1}, "num_hidden_layers=1"),
        ("electra", {}, "ctx-electra.*ctx-bert"),
    ):
        incompatible = FAMILIES[name]
        incompatible.models["AutoModel"](tiny_config(incompatible, **changes)).save_pretrained(tmp_path / "other")
        with pytest.raises(CtxError, match=message):
            replace_token_embeddings(tagger, tmp_path / "other")
