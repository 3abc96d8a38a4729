"""Conversion of released InferSent weights, compared with `torch.nn.LSTM` and max pooling."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels import CtxError, CtxInferSentModel
from hf_ctxmodels.conversion.torch_lstm import model_on_vectors, read_state_dict

SCRIPT = Path(__file__).parents[2] / "hf_ctxmodels" / "conversion" / "infersent.py"
WORDS = ["the", "cat", "saw", "The", "garden", "<p>", "</p>"]


def release_weights(width: int, hidden: int, seed: int = 0) -> tuple[torch.nn.LSTM, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    lstm = torch.nn.LSTM(width, hidden, bidirectional=True, batch_first=True)
    return lstm, {f"enc_lstm.{name}": value for name, value in lstm.state_dict().items()}


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize(("pooling", "pool"), [("max", lambda x: x.amax(0)), ("mean", lambda x: x.mean(0))])
@pytest.mark.parametrize(("width", "hidden"), [(300, 256), (7, 5)])
@torch.no_grad()
def test_embeddings_equal_torch(tmp_path: Path, width, hidden, pooling, pool, unpad: bool) -> None:
    """Compared one sentence at a time, so that padding cannot affect the maximum; unknown words are skipped."""
    lstm, weights = release_weights(width, hidden)
    torch.save(weights, tmp_path / "infersent.pkl", _use_new_zipfile_serialization=False)  # the format of 2017
    vectors = np.random.default_rng(0).normal(size=(40, width)).astype(np.float32)
    weights = read_state_dict(tmp_path / "infersent.pkl")
    model = model_on_vectors(CtxInferSentModel, weights, vectors, pooling=pooling, unpad=unpad)
    ids, lengths = torch.randint(2, 42, (5, 11)), (11, 4, 1, 8, 2)
    ids[0, 3:5] = ids[3, 0] = ids[4] = 1
    mask = (torch.arange(11) < torch.tensor(lengths)[:, None]).long()
    embeddings = model(input_ids=ids, attention_mask=mask).pooler_output
    table = torch.cat([torch.zeros(2, width), torch.from_numpy(vectors)])
    for row, length in enumerate(lengths):
        words = ids[row, :length]
        in_vocabulary = words[words != 1]
        expected = pool(lstm(table[in_vocabulary if len(in_vocabulary) else words][None])[0][0])
        torch.testing.assert_close(embeddings[row], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padding_does_not_change_an_embedding() -> None:
    """Unlike in the released code, whose maximum includes the zeros of padding."""
    lstm, weights = release_weights(6, 16)
    vectors = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    weights = {name.removeprefix("enc_lstm."): value for name, value in weights.items()}
    model = model_on_vectors(CtxInferSentModel, weights, vectors)
    short = torch.tensor([[3, 4]])
    expected = model(input_ids=short).pooler_output
    padded = torch.nn.functional.pad(short, (0, 5))
    with_padding = model(input_ids=padded, attention_mask=(padded != 0).long()).pooler_output
    torch.testing.assert_close(with_padding, expected, atol=1e-6, rtol=1e-6)
    with_zeros = torch.nn.functional.pad(lstm(torch.from_numpy(vectors)[None, [1, 2]])[0], (0, 0, 0, 5)).amax(1)
    assert (with_zeros - expected).abs().max() > 0.01, "the test needs a negative maximum"


@pytest.mark.parametrize(("version", "has_sentence_tokens"), [("1", False), ("2", True)])
@torch.no_grad()
def test_script(tmp_path: Path, monkeypatch, capsys, version: str, has_sentence_tokens: bool) -> None:
    """The file has vectors of the sentence tokens of version 2, but not of version 1."""
    lstm, weights = release_weights(6, 4)
    torch.save(weights, tmp_path / "infersent.pkl")
    matrix = np.random.default_rng(0).normal(size=(len(WORDS), 6)).round(4)
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(WORDS, matrix.tolist(), strict=True)]
    (tmp_path / "glove.txt").write_text("\n".join(lines) + "\n")
    files = {"weights": "infersent.pkl", "vectors": "glove.txt", "output": "infersent"}
    flags = [argument for name, file in files.items() for argument in (f"--{name}", str(tmp_path / file))]
    monkeypatch.setattr(sys, "argv", ["infersent.py", *flags, "--version", version])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_info.value.code == 0
    assert ("with <p> and </p>" in capsys.readouterr().out) == has_sentence_tokens
    model = AutoModel.from_pretrained(tmp_path / "infersent")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "infersent")
    embeddings = model.encode(["The cat barked", "barked"])
    for index, rows in enumerate(([3, 1], [])):
        rows = [5, *rows, 6] if has_sentence_tokens else rows
        vectors = torch.tensor(matrix[rows] if rows else np.zeros((1, 6)), dtype=torch.float32)
        torch.testing.assert_close(embeddings[index], lstm(vectors[None])[0][0].amax(0), atol=1e-5, rtol=1e-5)
    pair = tokenizer("the cat", "saw")
    assert pair.token_type_ids == ([0] * 4 + [1] * 3 if has_sentence_tokens else [0, 0, 1])
    assert tokenizer.convert_ids_to_tokens(pair.input_ids)[:2] == (
        ["<p>", "the"] if has_sentence_tokens else ["the", "cat"]
    )


def test_other_files_are_an_error(tmp_path: Path) -> None:
    _, weights = release_weights(6, 4)
    torch.save(release_weights(6, 4)[0], tmp_path / "module.pkl")  # a pickle that runs code
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_state_dict(tmp_path / "module.pkl")
    del weights["enc_lstm.weight_hh_l0_reverse"]
    torch.save(weights, tmp_path / "incomplete.pkl")
    with pytest.raises(CtxError, match=r"missing.*weight_hh_l0_reverse"):
        model_on_vectors(
            CtxInferSentModel, read_state_dict(tmp_path / "incomplete.pkl"), np.zeros((3, 6), dtype=np.float32)
        )
