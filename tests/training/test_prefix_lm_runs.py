"""Pretraining of a decoder by `prefix-lm`: accumulation, resumption, and the configuration of the model."""

import json

import pytest
from commands import run_command
from safetensors.torch import load_file
from training_runs import make_workspace

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.corpora import CorpusArguments, make_objective


@pytest.mark.parametrize("family", ["ulmfit", "xlm", "seqae"])
def test_families_without_objective_raise(family):
    arguments = CorpusArguments(dataset=["demo"], objective="prefix-lm")
    with pytest.raises(CtxError, match=rf"{family} has no objective 'prefix-lm'; families with it: gpt, gpt2, gpt3\."):
        make_objective(FAMILIES[family], None, arguments, seed=0)


@pytest.mark.slow
def test_prefix_lm_pretraining(tmp_path):
    """16 examples equal 4 x 4 accumulated ones, a resumed run is exact, and the objective sets `prefix_lm`."""
    workspace = make_workspace(tmp_path, "gpt2", vocab_size=300, objective="prefix-lm")

    def pretrain(name, *flags, steps=4, size=16, accumulation=1, config="exact.json"):
        limits = ("--max_steps", steps, "--per_device_batch_size", size, "--gradient_accumulation_steps", accumulation)
        output = tmp_path / name
        flags = workspace.flags(output, *limits, "--save_steps", 2, "--dataloader_workers", 0, *flags, config=config)
        assert run_command("pretrain", *flags) == 0
        return load_file(output / "model.safetensors"), output

    large_batch, output = pretrain("one")
    accumulated, _ = pretrain("four", size=4, accumulation=4)
    assert all((tensor - accumulated[name]).abs().max() < 1e-5 for name, tensor in large_batch.items())
    assert json.loads((output / "config.json").read_text())["prefix_lm"] is True
    uninterrupted, _ = pretrain("whole", config="dropout.json")
    pretrain("broken", steps=2, config="dropout.json")
    resumed, _ = pretrain("broken", "--resume", config="dropout.json")
    assert all((tensor == resumed[name]).all() for name, tensor in uninterrupted.items())
