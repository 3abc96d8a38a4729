"""Evaluation of saved decoders with the `hf` model of lm-evaluation-harness."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import command_output
from ecosystem_checks import CheckContext
from ecosystem_checks.evaluation import TEXTS, perplexity, save_decoder

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "evaluate.md"

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, which the extra `ecosystem` brings")


def code_blocks() -> dict[str, str]:
    return dict(re.findall(r"^```(yaml|sh)\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M))


@pytest.mark.parametrize("family", ["gpt2", "seqae"])
def test_documented_example(family: str, tmp_path: Path) -> None:
    """The perplexity equals the direct computation; tokenizers that append an end token need `add_bos_token=False`."""
    directory = Path(save_decoder(CheckContext(tmp_path), family))
    (tmp_path / "runs").mkdir()
    directory.rename(tmp_path / "runs" / "gpt2")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last_word.yaml").write_text(code_blocks()["yaml"])
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    program, *arguments = shlex.split(code_blocks()["sh"].replace("\\\n", " "))
    options = {"add_special_tokens": False} if family == "seqae" else {}
    if options:
        arguments = [arg + ",add_bos_token=False" if "pretrained=" in arg else arg for arg in arguments]
    command = [sys.executable, "-m", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    (file,) = (tmp_path / "results").rglob("*.json")
    results = json.loads(file.read_text("utf-8"))["results"]["last_word"]
    assert results["perplexity,none"] == pytest.approx(perplexity(str(tmp_path / "runs" / "gpt2"), **options), rel=1e-3)


CHOICE_TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {train: %s, test: %s}}
training_split: train
test_split: test
output_type: multiple_choice
doc_to_text: "{{sentence}} Answer:"
doc_to_target: label
doc_to_choice: "{{[first, second]}}"
num_fewshot: 2
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
metadata: {version: 1}
"""
LAST_WORD_TASK = """
task: last_words
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
fewshot_split: test
target_delimiter: ""
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
num_fewshot: 2
metric_list: [{metric: perplexity}, {metric: acc}]
metadata: {version: 1}
"""
PROMPT_TASKS = """
tasks:
  choices:
    file: {train: train.jsonl, validation: test.jsonl}
    input: "{sentence} Answer:"
    target: "{label}"
    labels: {0: "{first}", 1: "{second}"}
  last_words:
    file: {validation: texts.jsonl}
    format: lambada
    input: "{context}"
    target: "{word}"
    scoring: likelihood
"""


def test_evaluate_prompts_matches_lm_eval(tmp_path: Path) -> None:
    """Few-shot examples, log-likelihoods per document and metrics are equal."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    directory = save_decoder(CheckContext(tmp_path), "gpt2")
    words = [word for text in TEXTS for word in text.split()]
    rows = [
        {"sentence": text, "first": words[index], "second": f"{words[-index - 1]} é", "label": index % 2}
        for index, text in enumerate(TEXTS * 3)
    ]
    files = {"train.jsonl": rows[::-1], "test.jsonl": rows, "texts.jsonl": [{"text": text} for text in TEXTS]}
    for name, records in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choices.yaml").write_text(CHOICE_TASK % (tmp_path / "train.jsonl", tmp_path / "test.jsonl"))
    (tmp_path / "tasks" / "last_words.yaml").write_text(LAST_WORD_TASK % (tmp_path / "texts.jsonl"))
    (tmp_path / "prompts.yaml").write_text(PROMPT_TASKS)
    harness = simple_evaluate(
        model="hf",
        model_args={"pretrained": directory, "trust_remote_code": True, "dtype": "float32"},
        tasks=["choices", "last_words"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=4,
        fewshot_random_seed=5,
        bootstrap_iters=0,
    )
    output = command_output(
        "evaluate prompts",
        model=directory,
        task=tmp_path / "prompts.yaml",
        tasks_folder=tmp_path,
        shots=2,
        seeds=5,
        output_dir=tmp_path / "out",
        save_examples=True,
    )
    cells = json.loads((tmp_path / "out" / "prompts.json").read_text())["values"]["cells"]
    for task in ("choices", "last_words"):
        (cell,) = (cell for cell in cells if cell["task"] == task and cell["parameters"])
        expected = {
            name.removesuffix(",none"): value
            for name, value in harness["results"][task].items()
            if name.endswith(",none") and "stderr" not in name
        }
        values = {name: cell["metrics"][name][0] for name in expected}
        assert values == pytest.approx(expected, rel=1e-4)
        file = tmp_path / "out" / "examples" / f"{Path(directory).name}-{task}-2-5.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        samples = sorted(harness["samples"][task], key=lambda sample: sample["doc_id"])
        for record, sample in zip(records, samples, strict=True):
            assert record["context"] == sample["arguments"][0][0]
            assert record["continuations"] == [continuation for _, continuation in sample["arguments"]]
            log_likelihoods = [response[0] for response in sample["filtered_resps"]]
            assert record["log_probabilities"] == pytest.approx(log_likelihoods, abs=1e-3)
    assert "|last_words|" in make_table(harness).replace(" ", "")
    assert "|last_words|" in output.replace(" ", "")
