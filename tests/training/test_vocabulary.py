"""Another vocabulary below a frozen body: what is drawn anew, what is trained, and what is exchanged."""

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
OWN, OTHER = (FAMILIES["bert"].tokenizer.train([text] * 20, vocab_size=60 + len(text)) for text in _TEXTS.values())
READERS = [case for case in HEADS if case.auto_name == pretraining_auto_class(case.family) and case.has_auto_class]


def tables_by_size(model: torch.nn.Module, size: int) -> set[str]:
    """What has as many rows as there are tokens, which nothing else has."""
    return {name for name, each in model.named_parameters(remove_duplicate=False) if each.shape[0] == size}


@as_subtests(READERS)
def test_what_depends_on_the_vocabulary(case) -> None:
    size = 997 if case.family.name != "t5" else 7 * 128
    config = tiny_config(case.family, vocab_size=size)
    model = case.model_class(config)
    assert set(vocabulary_parameters(model)) == tables_by_size(model, size)


def test_the_body_stays_and_special_tokens_keep_their_rows(subtests) -> None:
    for name in ("bert", "albert", "electra"):
        with subtests.test(name):
            family = FAMILIES[name]
            torch.manual_seed(0)
            model = family.models["AutoModelForMaskedLM"](tiny_config(family, vocab_size=len(OWN)))
            drawn = torch.get_rng_state()
            found = replace_vocabulary(model, OWN, OTHER, seed=3)
            assert torch.equal(torch.get_rng_state(), drawn)
            assert found.config.vocab_size == len(OTHER) != len(OWN)
            tables, old, new = set(vocabulary_parameters(model)), model.state_dict(), found.state_dict()
            assert all(torch.equal(old[each], new[each]) for each in old if each not in tables)
            embeddings, before = found.get_input_embeddings().weight, model.get_input_embeddings().weight
            for token in OWN.all_special_tokens:
                assert torch.equal(
                    embeddings[OTHER.convert_tokens_to_ids(token)], before[OWN.convert_tokens_to_ids(token)]
                )
            torch.manual_seed(3)
            fresh = type(model)(copy.deepcopy(found.config)).get_input_embeddings().weight
            words = [place for token, place in OTHER.get_vocab().items() if token not in OTHER.all_special_tokens]
            assert torch.equal(embeddings[words], fresh[words])
            assert found.get_output_embeddings().weight is embeddings
            kept = EmbeddingTrainingArguments(train_only="embeddings").apply(model, OWN, OWN, seed=3)
            assert kept is model
            learning = {each for each, parameter in kept.named_parameters() if parameter.requires_grad}
            assert learning == {each for each, _ in model.named_parameters() if each in tables}
    elmo = FAMILIES["elmo"].models["AutoModelForTokenClassification"](tiny_config(FAMILIES["elmo"]))
    with pytest.raises(CtxError, match="no token embeddings"):
        freeze_token_embeddings(elmo)
    roberta = FAMILIES["roberta"]
    elsewhere = roberta.models["AutoModelForMaskedLM"](tiny_config(roberta, vocab_size=len(OWN), pad_token_id=1))
    with pytest.raises(CtxError, match="positions are counted"):
        replace_vocabulary(elsewhere, OWN, OTHER, seed=0)


def test_embeddings_are_exchanged(tmp_path: Path) -> None:
    """A tagger then computes what the other checkpoint would with the tagger's body and head."""
    family = FAMILIES["bert"]
    torch.manual_seed(0)
    config = tiny_config(family, vocab_size=len(OWN), initializer_range=0.3)
    start = family.models["AutoModelForMaskedLM"](config)
    german = replace_vocabulary(start, OWN, OTHER, seed=1)
    german.save_pretrained(tmp_path / "de")
    start.save_pretrained(tmp_path / "en")
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path / "en", num_labels=3).eval()
    freeze_token_embeddings(tagger)
    for parameter in tagger.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)  # as if it had learned

    expected = AutoModelForTokenClassification.from_pretrained(tmp_path / "de", num_labels=3).eval()
    tables, learned = set(vocabulary_parameters(expected)), tagger.state_dict()
    assert tables == {"bert.embeddings.word_embeddings.weight"}
    expected.load_state_dict({**expected.state_dict(), **{k: v for k, v in learned.items() if k not in tables}})
    ids = torch.tensor([[len(OTHER) - 1, *range(5, 9)]])
    replace_token_embeddings(tagger, tmp_path / "de")
    assert torch.equal(tagger(ids).logits, expected(ids).logits)
    assert tagger.config.vocab_size == tagger.get_input_embeddings().num_embeddings == len(OTHER)
    assert tagger.config.tokenizer_digest == german.config.tokenizer_digest
    tagger.save_pretrained(tmp_path / "exchanged")
    again = AutoModelForTokenClassification.from_pretrained(tmp_path / "exchanged").eval()
    assert torch.equal(again(ids).logits, expected(ids).logits)

    with pytest.raises(CtxError, match="also predicts tokens"):
        replace_token_embeddings(AutoModelForMaskedLM.from_pretrained(tmp_path / "en"), tmp_path / "de")
    for name, changes, message in (
        ("bert", {"hidden_size": 64}, "hidden_size=64"),
        ("bert", {"num_hidden_layers": 1}, "num_hidden_layers=1"),
        ("electra", {}, "ctx-electra.*ctx-bert"),
    ):
        other = FAMILIES[name]
        other.models["AutoModel"](tiny_config(other, **changes)).save_pretrained(tmp_path / "other")
        with pytest.raises(CtxError, match=message):
            replace_token_embeddings(tagger, tmp_path / "other")
