"""Conversion of released LASER encoders, compared with `torch.nn.LSTM` and max pooling."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels import CtxError, CtxLaserTokenizer
from hf_ctxmodels.conversion.laser import build_laser, read_encoder
from hf_ctxmodels.conversion.released_files import read_codes

# as in released files: "@@" within a word; only one of "ca" and "cat" is in the dictionary
SUBWORDS = ["the", "c@@", "a@@", "t", "s@@", "cat", "th@@", "e", ".", "sat"]
CODES = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>"), ("s", "a")]


def build_release(width: int, hidden: int, layers: int, seed: int = 0) -> tuple[torch.nn.LSTM, dict[str, Any]]:
    torch.manual_seed(seed)
    lstm = torch.nn.LSTM(width, hidden, num_layers=layers, bidirectional=True)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *SUBWORDS]
    table = torch.nn.Embedding(len(tokens), width, padding_idx=1)
    model = {"embed_tokens.weight": table.weight.detach()}
    model |= {f"lstm.{name}": value for name, value in lstm.state_dict().items()}
    params = {"num_embeddings": len(tokens), "padding_idx": 1, "embed_dim": width, "hidden_size": hidden}
    params |= {"num_layers": layers, "bidirectional": True, "left_pad": True, "padding_value": 0.0}
    return lstm, {"params": params, "model": model, "dictionary": {token: n for n, token in enumerate(tokens)}}


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("width", "hidden", "layers"), [(320, 512, 5), (7, 5, 1), (12, 4, 3)])
@torch.no_grad()
def test_embeddings_equal_torch(width: int, hidden: int, layers: int, side: str, unpad: bool) -> None:
    lstm, encoder = build_release(width, hidden, layers)
    model, _ = build_laser(encoder, [])
    model.config.unpad = unpad
    lengths = (9, 4, 1, 6)
    ids = torch.full((4, 9), 1)
    for row, length in enumerate(lengths):
        columns = slice(9 - length, 9) if side == "left" else slice(length)
        ids[row, columns] = torch.randint(2, len(SUBWORDS) + 4, (length,))
    embeddings = model(input_ids=ids, attention_mask=(ids != 1).long()).pooler_output
    for row in range(4):
        vectors = encoder["model"]["embed_tokens.weight"][ids[row][ids[row] != 1]]
        expected = lstm(vectors[:, None])[0][:, 0].amax(0)
        torch.testing.assert_close(embeddings[row], expected, atol=1e-5, rtol=1e-5)
    assert sum(map(torch.numel, model.layers.parameters())) == sum(map(torch.numel, lstm.parameters()))


def test_token_ids_match_release() -> None:
    pytest.importorskip("sacremoses", reason="needs the extra `moses`")
    _, encoder = build_release(6, 4, 1)
    model, tokenizer = build_laser(encoder, CODES)
    dictionary = encoder["dictionary"]
    tokens_by_text = {"the": ["the"], "cat .": ["cat", "."], "t": ["t"], "": []}
    tokens_by_text["The cat."] = tokens_by_text["the cat ."] = ["the", "cat", "."]
    # "sa@@" and "ca@@" are not in the dictionary: fastBPE undoes the merges; "c" at the end of a word is unknown
    tokens_by_text["sac"] = ["s@@", "a@@", "<unk>"]
    tokens_by_text["sacat casat"] = ["s@@", "a@@", "cat", "c@@", "a@@", "s@@", "a@@", "t"]
    tokens_by_text["t\u0301\x07the"] = ["t", "<unk>", "the"]  # not composed; a control character is a space
    for text, tokens in tokens_by_text.items():
        ids = tokenizer(text).input_ids
        assert ids == [*(dictionary[token] for token in tokens), dictionary["</s>"]], text
    assert tokenizer.get_vocab() == dictionary
    assert len(model.embeddings.weight) == len(dictionary)
    assert tokenizer.decode(tokenizer("The cat sat.").input_ids, skip_special_tokens=True) == "the cat sat ."
    for copied in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert copied(list(tokens_by_text)).input_ids == tokenizer(list(tokens_by_text)).input_ids
    assert tokenizer.decode(tokenizer("casat").input_ids, skip_special_tokens=True) == "casat"


@torch.no_grad()
def test_convert_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lstm, encoder = build_release(6, 4, 2)
    torch.save(encoder, tmp_path / "encoder.pt")
    (tmp_path / "codes").write_text("".join(f"{a} {b} 10\n" for a, b in CODES))
    pytest.importorskip("sacremoses", reason="needs the extra `moses`")
    flags = {"encoder": tmp_path / "encoder.pt", "codes": tmp_path / "codes", "output": tmp_path / "laser"}
    assert run_command("convert", "laser", **flags) == 0
    assert "tokens" in capsys.readouterr().out
    model = AutoModel.from_pretrained(tmp_path / "laser")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "laser")
    embeddings = model.encode(["The cat.", ""], tokenizer)
    for row, tokens in enumerate((["the", "cat", ".", "</s>"], ["</s>"])):
        ids = [encoder["dictionary"][token] for token in tokens]
        expected = lstm(encoder["model"]["embed_tokens.weight"][ids][:, None])[0][:, 0].amax(0)
        torch.testing.assert_close(embeddings[row], expected, atol=1e-5, rtol=1e-5)


def test_moses_language(tmp_path: Path) -> None:
    """It is saved, None is for text that is already split, and special tokens are not split."""
    pytest.importorskip("sacremoses", reason="needs the extra `moses`")
    tokenizer = build_laser(build_release(6, 4, 1)[1], CODES)[1]
    assert tokenizer.tokenize("The</s> cat.") == ["the", "</s>", "cat", "."]
    tokenizer.moses_language = "de"
    tokenizer.save_pretrained(tmp_path)
    reopened = AutoTokenizer.from_pretrained(tmp_path)
    assert (reopened.moses_language, reopened.reads_unchanged_text) == ("de", False)
    assert reopened(["The cat.", "sat"], ["the", "cat."]) == tokenizer(["The cat.", "sat"], ["the", "cat."])
    words = tokenizer(["The", "cat."], is_split_into_words=True)
    assert words.word_ids()[:2] == [0, 1], "words are not split again"
    tokenizer.moses_language = None
    assert tokenizer.tokenize("the cat.")[-1] == "."
    assert tokenizer.tokenize("the cat.") != ["the", "cat", "."]
    assert (tokenizer.moses_language, tokenizer.reads_unchanged_text) == (None, False)
    for language, message in (("zh", "'zh'"), (True, "name of a language")):
        with pytest.raises(CtxError, match=message):
            tokenizer.moses_language = language
    with pytest.raises(CtxError, match="not trained on texts"):
        CtxLaserTokenizer.train(["a cat"], 60, moses_language="en")


def test_invalid_files_raise(tmp_path: Path) -> None:
    lstm, encoder = build_release(6, 4, 2)
    torch.save(lstm, tmp_path / "module.pt")  # a pickle that runs code
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_encoder(tmp_path / "module.pt")
    torch.save(encoder["model"], tmp_path / "weights.pt")
    with pytest.raises(CtxError, match="not a LASER encoder"):
        read_encoder(tmp_path / "weights.pt")
    (tmp_path / "codes").write_text("a b 3\nabc\n")
    with pytest.raises(CtxError, match=r"Not two subwords[\s\S]*line 2"):
        read_codes(tmp_path / "codes")
    (tmp_path / "codes").write_text("")
    with pytest.raises(CtxError, match="is empty"):
        read_codes(tmp_path / "codes")
    dictionary = encoder["dictionary"]
    for invalid_dictionary, message in (
        ({"<s>": 0, "<pad>": 1, "<unk>": 2}, "lacks </s>"),
        (dictionary | {"the": 99}, "not 0, 1, 2"),
        (dictionary | {"more": 14}, r"The embeddings are \(14, 6\), expected \(15, 6\)"),
    ):
        with pytest.raises(CtxError, match=message):
            build_laser(encoder | {"dictionary": invalid_dictionary}, [])
    del encoder["model"]["lstm.bias_hh_l1_reverse"]
    with pytest.raises(CtxError, match=r"missing.*bias_hh_l1_reverse"):
        build_laser(encoder, [])
