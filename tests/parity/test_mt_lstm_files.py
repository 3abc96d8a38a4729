"""The released form of MT-LSTM weights: our encoder's states are torch.nn.LSTM's; files that are something else."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels import CtxCoveModel, CtxError
from hf_ctxmodels.architectures.torch_lstm_conversion import model_on_vectors, read_state_dict

SCRIPT = Path(__file__).parents[2] / "conversion" / "cove.py"
WORDS = ["the", "cat", "saw", "The", "garden"]


def released(width: int, hidden: int, layers: int, seed: int = 0) -> tuple[torch.nn.LSTM, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    lstm = torch.nn.LSTM(width, hidden, num_layers=layers, bidirectional=True, batch_first=True)
    return lstm, {f"rnn.{name}": value for name, value in lstm.state_dict().items()}


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize(("width", "hidden", "layers"), [(300, 300, 2), (7, 5, 1), (12, 4, 3)])
@torch.no_grad()
def test_states_are_those_of_torch(tmp_path: Path, width: int, hidden: int, layers: int, unpad: bool) -> None:
    lstm, weights = released(width, hidden, layers)
    torch.save(weights, tmp_path / "weights.pth")
    vectors = np.random.default_rng(0).normal(size=(40, width)).astype(np.float32)
    model = model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "weights.pth"), vectors)
    model.config.unpad = unpad
    ids, lengths = torch.randint(2, 42, (4, 11)), (11, 4, 1, 8)
    mask = (torch.arange(11) < torch.tensor(lengths)[:, None]).long()
    got = model(input_ids=ids, attention_mask=mask, output_final_states=True)
    for row, length in enumerate(lengths):
        read = torch.from_numpy(vectors)[ids[row, :length] - 2]
        expected, (last, cells) = lstm(read[None])
        joined = torch.cat([read, expected[0]], 1)
        torch.testing.assert_close(got.last_hidden_state[row, :length], joined, atol=1e-5, rtol=1e-5)
        for found, states in ((got.final_hidden, last), (got.final_cell, cells)):
            states = states.view(layers, 2 * hidden)  # (layers * 2, 1, hidden), directions behind each other
            torch.testing.assert_close(found[row], states, atol=1e-5, rtol=1e-5)
    assert sum(each.numel() for each in model.layers.parameters()) == sum(each.numel() for each in lstm.parameters())


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    lstm, weights = released(6, 4, 2)
    torch.save(weights, tmp_path / "weights.pth")
    matrix = np.random.default_rng(0).normal(size=(len(WORDS), 6)).round(4)
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(WORDS, matrix.tolist(), strict=True)]
    (tmp_path / "glove.txt").write_text("\n".join(lines) + "\n")
    files = {"weights": "weights.pth", "vectors": "glove.txt", "output": "cove"}
    flags = [part for name, file in files.items() for part in (f"--{name}", str(tmp_path / file))]
    monkeypatch.setattr(sys, "argv", ["cove.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 0
    assert "on 5 vectors" in capsys.readouterr().out
    model, tokenizer = (each.from_pretrained(tmp_path / "cove") for each in (AutoModel, AutoTokenizer))
    with torch.no_grad():
        got = model(**tokenizer("The cat barked", return_tensors="pt")).last_hidden_state[0]
    read = torch.tensor(np.array([matrix[3], matrix[1], np.zeros(6)]), dtype=torch.float32)
    torch.testing.assert_close(got[:, :6], read)
    torch.testing.assert_close(got[:, 6:], lstm(read)[0].detach(), atol=1e-5, rtol=1e-5)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    _, weights = released(6, 4, 2)
    vectors = np.zeros((3, 6), dtype=np.float32)
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_state_dict(tmp_path / "text.pth")
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_state_dict(tmp_path / "gone.pth")
    torch.save(released(6, 4, 2)[0], tmp_path / "module.pth")  # a pickle that runs code
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_state_dict(tmp_path / "module.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CtxError, match="holds a list"):
        read_state_dict(tmp_path / "list.pth")
    torch.save(weights | {"out.weight": torch.zeros(2)}, tmp_path / "more.pth")
    with pytest.raises(CtxError, match="unexpected"):
        model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "more.pth"), vectors)
    del weights["rnn.bias_hh_l1_reverse"]
    torch.save(weights, tmp_path / "less.pth")
    with pytest.raises(CtxError, match=r"missing.*bias_hh_l1_reverse"):
        model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "less.pth"), vectors)
    torch.save(released(6, 4, 2)[1], tmp_path / "weights.pth")
    with pytest.raises(CtxError, match="width 6"):
        model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "weights.pth"), vectors[:, :5])
