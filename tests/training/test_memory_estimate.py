"""Memory estimates on the meta device, compared with the allocations of real steps."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from benchmarks.measure import peak_bytes
from commands import command_output
from zoo import tiny_config

from hf_ctxmodels.data import load_documents
from hf_ctxmodels.layers.attention import backends
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.memory_estimate import META, StepMemory, largest_batch, measure_step
from hf_ctxmodels.training.training_step import enable_gradient_checkpointing

CASES = [("gpt3", "clm"), ("bert", "mlm+nsp"), ("t5", "span-corruption")]


@pytest.fixture(scope="module")
def texts() -> list[list[str]]:
    return list(islice(load_documents("demo"), 40))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointing"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "objective_name"), CASES)
def test_activation_estimate_equals_real_step(name, objective_name, dtype, checkpointing, texts, monkeypatch):
    """The estimate is for GPUs, where all blocks of banded attention (GPT-3) are computed in one call."""

    def attend(query, key, value, window, size, scale):
        return backends._attend_all_blocks(query, key, value, window, size, scale=scale, dropout=0.0)

    monkeypatch.setattr(backends._BlockwiseAttention, "apply", attend)
    family = FAMILIES[name]
    tokenizer = family.tokenizer.train([" ".join(text) for text in texts], vocab_size=600)
    objective: Objective = family.objectives[objective_name](tokenizer, max_length=40, seed=0)
    batch = largest_batch(objective, 12)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": len(tokenizer)}
    config = tiny_config(family, **sizes, **objective.config_fields)
    with META:
        model = family.models[objective.auto_class](config)
    memory = measure_step(model, batch, LoopArguments(output_dir="", gradient_checkpointing=checkpointing), dtype)
    model = family.models[objective.auto_class](config).train()
    if checkpointing:
        enable_gradient_checkpointing(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = model(**batch).loss
        loss.backward()

    assert memory.activations == pytest.approx(peak_bytes(step, torch.device("cpu")), rel=0.15)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert (memory.parameters, memory.gradients, memory.optimizer_state) == (size, size, 2 * size)


def test_memory_per_rank():
    memory = StepMemory(40 * 10**9, 40 * 10**9, 80 * 10**9, 30 * 10**9, 10 * 10**9, largest_block=10**9)
    assert memory.per_rank(1)["activations"] == 30e9
    assert memory.per_rank(4) == {"parameters": 10e9, "gradients": 10e9, "optimizer_state": 20e9, "activations": 12e9}
    assert memory.smallest_number_of_gpus() == 4
    assert StepMemory(0, 0, 0, 90 * 10**9, 80 * 10**9, 0).smallest_number_of_gpus() is None


def test_estimate_command(texts, tmp_path: Path):
    family = FAMILIES["gpt2"]
    family.tokenizer.train([" ".join(text) for text in texts], vocab_size=300).save_pretrained(tmp_path / "tokenizer")
    flags = {
        "family": "gpt2",
        "config": "tiny",
        "tokenizer": tmp_path / "tokenizer",
        "dataset": tmp_path / "missing.txt",
    }
    output = command_output("pretrain", "--estimate", **flags, max_length=32, output_dir=tmp_path / "run")
    assert output.splitlines()[-1].endswith("in reserve: 1")
    assert not (tmp_path / "run").exists()
