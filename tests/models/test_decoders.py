"""Decoders: caches, generation in all modes of transformers, padding on either side, and wrong inputs."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache, TextIteratorStreamer, pipeline
from zoo import CASES, Case, assert_close

from hf_ctxmodels import CtxError, CtxGpt2Config, CtxGpt2ForCausalLM, CtxGpt2Tokenizer

DECODERS = [case for case in CASES if case.auto_name == "AutoModelForCausalLM" and case.is_causal]
REFERENCE_CASES = [case for case in DECODERS if case.has_reference]
LENGTHS = (9, 4, 6)
OPTIONS = {"max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0}


def prompts(side: str) -> dict[str, Tensor]:
    """Three prompts of different lengths."""
    torch.manual_seed(0)
    rows = [torch.randint(5, 50, (length,)) for length in LENGTHS]
    batch = {"input_ids": torch.zeros(3, max(LENGTHS), dtype=torch.long)}
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    for row, (ids, length) in enumerate(zip(rows, LENGTHS)):
        place = slice(max(LENGTHS) - length, None) if side == "left" else slice(length)
        batch["input_ids"][row, place], batch["attention_mask"][row, place] = ids, 1
    return batch


@pytest.mark.parametrize("case", DECODERS, ids=str)
@torch.no_grad()
def test_a_cache_gives_what_one_pass_gives(case: Case) -> None:
    """Several tokens at a time and one by one, by a growing cache and one of fixed length, padded on the left."""
    model, batch = case.model(), prompts("left")
    whole = model(**batch).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=12)):
        found, start = [], 0
        for stop in (6, 7, 9):
            step = {"input_ids": batch["input_ids"][:, start:stop], "attention_mask": batch["attention_mask"][:, :stop]}
            found.append(model(**step, past_key_values=cache, use_cache=True).logits)
            start = stop
        real = batch["attention_mask"].bool()
        assert_close(torch.cat(found, 1)[real], whole[real])


@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_padding_does_not_change_a_continuation(case: Case) -> None:
    model, left, right = case.model(), prompts("left"), prompts("right")
    for beams in (1, 3):
        together = model.generate(**left, **OPTIONS, num_beams=beams, do_sample=False)[:, -7:]
        for row, length in enumerate(LENGTHS):
            alone = right["input_ids"][row : row + 1, :length]
            assert torch.equal(
                model.generate(alone, **OPTIONS, num_beams=beams, do_sample=False)[0, -7:], together[row]
            )
    assert_close(model(**right).logits[1, :4], model(**left).logits[1, -4:])


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_generation_is_that_of_the_reference(case: Case, tmp_path: Path) -> None:
    reference = case.reference_model(seed=0)
    reference.save_pretrained(tmp_path)
    ours = case.model_class.from_pretrained(tmp_path).eval()
    ids = prompts("left")["input_ids"][:1]
    for mode in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    ):
        assert torch.equal(ours.generate(ids, **OPTIONS, **mode), reference.generate(ids, **OPTIONS, **mode)), mode
    sampled = {"do_sample": True, "top_k": 5, "top_p": 0.9}
    draws = []
    for model in (ours, reference):
        torch.manual_seed(0)
        draws.append(model.generate(ids, **OPTIONS, **sampled))
    assert torch.equal(*draws)


@pytest.mark.parametrize("case", DECODERS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_other_modes_give_the_greedy_continuation(case: Case) -> None:
    """Assisted by itself, by look-up in the prompt, and with a cache of fixed length."""
    model, ids = case.model(), prompts("left")["input_ids"][:1]
    expected = model.generate(ids, **OPTIONS, do_sample=False)
    for mode in (
        {"assistant_model": case.model()},
        {"prompt_lookup_num_tokens": 2},
        {"cache_implementation": "static", "disable_compile": True},
    ):
        assert torch.equal(model.generate(ids, **OPTIONS, do_sample=False, **mode), expected), mode


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_shifted_labels_are_targets_in_their_place(case: Case, side: str) -> None:
    """`shift_labels`, as Trainer gives them where it splits rows over devices."""
    model, batch = case.model(), prompts(side)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[0, 3] = -100
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    if side == "left":  # nothing predicts a row's first token
        shifted = shifted.masked_fill(batch["attention_mask"] == 0, -100)
    expected, number = model(**batch, labels=labels).loss, int((shifted != -100).sum())
    assert torch.equal(model(**batch, shift_labels=shifted).loss, expected)
    assert torch.equal(model(**batch, labels=labels, shift_labels=shifted).loss, expected)
    assert_close(model(**batch, shift_labels=shifted, num_items_in_batch=7).loss, expected * number / 7)
    logits = model(**batch).logits
    assert_close(torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten()), expected)
    for wrong in (shifted[:, 1:], shifted[:2], labels.tolist(), shifted.half()):
        with pytest.raises(CtxError, match="shift_labels is"):
            model(**batch, shift_labels=wrong)


@pytest.fixture(scope="module")
def small() -> tuple[CtxGpt2ForCausalLM, CtxGpt2Tokenizer]:
    torch.manual_seed(0)
    texts = ["a cat sat on the mat", "dogs ran home"] * 3
    tokenizer = CtxGpt2Tokenizer.train(texts, vocab_size=280, model_max_length=32)
    tokenizer.padding_side = "left"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return CtxGpt2ForCausalLM(CtxGpt2Config(vocab_size=len(tokenizer), **sizes, **ids)).eval(), tokenizer


def test_pipeline_and_streaming(small: tuple[CtxGpt2ForCausalLM, CtxGpt2Tokenizer]) -> None:
    model, tokenizer = small
    options = {"max_new_tokens": 5, "do_sample": False}
    batch = tokenizer(["a cat", "dogs ran home"], return_tensors="pt", padding=True)
    expected = tokenizer.batch_decode(model.generate(**batch, **options), skip_special_tokens=True)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer)(["a cat", "dogs ran home"], **options)
    assert [answers[0]["generated_text"] for answers in made] == expected
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
    given = tokenizer(["dogs ran home"], return_tensors="pt")
    worker = Thread(target=model.generate, kwargs={**given, **options, "streamer": streamer})
    worker.start()
    assert "".join(streamer) == expected[1]
    worker.join()


@pytest.mark.filterwarnings("ignore")
def test_prompts_and_caches_that_cannot_be_right(small: tuple[CtxGpt2ForCausalLM, CtxGpt2Tokenizer]) -> None:
    model, tokenizer = small
    ids = tokenizer(["a cat sat"], return_tensors="pt").input_ids
    nothing = torch.zeros(1, 3, dtype=torch.long)
    cached = model(ids.repeat(2, 1), use_cache=True).past_key_values
    wrong: dict[str, Callable[[], object]] = {
        "40 tokens": lambda: model(torch.ones(1, 40, dtype=torch.long)),
        "32 tokens of past_key_values and 1 of the input": lambda: model.generate(
            ids, min_new_tokens=40, max_new_tokens=40
        ),
        "batch is empty": lambda: model.generate(
            tokenizer([""], return_tensors="pt").input_ids.long(), max_new_tokens=2
        ),
        "no token": lambda: model.generate(nothing, attention_mask=nothing, max_new_tokens=2),
        "batch size 2, but the input has 1": lambda: model(ids[:, :1], past_key_values=cached),
        "attention_mask is": lambda: model(ids, attention_mask=torch.ones(1, 2), use_cache=True),
        "sequence_ids cannot be combined with": lambda: model(ids[:, :1], sequence_ids=ids[:, :1], use_cache=True),
    }
    for message, call in wrong.items():
        with pytest.raises(CtxError, match=message):
            call()
