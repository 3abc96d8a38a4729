"""Contextual word vectors against the hidden states of single sentences."""

import copy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel, PreTrainedModel, PreTrainedTokenizerBase
from zoo import tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.word_alignment import align_words, split_words, word_spans
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.batch_threads import torch_threads
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.character_level import CtxCharacterTokenizer

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge", "the old sailor"]
SENTENCES = [*TEXTS, ["The", "sailor", "don't", "mend", ",", "Zürich", "!"], ["bridge"], "It isn't small, is it?"]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def build(family: FamilySpec) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=300)  # includes 256 bytes for some families
    torch.manual_seed(0)
    return family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer))), tokenizer


@pytest.fixture(scope="module")
def bert() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return build(FAMILIES["bert"])


def expected_vectors(model: Any, tokenizer: Any, sentence: str | list[str], pooling: str) -> list[torch.Tensor | None]:
    """(layers, hidden) vector of each word from a forward pass of this sentence; None for words without tokens."""
    words, spans, start = split_words(sentence), [], 0
    text = sentence if isinstance(sentence, str) else " ".join(sentence)
    for word in words:
        start = text.index(word, start)
        spans.append((start, start + len(word)))
        start += len(word)
    encoding = tokenizer([text], return_tensors="pt", return_offsets_mapping=True, return_special_tokens_mask=True)
    offsets, special = encoding.pop("offset_mapping")[0].tolist(), encoding.pop("special_tokens_mask")[0].tolist()
    if isinstance(tokenizer, CtxCharacterTokenizer):  # one token per word, between special tokens
        encoding, offsets = tokenizer([words], return_tensors="pt", is_split_into_words=True), [(0, 0), *spans, (0, 0)]
        special = [1, *[0] * len(words), 1]
    encoder = model.get_encoder() if hasattr(model, "decoder") and model.config.is_encoder_decoder else model
    with torch.no_grad():
        states = encoder.eval()(**encoding, output_hidden_states=True).hidden_states
    width = max(layer.shape[-1] for layer in states)
    stacked = torch.stack([F.pad(layer[0], (0, width - layer.shape[-1])) for layer in states], 1)
    vectors: list[torch.Tensor | None] = []
    for first, last in spans:
        positions = [
            index
            for index, (begin, end) in enumerate(offsets)
            if not special[index] and first <= max(begin, end - 1) < last
        ]
        positions = {"mean": positions, "first": positions[:1], "last": positions[-1:]}[pooling]
        vectors.append(stacked[positions].mean(0) if positions else None)
    return vectors


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I don't, it’s John's.", ["I", "don't", ",", "it’s", "John's", "."]),
        ("the U.S. at 10:30 a.m. (e.g. J.", ["the", "U.S.", "at", "10:30", "a.m.", "(", "e.g.", "J", "."]),
        ("1,000.5 of 3.14, 5: 7,a x,1", ["1,000.5", "of", "3.14", ",", "5", ":", "7", ",", "a", "x", ",", "1"]),
        (
            "e-mail me@b.org, see https://x.y/z?a=1.",
            ["e-mail", "me", "@", "b.org", ",", "see", "https://x.y/z?a=1", "."],
        ),
        ("नमस्ते, cafe\u0301 and می\u200cخواهم!", ["नमस्ते", ",", "cafe\u0301", "and", "می\u200cخواهم", "!"]),
        ("x.y... U.S.A foo.b. \ud800", ["x.y", ".", ".", ".", "U.S.A", "foo.b", ".", "\ud800"]),
    ],
)
def test_words_of_raw_text(text: str, words: list[str]) -> None:
    assert split_words(text) == words
    assert [text[start:end] for start, end in word_spans(text)] == words


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_vectors_of_all_families(family: FamilySpec) -> None:
    """Vectors do not depend on the batch; ELMo and CVT do not tokenize given words."""
    model, tokenizer = build(family)
    for pooling in ("mean", "first", "last"):
        encoder = WordEncoder(model.train(), tokenizer, pooling=pooling, batch_tokens=40)
        encoded = list(encoder.encode(iter(SENTENCES)))
        assert model.training, "the mode of the model must be restored"
        for sentence, result in zip(SENTENCES, encoded, strict=True):
            assert result.words == split_words(sentence)
            assert result.vectors.shape == (len(result.words), encoder.num_layers, encoder.hidden_size)
            expected = expected_vectors(model, tokenizer, sentence, pooling)
            for word, (vector, target) in enumerate(zip(result.vectors, expected, strict=True)):
                assert result.has_tokens[word] == (target is not None)
                torch.testing.assert_close(vector, torch.zeros_like(vector) if target is None else target, **CLOSE)
        last_layer = WordEncoder(model, tokenizer, layers=[-1], pooling=pooling).encode(SENTENCES)
        for result, all_layers in zip(last_layer, encoded, strict=True):
            torch.testing.assert_close(result.vectors[:, 0], all_layers.vectors[:, -1], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_vectors_do_not_depend_on_threads(family: FamilySpec) -> None:
    model, tokenizer = build(family)
    encoder = WordEncoder(model, tokenizer, batch_tokens=160)
    corpora = []
    for num_threads in (1, 4):
        with torch_threads(num_threads):
            corpora.append(encoder.encode_corpus(SENTENCES * 10, progress=False))
    assert torch.equal(corpora[0].has_tokens, corpora[1].has_tokens)
    torch.testing.assert_close(*(corpus.vectors for corpus in corpora), **CLOSE)


def test_transformers_model(bert: Any) -> None:
    _, tokenizer = bert
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes))
    [sentence] = WordEncoder(model, tokenizer, layers=[-1, 0]).encode([SENTENCES[4]])
    for vector, target in zip(sentence.vectors, expected_vectors(model, tokenizer, SENTENCES[4], "mean"), strict=True):
        torch.testing.assert_close(vector, target[[-1, 0]], **CLOSE)


