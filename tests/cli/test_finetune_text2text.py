"""`hf-ctxmodels finetune text2text` and `pretrain --mixture`: training, resuming, several processes, invalid flags."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import command_output, run_command, run_in_two_processes
from labeled_texts import BAD, GOOD
from test_finetune_seq2seq import WORDS, build_translation_tokenizer, model_flags
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.downstream.tasks.text_metrics import NormalizedReferences
from hf_ctxmodels.downstream.text2text import TextTask
from hf_ctxmodels.downstream.text2text.mixture import MixtureArguments, TextTaskRun
from hf_ctxmodels.downstream.text2text.text_to_text import TextToText
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import read_log

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
LENGTHS = {"max_length": 22, "max_target_length": 10}
TASK_ENTRIES = {
    "film": {"input": "film: {text}", "target": "{label}", "labels": {"0": "bad", "1": "good"}, "metrics": "accuracy"},
    "german": {"input": "german: {text}", "target": "{target}", "metrics": "exact_match"},
    "length": {"input": "length: {text}", "target": "{size}", "round": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three tasks with files, `text.txt`, and tiny models: `t5`, `gpt2`, and `transformers_gpt2` of transformers."""
    folder, rng = tmp_path_factory.mktemp("text2text"), random.Random(0)
    for split, size in (("train", 120), ("dev", 12)):
        films = [(rng.choice((GOOD, BAD)), rng.choice(("the film was", "a film"))) for _ in range(size)]
        rows = [{"text": f"{text} {rng.choice(words)}", "label": int(words is GOOD)} for words, text in films]
        texts = [rng.choices(list(WORDS), k=rng.randint(1, 2)) for _ in range(size)]
        pairs = [{"text": " ".join(text), "target": " ".join(map(WORDS.get, text))} for text in texts]
        numbers = [{"text": " ".join(text), "size": len(text)} for text in texts]
        for name, lines in (("film", rows), ("german", pairs), ("length", numbers[: size // 2])):
            (folder / f"{name}.{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tasks = {
        name: {"file": {"train": f"{name}.train.jsonl", "validation": f"{name}.dev.jsonl"}, **entry}
        for name, entry in TASK_ENTRIES.items()
    }
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}, sort_keys=False))
    names = ["film", "german", "length", ":", "=", "the", "was", "a", "good", "bad", "1.0", "2.0"]
    vocabulary = [*WORDS, *WORDS.values(), *GOOD, *BAD, *names]
    (folder / "text.txt").write_text("\n\n".join(" ".join(rng.choices(vocabulary, k=12)) for _ in range(60)))
    for name in ("t5", "gpt2"):
        spec = FAMILIES[name]
        tokenizer = spec.tokenizer.train([" ".join(vocabulary)] * 20, vocab_size=300)
        fields = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 32}
        fields |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        fields = {field: value for field, value in fields.items() if field in spec.config.__dataclass_fields__}
        auto_class = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
        spec.models[auto_class](spec.config(**fields)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, **ends
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "transformers_gpt2")
    AutoTokenizer.from_pretrained(folder / "gpt2").save_pretrained(folder / "transformers_gpt2")
    return folder


