"""Text-to-text tasks of decoders and encoder-decoders: batches, generation, ranking and baselines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import tiny_pair
from transformers import GPT2Config, GPT2LMHeadModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.downstream.text2text import TextTask
from hf_ctxmodels.downstream.text2text.mixture import TextTaskRun
from hf_ctxmodels.downstream.text2text.pretraining import IS_TASK, TextAndTaskCollator
from hf_ctxmodels.downstream.text2text.scores import ScoreTable, read_compared_runs
from hf_ctxmodels.downstream.text2text.text_to_text import CausalTextToText, TextToText, text_to_text_class
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary

ROWS = [("the film was great", 1), ("the plot was awful and dull", 0), ("great", 1), ("a dull film", 0)]
LABELS = {"0": "negative", "1": "not_negative"}
TEXTS = ["movie: the film was great awful and dull plot a negative not_negative = positive"]
ARGUMENTS = {"max_length": 24, "max_target_length": 8}


def make_model(name: str) -> tuple[Any, Any]:
    """A tiny random model and its tokenizer."""
    if name != "transformers' GPT-2":
        auto_class = "AutoModelForSeq2SeqLM" if name in ("t5", "bart") else "AutoModelForCausalLM"
        return tiny_pair(name, auto_class, TEXTS, max_position_embeddings=32)
    _, tokenizer = tiny_pair("gpt2", "AutoModelForCausalLM", TEXTS)
    torch.manual_seed(0)
    special_tokens = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=2, **special_tokens)
    return GPT2LMHeadModel(config).eval(), tokenizer


def encode_task(folder: Path, name: str, **arguments: Any) -> tuple[Any, ...]:
    """Model, tokenizer, task, pairs and their encoding."""
    model, tokenizer = make_model(name)
    lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    text_task = TextTask("movie", "movie: {text}", "{label}", labels=LABELS)
    task = text_to_text_class(model.config)(text_task, TaskArguments(**ARGUMENTS | arguments))
    pairs = task.read_file(str(folder / "rows.jsonl"))
    task.set_token_fields(model.config, tokenizer)
    task.configure(model.config, pairs, pairs)
    return model, tokenizer, task, pairs, task.encode(pairs, tokenizer)


@pytest.mark.parametrize("name", ["gpt2", "transformers' GPT-2"])
def test_decoder_batches_loss_and_generation(tmp_path: Path, name: str) -> None:
    """The loss covers targets and end tokens; generation does not depend on padding."""
    model, tokenizer, task, pairs, features = encode_task(tmp_path, name)
    collate = task.collator(tokenizer)
    batch = collate([feature | {"epoch": 0, "example_index": 0} for feature in features.features])
    losses = []
    for row, pair in enumerate(pairs):
        context = tokenizer(pair.source + CausalTextToText.separator).input_ids
        target = [*tokenizer(f" {pair.target}").input_ids, tokenizer.eos_token_id]
        length = len(context) + len(target)
        padding = batch["input_ids"].shape[1] - length
        assert batch["input_ids"][row, :length].tolist() == context + target
        assert batch["labels"][row].tolist() == [-100] * len(context) + target + [-100] * padding
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * padding
        with torch.no_grad():
            logits = model(torch.tensor([context + target])).logits[0].log_softmax(-1)
        losses += [-logits[len(context) + i - 1, token].item() for i, token in enumerate(target)]
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(np.mean(losses), abs=1e-4)
    texts = task.decode(pairs, features, task.generate(model, batch))
    prompts = [pair.source + CausalTextToText.separator for pair in pairs]
    assert texts == generate_texts(model, tokenizer, prompts, max_new_tokens=8, eos_token_id=tokenizer.eos_token_id)
    short_features = encode_task(tmp_path, name, max_length=8, cut_sources=True)[-1].features
    separator = tokenizer(CausalTextToText.separator).input_ids
    for full, truncated in zip(features.features, short_features, strict=True):
        assert truncated["labels"] == full["labels"]
        assert len(truncated["input_ids"]) == min(8, len(full["input_ids"]))
        assert truncated["input_ids"][-len(separator) :] == separator
    with pytest.raises(CtxError, match="more than 8 tokens"):
        encode_task(tmp_path, name, max_length=8)


@pytest.mark.parametrize("name", ["t5", "bart", "gpt2", "transformers' GPT-2"])
@pytest.mark.parametrize("max_length", [24, 6])
def test_ranking_matches_label_likelihoods(tmp_path: Path, name: str, max_length: int) -> None:
    """Also for truncated inputs."""
    model, tokenizer, task, pairs, features = encode_task(tmp_path, name, max_length=max_length, cut_sources=True)
    assert max(len(feature["input_ids"]) for feature in features.features) <= max_length
    collate, expected = task.collator(tokenizer), []
    for index in range(len(pairs)):
        log_probabilities = []
        for choice in LABELS.values():
            labels = next(
                feature["labels"]
                for pair, feature in zip(pairs, features.features, strict=True)
                if pair.target == choice
            )
            batch = collate([features.features[index] | {"labels": labels}])
            with torch.no_grad():
                mean = model(**batch).loss.item()
            log_probabilities.append(-mean * int((batch["labels"] != -100).sum()))
        expected.append(list(LABELS.values())[int(np.argmax(log_probabilities))])
    ranked = task.rank(model, pairs, features.features)
    assert task.decode(pairs, features, ranked) == expected
    scores = task.score(pairs, expected)
    assert scores["unknown_outputs"] == 0
    assert scores["accuracy"] == np.mean([pair.target == text for pair, text in zip(pairs, expected, strict=True)])


def test_label_strings_after_decoding(tmp_path: Path) -> None:
    """Decoded label strings are labels, other outputs are counted, and indistinguishable labels raise."""
    model, tokenizer, task, pairs, features = encode_task(tmp_path, "t5")
    outputs = [{"sequences": np.array(feature["labels"])} for feature in features.features]
    assert task.decode(pairs, features, outputs) == [pair.target for pair in pairs]
    assert task.score(pairs, ["negative", "film", "", "not_negative"]) == {"accuracy": 0, "unknown_outputs": 0.5}
    assert task.baseline(pairs, pairs) == ["not_negative"] * 4
    unknown = TextTask("movie", "movie: {text}", "{label}", labels={"0": "Ω", "1": "Ψ"})
    task = type(task)(unknown, TaskArguments(**ARGUMENTS))
    pairs = task.read_file(str(tmp_path / "rows.jsonl"))
    task.configure(model.config, pairs, pairs)
    with pytest.raises(CtxError, match="does not distinguish the label strings"):
        task.encode(pairs, tokenizer)


@pytest.mark.parametrize(("name", "objective"), [("t5", "span-corruption"), ("bart", "denoising"), ("gpt2", "clm")])
def test_mixed_batches_of_text_and_tasks(tmp_path: Path, name: str, objective: str) -> None:
    """Rows equal those of separate batches, in the order of the examples."""
    model, tokenizer, task, _, features = encode_task(tmp_path, name)
    objectives = FAMILIES[name].objectives
    text = objectives.get(objective, next(iter(objectives.values())))(tokenizer, max_length=16, seed=0)
    examples = ExampleSet.build(text.examples([["the film was great and the plot was awful", "a dull film"]] * 3))
    mixed = [{**examples[index], "epoch": 0, "example_index": index} for index in range(len(examples))]
    mixed.insert(1, {**features.features[1], IS_TASK: True, "epoch": 0, "example_index": 9})
    mixed.append({**features.features[2], IS_TASK: True, "epoch": 0, "example_index": 10})
    collate_tasks = task.collator(tokenizer)
    collate = TextAndTaskCollator(text, collate_tasks, model.config.is_encoder_decoder)
    batch = collate(mixed)
    losses, counts = [], []
    for row, example in enumerate(mixed):
        is_task = IS_TASK in example
        single = (collate_tasks if is_task else text.collate)([{k: v for k, v in example.items() if k != IS_TASK}])
        mask = batch["attention_mask"][row] != 0
        assert batch["input_ids"][row][mask].tolist() == single["input_ids"][single["attention_mask"] != 0].tolist()
        targets, expected = batch["labels"][row], single["labels"][0]
        assert targets[targets != -100].tolist() == expected[expected != -100].tolist()
        with torch.no_grad():
            losses.append(model(**single).loss.item())
        counts.append(int((expected != -100).sum()))
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(np.average(losses, weights=counts), abs=1e-4)
    task_batch = collate([mixed[1]])
    assert task_batch["labels"].tolist() == collate_tasks([features.features[1]])["labels"].tolist()


def test_unencodable_targets_are_reported(tmp_path: Path) -> None:
    """Tags without tokens are reported; indistinguishable choices raise only if they are labels."""
    model, tokenizer = make_model("t5")
    for targets, metric, expected in ((["B-Ω O", "O"], "entities", 0), (["great", "awful"], "exact_match", 1)):
        lines = [json.dumps({"a": "a film", "b": target, "c": ["Ω", "Ψ"]}) for target in targets]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        files = {"validation": (str(tmp_path / "rows.jsonl"),)}
        text_task = TextTask("tags", "tags: {a}", "{b}", files, choices="{c}", metrics=(metric,))
        run = TextTaskRun(TextToText(text_task, TaskArguments(**ARGUMENTS)))
        run.task.configure(model.config, run.training, run.validation)
        run.encode(tokenizer)
        assert run.target_warning() == (
            None if expected else "f1 of the targets is 0.0000 of 1 after the tokenizer encodes and decodes them"
        )


def test_referent_baseline_is_most_frequent_label(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": "Bob", "c": label} for label in (False, False, True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text_task = TextTask("wsc", "wsc: {a}", "{b}", label="{c}", postprocess="referent")
    task = TextToText(text_task, TaskArguments())
    pairs = task.read_file(str(tmp_path / "rows.jsonl"))
    for examples in (pairs, pairs[1:], pairs[2:]):
        baseline = task.score(examples, task.baseline(pairs[2:], examples))
        assert baseline["unknown_outputs"] == 0
        assert baseline["accuracy"] == max(np.mean([pair.label == label for pair in examples]) for label in (0, 1))


def test_free_text_baseline_is_input_without_prefix(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": "one cat", "b": "x"}\n{"a": "two cats", "b": "y"}')
    task = TextToText(TextTask("copy", "copy: {a}", "{b}"), TaskArguments())
    pairs = task.read_file(str(tmp_path / "rows.jsonl"))
    assert task.baseline(pairs, pairs) == ["one cat", "two cats"]


def test_score_table(tmp_path: Path) -> None:
    """Multi-task runs have one score per task name, single-task runs the score of their task."""
    fields = {"model_class": "M", "model_type": "m", "seed": 0, "parameters": 1, "steps": 1, "global_batch_size": 1}
    sst2 = TrainingSummary(task="t", dataset="a.tsv", metrics={"eval_accuracy": 0.5, "eval_f1": 0.1}, **fields)
    multitask = TrainingSummary(task="t", dataset="x", metrics={"eval_mrpc_f1": 0.25}, **fields)
    table = ScoreTable({"sst2": "accuracy", "mrpc": "f1"})
    table.add_row("model", {"eval_sst2_accuracy": 0.75, "eval_mrpc_f1": 0.5, "eval_mrpc_accuracy": 1}, "eval")
    for name, summary in (("sst2", sst2), ("multitask", multitask)):
        summary.save(tmp_path / name)
    entries = [f"heads:sst2={tmp_path}/sst2", f"heads={tmp_path}/multitask", f"one:sst2={tmp_path}/sst2"]
    for name, scores in read_compared_runs(entries, table.columns):
        table.add_row(name, scores, "eval")
    assert table.rows == {
        "model": {"sst2": 0.75, "mrpc": 0.5},
        "heads": {"sst2": 0.5, "mrpc": 0.25},
        "one": {"sst2": 0.5},
    }
    assert table.as_markdown().splitlines() == [
        "|       | sst2 (accuracy) | mrpc (f1) |",
        "| ----- | --------------: | --------: |",
        "| model |          0.7500 |    0.5000 |",
        "| heads |          0.5000 |    0.2500 |",
        "| one   |          0.5000 |           |",
    ]
