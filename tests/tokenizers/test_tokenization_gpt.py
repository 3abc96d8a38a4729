"""GPT's word-level BPE: ids, training and the special tokens of downstream tasks."""

import json
import pickle

import pytest
from tokenizer_texts import EDGE_CASE_TEXTS, TEXTS, assert_same_encodings, write_bpe_files
from transformers import AutoTokenizer, OpenAIGPTTokenizer

from hf_ctxmodels import CtxError, CtxGptTokenizer

EDGE_CASE_TEXTS = [*EDGE_CASE_TEXTS, "</w> <unk> a</w> _start_ unk"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Tokenizer and reference from vocab.json with merges.txt, and from the tokenizer.json of transformers."""
    plain, saved = (tmp_path_factory.mktemp(name) for name in ("vocab and merges", "tokenizer.json"))
    model = json.loads(CtxGptTokenizer.train([*TEXTS, *EDGE_CASE_TEXTS[:-1]] * 2, 320).backend_tokenizer.to_str())[
        "model"
    ]
    del model["vocab"]["</s>"]  # as in the released vocabulary
    write_bpe_files(plain, model)
    reference = OpenAIGPTTokenizer.from_pretrained(plain)
    reference.save_pretrained(saved)
    return {folder.name: (CtxGptTokenizer.from_pretrained(folder), reference) for folder in (plain, saved)}


def test_ids_equal_transformers(tokenizers):
    for name, (tokenizer, reference) in tokenizers.items():
        assert tokenizer.get_vocab() == reference.get_vocab(), name
        for texts in (TEXTS[:20], EDGE_CASE_TEXTS):
            assert_same_encodings(tokenizer, reference, texts)
        assert (tokenizer.eos_token, tokenizer.pad_token_id) == (None, tokenizer.unk_token_id), name


def test_ids_of_trained_tokens():
    """Special tokens, then every character within and at the end of a word."""
    assert CtxGptTokenizer.train(["ab"], 10).convert_ids_to_tokens(range(5)) == ["<unk>", "</s>", "a", "b", "a</w>"]


def test_merges_of_tokens_outside_the_vocabulary_raise():
    """Also if the merged token is longer than all others, for which the library panics."""
    vocab = {token: number for number, token in enumerate(["<unk>", "a", "b</w>", "ab</w>"])}
    CtxGptTokenizer(vocab=vocab, merges=[("a", "b</w>")])
    for merge in (("a", "ab</w>"), ("a", "c</w>")):
        with pytest.raises(CtxError, match="do not belong to the vocabulary"):
            CtxGptTokenizer(vocab=vocab, merges=[merge])


def test_prepare_for_tasks(tmp_path):
    tokenizer = CtxGptTokenizer.train(TEXTS, 100)
    size, text = len(tokenizer), tokenizer("boat").input_ids
    tokenizer.prepare_for_tasks()
    tokenizer.prepare_for_tasks()
    start, delimiter, classify = range(size, size + 3)
    assert tokenizer.convert_ids_to_tokens([start, delimiter, classify]) == ["_start_", "_delimiter_", "_classify_"]
    assert len(tokenizer) == size + 3
    tokenizer.save_pretrained(tmp_path)
    for copy in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert type(copy) is CtxGptTokenizer
        assert copy("boat").input_ids == [start, *text, classify]
        assert copy("boat", "boat").input_ids == [start, *text, delimiter, *text, classify]
        assert copy("boat " * 9, "boat", truncation=True, max_length=8).input_ids[-1] == classify
        assert copy.decode(copy("boat", "boat").input_ids, skip_special_tokens=True).split() == ["boat", "boat"]
