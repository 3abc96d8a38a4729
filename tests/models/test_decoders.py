"""Decoders and encoder-decoders: caches, generation in all modes of transformers, padding, and invalid inputs."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from benchmarks.measure import peak_bytes
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Cache,
    DataCollatorWithFlattening,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    TextIteratorStreamer,
    pipeline,
)
from transformers.cache_utils import QuantizedLayer
from zoo import (
    CASES,
    PATHS,
    Case,
    assert_close,
    assert_same_gradients,
    gradients,
    make_batch,
    make_targets,
    tiny_config,
)

from hf_ctxmodels import CtxBartConfig, CtxBartModel, CtxError, CtxGpt2Config, CtxGpt2ForCausalLM, CtxGpt2Tokenizer
from hf_ctxmodels.architectures.encoder_decoder_heads import TransformerForConditionalGeneration
from hf_ctxmodels.architectures.lstm_language_model import LSTMForCausalLM
from hf_ctxmodels.core.caches import SharedSourceCache
from hf_ctxmodels.heads.seq2seq import Seq2SeqHead
from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.layers.attention.modules import CrossAttention
from hf_ctxmodels.registry import FAMILIES

DECODERS = [case for case in CASES if case.auto_name == "AutoModelForCausalLM" and case.is_causal]
LSTM_LMS = [case for case in CASES if issubclass(case.model_class, LSTMForCausalLM)]
SEQ2SEQ = [case for case in CASES if issubclass(case.model_class, TransformerForConditionalGeneration)]
ALL_SEQ2SEQ = [case for case in CASES if issubclass(case.model_class, Seq2SeqHead) and case.has_auto_class]
TRANSFORMERS = [*DECODERS, *SEQ2SEQ]
CLASSIFIER = next(case for case in CASES if str(case) == "bart-AutoModelForSequenceClassification")
LENGTHS = (9, 4, 6)
OPTIONS = {"max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0}


def prompts(case: Case, side: str = "right") -> dict[str, Tensor]:
    """Three prompts or sources of different lengths."""
    batch = make_batch(case, LENGTHS, side=side)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def generate(model: Any, *args: Tensor, **options: Any) -> Tensor:
    """(texts, 7) generated tokens; a decoder generates without repetition, which would hide differences."""
    repetition = {"no_repeat_ngram_size": 1} if model.config.is_encoder_decoder else {}
    return model.generate(*args, **OPTIONS | repetition | {"do_sample": False} | options)[:, -7:]


@pytest.mark.parametrize("family", ["gpt", "gpt2", "gpt3", "grover", "ulmfit", "seqae"])
@pytest.mark.parametrize("path", ["sdpa", "eager"])
@torch.no_grad()
def test_positions_that_restart_separate_sequences(family: str, path: str) -> None:
    """The logits of a batch that transformers has packed, whose `position_ids` restart with each sequence."""
    case = next(case for case in (*DECODERS, *LSTM_LMS) if case.family.name == family)
    model = case.model(attention=path)
    rows = [make_batch(case, (length,))["input_ids"][0].tolist() for length in LENGTHS]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    packed = collator([{"input_ids": row} for row in rows])
    expected = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])
    assert_close(model(**{**packed, "labels": None}).logits[0], expected)
    two_rows = {name: packed[name].repeat(2, 1) for name in ("input_ids", "position_ids")}
    assert_close(model(**two_rows).logits[1], expected)


@pytest.mark.parametrize("case", TRANSFORMERS, ids=str)
@torch.no_grad()
def test_cached_steps_match_full_forward(case: Case) -> None:
    """Several tokens per step and one by one, with padding. Keys and values of the encoder are computed once."""
    model, prefix, batch = case.model(), "", {}
    ids, mask = prompts(case, "left").values()
    if case.is_seq2seq:
        prefix, batch = "decoder_", make_batch(case, LENGTHS)
        ids = batch.pop("decoder_input_ids")
        ids, mask = torch.cat([ids, ids[:, :3]], 1), torch.ones(3, 9, dtype=torch.long)
        mask[1, :2] = 0
    expected = model(**batch, **{f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}).logits
    cross_attentions = [module for module in model.modules() if isinstance(module, CrossAttention)]
    kv_projections = []
    for module in cross_attentions:
        module.kv_proj.register_forward_hook(lambda *_: kv_projections.append(1))
    config = model.config.get_text_config(decoder=True)

    def build_cache(cache_class: Any, **options: int) -> Any:
        caches = [cache_class(config=config, **options) for _ in range(1 + case.is_seq2seq)]
        return EncoderDecoderCache(*caches) if case.is_seq2seq else caches[0]

    for attention, cache in (
        ("sdpa", build_cache(DynamicCache)),
        ("sdpa", build_cache(StaticCache, max_cache_len=12)),
        ("eager", build_cache(StaticCache, max_cache_len=12)),
        ("sdpa", None),
    ):
        model.set_attn_implementation(attention)
        kv_projections.clear()
        logits, start, inputs = [], 0, batch
        for stop in (6, 7, 9):
            step = {f"{prefix}input_ids": ids[:, start:stop], f"{prefix}attention_mask": mask[:, :stop]}
            outputs = model(**inputs, **step, past_key_values=cache, use_cache=True)
            logits.append(outputs.logits)
            start, cache = stop, outputs.past_key_values
            if case.is_seq2seq:
                encoded = model.get_encoder()(**{name: batch[name] for name in ("input_ids", "attention_mask")})
                inputs = {"attention_mask": batch["attention_mask"], "encoder_outputs": encoded}
        assert_close(torch.cat(logits, 1)[mask == 1], expected[mask == 1], f"{attention}, {type(cache)}")
        assert len(kv_projections) == len(cross_attentions)


@pytest.mark.parametrize("case", [case for case in TRANSFORMERS if case.has_reference], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_generation_matches_transformers(case: Case, tmp_path: Path) -> None:
    """For one prompt, or several right-padded sources."""
    reference = case.reference_model(seed=0)
    reference.save_pretrained(tmp_path)
    model = case.model_class.from_pretrained(tmp_path).eval()
    batch = prompts(case) if case.is_seq2seq else {"input_ids": prompts(case)["input_ids"][:1]}
    for mode in (
        {},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 3, "length_penalty": 2.0, "repetition_penalty": 1.3},
        {"use_cache": False},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 5, "top_p": 0.9},
    ):
        texts = []
        for generator in (model, reference):
            torch.manual_seed(0)
            texts.append(generate(generator, **batch, **mode))
        assert torch.equal(*texts), mode
    assert len(texts[0].unique()) > 3, "too few distinct tokens to detect a difference"


@pytest.mark.parametrize("case", TRANSFORMERS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_generation_is_independent_of_padding_and_mode(case: Case) -> None:
    """Padding on both sides, also of the longest prompt; assisted generation, prompt lookup and a static cache."""
    model, left_batch, right_batch = case.model(), prompts(case, "left"), prompts(case)
    wide_batch = {name: F.pad(tensor, (0, 1)) for name, tensor in right_batch.items()}
    for num_beams in (1, 3):
        texts = generate(model, **left_batch, num_beams=num_beams)
        assert torch.equal(generate(model, **right_batch, num_beams=num_beams), texts)
        assert torch.equal(generate(model, **wide_batch, num_beams=num_beams), texts)
        for row, length in enumerate(LENGTHS):
            ids = right_batch["input_ids"][row : row + 1, :length]
            assert torch.equal(generate(model, ids, num_beams=num_beams)[0], texts[row])
    ids = right_batch["input_ids"][:1]
    modes: list[dict[str, Any]] = [{"assistant_model": case.model()}]
    modes += [{"cache_implementation": "static", "disable_compile": True}]
    modes += [] if case.is_seq2seq else [{"prompt_lookup_num_tokens": 2}]
    for mode in modes:
        assert torch.equal(generate(model, ids, **mode), generate(model, ids)), mode


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", [*DECODERS, *LSTM_LMS], ids=str)
def test_shifted_labels(case: Case, side: str) -> None:
    """`shift_labels`, which Trainer passes if it splits sequences over devices."""
    model, batch = case.model(), prompts(case, side)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[0, 3] = -100
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    if side == "left":  # the first token of a row is not predicted
        shifted = shifted.masked_fill(batch["attention_mask"] == 0, -100)
    expected, count = model(**batch, labels=labels).loss, int((shifted != -100).sum())
    assert torch.equal(model(**batch, shift_labels=shifted).loss, expected)
    assert torch.equal(model(**batch, labels=labels, shift_labels=shifted).loss, expected)
    assert_close(model(**batch, shift_labels=shifted, num_items_in_batch=7).loss, expected * count / 7)
    assert_close(F.cross_entropy(model(**batch).logits.flatten(0, 1), shifted.flatten()), expected)
    for invalid in (shifted[:, 1:], shifted[:2], labels.tolist(), shifted.half()):
        with pytest.raises(CtxError, match="shift_labels is"):
            model(**batch, shift_labels=invalid)


@pytest.fixture(scope="module")
def gpt2() -> tuple[CtxGpt2ForCausalLM, CtxGpt2Tokenizer]:
    torch.manual_seed(0)
    texts = ["a cat sat on the mat", "dogs ran home"] * 3
    tokenizer = CtxGpt2Tokenizer.train(texts, vocab_size=280, model_max_length=32)
    tokenizer.padding_side = "left"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return CtxGpt2ForCausalLM(CtxGpt2Config(vocab_size=len(tokenizer), **sizes, **ids)).eval(), tokenizer


class LosslessQuantizedLayer(QuantizedLayer):
    """Layer of transformers' quantized cache without its optional package: its codes are the values."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor


def test_generation_with_quantized_cache(gpt2: tuple[CtxGpt2ForCausalLM, CtxGpt2Tokenizer]) -> None:
    """The keys of a layer are an empty tensor whenever all tokens are quantized."""
    model, tokenizer = gpt2
    batch = tokenizer(["a cat", "dogs ran home"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    cache = Cache(layers=[LosslessQuantizedLayer(residual_length=3) for _ in range(model.config.num_hidden_layers)])
    assert torch.equal(model.generate(**batch, **options, past_key_values=cache), model.generate(**batch, **options))


def test_pipeline_and_streaming(gpt2: tuple[CtxGpt2ForCausalLM, CtxGpt2Tokenizer]) -> None:
    model, tokenizer = gpt2
    texts, options = ["a cat", "dogs ran home"], {"max_new_tokens": 5, "do_sample": False}
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    expected = tokenizer.batch_decode(model.generate(**batch, **options), skip_special_tokens=True)
    answers = pipeline("text-generation", model=model, tokenizer=tokenizer)(texts, **options)
    assert [answer[0]["generated_text"] for answer in answers] == expected
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
    prompt = tokenizer(texts[1:], return_tensors="pt")
    worker = Thread(target=model.generate, kwargs={**prompt, **options, "streamer": streamer})
    worker.start()
    assert "".join(streamer) == expected[1]
    worker.join()


@torch.no_grad()
def test_loss_of_packed_sequences_equals_reference() -> None:
    """Sequences that only `position_ids` separate have the loss of separate sequences, as in transformers."""
    case = Case(FAMILIES["gpt2"], "AutoModelForCausalLM")
    sequences = [list(range(10 * number, 10 * number + 3 + number)) for number in (1, 2, 3)]
    batch = DataCollatorWithFlattening()([{"input_ids": ids} for ids in sequences], return_tensors="pt")
    rows = [torch.tensor([ids]) for ids in sequences]
    for model in (case.model(), case.reference_model()):
        losses = [model(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1) for ids in rows]
        expected = sum(losses) / int((batch["labels"] != -100).sum())
        assert_close(model(**batch, use_cache=False).loss, expected)
        one_sequence = {"input_ids": rows[0], "position_ids": batch["position_ids"][:, :4] + 2}
        assert_close(model(**one_sequence, use_cache=False).logits, model(**one_sequence, use_cache=True).logits)


@pytest.mark.filterwarnings("ignore")
def test_invalid_prompts_and_caches(gpt2: tuple[CtxGpt2ForCausalLM, CtxGpt2Tokenizer]) -> None:
    model, tokenizer = gpt2
    ids, empty = tokenizer(["a cat sat", ""], return_tensors="pt", padding=True).input_ids[:1], torch.zeros(1, 0).long()
    padding = torch.zeros(1, 3, dtype=torch.long)
    cache = model(ids.repeat(2, 1), use_cache=True).past_key_values
    calls: dict[str, Callable[[], object]] = {
        "40 tokens": lambda: model(torch.ones(1, 40, dtype=torch.long)),
        "33 tokens, 32 of them in past_key_values": lambda: model.generate(ids, min_new_tokens=40, max_new_tokens=40),
        "batch is empty": lambda: model.generate(empty, max_new_tokens=2),
        "no token": lambda: model.generate(padding, attention_mask=padding, max_new_tokens=2),
        "batch size 2, but the input has 1": lambda: model(ids[:, :1], past_key_values=cache),
        "attention_mask is": lambda: model(ids, attention_mask=torch.ones(1, 2), use_cache=True),
        "sequence_ids cannot be combined with": lambda: model(ids[:, :1], sequence_ids=ids[:, :1], use_cache=True),
    }
    for message, call in calls.items():
        with pytest.raises(CtxError, match=message):
            call()


@pytest.mark.parametrize("case", SEQ2SEQ, ids=str)
def test_decoder_prompt_and_cross_attention_mask(case: Case) -> None:
    model, batch = case.model(), prompts(case)
    mask = batch["attention_mask"].clone()
    mask[:, 1:3] = 0
    encoded = model.get_encoder()(**batch)
    options = {**OPTIONS, "num_beams": 3, "output_scores": True, "return_dict_in_generate": True}
    inputs = (batch | {"cross_attention_mask": mask}, {"encoder_outputs": encoded, "attention_mask": mask}, batch)
    outputs = [model.generate(**arguments, **options) for arguments in inputs]
    assert all(type(output.past_key_values.cross_attention_cache) is SharedSourceCache for output in outputs)
    masked, without_tokens, unmasked = (output.sequences_scores for output in outputs)
    assert_close(masked, without_tokens)
    assert not torch.allclose(masked, unmasked)
    ids = batch["input_ids"][:1]
    text = model.generate(ids, **OPTIONS, do_sample=False)
    prompt = {"decoder_input_ids": text[:, :3], "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **OPTIONS | prompt), text)
    with pytest.raises(CtxError, match="cross_attention_mask is"):
        model(**batch, cross_attention_mask=mask[:, 1:], decoder_input_ids=text[:1].repeat(3, 1))


@pytest.mark.parametrize("case", SEQ2SEQ, ids=str)
def test_decoder_inputs(case: Case, packed_layouts: list[PackedLayout]) -> None:
    """Shifted labels, embeddings, and encoder outputs; the decoder runs only up to the last label."""
    model, batch = case.model(), make_batch(case, LENGTHS)
    ids = batch.pop("decoder_input_ids")
    labels = make_targets(case, batch | {"decoder_input_ids": ids})["labels"]
    labels[:, 0], labels[1, 2:] = 7, -100
    shifted = F.pad(labels[:, :-1], (1, 0), value=model.config.decoder_start_token_id)
    shifted = shifted.masked_fill(shifted == -100, model.config.pad_token_id)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    loss = model(**batch, labels=labels).loss
    steps = sum(int((row != -100).nonzero()[-1]) + 1 for row in labels)
    assert [layout.num_tokens for layout in packed_layouts] == [19, steps, 19]
    assert steps < labels.numel()
    logits = model(**batch, decoder_input_ids=shifted).logits
    assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    embeddings = model.base_model.decoder_word_embeddings
    assert_close(model(**batch, decoder_inputs_embeds=embeddings(shifted), labels=labels).loss, loss)
    encoded = model.get_encoder()(**batch, return_dict=False, output_hidden_states=True)
    assert isinstance(encoded, tuple)
    encoder_inputs = {"encoder_outputs": encoded, "attention_mask": batch["attention_mask"]}
    cached = model(**encoder_inputs, labels=labels, use_cache=True)
    assert_close(cached.loss, loss)
    assert_close(cached.encoder_hidden_states, encoded[1])
    assert cached.past_key_values.get_seq_length() == labels.shape[1]
    base_outputs = model.base_model(**encoder_inputs, decoder_input_ids=shifted)
    assert_close(base_outputs.encoder_hidden_states, encoded[1])
    model.config.return_dict = False
    assert_close(model(**batch, labels=labels)[0], loss)
    assert_close(model.base_model(**batch, decoder_input_ids=shifted)[0], base_outputs.last_hidden_state)
    model.config.return_dict = True
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    packed, padded = (
        network(**batch, decoder_input_ids=ids, decoder_attention_mask=mask).logits
        for network in (model, case.model(unpad=False))
    )
    assert_close(packed[mask == 1], padded[mask == 1])
    assert not torch.allclose(packed[0, -1], model(**batch, decoder_input_ids=ids).logits[0, -1])
    with pytest.raises(CtxError, match="decoder_input_ids cannot be combined with decoder_inputs_embeds"):
        model(**batch, decoder_input_ids=ids, decoder_inputs_embeds=embeddings(ids))


@torch.no_grad()
def test_mask_of_shifted_decoder_input() -> None:
    """A decoder without an input reads the source, shifted by one token, with the passed mask and positions."""
    model = CtxBartModel(tiny_config(FAMILIES["bart"])).eval()
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    shifted = F.pad(ids[:, :-1], (1, 0), value=model.config.decoder_start_token_id)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    for options in ({"decoder_attention_mask": mask}, {"decoder_position_ids": torch.arange(4)[None] + 1}):
        states = model(ids, **options).last_hidden_state
        expected = model(ids, decoder_input_ids=shifted, **options).last_hidden_state
        assert_close(states[mask == 1], expected[mask == 1])
        assert not torch.allclose(states[1, -1], model(ids).last_hidden_state[1, -1])
    with pytest.raises(CtxError, match=r"attention_mask is \(2, 9\)"):
        model(ids, decoder_attention_mask=torch.ones(2, 9))


@pytest.mark.parametrize("case", [case for case in SEQ2SEQ if hasattr(case.config(), "share_word_embeddings")], ids=str)
@torch.no_grad()
def test_separate_decoder_embeddings_are_resized(case: Case, tmp_path: Path) -> None:
    model, batch = case.model(tie_word_embeddings=False), make_batch(case, LENGTHS)
    original_logits = model(**batch).logits
    model.resize_token_embeddings(original_logits.shape[-1] + 9)
    assert_close(model(**batch).logits[..., :-9], original_logits)
    batch["decoder_input_ids"][:, 1] = original_logits.shape[-1] + 8  # a new token
    model.save_pretrained(tmp_path)
    reloaded = case.model_class.from_pretrained(tmp_path).eval()
    assert torch.equal(reloaded(**batch).logits, model(**batch).logits)
    assert not torch.allclose(reloaded(**batch).logits[:, 1, :-9], original_logits[:, 1])


def pack_pairs(pairs: list[dict[str, Tensor]], name: str, side: str) -> Tensor:
    """Pack (1, length) tensors into (rows, width), two per row, with at least two columns of padding."""
    rows = [torch.cat([pair[name][0] for pair in pairs[start : start + 2]]) for start in range(0, len(pairs), 2)]
    width = max(map(len, rows)) + 2
    pads = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    return torch.stack([F.pad(row, pad, value=-100 if name == "labels" else 0) for row, pad in zip(rows, pads)])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", SEQ2SEQ, ids=str)
def test_packed_pairs_match_single_pairs(case: Case, side: str, subtests: pytest.Subtests) -> None:
    """Logits, loss and gradients; one target has no labels."""
    languages = {"n_langs": 2} if hasattr(case.config(), "n_langs") else {}
    pairs = []
    for number, (length, steps) in enumerate([(5, 3), (8, 6), (4, 5), (7, 2)]):
        ids = torch.randint(5, 60, (1, steps), generator=torch.Generator().manual_seed(number))
        pair = {"input_ids": make_batch(case, (length,), seed=number)["input_ids"], "labels": ids}
        fill_values = {"sequence_ids": (1 + number % 2,) * 2, "langs": (number % 2, 1 - number % 2)}
        for name in ("sequence_ids", "langs") if languages else ("sequence_ids",):
            pair[name], pair[f"decoder_{name}"] = map(torch.full, ((1, length), (1, steps)), fill_values[name])
        pairs.append(pair)
    pairs[1]["labels"][0, 2], pairs[3]["labels"][:] = -100, -100
    single_pairs = [{name: value for name, value in pair.items() if "sequence_ids" not in name} for pair in pairs]
    num_labels, packed = torch.tensor(13), {name: pack_pairs(pairs, name, side) for name in pairs[0]}
    for path, options in PATHS.items():
        with subtests.test(path=path):
            model = case.model(**options, **languages)
            loss = model(**packed).loss
            expected = sum(model(**pair, num_items_in_batch=num_labels).loss for pair in single_pairs[:3])
            assert_close(loss, expected)
            assert_same_gradients(gradients(model, loss), gradients(model, expected))
            with torch.no_grad():
                logits = model(**packed, return_logits=True).logits[packed["decoder_sequence_ids"] != 0]
                expected_logits = [model(**pair, return_logits=True).logits[0] for pair in single_pairs]
            assert_close(logits, torch.cat(expected_logits))
            with pytest.raises(CtxError, match="Only one of sequence_ids and decoder_sequence_ids"):
                model(**{name: value for name, value in packed.items() if name != "decoder_sequence_ids"})


def with_end_tokens(ids: Tensor, *columns: list[int]) -> Tensor:
    """Replace the end tokens of each row by end tokens in the given columns."""
    end = CLASSIFIER.config().eos_token_id
    ids = ids.masked_fill(ids == end, 9)
    for row, row_columns in enumerate(columns):
        ids[row, row_columns] = end
    return ids


def test_classifier_uses_last_end_token(tmp_path: Path) -> None:
    """As in transformers if rows have equal numbers of end tokens, else row by row; last token for embeddings."""
    reference = CLASSIFIER.reference_model(seed=3)
    reference.save_pretrained(tmp_path)
    model: Any = CLASSIFIER.model_class.from_pretrained(tmp_path).eval()
    batch = prompts(CLASSIFIER)
    ids = with_end_tokens(batch["input_ids"], [2, 8], [0, 3], [1, 4])
    assert_close(model(**batch | {"input_ids": ids}).logits, reference(**batch | {"input_ids": ids}).logits)
    uneven_batch = batch | {"input_ids": with_end_tokens(batch["input_ids"], [8], [1, 3], [0, 2, 4])}
    outputs = model(**uneven_batch)
    with pytest.raises(ValueError, match="same number of <eos>"):
        reference(**uneven_batch)
    states = model.base_model(**uneven_batch).last_hidden_state
    for row, (length, end) in enumerate(zip(LENGTHS, (8, 3, 4))):
        assert_close(outputs.logits[row], model(uneven_batch["input_ids"][row : row + 1, :length]).logits[0])
        assert_close(outputs.logits[row], model.classifier(states[row, end]))
    ids_without_end = with_end_tokens(batch["input_ids"], [], [], [])
    embeddings = CLASSIFIER.embed_ids(model, ids_without_end)
    logits = model(inputs_embeds=embeddings, attention_mask=batch["attention_mask"]).logits
    assert_close(logits, model(**batch | {"input_ids": ids_without_end}).logits)
    outputs_with_states = model(**uneven_batch, output_hidden_states=True)
    assert_close(outputs_with_states.logits, outputs.logits)
    assert outputs_with_states.decoder_hidden_states[-1].shape == (3, 9, 32)


def test_encoder_peak_memory_without_gradients() -> None:
    """Six states: the inputs of the current and the first layer, and four of attention (queries, keys, values, context)
    or of the feed-forward network (input, output, sum, normalized sum)."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = CtxBartModel(CtxBartConfig(vocab_size=50, decoder_layers=1, **shape)).eval().get_encoder()
    ids = torch.randint(5, 50, (64, 128))  # more rows than one chunk of the feed-forward network

    @torch.inference_mode()
    def step() -> None:
        encoder(input_ids=ids)

    assert peak_bytes(step, torch.device("cpu")) < 6.2 * ids.numel() * 32 * 4


@pytest.mark.parametrize("case", ALL_SEQ2SEQ, ids=str)
def test_encoder_outputs_mask_shape(case: Case) -> None:
    """A mask of the wrong shape raises, without broadcasting; `generate` passes the full mask for prompt chunks."""
    model, batch = case.model(), prompts(case)
    encoded = model.get_encoder()(**batch)
    ids = torch.full((3, 4), 6)
    for shape in ((3, 1), (3, 5), (3, 11), (1, 9), (2, 9), (9,), (3, 9, 9)):
        inputs = {"encoder_outputs": encoded, "attention_mask": torch.ones(shape, dtype=torch.long)}
        for use_cache in (False, True):
            with pytest.raises(CtxError, match=r"attention_mask is .* but encoder_outputs have the shape"):
                model(**inputs, decoder_input_ids=ids, use_cache=use_cache)
    prompt = {"decoder_input_ids": ids, "no_repeat_ngram_size": 1, "do_sample": False, **OPTIONS}
    expected = model.generate(**batch, **prompt)
    assert torch.equal(model.generate(**batch, **prompt, prefill_chunk_size=2), expected)
