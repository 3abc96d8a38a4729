"""Conversion of released ELMo files, compared with the outputs of AllenNLP."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels import CtxElmoTokenizer, CtxError
from hf_ctxmodels.conversion.elmo import config_from_options, read_allennlp

h5py = pytest.importorskip("h5py", reason="reads HDF5 (extra `hdf5`)")


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "elmo_fixture"


@pytest.fixture(scope="module")
def tokenizer() -> CtxElmoTokenizer:
    return CtxElmoTokenizer.from_words([])


@pytest.fixture(scope="module")
def streams(folder: Path) -> list[list[list[str]]]:
    return [[line.split() for line in stream] for stream in json.loads((folder / "sentences.json").read_text())]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Tensor]]:
    """(words, 2 * 16) top layer of each sentence in each stream."""
    arrays = []
    for number in range(3):
        with h5py.File(folder / f"lm_embeddings_{number}.hdf5") as file:
            arrays.append([torch.from_numpy(np.concatenate(file[str(index)][...], -1)) for index in range(10)])
    return arrays


def load_model(folder: Path) -> Any:
    return read_allennlp(folder / "options.json", folder / "lm_weights.hdf5")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("unpad", [True, False])
def test_top_layer_of_consecutive_batches_equals_allennlp(
    folder: Path, tokenizer: CtxElmoTokenizer, streams: list, expected: list, unpad: bool, side: str
) -> None:
    model = load_model(folder)
    model.config.unpad = unpad
    cache = None
    for number in range(10):
        options = {"is_split_into_words": True, "padding": True, "padding_side": side, "return_tensors": "pt"}
        batch = tokenizer([stream[number] for stream in streams], **options)
        with torch.no_grad():
            outputs = model(**batch, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        for row, stream in enumerate(expected):
            states = outputs.last_hidden_state[row][batch["attention_mask"][row].bool()]
            torch.testing.assert_close(states[1:-1], stream[number], rtol=0, atol=1e-5)


def test_character_encoder_equals_allennlp(folder: Path, tokenizer: CtxElmoTokenizer) -> None:
    """For a list of words."""
    words = (folder / "vocab_test.txt").read_text().split("\n")
    with h5py.File(folder / "elmo_token_embeddings.hdf5") as file:
        table = torch.from_numpy(file["embedding"][...])
    model = load_model(folder)
    with torch.no_grad():
        vectors = model.embed_ids(tokenizer([words], is_split_into_words=True, return_tensors="pt").input_ids)[0, 1:-1]
    assert len(table) == len(vectors)
    torch.testing.assert_close(vectors, table, rtol=0, atol=1e-5)


def test_damaged_files_raise(folder: Path, tmp_path: Path) -> None:
    options = json.loads((folder / "options.json").read_text())
    with pytest.raises(CtxError, match="KeyError: 'dim'"):
        config_from_options({**options, "lstm": {"projection_dim": 16}})
    for overrides, message in (({"dim": 65}, "layers.0.input_weight is"), ({"n_layers": 3}, "no 'RNN_0/.*Cell2")):
        file = tmp_path / "options.json"
        file.write_text(json.dumps({**options, "lstm": {**options["lstm"], **overrides}}))
        with pytest.raises(CtxError, match=message):
            read_allennlp(file, folder / "lm_weights.hdf5")
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_allennlp(folder / "options.json", folder / "sentences.json")
    text_file = tmp_path / "text.hdf5"
    text_file.write_bytes((folder / "lm_weights.hdf5").read_bytes())
    with h5py.File(text_file, "r+") as file:
        text = np.array(file["char_embed"]).astype("S")
        del file["char_embed"]
        file["char_embed"] = text
    with pytest.raises(CtxError, match=r"Cannot read the weights: .*Cannot cast"):
        read_allennlp(folder / "options.json", text_file)
    with pytest.raises(CtxError, match="The file cannot be read"):
        read_allennlp(tmp_path / "missing.json", folder / "lm_weights.hdf5")


def test_convert_command(folder: Path, tmp_path: Path, streams: list, expected: list) -> None:
    """The auto classes load the output, which computes the same states as AllenNLP."""
    files = {"options": folder / "options.json", "weights": folder / "lm_weights.hdf5"}
    assert run_command("convert", "elmo", **files, vocabulary=folder / "vocab_test.txt", output=tmp_path / "out") == 0
    model, tokenizer = AutoModel.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    words = (folder / "vocab_test.txt").read_text().split()
    assert len(tokenizer) == model.config.vocab_size == len({*words, *tokenizer.special_tokens} - {"<UNK>"})
    batch = tokenizer([" ".join(stream[0]) for stream in streams], padding=True, return_tensors="pt")
    with torch.no_grad():
        outputs = model.eval()(**batch)
    for row, stream in enumerate(expected):
        states = outputs.last_hidden_state[row][batch["attention_mask"][row].bool()]
        torch.testing.assert_close(states[1:-1], stream[0], rtol=0, atol=1e-5)
