"""Conversion of fastai's AWD-LSTM files, compared with `torch.nn.LSTM`."""

import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from commands import run_command
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_ctxmodels import CtxError, CtxUlmfitTokenizer
from hf_ctxmodels.conversion.ulmfit import build_ulmfit_tokenizer, read_fastai, read_words

WORDS, WIDTH, CELL, LAYERS, LABELS = 40, 12, 20, 3, 2
ITOS = [*CtxUlmfitTokenizer.special_tokens, *(f"w{number}" for number in range(WORDS - 11)), "xxfake", "xxfake"]


class ReferenceModel(nn.Module):
    """AWD-LSTM language model without dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        sizes = [WIDTH, *[CELL] * (LAYERS - 1), WIDTH]
        self.rnns = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in pairwise(sizes))
        self.bias = nn.Parameter(torch.randn(WORDS))

    def forward(self, ids: Tensor, states: list | None = None) -> tuple[Tensor, list]:
        values, final_states = self.hidden_states(ids, states)
        return values @ self.encoder.weight.T + self.bias, final_states

    def hidden_states(self, ids: Tensor, states: list | None = None) -> tuple[Tensor, list]:
        """(batch, length, hidden) of the last layer, and the final state of each layer."""
        values, final_states = self.encoder(ids), []
        for rnn, state in zip(self.rnns, states or [None] * LAYERS, strict=True):
            values, state = rnn(values, state)
            final_states.append(state)
        return values, final_states


def release_weights(reference: ReferenceModel, layout: str) -> dict[str, Tensor]:
    """Weights with the names of a release."""
    prefix = "" if layout == "encoder" else "0."
    weights = {f"{prefix}encoder.weight": reference.encoder.weight}
    duplicate = "encoder_with_dropout.embed" if layout == "2018" else "encoder_dp.emb"
    weights[f"{prefix}{duplicate}.weight"] = reference.encoder.weight
    for number, rnn in enumerate(reference.rnns):
        layer = f"{prefix}rnns.{number}"
        for name, value in rnn.named_parameters():
            weights[f"{layer}.module.{name}"] = value
        raw = f"{layer}.module." if layout == "2018" else f"{layer}."
        weights[f"{raw}weight_hh_l0_raw"] = rnn.weight_hh_l0
        weights[f"{layer}.module.weight_hh_l0"] = torch.zeros_like(rnn.weight_hh_l0)  # after dropout, must be ignored
    if layout != "encoder":
        weights["1.decoder.weight"] = reference.encoder.weight
    if layout in ("1", "2"):
        weights["1.decoder.bias"] = reference.bias
    return {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize("layout", ["1", "2", "2018", "encoder"])
def test_logits_equal_torch_lstm(layout: str, tmp_path: Path) -> None:
    reference = ReferenceModel()
    if layout in ("2018", "encoder"):  # files without a bias
        reference.bias.data.zero_()
    weights = release_weights(reference, layout)
    torch.save({"model": weights, "opt": {}} if layout == "2" else weights, tmp_path / "model.pth")
    model = read_fastai(tmp_path / "model.pth")
    ids = torch.randint(WORDS, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = cache = None
        for segment in (ids, ids.flip(1)):
            expected, states = reference(segment, states)
            outputs = model(input_ids=segment, past_key_values=cache, use_cache=True)
            torch.testing.assert_close(outputs.logits, expected, atol=1e-5, rtol=1e-5)
            cache = outputs.past_key_values


def test_separate_output_layer(tmp_path: Path) -> None:
    """An output layer that is not tied to the embeddings stays separate, also after saving."""
    reference, file = ReferenceModel(), tmp_path / "model.pth"
    weights = release_weights(reference, "1")
    weights["1.decoder.weight"] = torch.randn_like(reference.encoder.weight)
    torch.save(weights, file)
    model = read_fastai(file)
    ids = torch.arange(WORDS)[None]
    with torch.no_grad():
        states = reference.hidden_states(ids)[0]
        expected = states @ weights["1.decoder.weight"].T + reference.bias
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
        model.save_pretrained(tmp_path / "saved")
        reloaded = type(model).from_pretrained(tmp_path / "saved").eval()
        torch.testing.assert_close(reloaded(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


class ReferenceClassifier(nn.Module):
    """Two blocks of normalization and linear layer, in the layout of a release, on pooled states of the last layer."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.language_model = ReferenceModel()
        widths = [3 * WIDTH, 50, LABELS]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[:2])
        self.linears = nn.ModuleList(nn.Linear(*pair, bias=layout != "2") for pair in pairwise(widths))
        for norm in self.norms:
            for values in (norm.weight, norm.bias, norm.running_mean):
                nn.init.normal_(values)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.language_model.hidden_states(ids)
        values = torch.cat([states[:, -1], states.amax(1), states.mean(1)], 1)
        values = self.linears[0](self.norms[0](values)).relu()
        return self.linears[1](self.norms[1](values))

    def release_weights(self, layout: str) -> dict[str, Tensor]:
        """Weights with the names of a release; the file of 2018 has no number of batches."""
        encoder = {
            name: value for name, value in release_weights(self.language_model, layout).items() if name[0] == "0"
        }
        prefix = "0." if layout == "2018" else "0.module."
        weights = {name.replace("0.", prefix, 1): value for name, value in encoder.items()}
        for block, modules in enumerate(zip(self.norms, self.linears, strict=True)):
            names = {"2018": ("{0}.bn", "{0}.lin"), "1": ("{1}", "{2}"), "2": ("{0}.0", "{0}.2")}[layout]
            for name, module in zip(names, modules, strict=True):
                name = name.format(block, 4 * block, 4 * block + 2)
                weights |= {f"1.layers.{name}.{key}": value for key, value in module.state_dict().items()}
        if layout == "2018":
            weights = {name: value for name, value in weights.items() if "num_batches" not in name}
        return weights


@pytest.mark.parametrize("layout", ["1", "2", "2018"])
def test_classifier(layout: str, tmp_path: Path) -> None:
    reference, out = ReferenceClassifier(layout).eval(), tmp_path / "out"
    torch.save({"model": reference.release_weights(layout)}, tmp_path / "classifier.pth")
    (tmp_path / "itos.json").write_text(json.dumps(ITOS))
    flags = {"weights": tmp_path / "classifier.pth", "vocabulary": tmp_path / "itos.json", "output": out}
    assert run_command("convert", "ulmfit", **flags) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForSequenceClassification.from_pretrained(out)
    batch = tokenizer("w3 W7 w5", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, reference(batch.input_ids), atol=1e-5, rtol=1e-5)


def test_convert_command(tmp_path: Path) -> None:
    """The auto classes load model and tokenizer; repeated words keep their ids."""
    reference, out = ReferenceModel(), tmp_path / "out"
    torch.save(release_weights(reference, "2"), tmp_path / "model.pth")
    (tmp_path / "itos.json").write_text(json.dumps(ITOS))
    flags = {"weights": tmp_path / "model.pth", "vocabulary": tmp_path / "itos.json", "output": out}
    assert run_command("convert", "ulmfit", **flags) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out).eval()
    batch = tokenizer("w3 W7 w5", return_tensors="pt")
    assert tokenizer.convert_ids_to_tokens(batch.input_ids[0]) == ["xxbos", "w3", "xxup", "w7", "w5"]
    assert len(tokenizer) == WORDS
    assert tokenizer.convert_tokens_to_ids("w28") == ITOS.index("w28")
    with torch.no_grad():
        expected, _ = reference(batch.input_ids)
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)


def test_read_words(tmp_path: Path) -> None:
    """Text files, pickled lists only with `allow_pickle`, and the token names of 2018."""
    (tmp_path / "a.txt").write_text("\n".join(ITOS))
    (tmp_path / "separator.txt").write_text("the\na\u2028b\n", encoding="utf-8")
    assert read_words(tmp_path / "separator.txt") == ["the", "a\u2028b"], "only line feeds end a word"
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(ITOS))
    (tmp_path / "code.pkl").write_bytes(pickle.dumps(Path("/")))
    assert read_words(tmp_path / "a.txt") == read_words(tmp_path / "a.pkl", allow_pickle=True) == ITOS
    with pytest.raises(CtxError, match="--allow_pickle"):
        read_words(tmp_path / "a.pkl")
    with pytest.raises(CtxError, match="pathlib"):
        read_words(tmp_path / "code.pkl", allow_pickle=True)
    tokenizer = build_ulmfit_tokenizer(["_unk_", "_pad_", "xbos", "the", "t_up"])
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1, 2)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("0.encoder.weight", "no encoder.weight"),
        ("0.rnns.1.module.bias_hh_l0", r"lacks 1 weights.*layers.1.state_bias"),
        ("rnns", "no LSTM"),
        ("", "Cannot read the weights"),
    ],
)
def test_invalid_files_raise(missing: str, message: str, tmp_path: Path) -> None:
    weights = {name: value for name, value in release_weights(ReferenceModel(), "2").items() if missing not in name}
    torch.save(weights, tmp_path / "model.pth")
    if not missing:
        (tmp_path / "model.pth").write_bytes(b"no weights")
    with pytest.raises(CtxError, match=message):
        read_fastai(tmp_path / "model.pth")