def make_flags(folder: Path, source: str, out: Path, **overrides: Any) -> dict[str, Any]:
    paths = {"model": folder / source, "tasks": folder / "tasks.yaml", "tasks_folder": folder, "output_dir": out}
    loop = {"per_device_batch_size": 16, "learning_rate": "5e-3", "logging_steps": 1, "save_steps": 0, "max_steps": 3}
    return paths | LENGTHS | loop | overrides


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ("gpt2", 6),
        pytest.param("t5", 100, marks=pytest.mark.slow),
        *(pytest.param(name, 300, marks=pytest.mark.slow) for name in ("gpt2", "transformers_gpt2")),
    ],
)
def test_mixture_training_prediction_and_finetuning(folder: Path, tmp_path: Path, model: str, steps: int) -> None:
    """Tasks are trained jointly; the best model of each task is saved; one task is fine-tuned further, by ranking."""
    out = tmp_path / "out"
    flags = {"max_steps": steps, "eval_steps": steps // 2, "logging_steps": 20, "keep_best": True}
    flags["predictions_file"] = tmp_path / "predictions.jsonl"
    printed = command_output("finetune text2text", **make_flags(folder, model, out, **flags))
    predictions = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [row["task"] for row in predictions] == ["film"] * 12 + ["german"] * 12 + ["length"] * 6
    metrics = TrainingSummary.load(out).metrics
    matches = [row["prediction"] == row["target"] for row in predictions if row["task"] == "film"]
    assert sum(matches) / len(matches) == metrics["eval_film_accuracy"]
    has_learned = steps >= 100
    assert metrics["eval_film_accuracy"] > 0.8 > metrics["baseline_film_accuracy"] or not has_learned
    assert metrics["baseline_film_unknown_outputs"] == 0
    for task, unknown in (("film", "none of the labels"), ("german", "empty"), ("length", "not a number")):
        share = metrics[f"eval_{task}_unknown_outputs"]
        assert (f"{task}: {share:.1%} of the outputs are {unknown}\n" in printed) == (share > 0)
    scores = json.loads((out / "scores.json").read_text())
    assert scores["metrics"] == {"film": "accuracy", "german": "exact_match", "length": "pearsonr"}
    assert list(scores["rows"]) == ["model", "best model of each task", "baseline"]
    assert (out / "scores.md").read_text() in printed
    log = [row for row in read_log(out) if "eval_mean" in row]
    auto_class = AutoModelForSeq2SeqLM if model == "t5" else AutoModelForCausalLM
    for task, metric in scores["metrics"].items():
        best = max(row[f"eval_{task}_{metric}"] for row in log)
        assert scores["rows"]["best model of each task"][task] == best
        best_model, loading_info = auto_class.from_pretrained(out / "best" / task, output_loading_info=True)
        assert not any(loading_info.values())
    tokenizer = AutoTokenizer.from_pretrained(out / "best" / "film")
    prompt = f"film: the film was {GOOD[0]}" + ("" if model == "t5" else " =")
    best_model = auto_class.from_pretrained(out / "best" / "film")
    assert generate_texts(best_model, tokenizer, [prompt], max_new_tokens=8) == ["good"] or not has_learned

    film = yaml.safe_load((folder / "tasks.yaml").read_text())["tasks"]["film"]
    (tmp_path / "film.yaml").write_text(yaml.safe_dump({"tasks": {"film": film}}))
    rows = [json.loads(line) for line in (folder / "film.dev.jsonl").read_text().splitlines()]
    (tmp_path / "unlabeled.jsonl").write_text("\n".join(json.dumps({"text": row["text"]}) for row in rows))
    flags = {"model": out, "text_task": tmp_path / "film.yaml", "max_target_length": LENGTHS["max_target_length"]}
    printed = command_output("predict", **flags, input=folder / "film.dev.jsonl", output=tmp_path / "films.jsonl")
    assert f"accuracy{metrics['eval_film_accuracy']:>29.4f}  0 to 1" in printed
    results = [json.loads(line) for line in (tmp_path / "films.jsonl").read_text().splitlines()]
    assert [result["output"] for result in results] == [row["prediction"] for row in predictions[:12]]
    assert all(result["prediction"] == {"bad": "0", "good": "1"}.get(result["output"]) for result in results)
    printed = command_output("predict", **flags, input=tmp_path / "unlabeled.jsonl")
    assert [json.loads(line) for line in printed.splitlines()] == results
    flags["text_task"] = folder / "tasks.yaml"
    assert "several tasks" in command_output("predict", **flags, input=folder / "film.dev.jsonl", fails=True)

    if model != "transformers_gpt2":  # a class of transformers
        assert run_command("push", model=out, repo_id="a/b", output_dir=tmp_path / "hub") == 0

    rank_flags = {"model": out, "only": "film", "max_steps": 1, "learning_rate": 1e-9, "prediction": "rank"}
    rank_flags |= {"compare": [f"mixture={out}"], "predictions_file": tmp_path / "again.jsonl"}
    command_output("finetune text2text", **make_flags(folder, model, tmp_path / "again", **rank_flags))
    rows = json.loads((tmp_path / "again" / "scores.json").read_text())["rows"]
    assert 0 <= rows["model"]["film"] <= 1
    ranked = [json.loads(line)["prediction"] for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    flags |= {"model": tmp_path / "again", "text_task": tmp_path / "film.yaml", "prediction": "rank"}
    results = list(map(json.loads, command_output("predict", **flags, input=tmp_path / "unlabeled.jsonl").splitlines()))
    assert [result["output"] for result in results] == ranked
    assert rows["mixture"] == {"film": metrics["eval_film_accuracy"]}


def test_mixing_rates() -> None:
    arguments = MixtureArguments(mixing_limit=300, mixing_scale=["b=0.5"])
    assert arguments.rates({"a": 500, "b": 400, "c": 100}) == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    sizes = {"text": 900, "a": 500, "b": 200}
    assert MixtureArguments(mixing_limit=300).rates(sizes, unlimited=["text"]) == pytest.approx(
        [9 / 14, 3 / 14, 2 / 14]
    )
    assert MixtureArguments(mixing="equal").rates({"a": 500, "b": 400}) == [0.5, 0.5]
    for options in ({"mixing": "proportional"}, {"prediction": "ranking"}):
        with pytest.raises(CtxError, match="is unknown"):
            MixtureArguments(**options)


def test_tasks_without_train_or_validation_file(folder: Path, tmp_path: Path, capsys) -> None:
    file, content = tmp_path / "tasks.yaml", yaml.safe_load((folder / "tasks.yaml").read_text())
    del content["tasks"]["german"]["file"]["train"], content["tasks"]["length"]["file"]["validation"]
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    flags = make_flags(folder, "t5", tmp_path / "out", tasks=file, keep_best=True, max_steps=1)
    assert run_command("finetune", "text2text", **flags) == 0
    printed = capsys.readouterr().err
    assert "film 120 (66.7%), length 60 (33.3%)" in printed
    assert "evaluated, not trained (no train file): german" in printed
    assert "trained, not evaluated (no validation file): length" in printed
    rows = json.loads((tmp_path / "out" / "scores.json").read_text())["rows"]
    assert all(set(row) == {"film", "german"} for row in rows.values())
    for only, split in (("german", "train"), ("length", "validation")):
        flags |= {"only": only, "output_dir": tmp_path / only}
        assert f"No task has a {split} file" in command_output("finetune text2text", fails=True, **flags)


def test_validation_subset_keeps_groups_complete(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": i % 2, "question": i // 3} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    labels, files = {"0": "no", "1": "yes"}, {"validation": (str(tmp_path / "rows.jsonl"),)}
    task = TextTask("t", "t: {text}", "{label}", files, labels=labels, group="{question}")
    for size, expected in ((10, 9), (2, 3), (99, 30)):
        run = TextTaskRun(TextToText(task, TaskArguments()))
        run.select_validation(size)
        groups = [pair.example.group for pair in run.validation]
        assert len(groups) == expected
        assert all(groups.count(group) == 3 for group in groups)


def test_predict_with_normalized_label_strings(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that equals a label string after tokenization is this label, as in `finetune text2text`."""
    film = yaml.safe_load((folder / "tasks.yaml").read_text())["tasks"]["film"]
    labels = {"0": "bad_Ω", "1": "good_Ω"}
    (tmp_path / "film.yaml").write_text(yaml.safe_dump({"tasks": {"film": film | {"labels": labels}}}))
    normalized = NormalizedReferences(AutoTokenizer.from_pretrained(folder / "t5"), ()).texts(list(labels.values()))
    assert set(normalized).isdisjoint(labels.values())
    rows = [json.loads(line) for line in (folder / "film.dev.jsonl").read_text().splitlines()]
    (tmp_path / "input.jsonl").write_text("\n".join(json.dumps({"text": row["text"]}) for row in rows))
    monkeypatch.setattr("hf_ctxmodels.cli.predict.generate_texts", lambda *_, **__: [normalized[1]] * len(rows))
    flags = {"model": folder / "t5", "text_task": tmp_path / "film.yaml", "input": tmp_path / "input.jsonl"}
    results = [json.loads(line) for line in command_output("predict", **flags).splitlines()]
    assert [(row["output"], row["prediction"]) for row in results] == [(labels["1"], "1")] * len(rows)
    rows[0]["label"] = "unknown"  # the file has no score
    (tmp_path / "input.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [json.loads(line) for line in command_output("predict", **flags).splitlines()] == results


def test_predict_by_ranking_requires_label_strings(folder: Path, tmp_path: Path) -> None:
    german = yaml.safe_load((folder / "tasks.yaml").read_text())["tasks"]["german"]
    (tmp_path / "german.yaml").write_text(yaml.safe_dump({"tasks": {"german": german}}))
    flags = {"model": folder / "t5", "input": folder / "german.dev.jsonl", "prediction": "rank", "fails": True}
    assert "Only outputs of a task as text are ranked" in command_output("predict", **flags)
    flags["text_task"] = tmp_path / "german.yaml"
    assert "The task german has neither label strings nor `choices`" in command_output("predict", **flags)
    assert "does not use it" in command_output("predict", **flags, num_beams=2)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("bart", "mass", "unilm")), "ernie_gen"]
)
@pytest.mark.parametrize("prediction", ["generate", "rank"])
def test_families_with_generation_and_ranking(folder: Path, tmp_path: Path, name: str, prediction: str) -> None:
    """Encoder-decoders and prefix LMs train on the targets of their papers; both modes of prediction work."""
    family = FAMILIES[name]
    build_translation_tokenizer(family).save_pretrained(tmp_path / "tokenizer")
    model_args = [*model_flags(family, tmp_path / "tokenizer"), "max_position_embeddings=128"]
    flags = make_flags(folder, "t5", tmp_path / "out", only="film", max_length=60, max_target_length=10, max_steps=2)
    del flags["model"]
    assert run_command("finetune", "text2text", *model_args, **flags, prediction=prediction, validation_examples=4) == 0
    metrics = TrainingSummary.load(tmp_path / "out").metrics
    assert 0 <= metrics["eval_film_accuracy"] <= 1
    assert metrics["eval_film_unknown_outputs"] == 0 or prediction == "generate"


def test_preview_prints_examples_without_training(folder: Path, tmp_path: Path) -> None:
    printed = command_output("finetune text2text", **make_flags(folder, "t5", tmp_path / "out", preview=True))
    assert "film: 120 training, 12 validation examples, metrics accuracy\n  input (" in printed
    assert printed.count("  target (") == 9
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_predictions_never_replace_a_data_file(folder: Path, tmp_path: Path, capsys) -> None:
    data_file = folder / "film.dev.jsonl"
    content = data_file.read_text()
    assert run_finetune(folder, tmp_path / "out", "--overwrite", predictions_file=data_file, max_steps=1) == 2
    assert "one of the input files" in capsys.readouterr().err
    assert data_file.read_text() == content


def test_deca_score_is_printed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text((folder / "tasks.yaml").read_text().replace("  film:", "  deca_film:"))
    flags = {"tasks": file, "only": "deca_film", "max_steps": 1}
    printed = command_output("finetune text2text", **make_flags(folder, "t5", tmp_path / "out", **flags))
    accuracy = TrainingSummary.load(tmp_path / "out").metrics["eval_deca_film_accuracy"]
    assert f"decaScore: {100 * accuracy:.1f} of 100\n" in printed


def run_pretrain(folder: Path, out: Path, *args: object, **overrides: Any) -> int:
    loop = make_flags(folder, "t5", out, **overrides)
    options = {name: loop.pop(name) for name in ("tasks", "tasks_folder", "max_target_length")}
    mixture = f"{options['tasks']}:tasks_folder={folder},text_size=60,mixing_temperature=2,max_target_length=10"
    mixture += ",mixing_scale=film=0.5,mixing_scale=german=0.25"
    text = {"dataset": folder / "text.txt", "validation_fraction": 0.1, "mixture": mixture}
    return run_command("pretrain", *args, **loop, **text)


def run_finetune(folder: Path, out: Path, *args: object, **overrides: Any) -> int:
    return run_command("finetune", "text2text", *args, **make_flags(folder, "t5", out, keep_best=True, **overrides))


@pytest.mark.parametrize("run", [pytest.param(run_finetune, marks=pytest.mark.slow), run_pretrain])
def test_resumed_run_equals_uninterrupted_run(run, folder: Path, tmp_path: Path, capsys) -> None:
    flags = {"save_steps": 1, "eval_steps": 2, "save_total_limit": 9, "max_steps": 3}
    assert run(folder, tmp_path / "whole", **flags) == 0
    summary = TrainingSummary.load(tmp_path / "whole")
    metrics = summary.metrics
    rates = {name: rate for name, rate in summary.rates.items() if name.startswith("mixing_")}
    members = ["text", "film", "german", "length"][run is run_finetune :]
    assert list(rates) == [f"mixing_{name}" for name in members]
    assert sum(rates.values()) == pytest.approx(1)
    printed = capsys.readouterr().err
    assert all(f"({rate:.1%})" in printed for rate in rates.values())
    assert metrics.keys() >= {"eval_loss", "eval_film_accuracy", "eval_german_exact_match", "eval_mean"}
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "stopped" / f"checkpoint-{step}")
    assert run(folder, tmp_path / "stopped", "--resume", **flags) == 0
    for name in ("model.safetensors", "checkpoint-3/model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    if run is run_finetune:
        assert run(folder, tmp_path / "stopped", "--resume", mixing="equal", **flags) == 2
        assert "belongs to another run" in capsys.readouterr().err


@pytest.mark.slow
def test_accumulation_and_processes_match_one_batch(folder: Path, tmp_path: Path) -> None:
    subset = {"only": ["film", "length"], "validation_examples": 5, "max_steps": 2}
    for name, size, micro_batches in (("whole", 16, 1), ("accumulated", 4, 4)):
        sizes = {**subset, "per_device_batch_size": size, "gradient_accumulation_steps": micro_batches}
        assert run_command("finetune", "text2text", **make_flags(folder, "t5", tmp_path / name, **sizes)) == 0
    divided = make_flags(folder, "t5", tmp_path / "divided", **subset, per_device_batch_size=8)
    run_in_two_processes("finetune", "text2text", **divided)
    expected = read_log(tmp_path / "whole")
    for name in ("accumulated", "divided"):
        for expected_row, actual in zip(expected, read_log(tmp_path / name), strict=True):
            for key in expected_row.keys() - {"tokens_per_second", "run_tokens_per_second"}:
                assert actual[key] == pytest.approx(expected_row[key], abs=1e-5, nan_ok=True), (name, key)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"only": "films"}, "no task films"),
        ({"tasks": ["glue", "sst2"]}, "The task sst2 is named twice"),
        ({"mixing_temperature": 0.5}, "temperature of 0.5 is too low"),
        ({"mixing_scale": "films=2"}, "for one of film, german, length"),
        ({"mixing_scale": "film=0"}, "Expected TASK=FACTOR"),
        ({"mixing": "equal", "mixing_limit": 9}, "Equal mixing has no temperature, limit or factors"),
        ({"mixing_limit": 0}, "mixing_limit"),
        ({"compare": "out"}, "Expected NAME=DIR"),
        ({"compare": "heads:films=out"}, "with one of the tasks film, german, length"),
        ({"max_target_length": 1}, "targets have more than 1 tokens"),
        ({"model": "gpt2", "max_length": 30}, "limit of 32 tokens"),
    ],
)
def test_invalid_options(folder: Path, tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    model = overrides.pop("model", "t5")
    assert message in command_output(
        "finetune text2text", fails=True, **make_flags(folder, model, tmp_path / "out", **overrides)
    )


def test_streaming_cannot_be_mixed_with_tasks(folder: Path, tmp_path: Path, capsys) -> None:
    assert run_pretrain(folder, tmp_path / "out", streaming=True) == 2
    assert "cannot be mixed with tasks" in capsys.readouterr().err
