"""`compare` command: results, also after kills and with two processes, tables, and agreement with `evaluate`."""

import json
import os
import random
import re
import shutil
import signal
import time
from itertools import islice
from pathlib import Path

import pytest
from commands import command_output
from forked import ForkedProcess, run_forked

from hf_ctxmodels.analysis.figures import Figure
from hf_ctxmodels.cli.compare import print_dry_run
from hf_ctxmodels.comparison.measures import Finetuning, MeasuredCheckpoint
from hf_ctxmodels.comparison.plan import read_plan
from hf_ctxmodels.comparison.runner import Comparison
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.training.summary import TrainingSummary

SCRIPT = Path(__file__).with_name("forked_compare.py")
PLAN = """
dataset: stories.txt
validation_fraction: 0.1
vocab_size: 600
budget: {words: 3000}
checkpoints: 2
seeds: [0, 1]
pretraining: {config: tiny, max_length: 32, per_device_batch_size: 8}
families: [gpt2]
variants:
  cbow: {family: word2vec, objective: cbow}
contrasts:
  attention and windows: [gpt2, cbow]
measures:
  agreement: {kind: pairs, files: pairs.txt, unigram_words: 3000}
  rated: {kind: similarity, file: rated.tsv, columns: [first, second, score], checkpoints: last}
  perplexity: {kind: perplexity, documents: 2}
  held_out: {kind: pretraining, text: stories.txt, max_length: 16, checkpoints: last}
  order: {kind: pretraining, text: stories.txt, options: {sentence_task: order}, checkpoints: last}
"""
NUM_RUNS = 4
TIMED_SECONDS = 0.1  # of timed steps, see forked_compare.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "plan.yaml").write_text(PLAN)
    stories = list(islice(demo_documents(), 60))  # news, 12,000 words
    (folder / "stories.txt").write_text("\n\n".join("\n".join(story) for story in stories) + "\n")
    pairs = [f"the {noun} {bad} .\nthe {noun} {good} .\n" for noun in ("man", "day") for bad, good in [("are", "is")]]
    (folder / "pairs.txt").write_text("".join(pairs))
    rows = ["first\tsecond\tscore", "a man ran\ta man ran home\t4", "a man ran\tthe sea is cold\t1", "so\tit is\t2"]
    (folder / "rated.tsv").write_text("\n".join(rows) + "\n")
    return folder


def flags(folder: Path, output: str, *extra_flags: object) -> tuple[object, ...]:
    return SCRIPT, "--plan", folder / "plan.yaml", "--data_dir", folder, "--output_dir", folder / output, *extra_flags


@pytest.fixture(scope="module")
def finished_dir(folder: Path) -> Path:
    """The output of an uninterrupted comparison."""
    result = run_forked(*flags(folder, "finished"))
    assert result.returncode == 0, result.stderr
    (folder / "output.txt").write_text(result.stdout)
    (folder / "status.txt").write_text(result.stderr)
    return folder / "finished"


def test_results_of_all_runs(finished_dir):
    records = [json.loads(line) for line in (finished_dir / "results.jsonl").read_text().splitlines()]
    run_records = [record for record in records if record["budget"] is not None]
    assert {(record["variant"], record["seed"]) for record in run_records} == {
        (variant, seed) for variant in ("gpt2", "cbow") for seed in (0, 1)
    }
    steps = {record["step"] for record in run_records if record["variant"] == "gpt2"}
    assert min(steps) == 0
    assert len(steps) == 3
    for variant in ("gpt2", "cbow"):
        words = max(record["words"] for record in run_records if record["variant"] == variant)
        assert words == pytest.approx(3000, rel=0.1)
    # six operations per weight and token; the input embeddings are tied to the output layer
    (flops_record,) = (record for record in run_records if record["variant"] == "gpt2" and record["seed"] == 0
                       and record["words"] > 2000 and record["metric"] == "flops")  # fmt: skip
    gpt2_values = {record["metric"]: record["value"] for record in run_records if record["variant"] == "gpt2"}
    tokens = TrainingSummary.load(next((finished_dir / "runs" / "words").glob("gpt2-0-*"))).tokens
    assert flops_record["value"] == pytest.approx(6 * (gpt2_values["parameters"] - 512 * 128) * tokens, rel=0.15)
    measures = {(record["variant"], record["measure"]) for record in run_records} - {("gpt2", "cost"), ("cbow", "cost")}
    shared_measures = {(variant, measure) for variant in ("gpt2", "cbow") for measure in ("rated", "held_out")}
    assert measures == shared_measures | {("gpt2", "agreement"), ("gpt2", "perplexity")}
    baselines = {(record["variant"], record["measure"]) for record in records if record["budget"] is None}
    assert baselines == {("frequency (gpt2)", "agreement"), ("frequency (word2vec)", "agreement")}
    costs = [json.loads(line) for line in (finished_dir / "costs.jsonl").read_text().splitlines()]
    seconds = [record["value"] for record in costs if record["metric"] == "seconds" and record["variant"] == "gpt2"]
    assert seconds[0] == 0 < seconds[1] < seconds[2]


