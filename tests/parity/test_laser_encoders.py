"""Token ids and sentence vectors of LASER2 equal the ones of the package laser_encoders, its released code."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from hf_ctxmodels.conversion.laser import build_laser, read_encoder

_REASON = "pip install --no-deps laser_encoders unicategories appdirs"
TEXTS = [
    "Hello, World! It's a \u201ctest\u201d... (and) the cat don't $5.50",
    "\u2018single\u2019 \u201alow\u2019 rock\u2019n\u2019roll don\u2019t \u00b4\u00b4acute\u00b4\u00b4 `back` ''two''",
    "\u00a0\u00ab\u00a0Oui\u00a0\u00bb\u00a0! 50\u00a0% \u00abnon\u00bb 3\u00a0000 n\u00ba\u00a05",
    "tab\tzero\u200bwidth\u00adsoft\x07bell\ue000private\u2028line\ufeff",
    "Stra\u00dfe \u0130stanbul \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03a3 \ufb01n \u212b e\u0301t\u00e9 \u0391\u0301",
    "\u6f22\u5b57 \u6f22 and \u6f22\u5b57\u6f22 \U0001f600\U0001f600 x\U0001f600",
    "\u3000wide\u2003spaces\u2009here  twice ",
    "\u2581under\u2581 < s > @@ &amp; &#39;",
    "",
    "   ",
    "the cat " * 2000,
    "x" * 3000,
]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the package; its imports for LASER3 and for downloads are replaced."""
    for name, names in {
        "requests": (),
        "fairseq": (),
        "fairseq.data": (),
        "fairseq.data.dictionary": ("Dictionary",),
        "fairseq.models": (),
        "fairseq.models.transformer": ("Embedding", "TransformerEncoder"),
        "fairseq.modules": ("LayerNorm",),
    }.items():
        module = ModuleType(name)
        for attribute in names:
            setattr(module, attribute, torch.nn.Module)
        monkeypatch.setitem(sys.modules, name, module)
    pytest.importorskip("laser_encoders", reason=_REASON)
    return sys.modules["laser_encoders.laser_tokenizer"], sys.modules["laser_encoders.models"]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("normalization", ["nmt_nfkc", "identity"])
def test_ids_and_vectors(reference: Any, tmp_path: Path, model_type: str, normalization: str) -> None:
    lines = [text.lower() for text in TEXTS[:5]] * 4 + ["the cat sat on the mat ."] * 9
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "laser2"),
        model_type=model_type,
        vocab_size=120,
        hard_vocab_limit=False,
        normalization_rule_name=normalization,
        minloglevel=2,
    )
    processor = SentencePieceProcessor(model_file=str(tmp_path / "laser2.model"))
    pieces = [processor.id_to_piece(number) for number in range(3, len(processor))]
    # some pieces are missing, and some entries are no pieces: unknown characters of the training text
    subwords = [*pieces[:20], *pieces[24:], "\u6f22", "\u6f22\u5b57", "\U0001f600"]
    dictionary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *subwords])}

    tokenizer_module, models = reference
    torch.manual_seed(0)
    params = {"num_embeddings": len(dictionary), "padding_idx": 1, "embed_dim": 6, "hidden_size": 5}
    params |= {"num_layers": 2, "bidirectional": True, "left_pad": True, "padding_value": 0.0}
    weights = models.LaserLstmEncoder(**params).state_dict()
    weights["embed_tokens.weight"] = torch.randn(len(dictionary), 6)  # of padding too
    torch.save({"params": params, "model": weights, "dictionary": dictionary}, tmp_path / "laser2.pt")
    encoder = models.SentenceEncoder(str(tmp_path / "laser2.pt"), max_sentences=4, cpu=True)
    prepare = tokenizer_module.LaserTokenizer(spm_model=tmp_path / "laser2.model")
    segmented = [prepare.tokenize(text) for text in TEXTS]

    model, tokenizer = build_laser(read_encoder(tmp_path / "laser2.pt"), sentencepiece=tmp_path / "laser2.model")
    ids = tokenizer(TEXTS).input_ids
    assert ids == [encoder._tokenize(text).tolist() for text in segmented]
    assert 3 in ids[0] + ids[1] + ids[2] + ids[3] + ids[4], "pieces that the dictionary lacks are unknown"
    assert dictionary["\u6f22\u5b57"] in ids[5], "the dictionary is applied to unknown characters too"
    torch.testing.assert_close(
        model.encode(TEXTS, tokenizer), torch.from_numpy(encoder.encode_sentences(segmented)), atol=1e-6, rtol=1e-6
    )
