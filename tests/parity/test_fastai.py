"""Models and texts of fastai itself, where it is installed: AWD-LSTM files, and the words of its tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ctxmodels import CtxUlmfitTokenizer
from hf_ctxmodels.conversion.ulmfit import read_fastai

models: Any = pytest.importorskip("fastai.text.models", reason="pip install fastai spacy")
core: Any = pytest.importorskip("fastai.text.core", reason="pip install fastai spacy")
awdlstm: Any = pytest.importorskip("fastai.text.models.awdlstm", reason="pip install fastai spacy")

WORDS, SIZES = 50, {"emb_sz": 16, "n_hid": 24, "n_layers": 3}
TEXTS = [
    "McDonald. A, I met U.S. and W7 films!!",
    "He can't, cannot and won't; it's what I'd think they've done, we’ll see.",
    "it 's 5 @.@ 2 well @-@ known, do n't you 've",
    "O'Clock k-19 24-hour well-known 5km 9pm 1,234.5 10:30 3-4 5% $5 1990s",
    'So... (good) "yes." -lrb- high- -- end',
    "a\nb\n\nc <br />d, p.m. e.g. F. Scott",
    "x.com a/b c#d rock'n'roll d'Artagnan 'quoted' the dogs' tails a_b",
    "no no no no, soooo good!!!! GOOD Good",
]


def random_weights(model: torch.nn.Module) -> None:
    """Set random weights, and positive variances of batch normalization."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if "running" in name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)


def test_language_model(tmp_path: Path) -> None:
    reference = models.get_language_model(awdlstm.AWD_LSTM, WORDS, config=awdlstm.awd_lstm_lm_config | SIZES).eval()
    random_weights(reference)
    torch.save({"model": reference.state_dict(), "opt": None}, tmp_path / "model.pth")
    model, cache = read_fastai(tmp_path / "model.pth"), None
    ids = torch.randint(WORDS, (3, 17))
    reference.reset()
    with torch.no_grad():
        for segment in (ids, ids.flip(1)):
            outputs = model(input_ids=segment, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            torch.testing.assert_close(outputs.logits, reference(segment)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.4, 0.0])
def test_classifier(dropout: float, tmp_path: Path) -> None:
    config = awdlstm.awd_lstm_clas_config | SIZES | {"output_p": dropout}
    reference = models.get_text_classifier(awdlstm.AWD_LSTM, WORDS, 3, config=config, ps=[dropout]).eval()
    random_weights(reference)
    torch.save(reference.state_dict(), tmp_path / "classifier.pth")
    ids = torch.randint(3, WORDS, (4, 150))
    with torch.no_grad():
        logits = read_fastai(tmp_path / "classifier.pth")(input_ids=ids).logits
        torch.testing.assert_close(logits, reference(ids)[0], atol=1e-5, rtol=1e-5)


def test_words() -> None:
    pytest.importorskip("spacy", reason="pip install spacy")
    tokenize = core.TokenizeWithRules(core.SpacyTokenizer("en"), core.defaults.text_proc_rules, [])
    expected = [list(words) for words in tokenize(TEXTS)]
    words = sorted({word for text in expected for word in text} - set(CtxUlmfitTokenizer.special_tokens))
    tokenizer = CtxUlmfitTokenizer.from_words(words)
    for text, tokens in zip(TEXTS, expected, strict=True):
        assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens
