"""Generation with UniLM and ERNIE-GEN: one pass over source, target and queries equals a pass for every token, and
`generate` equals a plain loop."""

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


def sources(side: str = "right") -> dict[str, Tensor]:
    ids, generator = torch.zeros(3, 8, dtype=torch.long), torch.Generator().manual_seed(0)
    for row, length in enumerate(LENGTHS):
        columns = slice(8 - length, None) if side == "left" else slice(length)
        ids[row, columns] = torch.randint(5, 61, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def targets() -> Tensor:
    """(batch, steps) labels, one of them ignored."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, 61, (3, max(STEPS)), generator=generator)
    for row, count in enumerate(STEPS):
        labels[row, count:] = -100
    labels[0, 1] = -100
    return labels


def prediction(case: Case, model: PreTrainedModel, source: Tensor, previous: list[int], spans: list[int]) -> Tensor:
    """(queries, vocabulary) log-probabilities of the tokens after `previous`: a forward of the masked-LM model over one
    sequence with an explicit mask. `previous` begins with the start token; queries of one span attend to each other."""
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


def rows_of(batch: dict[str, Tensor]) -> list[Tensor]:
    return [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]


@all_cases
@pytest.mark.parametrize("side", ["right", "left"])
def test_one_pass_equals_a_pass_for_every_token(case: Case, side: str) -> None:
    """The loss, its gradients and all logits, with inputs that are not the labels (noise)."""
    batch, labels, slow = sources(side), targets(), case.model()
    inputs = torch.randint(5, 61, labels.shape, generator=torch.Generator().manual_seed(3))
    inputs[:, 0] = START
    logs = torch.stack(
        [
            torch.cat([prediction(case, slow, source, inputs[row, : step + 1].tolist(), [0]) for step in range(6)])
            for row, source in enumerate(rows_of(batch))
        ]
    )
    expected = F.nll_loss(logs.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected_gradients = gradients(slow, expected)
    for path, options in PATHS.items():
        model = case.model(**options)
        outputs = model(**batch, decoder_input_ids=inputs, labels=labels)
        assert outputs.logits is None
        assert_close(outputs.loss, expected, path)
        assert_same_gradients(gradients(model, outputs.loss), expected_gradients, 1e-4, path)
        with torch.no_grad():
            logits = model(**batch, decoder_input_ids=inputs).logits
            cached = model(**batch, decoder_input_ids=inputs, use_cache=True)
        assert_close(logits.log_softmax(-1), logs.detach(), path)
        assert_close(cached.logits, logits, f"with a cache, {path}")
        assert cached.past_key_values.get_seq_length() == 8 + inputs.shape[1] - (case.family.name == "unilm")


@all_cases
def test_spans_are_predicted_from_the_tokens_before_them(case: Case) -> None:
    """Ignored steps have no query, and the others keep their positions."""
    batch, labels = sources(), targets()
    spans = torch.tensor([[4, 4, 4, 9, 9, 9], [0, 0, 1, 2, 2, 2], [7, 8, 8, 8, 8, 8]])
    slow, losses = case.model(), []
    for row, source in enumerate(rows_of(batch)):
        previous = [START, *labels[row, :-1].clamp(min=0).tolist()]
        for span in dict.fromkeys(spans[row].tolist()):
            steps = (spans[row] == span).nonzero().flatten().tolist()
            queries = [0 if labels[row, step] != -100 else -1 - step for step in steps]
            logs = prediction(case, slow, source, previous[: steps[0] + 1], queries)
            losses += [-log[labels[row, step]] for log, step in zip(logs, steps) if labels[row, step] != -100]
    span_loss, token_loss = sum(losses) / len(losses), slow(**batch, labels=labels).loss
    expected = 0.75 * token_loss + 0.25 * span_loss
    expected_gradients = gradients(slow, expected)
    for path, options in PATHS.items():
        model = case.model(**options, span_loss_weight=0.25)
        loss = model(**batch, labels=labels, span_ids=spans).loss
        assert_close(loss, expected, path)
        assert_close(model(**batch, labels=labels, span_ids=spans, return_logits=True).loss, loss, f"{path}, logits")
        assert_same_gradients(gradients(model, loss), expected_gradients, 1e-4, path)


@all_cases
@torch.no_grad()
def test_generation_is_a_plain_loop(case: Case) -> None:
    """Greedy, without repeated n-grams; beams with and without a cache; a batch and each row by itself."""
    model = case.model(2, initializer_range=0.5)
    for side in ("right", "left"):
        batch = sources(side)
        for extra in ({}, {"no_repeat_ngram_size": 1}):
            got = model.generate(**batch, **OPTIONS, **extra)
            for row, source in enumerate(rows_of(batch)):
                text = [START]
                for _ in range(7):
                    logs = prediction(case, model, source, text, [0])[0]
                    if extra:
                        logs[text] = float("-inf")
                    text.append(int(logs.argmax()))
                assert got[row].tolist() == text, (side, extra)
            assert len(got[:, 1:].unique()) > 3, "too dull a text to tell anything"
        for extra in ({"num_beams": 3}, {"num_beams": 4, "no_repeat_ngram_size": 2, "length_penalty": 0.7}):
            together = model.generate(**batch, **OPTIONS, **extra)
            assert torch.equal(together, model.generate(**batch, **OPTIONS, **extra, use_cache=False)), (side, extra)
            for row, source in enumerate(rows_of(batch)):
                assert torch.equal(model.generate(source[None], **OPTIONS, **extra)[0], together[row]), (side, extra)


def test_masked_targets_are_rows_of_the_masked_lm() -> None:
    """UniLM's fine-tuning: the loss of source and target in one row, of segments 4 and 5."""
    batch, labels = sources(), targets()
    masked = labels.clamp(min=0)
    masked[masked == 0] = 9
    for row, count in enumerate(STEPS):
        masked[row, count + 1 :] = 0
    joined = {name: torch.zeros(3, 16, dtype=torch.long) for name in ("input_ids", "attention_mask", "token_type_ids")}
    wanted = torch.full((3, 16), -100)
    for row, source in enumerate(rows_of(batch)):
        written = masked[row][masked[row] != 0]
        n, stop = len(source), len(source) + len(written)
        joined["input_ids"][row, :stop], joined["attention_mask"][row, :stop] = torch.cat([source, written]), 1
        joined["token_type_ids"][row, :stop] = torch.tensor([4] * n + [5] * len(written))
        wanted[row, n:stop] = labels[row, : len(written)]
    plain = Case(FAMILIES["unilm"], "AutoModelForMaskedLM").model()
    for options in PATHS.values():
        model = CASES[0].model(**options)
        found = model(**batch, masked_target_ids=masked, labels=labels)
        assert_close(found.loss, plain(**joined, labels=wanted).loss)
        logits = model(**batch, masked_target_ids=masked).logits
        assert_close(logits[1], plain(**joined).logits[1, 3:9])


def test_smoothed_labels_in_training() -> None:
    batch, labels = sources(), targets()
    model = CASES[0].model(label_smoothing=0.1)
    plain = model(**batch, labels=labels).loss
    logs = model(**batch, decoder_input_ids=model.resolve_decoder_input_ids(3, None, labels)).logits.log_softmax(-1)
    known = labels != -100
    uniform = -logs[known].mean(-1).mean()
    assert_close(plain, F.nll_loss(logs[known], labels[known]))
    assert_close(model.train()(**batch, labels=labels).loss, 0.9 * plain + 0.1 * uniform)


def test_what_is_refused() -> None:
    case = CASES[0]
    model, batch = case.model(), sources()
    long: dict[str, Any] = {"decoder_input_ids": torch.full((3, 36), 7)}
    with pytest.raises(CtxError, match=r"Source and target have \d+ tokens, above"):
        model(**batch, **long)
    with pytest.raises(CtxError, match="masked_target_ids is"):
        model(**batch, masked_target_ids=torch.full((2, 4), 7))
    with pytest.raises(CtxError, match="query_token_id=None"):
        case.model(query_token_id=None)(**batch, labels=targets())
    cache = model(**batch, decoder_input_ids=torch.full((3, 5), 7), use_cache=True).past_key_values
    with pytest.raises(CtxError, match="pass all target tokens"):
        model(**batch, decoder_input_ids=torch.full((3, 2), 7), past_key_values=cache)

    for name in ("position_ids", "sequence_ids", "span_id", "decoder_attention_mask"):
        for call in (model, model.get_encoder()):
            with pytest.raises(CtxError, match=f"does not accept the argument {name}"):
                call(**batch, **({"labels": targets()} if call is model else {}), **{name: batch["input_ids"]})
    ids, encoded = targets().clamp(min=5), model.get_encoder()(**batch)
    read = {"span_ids": ids, "decoder_input_ids": ids, "encoder_outputs": encoded, "past_key_values": cache}
    for name, value in read.items():
        with pytest.raises(CtxError, match=f"(?s)masked_target_ids is the whole target.*{name}"):
            model(**batch, labels=targets(), masked_target_ids=ids, **{name: value})
        if value is not ids:
            with pytest.raises(CtxError, match=f"(?s)span_ids belong to a target.*{name}"):
                model(**batch, labels=targets(), span_ids=ids, **{name: value})
    for other in (encoded.to_tuple(), BaseModelOutput(encoded.last_hidden_state)):
        with pytest.raises(CtxError, match="no keys_and_values"):
            model(encoder_outputs=other, attention_mask=batch["attention_mask"], labels=targets())


def test_source_and_target_share_the_positions() -> None:
    """The evaluated loss needs no positions of padding; `generate_texts` says before it writes what is too long."""
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
            trained = model(**batch).loss
            with torch.no_grad():
                assert_close(model(**batch).loss, trained, path)
                longer = labels.clone()
                longer[0, limit - 28] = 7
                with pytest.raises(CtxError, match="Source and target have 33 tokens"):
                    model(**batch | {"labels": longer})
        tokenizer = case.family.tokenizer.train([" ".join(words)] * 4, vocab_size=60, min_frequency=1)
        sizes = {"vocab_size": len(tokenizer), "query_token_id": tokenizer.mask_token_id, "eos_token_id": None}
        model = case.model(max_position_embeddings=32, **sizes)
        room = limit - 9
        texts = ["cat", " ".join((words * 5)[: room - 2])]
        assert len(generate_texts(model, tokenizer, texts, max_new_tokens=9)) == 2, "to the last position"
        with pytest.raises(CtxError, match=rf"(?s)Text 1 .* {limit} positions, 10 of them .*at most {room - 1},"):
            generate_texts(model, tokenizer, texts, max_new_tokens=10)
        assert len(generate_texts(model, tokenizer, texts, max_new_tokens=10, max_length=room - 1)) == 2


@all_cases
def test_seq2seq_trainer_evaluates_by_generation(case: Case, tmp_path: Path) -> None:
    """With labels that Trainer smooths, from columns of sources and targets."""
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
    found = tokenizer.batch_decode(trainer.predict(rows).predictions.clip(0), skip_special_tokens=True)
    assert found == [target for _, target in texts]
