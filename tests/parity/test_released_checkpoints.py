"""Files of released checkpoints, as they were published, open or raise clear errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizer_texts import TEXTS, train_sentencepiece
from transformers import BertConfig, BertForMaskedLM, ElectraConfig, ElectraForMaskedLM, T5Tokenizer, XLMTokenizer

from hf_ctxmodels import (
    CtxBertForMaskedLM,
    CtxBertModel,
    CtxBertTokenizer,
    CtxElectraForMaskedLM,
    CtxError,
    CtxT5Tokenizer,
    CtxXLMRobertaTokenizer,
    CtxXLMTokenizer,
)
from hf_ctxmodels.training.model_loading import load_family_config, load_model, load_tokenizer

SIZES = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2, "num_hidden_layers": 2}
SIZES |= {"vocab_size": 40, "max_position_embeddings": 16}
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "##s"]


def write_json(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@torch.no_grad()
def test_electra_generator(tmp_path: Path) -> None:
    """Its config.json has the relative width as a string."""
    fields = {**SIZES, "embedding_size": 8, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    torch.manual_seed(0)
    reference = ElectraForMaskedLM(ElectraConfig(**fields)).eval()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    types = {"model_type": "electra", "architectures": ["ElectraForMaskedLM"]}
    for size in ("0.25", "0.33333"):
        write_json(tmp_path, {"config.json": {**fields, **types, "generator_size": size}})
        model = CtxElectraForMaskedLM.from_pretrained(tmp_path)
        ids = torch.randint(40, (2, 7))
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)
        assert type(load_family_config(tmp_path)) is type(model.config)


@pytest.fixture
def bert(tmp_path: Path) -> BertForMaskedLM:
    """A saved BERT without `model_type`, as in the first releases."""
    torch.manual_seed(0)
    reference = BertForMaskedLM(BertConfig(**SIZES)).eval()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    write_json(tmp_path, {"config.json": {**SIZES, "type_vocab_size": 2, "hidden_act": "gelu"}})
    return reference


@torch.no_grad()
def test_config_without_model_type(bert: BertForMaskedLM, tmp_path: Path) -> None:
    ids = torch.randint(40, (2, 7))
    logits = CtxBertForMaskedLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(logits, bert(ids).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(CtxError, match=r'model_type` key[\s\S]*add "model_type": "bert", or the type of its family'):
        load_family_config(tmp_path)


def test_weights_of_a_wrapped_model(bert: BertForMaskedLM, tmp_path: Path) -> None:
    names = {f"module.{name}": value for name, value in bert.state_dict().items()}
    torch.save(names, tmp_path / "pytorch_model.bin")
    config = CtxBertModel.config_class.from_pretrained(tmp_path)
    with pytest.raises(CtxError, match=r"encoder are missing[\s\S]*remove the prefix 'module\.' of all names"):
        load_model(tmp_path, "AutoModel", config)


def test_xlm_merges_have_counts(tmp_path: Path) -> None:
    pytest.importorskip("sacremoses", reason="transformers' tokenizer needs sacremoses (extra `moses`)")
    merges = ["c a 123", "ca t</w> 12", "t h 9", "th e</w> 3"]
    letters = [*"catheso", *(f"{letter}</w>" for letter in "catheso")]
    tokens = ["<s>", "</s>", "<pad>", "<unk>", *(f"<special{number}>" for number in range(10)), *letters]
    tokens += ["ca", "cat</w>", "th", "the</w>"]
    fields = {"do_lowercase_and_remove_accent": True, "id2lang": {"0": "en"}, "lang2id": {"en": 0}}
    vocab = {token: number for number, token in enumerate(tokens)}
    write_json(tmp_path, {"vocab.json": vocab, "tokenizer_config.json": fields})
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    reference, tokenizer = XLMTokenizer.from_pretrained(tmp_path), CtxXLMTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("The cat has cats") == reference.tokenize("The cat has cats")
    assert tokenizer.tokenize("the cat") == ["the</w>", "cat</w>"]
    write_json(tmp_path, {"config.json": {"model_type": "xlm", "n_layers": 2}})
    assert load_tokenizer(tmp_path).tokenize("the cat") == ["the</w>", "cat</w>"]
    (tmp_path / "merges.txt").write_text("c a 1\nc a t\n")
    with pytest.raises(CtxError, match="'c a t', which is not two tokens"):
        CtxXLMTokenizer.from_pretrained(tmp_path)


def test_mt5_has_no_additional_sentinels(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    fields = {"extra_ids": 0, "additional_special_tokens": None, "tokenizer_class": "T5Tokenizer"}
    fields |= {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "name_or_path": "google/mt5-small"}
    write_json(tmp_path, {"tokenizer_config.json": fields})
    tokenizer, reference = CtxT5Tokenizer.from_pretrained(tmp_path), T5Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert tokenizer(TEXTS).input_ids == reference(TEXTS).input_ids
    tokenizer.save_pretrained(tmp_path / "saved")
    assert CtxT5Tokenizer.from_pretrained(tmp_path / "saved").get_vocab() == reference.get_vocab()
    write_json(tmp_path, {"tokenizer_config.json": {**fields, "extra_ids": 7}})
    assert len(CtxT5Tokenizer.from_pretrained(tmp_path)) == len(tokenizer) + 7


def test_tokenizers_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """GPT pads in batches, as in the released code, and a class that transformers lacks is opened."""
    tokens = ["<unk>", *"cat", *(f"{letter}</w>" for letter in "cat"), "ca", "cat</w>"]
    gpt, ernie = tmp_path / "gpt", tmp_path / "ernie"
    for folder, model_type in ((gpt, "openai-gpt"), (ernie, "ernie")):
        folder.mkdir()
        write_json(folder, {"config.json": {"model_type": model_type}})
    write_json(gpt, {"vocab.json": {token: number for number, token in enumerate(tokens)}})
    (gpt / "merges.txt").write_text("#version: 0.2\nc a\nca t</w>\n")
    batch = load_tokenizer(gpt)(["cat cat", "cat"], padding=True)
    assert (batch.input_ids, batch.attention_mask) == ([[8, 8], [8, 0]], [[1, 1], [1, 0]])
    (ernie / "vocab.txt").write_text("\n".join(WORD_PIECES) + "\n")
    write_json(ernie, {"tokenizer_config.json": {"tokenizer_class": "ErnieTokenizer", "do_lower_case": True}})
    assert load_tokenizer(ernie)("A cats").input_ids == [2, 5, 6, 7, 3]
    assert not capsys.readouterr().err


def test_lower_casing_with_cased_vocabulary_warns(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As for cased models that were published without tokenizer_config.json."""
    (tmp_path / "vocab.txt").write_text("\n".join([*WORD_PIECES, "A", "Cat"]) + "\n")
    write_json(tmp_path, {"config.json": {"model_type": "bert"}})
    load_tokenizer(tmp_path)
    assert 'write {"do_lower_case": false} to tokenizer_config.json' in capsys.readouterr().err
    write_json(tmp_path, {"tokenizer_config.json": {"do_lower_case": False}})
    assert load_tokenizer(tmp_path).tokenize("A Cat") == ["A", "Cat"]
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab", "do_lower_case": False},
        {"word_tokenizer_type": "mecab", "subword_tokenizer_type": "character"},  # before `tokenizer_class`
    ],
    ids=["class", "fields"],
)
def test_japanese_tokenizers_raise(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORD_PIECES) + "\n")
    write_json(tmp_path, {"tokenizer_config.json": fields})
    with pytest.raises(CtxError, match=r"files of a BertJapaneseTokenizer[\s\S]*AutoTokenizer"):
        CtxBertTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["CamembertTokenizer", "MBartTokenizerFast"])
def test_other_sentencepiece_tokenizers_raise(name: str, tmp_path: Path) -> None:
    train_sentencepiece(tmp_path / "sentencepiece.bpe.model")
    assert CtxXLMRobertaTokenizer.from_pretrained(tmp_path).tokenize("a")
    write_json(tmp_path, {"tokenizer_config.json": {"tokenizer_class": name}})
    with pytest.raises(CtxError, match=f"files of a {name}"):
        CtxXLMRobertaTokenizer.from_pretrained(tmp_path)
