"""Conversion of a LASER2 release: ids, vectors, saving and errors."""

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

pytest.importorskip("sacremoses", reason="needs the extra `moses`")
sentencepiece: Any = pytest.importorskip("sentencepiece", reason="needs the extra `sentencepiece`")

TEXTS = ["The cat sat.", "", "A \u201ccat\u201d\u2026 isn\u2019t\ta\u200bdog \u6f22\u5b57!"]
PREPARED = ["the cat sat.", "", 'a "cat..." isn\'t a dog \u6f22\u5b57!']


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with laser2.pt and laser2.spm; the dictionary lacks the pieces for "t" and has an unknown text."""
    folder = tmp_path_factory.mktemp("release")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*PREPARED[:1], 'a cat isn\'t a dog ... "!"'] * 20),
        model_prefix=str(folder / "laser2"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "laser2.model").rename(folder / "laser2.spm")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "laser2.spm"))
    pieces = [processor.id_to_piece(number) for number in range(3, len(processor))]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece in pieces if "t" not in piece), "\u6f22\u5b57"]
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(6, 4, num_layers=2, bidirectional=True)
    model = {f"lstm.{name}": value for name, value in lstm.state_dict().items()}
    model["embed_tokens.weight"] = torch.randn(len(tokens), 6)
    dictionary = {token: number for number, token in enumerate(tokens)}
    torch.save({"params": {}, "model": model, "dictionary": dictionary}, folder / "laser2.pt")
    return folder


def released_ids(release: Path, prepared_text: str, dictionary: dict[str, int]) -> list[int]:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(release / "laser2.spm"))
    return [*(dictionary.get(piece, 3) for piece in processor.encode(prepared_text, out_type=str)), 2]


@torch.no_grad()
def test_convert_command(release: Path, tmp_path: Path) -> None:
    flags = {"encoder": release / "laser2.pt", "sentencepiece": release / "laser2.spm", "output": tmp_path}
    assert run_command("convert", "laser", **flags) == 0
    model, tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(tokenizer, CtxLaserTokenizer)
    encoder = read_encoder(release / "laser2.pt")
    assert tokenizer.get_vocab() == encoder["dictionary"]
    assert len(tokenizer) == model.config.vocab_size
    expected_ids = [released_ids(release, text, encoder["dictionary"]) for text in PREPARED]
    assert tokenizer(TEXTS).input_ids == expected_ids
    assert tokenizer(TEXTS[2]).input_ids[-3] == encoder["dictionary"]["\u6f22\u5b57"]
    lstm = torch.nn.LSTM(6, 4, num_layers=2, bidirectional=True)
    weights = encoder["model"]
    lstm.load_state_dict({name.removeprefix("lstm."): weights[name] for name in weights if name.startswith("lstm.")})
    expected = [lstm(weights["embed_tokens.weight"][ids][:, None])[0][:, 0].amax(0) for ids in expected_ids]
    torch.testing.assert_close(model.encode(TEXTS, tokenizer), torch.stack(expected), atol=1e-6, rtol=1e-6)


def test_tokenizer_is_saved_and_copied(release: Path, tmp_path: Path) -> None:
    tokenizer = build_laser(read_encoder(release / "laser2.pt"), sentencepiece=release / "laser2.spm")[1]
    ids = tokenizer(TEXTS, ["a cat", "dog", ""]).input_ids
    tokenizer.save_pretrained(tmp_path / "first")
    reopened = AutoTokenizer.from_pretrained(tmp_path / "first")
    reopened.save_pretrained(tmp_path / "second")
    copies = [reopened, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))]
    for tokenizer_copy in [*copies, AutoTokenizer.from_pretrained(tmp_path / "second")]:
        assert tokenizer_copy(TEXTS, ["a cat", "dog", ""]).input_ids == ids
        assert not tokenizer_copy.reads_unchanged_text
    words = tokenizer(["The", "\u201ccat\u201d", ""], is_split_into_words=True)
    assert words.word_ids()[-1] is None
    assert sorted(set(words.word_ids()[:-1])) == [0, 1]
    batch = tokenizer(["a cat " * 300, "dog"], truncation=True, max_length=9, padding=True, return_tensors="pt")
    assert batch.input_ids.shape == (2, 9)
    assert batch.input_ids[:, -1].tolist() == [2, 1]
    assert tokenizer.decode(tokenizer("A dog \u2026").input_ids, skip_special_tokens=True) == "a dog ..."


def test_invalid_arguments_raise(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run_command("convert", "laser", encoder=release / "laser2.pt", output=tmp_path) == 2
    assert "--codes (LASER1) and --sentencepiece (LASER2)" in capsys.readouterr().err
    encoder = read_encoder(release / "laser2.pt")
    (tmp_path / "damaged.spm").write_bytes(b"no model")
    for file in ("damaged.spm", "missing.spm"):
        with pytest.raises(CtxError, match="Cannot read the SentencePiece model"):
            build_laser(encoder, sentencepiece=tmp_path / file)
    tokenizer = build_laser(encoder, sentencepiece=release / "laser2.spm")[1]
    with pytest.raises(CtxError, match="LASER2 does not split words"):
        tokenizer.moses_language = "en"
    tokenizer.moses_language = None
    assert not tokenizer.reads_unchanged_text
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "spm.model").unlink()
    with pytest.raises(CtxError, match=r"lacks merges\.txt \(LASER1\) or spm\.model \(LASER2\)"):
        CtxLaserTokenizer.from_pretrained(tmp_path)
