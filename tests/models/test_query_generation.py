"""UniLM and ERNIE-GEN: a single pass over source, target and queries compared with a pass per token, and `generate`
compared with an explicit loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.modeling_outputs import BaseModelOutput
from zoo import PATHS, Case, assert_close, assert_same_gradients, gradients

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.registry import FAMILIES

CASES = [Case(FAMILIES[name], "AutoModelForSeq2SeqLM") for name in ("unilm", "ernie_gen")]
LENGTHS, STEPS, START, QUERY = (7, 3, 5), (4, 6, 1), 1, 3
OPTIONS = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
all_cases = pytest.mark.parametrize("case", CASES, ids=str)


def make_sources(side: str = "right") -> dict[str, Tensor]:
    ids, generator = torch.zeros(3, 8, dtype=torch.long), torch.Generator().manual_seed(0)
    for row, length in enumerate(LENGTHS):
        columns = slice(8 - length, None) if side == "left" else slice(length)
        ids[row, columns] = torch.randint(5, 61, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def make_labels() -> Tensor:
    """(batch, steps) labels, one of them ignored."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, 61, (3, max(STEPS)), generator=generator)
    for row, count in enumerate(STEPS):
        labels[row, count:] = -100
    labels[0, 1] = -100
    return labels


def predict(case: Case, model: PreTrainedModel, source: Tensor, previous: list[int], spans: list[int]) -> Tensor:
    """(queries, vocabulary) log-probabilities of the tokens after `previous`: a forward pass of the masked LM over one
    sequence with an explicit mask. `previous` starts with the start token; queries of a span attend to each other."""
    target = previous if case.family.name == "ernie_gen" else previous[1:]
    segments = (0, 3) if case.family.name == "ernie_gen" else (4, 5)
    n, m, num_queries = len(source), len(source) + len(target), len(spans)
    ids = torch.tensor([*source.tolist(), *target, *[QUERY] * num_queries])
    is_attended = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    is_attended[:n, :n] = True
    is_attended[m:, m:] = torch.tensor(spans)[:, None] == torch.tensor(spans)
    types = torch.tensor([[segments[0]] * n + [segments[1]] * (len(target) + num_queries)])
    states = model.bert.embeddings(model.get_input_embeddings()(ids)[None], torch.arange(len(ids))[None], types)
    mask = torch.zeros(1, 1, *is_attended.shape).masked_fill(~is_attended, float("-inf"))
    for layer in model.bert.layers:
        attention = layer.attention
        query, key, value = (
            tensor.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for tensor in attention.qkv_proj(states).chunk(3, -1)
        )
        scores = query @ key.transpose(2, 3) * attention.scale + mask
        context = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        states = layer.attention_norm(states + attention.out_proj(context))
        states = layer.feed_forward_norm(states + layer.feed_forward(states))
    return model.mlm_head(states[0, m:]).log_softmax(-1)


def unpadded_sources(batch: dict[str, Tensor]) -> list[Tensor]:
    return [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]