def test_windows_cover_each_word_once(bert: Any) -> None:
    """Long sentences are split; each word is read from the window with the most context."""
    _, tokenizer = bert
    words = ["the", "cat", "saw", "a", "small", "garden", "over", "bridges"] * 6
    windows = align_words(tokenizer, [words, ["cat"]], max_length=12)
    sentence_windows = [window for window in windows if window.sentence == 0]
    assert len(sentence_windows) > 3
    assert [(sentence_windows[0].first, sentence_windows[-1].last)] == [(0, len(words))]
    assert all(left.last == right.first for left, right in pairwise(sentence_windows))
    full_token_words = align_words(tokenizer, [words])[0].token_words
    for window in sentence_windows:
        for word in range(window.first, window.last):
            assert (window.token_words == word).sum() == (full_token_words == word).sum()
    inner_window = sentence_windows[1]
    margins = [(inner_window.token_words == word).nonzero()[0] for word in range(inner_window.first, inner_window.last)]
    assert min(int(margin[0]) for margin in margins) > 1
    assert windows[-1].sentence == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी भाषा, सुंदर।", ["हिन्दी", "भाषा", ",", "सुंदर", "।"]),
        ("ภาษาไทยก็ดี ครับ", ["ภาษาไทยก็ดี", "ครับ"]),
        ("العَرَبِيَّةُ شָלוֹם", ["العَرَبِيَّةُ", "شָלוֹם"]),
        ("cafe\u0301s, nai\u0308ve", ["cafe\u0301s", ",", "nai\u0308ve"]),
        ("👩\u200d👩\u200d👧 👨🏽\u200d🚀! 🇩🇪", ["👩\u200d👩\u200d👧", "👨🏽\u200d🚀", "!", "🇩🇪"]),
        ("co\u00adop \ufeffa\u200bb \u06cc\u200c\u062e", ["co\u00adop", "a", "b", "\u06cc\u200c\u062e"]),
        ("m² ½ 3.14 don't e-mail (x_y)", ["m²", "½", "3.14", "don't", "e-mail", "(", "x_y", ")"]),
    ],
)
def test_words_of_scripts_with_marks(bert: Any, text: str, words: list[str]) -> None:
    """Marks are parts of their letter's word, modifiers of their emoji, and format characters no words."""
    assert split_words(text) == words
    assert [text[start:stop] for start, stop in word_spans(text)] == words
    assert next(WordEncoder(*bert).encode([text])).words == words