def test_status_lines_contain_the_steps_of_each_run(folder, finished_dir):
    printed_steps = re.findall(r"([\d,]+) steps of pretraining", (folder / "status.txt").read_text())
    steps = [TrainingSummary.load(run).steps for run in (finished_dir / "runs" / "words").iterdir()]
    assert sorted(int(number.replace(",", "")) for number in printed_steps) == sorted(steps)


def test_tables_and_report(finished_dir):
    table = (finished_dir / "table.md").read_text()
    for row in ("gpt2", "cbow", "attention and windows: gpt2 - cbow", "random weights, mean", "frequency", "chance"):
        assert re.search(rf"^\| {row}", table, re.M), row
    page = (finished_dir / "report.html").read_text()
    assert "agreement (accuracy) by words" in page
    assert "agreement (accuracy) by FLOPs" in page
    result = json.loads((finished_dir / "comparison-words.json").read_text())
    figure = Figure.from_json(result["figures"][0])
    assert figure.labels == ["gpt2", "cbow"]
    agreement = figure.panels["agreement"]
    assert [len(agreement[series][0]) for series in ("random weights", "trained")] == [2, 2]  # two seeds
    assert agreement["trained"][1] == []  # not defined for cbow
    assert set(figure.references["agreement"]) == {"frequency", "chance"}
    for axis in ("words", "flops", "seconds"):
        assert (finished_dir / f"comparison-words-agreement-{axis}.svg").exists()


def test_errors_of_trials_name_the_variant(folder, tmp_path, monkeypatch, capsys):
    def fail(plan, variant, tokenizer, seconds, device):
        raise CtxError("no memory", location="step 1")

    monkeypatch.setattr("hf_ctxmodels.comparison.runner.measure_size", fail)
    monkeypatch.setattr(Comparison, "tokenizer", lambda comparison, variant: tmp_path)
    comparison = Comparison(read_plan(folder / "plan.yaml", folder), tmp_path)
    with pytest.raises(CtxError, match=r"Failed variants: 2.*\n.*gpt2, step 1"):
        print_dry_run(comparison)
    assert re.findall("(.*) failed: no memory", capsys.readouterr().err) == ["gpt2", "cbow"]
    assert [error.location for error in comparison.run(lambda: None)] == [
        f"{run.name}, step 1" for run in comparison.selected_runs()
    ]


def test_all_parts_use_the_device(folder, finished_dir, tmp_path, monkeypatch):
    """Each part fails for a device that does not exist."""
    device = "cuda:99"
    plan = read_plan(folder / "plan.yaml", folder)
    options = {"only": ["gpt2"], "timing_seconds": TIMED_SECONDS}
    comparison = Comparison(plan, tmp_path / "new", **options, device=device)
    monkeypatch.setattr(Comparison, "tokenizer", lambda *args: finished.tokenizer_folder(run.variant))
    finished = Comparison(plan, finished_dir, **options)
    run = finished.selected_runs()[0]
    with pytest.raises(CtxError, match=f"no device {device}"):
        comparison.size(run.variant)
    shutil.copytree(finished_dir / "sizes", tmp_path / "new" / "sizes")
    errors = comparison.run(lambda: None)
    assert len(errors) == len(plan.seeds)
    assert all(f"no device {device}" in str(error) for error in errors)
    (tmp_path / "rows.csv").write_text("text,label\na man ran,a\nso it is,b\n")
    monkeypatch.chdir(tmp_path)
    finetuning = Finetuning(name="classes", train_file="rows.csv", validation_file="rows.csv")
    checkpoint = MeasuredCheckpoint(finished.run_folder(run), tmp_path, 0, finished.documents[1], device)
    for measure in (*plan.measures[:4], finetuning):
        with pytest.raises(CtxError, match=f"no device {device}"):
            measure.evaluate(checkpoint)


