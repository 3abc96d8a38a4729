"""Heads on a simulated CUDA device: results equal the CPU's, and the host rarely waits for the device."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

from hf_ctxmodels.registry import FAMILIES

FOLDER = Path(__file__).parent
# packed and padded, float32 and half precision, batches of the package's collators and other tensors
CONDITIONS = "packed-float32-collated,padded-autocast-collated,packed-autocast-plain,padded-float32-plain"
QUICK_CONDITIONS = "packed-autocast-collated,padded-float32-plain"
REPRESENTATIVES = [
    "bert-AutoModelForPreTraining",
    "gpt2-AutoModelForCausalLM",
    "t5-AutoModelForSeq2SeqLM",
    "xlnet-AutoModelForCausalLM",
    "electra-AutoModelForPreTraining",
    "elmo-AutoModelForPreTraining",
    "ulmfit-AutoModelForCausalLM",
    "transformer_xl-AutoModelForCausalLM",
    "cove-AutoModelForSeq2SeqLM",
    "glove-AutoModelForPreTraining",
    "unilm-AutoModelForSeq2SeqLM",
]
# not pretrained on a text file, or with sparse gradients, which the simulated device does not clip
EXCLUDED_FROM_TRAINING = ("cvt", "cove", "infersent", "laser", "lmseq2seq", "glove")
# their random views differ between the devices
RANDOM_CASES = ("cvt-AutoModelForSequenceClassification", "cvt-AutoModelForTokenClassification")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="builds a device guard with g++")


Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run_on_simulated_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Records]]:
    """A function that runs a script of this directory and returns the records that it prints."""
    path = os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER.parent), str(FOLDER)])
    modules = ("simulated_device", "zoo", "training_runs", "transformers.trainer")
    with ForkServer(modules, {**os.environ, "PYTHONPATH": path}, tmp_path_factory.mktemp("device")) as process:

        def run(script: str, *arguments: str) -> Records:
            result = process.run(FOLDER / script, *arguments)
            assert result.returncode == 0, result.stderr[-2000:]
            return [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"')]

        yield run


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("9.0", QUICK_CONDITIONS, REPRESENTATIVES), id="representatives"),
        pytest.param(("7.5", QUICK_CONDITIONS, []), id="7.5", marks=pytest.mark.slow),
        pytest.param(("8.0", CONDITIONS, []), id="8.0", marks=pytest.mark.slow),
        pytest.param(("9.0", CONDITIONS, []), id="9.0", marks=pytest.mark.slow),
    ],
)
def records(request: pytest.FixtureRequest, run_on_simulated_device: Callable[..., Records]) -> Records:
    capability, conditions, cases = request.param
    records = run_on_simulated_device("head_records.py", capability, conditions, *cases)
    assert len(records) >= len(cases) * len(conditions.split(","))
    return records


def test_results_equal_cpu(records: Records) -> None:
    errors = {}
    for record in records:
        name = f"{record['case']} {record['conditions']}"
        limits = (0.05, 0.4) if "autocast" in name else (1e-5, 1e-4)  # as on the CPU in bfloat16
        if "exception" in record:
            errors[name] = record["exception"]
        elif record["case"] not in RANDOM_CASES and not (
            record["error"] <= limits[0] and record["gradient_error"] <= limits[1]
        ):
            errors[name] = record["error"], record["gradient_error"]
    assert not errors


def test_host_waits_at_most_once(records: Records) -> None:
    """Never with a batch of the package's collators, which keep CPU tensors. CVT's translator is excluded: the beam
    search for the targets of its views waits at every step."""
    waits = {
        f"{record['case']} {record['conditions']}": record["waits"]
        for record in records
        if record["case"] != "cvt-AutoModelForSeq2SeqLM"
        and "waits" in record
        and sum(record["waits"].values()) > record["conditions"].endswith("plain")
    }
    assert not waits


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(["electra", "Trainer"], id="quick"),
        pytest.param(
            [name for name in FAMILIES if name not in ("electra", *EXCLUDED_FROM_TRAINING)],
            id="others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_step_does_not_wait(families: list[str], run_on_simulated_device: Callable[..., Records]) -> None:
    records = run_on_simulated_device("training_records.py", *families)
    assert [record["family"] for record in records] == families
    assert not any(record["waits"] for record in records), records


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(["bert"], id="quick"),
        pytest.param(["xlnet", "t5", "gpt2", "electra"], id="others", marks=pytest.mark.slow),
    ],
)
def test_launches_per_layer(families: list[str], run_on_simulated_device: Callable[..., Records]) -> None:
    """At most as many as in transformers, for any batch size; the optimizer's do not grow with the model; the steps of
    a clipped LSTM, which cuDNN does not have, and the fake quantization of a linear layer launch few."""
    *records, component_launches = run_on_simulated_device("launch_records.py", *families)
    assert {record["family"] for record in records} == set(families)
    for record in records:
        assert record["32"] == record["8"], record
        assert record["8"]["launches"] <= record["transformers"]["launches"], record
        assert record["8"]["views"] <= record["transformers"]["views"], record
    small, large = component_launches["optimizer"]
    assert small == large < 36
    assert component_launches["clipped_lstm_step"] <= 22
    assert component_launches["clipped_lstm_step_by_triton"] <= 10
    assert component_launches["fake_quantization"] <= 26


def test_generation_waits_once_per_step(run_on_simulated_device: Callable[..., Records]) -> None:
    """In addition to transformers' stopping criterion and, with beams, their order."""
    records = run_on_simulated_device("generation_records.py", "gpt2-AutoModelForCausalLM", "t5-AutoModelForSeq2SeqLM")
    assert len(records) == 4
    for record in records:
        assert sum(record["waits"].values()) <= 2 + (record["num_beams"] > 1), record


def test_host_copies_are_valid_until_changed(run_on_simulated_device: Callable[..., Records]) -> None:
    records = run_on_simulated_device("host_copy_records.py")
    assert len(records) == 7
    assert all(record["equal"] for record in records), records
    assert {record["change"] for record in records if record.get("reads") == 0} >= {"none"}


def test_mixed_devices_raise(run_on_simulated_device: Callable[..., Records]) -> None:
    """As in CUDA, except for scalars and indices on the CPU."""
    records = run_on_simulated_device("mixed_device_records.py")
    assert len(records) == 6
    assert {record["combination"] for record in records if not record["raises"]} == {"scalar", "index"}