def test_vectors_of_first_window(bert: Any) -> None:
    """Words of the first window have the vectors of a forward pass of that window."""
    model, tokenizer = bert
    words = ["the", "cat", "saw", "a", "small", "garden", "over", "the", "bridge"] * 3
    [result] = WordEncoder(model, tokenizer, max_length=12).encode([words])
    assert result.has_tokens.all()
    window = align_words(tokenizer, [words], 12)[0]
    with torch.no_grad():
        inputs = {name: torch.tensor(values)[None] for name, values in window.features.items()}
        states = model.eval()(**inputs).last_hidden_state[0]
    for word in range(window.first, window.last):
        torch.testing.assert_close(result.vectors[word, -1], states[window.token_words == word].mean(0), **CLOSE)


def test_words_without_tokens(bert: Any) -> None:
    model, tokenizer = bert
    first, second, empty = WordEncoder(model, tokenizer).encode([["the", "\x00", "cat"], ["the", "cat"], []])
    assert first.has_tokens.tolist() == [True, False, True]
    assert not first.vectors[1].any()
    torch.testing.assert_close(first.vectors[[0, 2]], second.vectors, **CLOSE)
    assert empty.vectors.shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_corpus_cache(bert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A cached corpus is loaded without recomputation; cache keys depend on weights, sentences and options."""
    model, tokenizer = bert
    encoder = WordEncoder(model, tokenizer)
    expected = encoder.encode_corpus(SENTENCES, dtype=dtype, progress=False)
    computed = encoder.encode_corpus(iter(SENTENCES), cache_dir=tmp_path, dtype=dtype, progress=False)
    assert torch.equal(computed.vectors, expected.vectors)
    assert torch.equal(computed[4].vectors, expected.vectors[expected.starts[4] : expected.starts[5]])
    assert computed[-1].words == split_words(SENTENCES[-1])
    with monkeypatch.context() as patch:
        patch.setattr(WordEncoder, "hidden_states", lambda *args: pytest.fail("encoded again"))
        cached = encoder.encode_corpus(SENTENCES, cache_dir=tmp_path, dtype=dtype, progress=False)
    assert torch.equal(cached.vectors, expected.vectors)
    assert cached.sentences == expected.sentences
    [file] = tmp_path.iterdir()
    changed_model = copy.deepcopy(model)
    changed_model.get_input_embeddings().weight.data[0, 0] += 1
    uncached = [
        (encoder, SENTENCES[1:]),
        (WordEncoder(model, tokenizer, pooling="first"), SENTENCES),
        (WordEncoder(changed_model, tokenizer), SENTENCES),
    ]
    for num_files, (other_encoder, sentences) in enumerate(uncached, start=2):
        other_encoder.encode_corpus(sentences, cache_dir=tmp_path, dtype=dtype, progress=False)
        assert len(list(tmp_path.iterdir())) == num_files
    file.write_bytes(b"damaged")
    with pytest.raises(CtxError, match="cached vectors are damaged"):
        encoder.encode_corpus(SENTENCES, cache_dir=tmp_path, dtype=dtype, progress=False)


def test_corpus_cache_is_no_url(bert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CtxError, match="The output is a URL"):
        WordEncoder(*bert).encode_corpus(SENTENCES, cache_dir="s3://bucket/cache", progress=False)
    assert not list(tmp_path.iterdir())


def test_sentences_are_read_lazily(bert: Any) -> None:
    consumed = []

    def sentences() -> Iterator[str]:
        for number in range(5000):
            consumed.append(number)
            yield "the cat"

    next(WordEncoder(*bert).encode(sentences()))
    assert len(consumed) < 2000


def test_invalid_arguments_raise(bert: Any) -> None:
    model, tokenizer = bert
    with pytest.raises(CtxError, match="layers 0 to 3, not 4"):
        WordEncoder(model, tokenizer, layers=[4])
    with pytest.raises(CtxError, match="No layer"):
        WordEncoder(model, tokenizer, layers=[])
    with pytest.raises(CtxError, match="pooling='max'"):
        WordEncoder(model, tokenizer, pooling="max")
    with pytest.raises(CtxError, match="neither a text nor a list of words"):
        list(WordEncoder(model, tokenizer).encode([[1]]))
    larger_tokenizer = CtxBertTokenizer.train([chr(9000 + number) for number in range(600)], 1500)
    with pytest.raises(CtxError, match="does not fit the model"):
        WordEncoder(model, larger_tokenizer)
