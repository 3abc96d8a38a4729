"""Perplexity by overlapping windows against a plain loop over the tokens."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import command_output, save
from datasets import Dataset, DatasetDict
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels import (
    CtxBertConfig,
    CtxBertForMaskedLM,
    CtxError,
    CtxGpt2Config,
    CtxGpt2ForCausalLM,
    CtxGpt2Tokenizer,
    CtxUlmfitConfig,
    CtxUlmfitForCausalLM,
    CtxUlmfitTokenizer,
    CtxXLNetConfig,
    CtxXLNetForPreTraining,
    CtxXLNetTokenizer,
)
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.evaluation.perplexity import measure_perplexity

DOCUMENTS = ["a cat sat on the mat and saw a dog", "", "rain fell", "the dog ran " * 12]
Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def decoder() -> Pair:
    torch.manual_seed(0)
    tokenizer = CtxGpt2Tokenizer.train(DOCUMENTS, vocab_size=280)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CtxGpt2Config(vocab_size=len(tokenizer), initializer_range=0.2, **sizes, **end)
    return CtxGpt2ForCausalLM(config), tokenizer


@torch.no_grad()
def score_by_loop(
    predict: Callable[[Tensor], Tensor], documents: list[list[int]], length: int, stride: int
) -> tuple[float, int]:
    """Score one token at a time; `predict` reads its window."""
    nats, count = 0.0, 0
    for ids in documents:
        for target in range(1, len(ids)):
            start = max(0, -(-(target - length) // stride)) * stride
            logits = predict(torch.tensor([ids[start:target]]))[0, -1].double()
            nats, count = nats - float(logits.log_softmax(-1)[ids[target]]), count + 1
    return nats, count


@pytest.mark.parametrize(("length", "stride"), [(16, 1), (16, 8), (16, 16), (7, 3), (None, None)])
def test_decoder_windows_match_loop(decoder: Pair, length: int | None, stride: int | None) -> None:
    model, tokenizer = decoder
    model.train()
    result = measure_perplexity(model, tokenizer, DOCUMENTS, max_length=length, stride=stride, batch_size=3)
    assert model.training
    end = tokenizer.eos_token_id
    ids = [[end, *tokenizer(text).input_ids, end] for text in DOCUMENTS if text]
    model.eval()
    nats, tokens = score_by_loop(lambda window: model(window).logits, ids, length or 16, stride or 8)
    assert (result.tokens, result.words) == (tokens, sum(len(text.split()) for text in DOCUMENTS))
    assert result.nats == pytest.approx(nats, rel=1e-5)
    assert result.per_word == pytest.approx(math.exp(nats / result.words), rel=1e-4)


def test_recurrent_model_reads_full_documents() -> None:
    torch.manual_seed(0)
    tokenizer = CtxUlmfitTokenizer.train(DOCUMENTS, vocab_size=40)
    config = CtxUlmfitConfig(vocab_size=len(tokenizer), hidden_size=16, cell_size=16, num_hidden_layers=2)
    model = CtxUlmfitForCausalLM(config)
    result = measure_perplexity(model, tokenizer, DOCUMENTS)
    ids = [tokenizer(text).input_ids for text in DOCUMENTS if text]
    model.eval()
    nats, tokens = score_by_loop(lambda window: model(window).logits, ids, 10_000, 10_000)
    assert result.tokens == tokens
    assert result.nats == pytest.approx(nats, rel=1e-5)
    assert result.unknown == sum(row[1:].count(tokenizer.unk_token_id) for row in ids) > 0


@pytest.mark.parametrize(("length", "stride"), [(6, 4), (None, None)])
@torch.no_grad()
def test_xlnet_query_stream_in_text_order(length: int | None, stride: int | None) -> None:
    torch.manual_seed(0)
    tokenizer = CtxXLNetTokenizer.train(DOCUMENTS, vocab_size=40)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = CtxXLNetConfig(vocab_size=len(tokenizer), initializer_range=0.2, **sizes)
    model = CtxXLNetForPreTraining(config).eval()

    def predict(ids: Tensor) -> Tensor:
        inputs = F.pad(ids, (0, 1), value=tokenizer.pad_token_id)  # the target is padding in the input
        perm_mask = torch.ones(1, inputs.shape[1], inputs.shape[1]).triu()  # the content stream attends to itself
        target_mapping = torch.eye(inputs.shape[1])[None, -1:]
        segments = torch.zeros_like(inputs)
        return model(inputs, token_type_ids=segments, perm_mask=perm_mask, target_mapping=target_mapping).logits

    result = measure_perplexity(model, tokenizer, DOCUMENTS, max_length=length, stride=stride, batch_size=3)
    ids = tokenizer([text for text in DOCUMENTS if text], add_special_tokens=False).input_ids
    nats, tokens = score_by_loop(predict, ids, length or 10_000, stride or 10_000)
    assert result.tokens == tokens
    assert result.nats == pytest.approx(nats, rel=1e-5)


def test_command_measures_held_out_documents(decoder: Pair, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"{number} cats sat" for number in range(8)))
    flags = {"model": save(tmp_path / "model", *decoder), "dataset": tmp_path / "text.txt"}
    assert "24 words" in command_output("evaluate perplexity", **flags)
    printed = command_output("evaluate perplexity", **flags, validation_fraction=0.25)
    held_out = list(load_documents(str(tmp_path / "text.txt")).split(0.25)[1])
    expected = measure_perplexity(*decoder, map(" ".join, held_out))
    assert len(held_out) == 2
    assert f"{expected.per_word:.3f} per word; {expected.tokens} tokens, 6 words, 0 unknown" in printed


def test_command_reads_test_split_of_dataset(decoder: Pair, tmp_path: Path) -> None:
    splits = {split: Dataset.from_dict({"body": [text]}) for split, text in (("train", "cats"), ("test", "3 cats sat"))}
    DatasetDict(splits).save_to_disk(tmp_path / "texts")
    flags = {"model": save(tmp_path / "model", *decoder), "dataset": tmp_path / "texts", "text_column": "body"}
    assert "3 words" in command_output("evaluate perplexity", **flags)


def test_text_without_spaces(decoder: Pair, tmp_path: Path) -> None:
    """The perplexity of a word of hundreds of tokens exceeds the largest number."""
    (tmp_path / "text.txt").write_text("\u5929" * 400)
    printed = command_output(
        "evaluate perplexity", model=save(tmp_path / "model", *decoder), dataset=tmp_path / "text.txt"
    )
    result = measure_perplexity(*decoder, ["\u5929" * 400])
    assert (result.words, result.per_word) == (1, math.exp(700))
    assert f"{result.per_token:.3f} per token, {math.exp(700):.3e} per word" in printed


def test_unsupported_models_and_windows_raise(decoder: Pair) -> None:
    model, tokenizer = decoder
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    masked = CtxBertForMaskedLM(CtxBertConfig(vocab_size=30, **sizes))
    for message, scored_model, options in (
        ("left context", masked, {}),
        ("Windows of 17 tokens do not fit", model, {"max_length": 17}),
        ("A stride of 9 tokens does not fit", model, {"max_length": 8, "stride": 9}),
    ):
        with pytest.raises(CtxError, match=message):
            measure_perplexity(scored_model, tokenizer, DOCUMENTS, **options)
    with pytest.raises(CtxError, match="no text to predict"):
        measure_perplexity(model, tokenizer, [""])
