"""GPT's BPE of words: upstream's ids, training, and the inputs of tasks."""

import gzip
import json
import pickle

import bpe_texts
import pytest
from bpe_texts import TEXTS, trained_in_both_orders
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, OpenAIGPTTokenizer

from hf_ctxmodels import CtxGptTokenizer
from hf_ctxmodels.core.errors import CtxError

TRICKY = [*bpe_texts.TRICKY, "</w> <unk> a</w> _start_ unk"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Ours and the peer's, of vocab.json with merges.txt, and of the tokenizer.json that the peer saved."""
    plain, saved = (tmp_path_factory.mktemp(name) for name in ("vocab and merges", "tokenizer.json"))
    model = json.loads(CtxGptTokenizer.train([*TEXTS, *TRICKY[:-1]] * 2, 320).backend_tokenizer.to_str())["model"]
    del model["vocab"]["</s>"]  # as in the released vocabulary
    table = {token: number for number, token in enumerate(model["vocab"])}
    (plain / "vocab.json").write_text(json.dumps(table))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (plain / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    theirs = OpenAIGPTTokenizer.from_pretrained(plain)
    theirs.save_pretrained(saved)
    return {folder.name: (CtxGptTokenizer.from_pretrained(folder), theirs) for folder in (plain, saved)}


def test_ids_are_upstreams(tokenizers):
    for name, (ours, theirs) in tokenizers.items():
        assert ours.get_vocab() == theirs.get_vocab(), name
        for texts in (TEXTS[:20], TRICKY):
            expected = theirs(texts, return_offsets_mapping=True).data
            assert ours(texts, return_offsets_mapping=True).data == expected, name
            pairs = {"text": texts[:-1], "text_pair": texts[1:], "truncation": True, "max_length": 48}
            assert ours(**pairs).data == theirs(**pairs).data, name
            assert [ours.decode(ids) for ids in expected["input_ids"]] == list(
                map(theirs.decode, expected["input_ids"])
            )
        assert (ours.eos_token, ours.pad_token_id) == (None, ours.unk_token_id), name


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_ids_are_upstreams_on_any_text(tokenizers, text):
    for ours, theirs in tokenizers.values():
        assert ours(text).input_ids == theirs(text).input_ids


def test_ids_are_upstreams_on_real_text(shared_data, tmp_path):
    with gzip.open(shared_data / "corpus/wikipedia_articles.txt.gz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file if len(line) > 20]
    ours = CtxGptTokenizer.train(lines[::10], 2000)
    ours.save_pretrained(tmp_path)
    theirs = OpenAIGPTTokenizer.from_pretrained(tmp_path)
    assert len(ours) == 2000
    assert ours(lines[5::100]).input_ids == theirs(lines[5::100]).input_ids
    fertility = len(ours.tokenize(" ".join(lines[5::100]))) / len(" ".join(lines[5::100]).split())
    assert 1 < fertility < 2.5, "whole words and large parts of words have been learned"


def test_training_gives_the_same_vocabulary_in_every_process_and_order(tmp_path):
    trained, vocabulary = trained_in_both_orders(CtxGptTokenizer, 300, tmp_path)
    assert vocabulary == trained.get_vocab()
    assert len(trained) == 300
    assert trained.convert_ids_to_tokens([0, 1, 2, 12]) == ["<unk>", "</s>", "a", "a</w>"]


def test_tokens_of_tasks_come_last_and_stay(tmp_path):
    tokenizer = CtxGptTokenizer.train(TEXTS, 100)
    size, text = len(tokenizer), tokenizer("boat").input_ids
    tokenizer.prepare_for_tasks()
    tokenizer.prepare_for_tasks()
    start, delimiter, classify = range(size, size + 3)
    assert tokenizer.convert_ids_to_tokens([start, delimiter, classify]) == ["_start_", "_delimiter_", "_classify_"]
    assert len(tokenizer) == size + 3
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert type(each) is CtxGptTokenizer
        assert each("boat").input_ids == [start, *text, classify]
        assert each("boat", "boat").input_ids == [start, *text, delimiter, *text, classify]
        assert each("boat " * 9, "boat", truncation=True, max_length=8).input_ids[-1] == classify
        assert each.decode(each("boat", "boat").input_ids, skip_special_tokens=True).split() == ["boat", "boat"]


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        ([], 300, "No text to learn"),
        ([" \n", ""], 300, "No text to learn"),
        (["abc é"], 9, "ask for at least 10 tokens"),
    ],
)
def test_training_that_cannot_work_says_why(texts, size, message):
    with pytest.raises(CtxError, match=message):
        CtxGptTokenizer.train(texts, size)
