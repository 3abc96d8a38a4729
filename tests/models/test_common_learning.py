"""Every family, by its own objective, learns from real text: what it predicts of unseen text beats a stated guess."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from hf_ctxmodels.benchmarks.learning import is_token_loss
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.registry import FAMILIES, Family
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain
from hf_ctxmodels.training.recipe import parse_arguments

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
HELD_OUT = 0.02
MARGIN = 0.1  # nats below guessing by frequency: more than a model can gain that does not look at the context


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_pretraining_beats_guessing_by_frequency(family: Family, tmp_path) -> None:
    """By the recipe of scripts/learning.py, cut short to a minute or two."""
    pytest.importorskip("gensim", reason="the demo text is part of gensim (extra `demo`)")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    training, _ = load_documents("demo").split(HELD_OUT)
    family.tokenizer.train(training.texts(), vocab_size=1000).save_pretrained(tmp_path / "tokenizer")
    flags = {
        "recipe": RECIPES / f"{family.name}_learning.yaml",
        "tokenizer": tmp_path / "tokenizer",
        "dataset": "demo",
        "validation_fraction": HELD_OUT,
        "max_length": 64,
        "per_device_batch_size": 32,
        "max_steps": 600,
        "lr_scheduler": "constant",
        "dataloader_workers": 0,
        "output_dir": tmp_path / "out",
    }
    argv = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    summary = pretrain(*parse_arguments(PretrainingArguments, LoopArguments, argv=argv))
    judged = [name for name in summary.baselines if is_token_loss(name, summary.metrics)]
    assert judged
    for name in judged:
        loss, guess = summary.metrics[f"eval_{name}"], summary.baselines[name]
        assert loss < guess - MARGIN, f"{name} {loss:.3f}, guessing by frequency gets {guess:.3f}"