def test_dry_run_refuses_time_limit(folder):
    error = command_output(
        "compare", folder / "plan.yaml", output_dir=folder / "dry", dry_run=True, max_minutes=1, fails=True
    )
    assert "--max_minutes cannot be combined with --dry_run" in error


def test_finished_runs_and_measures_are_skipped(folder, finished_dir):
    modification_times = {
        path: path.stat().st_mtime_ns for path in finished_dir.rglob("*") if path.parent.name in ("measures", "sizes")
    }
    result = run_forked(*flags(folder, "finished"))
    assert result.returncode == 0
    assert result.stdout == (folder / "output.txt").read_text()
    assert not re.search("pretraining|measuring|training the", result.stderr)
    assert {path: path.stat().st_mtime_ns for path in modification_times} == modification_times


def test_optimizer_states_of_finished_runs_are_removed(folder, finished_dir):
    """Also if the comparison was killed, and its training process finished the run."""
    shutil.copytree(finished_dir, folder / "finished_alone")
    checkpoint = next((folder / "finished_alone" / "runs").rglob("checkpoint-*"))
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    assert run_forked(*flags(folder, "finished_alone")).returncode == 0
    assert not [*(folder / "finished_alone" / "runs").rglob("optimizer.safetensors")]


def test_results_are_rebuilt_from_copied_json_files(folder, finished_dir):
    """As for machines without a shared file system: weights are not needed."""
    for file in finished_dir.rglob("*.json"):
        copy = folder / "copied" / file.relative_to(finished_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    other_results = [folder / "copied" / f"comparison-{name}" for name in ("minutes.json", "words-removed-words.svg")]
    for file in other_results:  # of a plan with another budget or measure
        file.write_text("")
    result = run_forked(*flags(folder, "copied"))
    assert result.returncode == 0, result.stderr
    assert "steps of pretraining" not in result.stderr
    for name in ("results.jsonl", "costs.jsonl", "table.md"):
        assert (folder / "copied" / name).read_text() == (finished_dir / name).read_text(), name
    assert not any(file.exists() for file in other_results)
    figures = {file.name for file in finished_dir.glob("comparison-*")}
    assert figures == {file.name for file in (folder / "copied").glob("comparison-*")}


def test_measures_equal_evaluation_commands(folder, finished_dir):
    plan = read_plan(folder / "plan.yaml", folder)
    comparison = Comparison(plan, finished_dir, timing_seconds=TIMED_SECONDS)
    (run,) = (run for run in plan.runs() if run.variant.name == "gpt2" and run.seed == 0)
    model = comparison.run_folder(run)
    records = [record for record in comparison.records() if record.digest == run.digest]
    last_step = max(record.step for record in records)
    values = {(record.measure, record.metric): record.value for record in records if record.step == last_step}
    pairs = command_output("evaluate pairs", model=model, pairs=folder / "pairs.txt", unigram_text=folder / "pairs.txt")
    assert f"all                                  accuracy {values['agreement', 'accuracy']:.4f}" in pairs
    rated = f"{folder / 'rated.tsv'}=first,second,score"
    sentences = command_output("evaluate sentences", model=model, similarity=rated, pooling="mean")
    assert f"spearman {values['rated', 'spearman']:.4f}" in sentences
    held_out = command_output("evaluate pretraining", model=model, text=folder / "stories.txt", max_length=16)
    assert re.search(rf"^loss +{values['held_out', 'loss']:.4f}", held_out, re.MULTILINE)
    assert ("order", "loss") not in values  # a causal objective has no sentence pairs


@pytest.mark.slow
def test_results_after_kills_equal_uninterrupted_results(folder, finished_dir):
    """The comparison is killed at random times and restarted."""
    rng = random.Random(0)
    for attempt in range(20):
        process = ForkedProcess(*flags(folder, "killed"))
        deadline = time.monotonic() + rng.uniform(0.5, 4) * (1 + attempt / 4)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break
    if process.returncode != 0:
        assert run_forked(*flags(folder, "killed")).returncode == 0
    assert (folder / "killed" / "results.jsonl").read_bytes() == (finished_dir / "results.jsonl").read_bytes()


@pytest.mark.slow
def test_two_processes_share_runs(folder, finished_dir):
    processes = [ForkedProcess(*flags(folder, "shared")) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert (folder / "shared" / "results.jsonl").read_bytes() == (finished_dir / "results.jsonl").read_bytes()
    # each run was trained by exactly one process
    training_messages = [line for text in errors for line in text.splitlines() if line.endswith("steps of pretraining")]
    assert len(training_messages) == NUM_RUNS
