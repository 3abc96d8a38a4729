"""Conversion of released MT-LSTM weights, compared with `torch.nn.LSTM`."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels import CtxCoveModel, CtxError
from hf_ctxmodels.conversion.torch_lstm import model_on_vectors, read_state_dict

SCRIPT = Path(__file__).parents[2] / "hf_ctxmodels" / "conversion" / "cove.py"
WORDS = ["the", "cat", "saw", "The", "garden"]


def release_weights(
    width: int, hidden: int, layers: int, seed: int = 0
) -> tuple[torch.nn.LSTM, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    lstm = torch.nn.LSTM(width, hidden, num_layers=layers, bidirectional=True, batch_first=True)
    return lstm, {f"rnn.{name}": value for name, value in lstm.state_dict().items()}


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize(("width", "hidden", "layers"), [(300, 300, 2), (7, 5, 1), (12, 4, 3)])
@torch.no_grad()
def test_states_equal_torch(tmp_path: Path, width: int, hidden: int, layers: int, unpad: bool) -> None:
    lstm, weights = release_weights(width, hidden, layers)
    torch.save(weights, tmp_path / "weights.pth")
    vectors = np.random.default_rng(0).normal(size=(40, width)).astype(np.float32)
    model = model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "weights.pth"), vectors)
    model.config.unpad = unpad
    ids, lengths = torch.randint(2, 42, (4, 11)), (11, 4, 1, 8)
    mask = (torch.arange(11) < torch.tensor(lengths)[:, None]).long()
    outputs = model(input_ids=ids, attention_mask=mask, output_final_states=True)
    for row, length in enumerate(lengths):
        words = torch.from_numpy(vectors)[ids[row, :length] - 2]
        states, (hidden_states, cell_states) = lstm(words[None])
        expected = torch.cat([words, states[0]], 1)
        torch.testing.assert_close(outputs.last_hidden_state[row, :length], expected, atol=1e-5, rtol=1e-5)
        for final, expected in ((outputs.final_hidden, hidden_states), (outputs.final_cell, cell_states)):
            expected = expected.view(layers, 2 * hidden)  # (layers * 2, 1, hidden), directions alternate
            torch.testing.assert_close(final[row], expected, atol=1e-5, rtol=1e-5)
    assert sum(map(torch.numel, model.layers.parameters())) == sum(map(torch.numel, lstm.parameters()))


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    lstm, weights = release_weights(6, 4, 2)
    torch.save(weights, tmp_path / "weights.pth")
    matrix = np.random.default_rng(0).normal(size=(len(WORDS), 6)).round(4)
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(WORDS, matrix.tolist(), strict=True)]
    (tmp_path / "glove.txt").write_text("\n".join(lines) + "\n")
    files = {"weights": "weights.pth", "vectors": "glove.txt", "output": "cove"}
    flags = [argument for name, file in files.items() for argument in (f"--{name}", str(tmp_path / file))]
    monkeypatch.setattr(sys, "argv", ["cove.py", *flags])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_info.value.code == 0
    assert "on 5 vectors" in capsys.readouterr().out
    model = AutoModel.from_pretrained(tmp_path / "cove")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "cove")
    with torch.no_grad():
        states = model(**tokenizer("The cat barked", return_tensors="pt")).last_hidden_state[0]
    vectors = torch.tensor(np.array([matrix[3], matrix[1], np.zeros(6)]), dtype=torch.float32)
    torch.testing.assert_close(states[:, :6], vectors)
    torch.testing.assert_close(states[:, 6:], lstm(vectors)[0].detach(), atol=1e-5, rtol=1e-5)


def test_other_files_are_an_error(tmp_path: Path) -> None:
    _, weights = release_weights(6, 4, 2)
    vectors = np.zeros((3, 6), dtype=np.float32)
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_state_dict(tmp_path / "text.pth")
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_state_dict(tmp_path / "missing.pth")
    torch.save(release_weights(6, 4, 2)[0], tmp_path / "module.pth")  # a pickle that runs code
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_state_dict(tmp_path / "module.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CtxError, match="contains a list"):
        read_state_dict(tmp_path / "list.pth")
    torch.save(weights | {"out.weight": torch.zeros(2)}, tmp_path / "additional.pth")
    with pytest.raises(CtxError, match="unexpected"):
        model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "additional.pth"), vectors)
    del weights["rnn.bias_hh_l1_reverse"]
    torch.save(weights, tmp_path / "incomplete.pth")
    with pytest.raises(CtxError, match=r"missing.*bias_hh_l1_reverse"):
        model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "incomplete.pth"), vectors)
    torch.save(release_weights(6, 4, 2)[1], tmp_path / "weights.pth")
    with pytest.raises(CtxError, match="width 6"):
        model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "weights.pth"), vectors[:, :5])