@all_cases
@pytest.mark.parametrize("side", ["right", "left"])
def test_single_pass_matches_pass_per_token(case: Case, side: str) -> None:
    """The loss, its gradients and all logits, with inputs that are not the labels (noise)."""
    batch, labels, reference = make_sources(side), make_labels(), case.model()
    inputs = torch.randint(5, 61, labels.shape, generator=torch.Generator().manual_seed(3))
    inputs[:, 0] = START
    log_probs = torch.stack(
        [
            torch.cat([predict(case, reference, source, inputs[row, : step + 1].tolist(), [0]) for step in range(6)])
            for row, source in enumerate(unpadded_sources(batch))
        ]
    )
    expected = F.nll_loss(log_probs.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected_gradients = gradients(reference, expected)
    for path, options in PATHS.items():
        model = case.model(**options)
        outputs = model(**batch, decoder_input_ids=inputs, labels=labels)
        assert outputs.logits is None
        assert_close(outputs.loss, expected, path)
        assert_same_gradients(gradients(model, outputs.loss), expected_gradients, 1e-4, path)
        with torch.no_grad():
            logits = model(**batch, decoder_input_ids=inputs).logits
            cached = model(**batch, decoder_input_ids=inputs, use_cache=True)
        assert_close(logits.log_softmax(-1), log_probs.detach(), path)
        assert_close(cached.logits, logits, f"with a cache, {path}")
        assert cached.past_key_values.get_seq_length() == 8 + inputs.shape[1] - (case.family.name == "unilm")


@all_cases
def test_span_loss_matches_pass_per_span(case: Case) -> None:
    """Ignored steps have no query; the other steps keep their positions."""
    batch, labels = make_sources(), make_labels()
    spans = torch.tensor([[4, 4, 4, 9, 9, 9], [0, 0, 1, 2, 2, 2], [7, 8, 8, 8, 8, 8]])
    reference, losses = case.model(), []
    for row, source in enumerate(unpadded_sources(batch)):
        previous = [START, *labels[row, :-1].clamp(min=0).tolist()]
        for span in dict.fromkeys(spans[row].tolist()):
            steps = (spans[row] == span).nonzero().flatten().tolist()
            queries = [0 if labels[row, step] != -100 else -1 - step for step in steps]
            log_probs = predict(case, reference, source, previous[: steps[0] + 1], queries)
            losses += [-logp[labels[row, step]] for logp, step in zip(log_probs, steps) if labels[row, step] != -100]
    span_loss, token_loss = sum(losses) / len(losses), reference(**batch, labels=labels).loss
    expected = 0.75 * token_loss + 0.25 * span_loss
    expected_gradients = gradients(reference, expected)
    for path, options in PATHS.items():
        model = case.model(**options, span_loss_weight=0.25)
        loss = model(**batch, labels=labels, span_ids=spans).loss
        assert_close(loss, expected, path)
        assert_close(model(**batch, labels=labels, span_ids=spans, return_logits=True).loss, loss, f"{path}, logits")
        assert_same_gradients(gradients(model, loss), expected_gradients, 1e-4, path)


@all_cases
@torch.no_grad()
def test_generation_matches_explicit_loop(case: Case) -> None:
    """Greedy search, also without repeated tokens; beam search with and without cache, batched and row by row."""
    model = case.model(2, initializer_range=0.5)
    for side in ("right", "left"):
        batch = make_sources(side)
        for strategy in ({}, {"no_repeat_ngram_size": 1}):
            generated = model.generate(**batch, **OPTIONS, **strategy)
            for row, source in enumerate(unpadded_sources(batch)):
                text = [START]
                for _ in range(7):
                    log_probs = predict(case, model, source, text, [0])[0]
                    if strategy:
                        log_probs[text] = float("-inf")
                    text.append(int(log_probs.argmax()))
                assert generated[row].tolist() == text, (side, strategy)
            assert len(generated[:, 1:].unique()) > 3, "too few distinct tokens to detect a difference"
        for strategy in ({"num_beams": 3}, {"num_beams": 4, "no_repeat_ngram_size": 2, "length_penalty": 0.7}):
            options = OPTIONS | strategy
            generated = model.generate(**batch, **options)
            assert torch.equal(generated, model.generate(**batch, **options, use_cache=False)), (side, strategy)
            for row, source in enumerate(unpadded_sources(batch)):
                assert torch.equal(model.generate(source[None], **options)[0], generated[row]), (side, strategy)


@all_cases
def test_generation_with_gradient_checkpointing(case: Case) -> None:
    """A model in training mode generates the same text, and is checkpointed again afterwards."""
    model, batch = case.model(2, initializer_range=0.5), make_sources()
    expected = model.generate(**batch, **OPTIONS)
    model.train().activation_checkpointing_enable()
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert all(layer.gradient_checkpointing for layer in model.bert.layers)


def test_masked_targets_match_masked_lm() -> None:
    """UniLM's fine-tuning: equal to the masked LM on rows of source (segment 4) and target (segment 5)."""
    batch, labels = make_sources(), make_labels()
    masked_targets = labels.masked_fill(labels == -100, 9)
    for row, count in enumerate(STEPS):
        masked_targets[row, count + 1 :] = 0
    names = ("input_ids", "attention_mask", "token_type_ids")
    joined = {name: torch.zeros(3, 16, dtype=torch.long) for name in names} | {"labels": torch.full((3, 16), -100)}
    for row, source in enumerate(unpadded_sources(batch)):
        target = masked_targets[row][masked_targets[row] != 0]
        n, stop = len(source), len(source) + len(target)
        joined["input_ids"][row, :stop], joined["attention_mask"][row, :stop] = torch.cat([source, target]), 1
        joined["token_type_ids"][row, :stop] = torch.tensor([4] * n + [5] * len(target))
        joined["labels"][row, n:stop] = labels[row, : len(target)]
    masked_lm = Case(FAMILIES["unilm"], "AutoModelForMaskedLM").model()
    expected_loss, joined_labels = masked_lm(**joined).loss, joined.pop("labels")
    assert (joined_labels != -100).any()
    for options in PATHS.values():
        model = CASES[0].model(**options)
        assert_close(model(**batch, masked_target_ids=masked_targets, labels=labels).loss, expected_loss)
        logits = model(**batch, masked_target_ids=masked_targets).logits
        assert_close(logits[1], masked_lm(**joined).logits[1, 3:9])


def test_label_smoothing_in_training() -> None:
    batch, labels = make_sources(), make_labels()
    model = CASES[0].model(label_smoothing=0.1)
    unsmoothed_loss = model(**batch, labels=labels).loss
    log_prob = model(**batch, decoder_input_ids=model.resolve_decoder_input_ids(3, None, labels)).logits.log_softmax(-1)
    is_target = labels != -100
    uniform = -log_prob[is_target].mean(-1).mean()
    assert_close(unsmoothed_loss, F.nll_loss(log_prob[is_target], labels[is_target]))
    assert_close(model.train()(**batch, labels=labels).loss, 0.9 * unsmoothed_loss + 0.1 * uniform)


@all_cases
@torch.no_grad()
def test_logits_to_keep(case: Case) -> None:
    """Logits are selected as in transformers, with and without an encoded source; the loss does not change."""
    model, batch, labels = case.model(), make_sources(), make_labels()
    mask = labels != -100
    for inputs in (batch, {"encoder_outputs": model.get_encoder()(**batch)} | batch):
        expected = model(**inputs, labels=labels)
        for logits_to_keep, logits in (
            (2, expected.logits[:, -2:]),
            (torch.tensor([0, 4]), expected.logits[:, [0, 4]]),
            (torch.tensor([[0], [4], [2]]), expected.logits[range(3), [0, 4, 2]][:, None]),
            (mask, expected.logits[mask]),
        ):
            outputs = model(**inputs, labels=labels, logits_to_keep=logits_to_keep)
            assert_close(outputs.logits, logits)
            assert_close(outputs.loss, expected.loss)
            steps = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
            assert_close(model(**inputs, **steps, logits_to_keep=logits_to_keep).logits, logits)


def test_invalid_inputs() -> None:
    case = CASES[0]
    model, batch, labels = case.model(), make_sources(), make_labels()
    ids, encoded = labels.clamp(min=5), model.get_encoder()(**batch)
    cache = model(**batch, decoder_input_ids=torch.full((3, 5), 7), use_cache=True).past_key_values
    invalid: list[tuple[dict[str, Any], str]] = [
        ({"decoder_input_ids": torch.full((3, 36), 7)}, r"Source and target have \d+ tokens, above"),
        ({"masked_target_ids": torch.full((2, 4), 7)}, "masked_target_ids is"),
        ({"masked_target_ids": torch.full((3, 0), 7)}, "masked_target_ids is"),
        ({"decoder_input_ids": torch.full((3, 2), 7), "past_key_values": cache}, "pass all target tokens"),
        ({"encoder_outputs": encoded.to_tuple(), "labels": labels}, "no keys_and_values"),
        ({"encoder_outputs": BaseModelOutput(encoded.last_hidden_state), "labels": labels}, "no keys_and_values"),
    ]
    for name in ("position_ids", "sequence_ids", "span_id", "decoder_attention_mask"):
        message = f"does not accept the argument {name}"
        invalid.append(({"labels": labels, name: batch["input_ids"]}, message))
        with pytest.raises(CtxError, match=message):
            model.get_encoder()(**batch, **{name: batch["input_ids"]})
    for name, value in {
        "encoder_outputs": encoded,
        "past_key_values": cache,
        "span_ids": ids,
        "decoder_input_ids": ids,
    }.items():
        inputs = {"labels": labels, name: value}
        invalid.append((inputs | {"masked_target_ids": ids}, f"(?s)masked_target_ids is the whole target.*{name}"))
        if value is not ids:
            invalid.append((inputs | {"span_ids": ids}, f"(?s)span_ids belong to a target.*{name}"))
    for inputs, message in invalid:
        with pytest.raises(CtxError, match=message):
            model(**batch, **inputs)
    for token_id in (None, -1, case.model().config.vocab_size):
        with pytest.raises(CtxError, match=f"query_token_id={token_id} is not a token"):
            case.model(query_token_id=token_id)(**batch, labels=labels)


def test_source_and_target_share_position_limit() -> None:
    """Padding does not count in evaluation; `generate_texts` checks the lengths of all texts first."""
    words = ["a", "cat", "sat", "dogs", "ran", "home"]
    for case in CASES:
        limit = case.config(max_position_embeddings=32).max_source_target_length
        labels = torch.full((2, 12), -100)
        labels[0, : limit - 28], labels[1] = 7, 9
        ids = torch.full((2, 28), 8)
        ids[1, 5:] = 0
        batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
        batch["span_ids"] = torch.arange(12).div(4, rounding_mode="floor").expand(2, 12)
        for path, options in PATHS.items():
            model = case.model(max_position_embeddings=32, hidden_dropout_prob=0.0, **options)
            training_loss = model(**batch).loss
            with torch.no_grad():
                assert_close(model(**batch).loss, training_loss, path)
                long_labels = labels.clone()
                long_labels[0, limit - 28] = 7
                with pytest.raises(CtxError, match="Source and target have 33 tokens"):
                    model(**batch | {"labels": long_labels})
        tokenizer = case.family.tokenizer.train([" ".join(words)] * 4, vocab_size=60, min_frequency=1)
        sizes = {"vocab_size": len(tokenizer), "query_token_id": tokenizer.mask_token_id, "eos_token_id": None}
        model = case.model(max_position_embeddings=32, **sizes)
        texts = ["cat", " ".join((words * 5)[: limit - 11])]
        assert len(generate_texts(model, tokenizer, texts, max_new_tokens=9)) == 2, "up to the last position"
        with pytest.raises(CtxError, match=rf"(?s)Text 1 .* {limit} positions, 10 of them .*at most {limit - 10},"):
            generate_texts(model, tokenizer, texts, max_new_tokens=10)
        assert len(generate_texts(model, tokenizer, texts, max_new_tokens=10, max_length=limit - 10)) == 2


@all_cases
def test_seq2seq_trainer_evaluates_by_generation(case: Case, tmp_path: Path) -> None:
    """With label smoothing in Trainer, from source and target columns."""
    tokenizer = case.family.tokenizer.train(["a cat sat", "dogs ran home"] * 4, vocab_size=60, min_frequency=1)
    ids = {"query_token_id": tokenizer.mask_token_id, "decoder_start_token_id": tokenizer.cls_token_id}
    ids |= {"eos_token_id": tokenizer.sep_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = case.model(vocab_size=len(tokenizer), num_hidden_layers=1, initializer_range=0.1, **ids)
    texts = [("a cat sat", "dogs ran"), ("sat", "home"), ("dogs ran home", "a cat"), ("cat dogs", "sat sat sat")]
    rows = [{"input_ids": tokenizer(a).input_ids, "labels": tokenizer(b).input_ids[1:]} for a, b in texts]
    options = {"max_steps": 60, "learning_rate": 1e-2, "predict_with_generate": True, "generation_max_length": 6}
    options |= {"label_smoothing_factor": 0.1, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(str(tmp_path), **options),
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    )
    trainer.train()
    predictions = tokenizer.batch_decode(trainer.predict(rows).predictions.clip(0), skip_special_tokens=True)
    assert predictions == [target for _, target in texts]
