"""Conversion of released InferSent and MT-LSTM (CoVe) weights, compared with `torch.nn.LSTM`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_command
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_ctxmodels import CtxCoveModel, CtxError, CtxInferSentModel
from hf_ctxmodels.conversion.torch_lstm import model_on_vectors, read_state_dict

PREFIXES: dict[type[PreTrainedModel], str] = {CtxCoveModel: "rnn.", CtxInferSentModel: "enc_lstm."}
WORDS = ["the", "cat", "saw", "The", "garden", "<p>", "</p>"]


def release_weights(
    model_class: type[PreTrainedModel], width: int, hidden: int, layers: int = 1
) -> tuple[torch.nn.LSTM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(width, hidden, num_layers=layers, bidirectional=True, batch_first=True)
    return lstm, {f"{PREFIXES[model_class]}{name}": value for name, value in lstm.state_dict().items()}


def random_vectors(count: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)


def write_vectors(words: list[str], path: Path) -> np.ndarray:
    """Write vectors of width 6 in GloVe's format."""
    matrix = np.random.default_rng(0).normal(size=(len(words), 6)).round(4)
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(words, matrix.tolist(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return matrix


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize(("width", "hidden", "layers"), [(300, 300, 2), (7, 5, 1), (12, 4, 3)])
@torch.no_grad()
def test_cove_states_equal_torch(tmp_path: Path, width: int, hidden: int, layers: int, unpad: bool) -> None:
    lstm, weights = release_weights(CtxCoveModel, width, hidden, layers)
    torch.save(weights, tmp_path / "weights.pth")
    vectors = random_vectors(40, width)
    model = model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "weights.pth"), vectors)
    model.config.unpad = unpad
    ids, lengths = torch.randint(2, 42, (4, 11)), (11, 4, 1, 8)
    mask = (torch.arange(11) < torch.tensor(lengths)[:, None]).long()
    outputs = model(input_ids=ids, attention_mask=mask, output_final_states=True)
    for row, length in enumerate(lengths):
        word_vectors = torch.from_numpy(vectors)[ids[row, :length] - 2]
        states, (hidden_states, cell_states) = lstm(word_vectors[None])
        expected = torch.cat([word_vectors, states[0]], 1)
        torch.testing.assert_close(outputs.last_hidden_state[row, :length], expected, atol=1e-5, rtol=1e-5)
        for final, expected in ((outputs.final_hidden, hidden_states), (outputs.final_cell, cell_states)):
            expected = expected.view(layers, 2 * hidden)  # (layers * 2, 1, hidden), directions alternate
            torch.testing.assert_close(final[row], expected, atol=1e-5, rtol=1e-5)
    assert sum(map(torch.numel, model.layers.parameters())) == sum(map(torch.numel, lstm.parameters()))


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize(("pooling", "pool"), [("max", lambda x: x.amax(0)), ("mean", lambda x: x.mean(0))])
@pytest.mark.parametrize(("width", "hidden"), [(300, 256), (7, 5)])
@torch.no_grad()
def test_infersent_embeddings_equal_torch(tmp_path: Path, width, hidden, pooling, pool, unpad: bool) -> None:
    """Sentence by sentence: unlike in the released code, max pooling excludes padding. Unknown words are skipped."""
    lstm, weights = release_weights(CtxInferSentModel, width, hidden)
    torch.save(weights, tmp_path / "infersent.pkl", _use_new_zipfile_serialization=False)  # the format of 2017
    vectors, weights = random_vectors(40, width), read_state_dict(tmp_path / "infersent.pkl")
    model = model_on_vectors(CtxInferSentModel, weights, vectors, pooling=pooling, unpad=unpad)
    ids, lengths = torch.randint(2, 42, (5, 11)), (11, 4, 1, 8, 2)
    ids[0, 3:5] = ids[3, 0] = ids[4] = 1
    mask = (torch.arange(11) < torch.tensor(lengths)[:, None]).long()
    embeddings = model(input_ids=ids, attention_mask=mask).pooler_output
    table = torch.cat([torch.zeros(2, width), torch.from_numpy(vectors)])
    for row, length in enumerate(lengths):
        word_ids = ids[row, :length]
        in_vocabulary = word_ids[word_ids != 1]
        expected = pool(lstm(table[in_vocabulary if len(in_vocabulary) else word_ids][None])[0][0])
        torch.testing.assert_close(embeddings[row], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_convert_cove_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lstm, weights = release_weights(CtxCoveModel, 6, 4, 2)
    torch.save(weights, tmp_path / "weights.pth")
    matrix, out = write_vectors(WORDS[:5], tmp_path / "glove.txt"), tmp_path / "cove"
    flags = {"weights": tmp_path / "weights.pth", "vectors": tmp_path / "glove.txt", "output": out}
    assert run_command("convert", "cove", **flags) == 0
    assert "on 5 vectors" in capsys.readouterr().out
    model, tokenizer = AutoModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    states = model(**tokenizer("The cat barked", return_tensors="pt")).last_hidden_state[0]
    vectors = torch.tensor(np.array([matrix[3], matrix[1], np.zeros(6)]), dtype=torch.float32)
    torch.testing.assert_close(states[:, :6], vectors)
    torch.testing.assert_close(states[:, 6:], lstm(vectors)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("version", "has_sentence_tokens"), [("1", False), ("2", True)])
@torch.no_grad()
def test_convert_infersent_command(
    tmp_path: Path, capsys: pytest.CaptureFixture, version: str, has_sentence_tokens: bool
) -> None:
    """The vectors include the sentence tokens of version 2, but not those of version 1."""
    lstm, weights = release_weights(CtxInferSentModel, 6, 4)
    torch.save(weights, tmp_path / "infersent.pkl")
    matrix, out = write_vectors(WORDS, tmp_path / "glove.txt"), tmp_path / "infersent"
    flags = {"weights": tmp_path / "infersent.pkl", "vectors": tmp_path / "glove.txt", "output": out}
    assert run_command("convert", "infersent", **flags, version=version) == 0
    assert ("with <p> and </p>" in capsys.readouterr().out) == has_sentence_tokens
    model, tokenizer = AutoModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    embeddings = model.encode(["The cat barked", "barked"])
    for index, rows in enumerate(([3, 1], [])):
        rows = [5, *rows, 6] if has_sentence_tokens else rows
        vectors = torch.tensor(matrix[rows] if rows else np.zeros((1, 6)), dtype=torch.float32)
        torch.testing.assert_close(embeddings[index], lstm(vectors[None])[0][0].amax(0), atol=1e-5, rtol=1e-5)
    pair = tokenizer("the cat", "saw")
    assert pair.token_type_ids == ([0] * 4 + [1] * 3 if has_sentence_tokens else [0, 0, 1])
    first_tokens = ["<p>", "the"] if has_sentence_tokens else ["the", "cat"]
    assert tokenizer.convert_ids_to_tokens(pair.input_ids)[:2] == first_tokens


def test_weights_of_different_shapes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, weights = release_weights(CtxCoveModel, 6, 4)
    write_vectors(WORDS, tmp_path / "glove.txt")
    flags = {"weights": tmp_path / "weights.pth", "vectors": tmp_path / "glove.txt", "output": tmp_path / "out"}
    for value in (weights["rnn.bias_ih_l0"][1:], weights["rnn.bias_ih_l0"].to_sparse()):
        torch.save(weights | {"rnn.bias_ih_l0": value}, tmp_path / "weights.pth")
        assert run_command("convert", "cove", **flags) == 2
        error = capsys.readouterr().err
        assert "The files cannot be converted" in error
        assert f"--weights {tmp_path}/weights.pth --vectors {tmp_path}/glove.txt\n" in error  # only the given flags
    assert not (tmp_path / "out").exists()


def test_invalid_files_raise(tmp_path: Path) -> None:
    lstm, weights = release_weights(CtxCoveModel, 6, 4, 2)
    (tmp_path / "text.pth").write_text("no weights")
    torch.save(lstm, tmp_path / "module.pth")  # a pickle that runs code
    for name in ("text", "missing", "module"):
        with pytest.raises(CtxError, match="Cannot read the weights"):
            read_state_dict(tmp_path / f"{name}.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CtxError, match="contains a list"):
        read_state_dict(tmp_path / "list.pth")
    incomplete = {name: value for name, value in weights.items() if name != "rnn.bias_hh_l1_reverse"}
    for content, width, message in (
        (weights | {"out.weight": torch.zeros(2)}, 6, "unexpected"),
        (incomplete, 6, r"missing.*bias_hh_l1_reverse"),
        (weights, 5, "width 6"),
    ):
        torch.save(content, tmp_path / "weights.pth")
        with pytest.raises(CtxError, match=message):
            model_on_vectors(CtxCoveModel, read_state_dict(tmp_path / "weights.pth"), random_vectors(3, width))
