"""AWD-LSTM files as fastai writes them, against `torch.nn.LSTM` with the same weights."""

import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from forked import run_forked
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ctxmodels import CtxError, CtxUlmfitTokenizer
from hf_ctxmodels.models.ulmfit.conversion_ulmfit import build_ulmfit_tokenizer, read_fastai, read_words

WORDS, WIDTH, CELL, LAYERS = 40, 12, 20, 3
ITOS = [*CtxUlmfitTokenizer.special_tokens, *(f"w{number}" for number in range(WORDS - 11)), "xxfake", "xxfake"]


class Stack(nn.Module):
    """The language model, plainly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        sizes = [WIDTH, *[CELL] * (LAYERS - 1), WIDTH]
        self.rnns = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in pairwise(sizes))
        self.bias = nn.Parameter(torch.randn(WORDS))

    def forward(self, ids: Tensor, states: list | None = None) -> tuple[Tensor, list]:
        values, after = self.encoder(ids), []
        for rnn, state in zip(self.rnns, states or [None] * LAYERS, strict=True):
            values, state = rnn(values, state)
            after.append(state)
        return values @ self.encoder.weight.T + self.bias, after


def saved(stack: Stack, layout: str) -> dict[str, Tensor]:
    """Its weights under the names of a release."""
    prefix = "" if layout == "encoder" else "0."
    weights = {f"{prefix}encoder.weight": stack.encoder.weight}
    copy = "encoder_with_dropout.embed" if layout == "2018" else "encoder_dp.emb"
    weights[f"{prefix}{copy}.weight"] = stack.encoder.weight
    for number, rnn in enumerate(stack.rnns):
        layer = f"{prefix}rnns.{number}"
        for name, value in rnn.named_parameters():
            weights[f"{layer}.module.{name}"] = value
        raw = f"{layer}.module." if layout == "2018" else f"{layer}."
        weights[f"{raw}weight_hh_l0_raw"] = rnn.weight_hh_l0
        weights[f"{layer}.module.weight_hh_l0"] = torch.zeros_like(rnn.weight_hh_l0)  # dropped: not to be read
    if layout != "encoder":
        weights["1.decoder.weight"] = stack.encoder.weight
    if layout in ("1", "2"):
        weights["1.decoder.bias"] = stack.bias
    return {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize("layout", ["1", "2", "2018", "encoder"])
def test_equal_to_a_stack_of_torch(layout: str, tmp_path: Path) -> None:
    stack = Stack()
    if layout in ("2018", "encoder"):  # without a bias
        stack.bias.data.zero_()
    weights = saved(stack, layout)
    torch.save({"model": weights, "opt": {}} if layout == "2" else weights, tmp_path / "model.pth")
    model = read_fastai(tmp_path / "model.pth")
    ids = torch.randint(WORDS, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, after = stack(ids)
        outputs = model(input_ids=ids, use_cache=True)
        torch.testing.assert_close(outputs.logits, expected, atol=1e-5, rtol=1e-5)
        second, _ = stack(ids.flip(1), after)
        torch.testing.assert_close(
            model(input_ids=ids.flip(1), past_key_values=outputs.past_key_values).logits, second, atol=1e-5, rtol=1e-5
        )


def test_script(tmp_path: Path) -> None:
    """Both parts open with the Auto classes; words that stand twice keep their places."""
    stack = Stack()
    torch.save(saved(stack, "2"), tmp_path / "model.pth")
    (tmp_path / "itos.json").write_text(json.dumps(ITOS))
    script = Path(__file__).resolve().parents[2] / "conversion" / "ulmfit.py"
    flags = ["--weights", tmp_path / "model.pth", "--vocabulary", tmp_path / "itos.json", "--output", tmp_path / "out"]
    done = run_forked(script, *flags)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    batch = tokenizer("w3 W7 w5", return_tensors="pt")
    assert tokenizer.convert_ids_to_tokens(batch.input_ids[0]) == ["xxbos", "w3", "xxup", "w7", "w5"]
    assert len(tokenizer) == WORDS
    assert tokenizer.convert_tokens_to_ids("w28") == ITOS.index("w28")
    with torch.no_grad():
        expected, _ = stack(batch.input_ids)
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)


class TestWords:
    def test_kinds_of_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("\n".join(ITOS))
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(ITOS))
        assert read_words(tmp_path / "a.txt") == read_words(tmp_path / "a.pkl", allow_pickle=True) == ITOS

    def test_a_pickle_is_not_opened_unasked(self, tmp_path: Path) -> None:
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(ITOS))
        with pytest.raises(CtxError, match="--allow_pickle"):
            read_words(tmp_path / "a.pkl")

    def test_a_pickle_of_anything_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(Path("/")))
        with pytest.raises(CtxError, match="pathlib"):
            read_words(tmp_path / "a.pkl", allow_pickle=True)

    def test_names_of_2018(self) -> None:
        tokenizer = build_ulmfit_tokenizer(["_unk_", "_pad_", "xbos", "the", "t_up"])
        assert (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("0.encoder.weight"), "no encoder.weight"),
        (lambda weights: weights.pop("0.rnns.1.module.bias_hh_l0"), "layers.1.state_bias is None"),
        (lambda weights: [weights.pop(name) for name in list(weights) if "rnns" in name], "no LSTM"),
    ],
)
def test_other_files_are_refused(change, message: str, tmp_path: Path) -> None:
    weights = saved(Stack(), "2")
    change(weights)
    torch.save(weights, tmp_path / "model.pth")
    with pytest.raises(CtxError, match=message):
        read_fastai(tmp_path / "model.pth")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(b"nothing")
    with pytest.raises(CtxError, match="Cannot read the weights"):
        read_fastai(tmp_path / "model.pth")
