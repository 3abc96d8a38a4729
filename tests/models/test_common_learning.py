"""Every family, by its own objective, learns from real text: what it predicts of unseen text beats a stated guess."""

import pytest
from accelerate.state import AcceleratorState, GradientState

from hf_ctxmodels.benchmarks.learning import is_token_loss
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.registry import FAMILIES, Family
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain

HELD_OUT = 0.02
MARGIN = 0.1  # nats below guessing by frequency: more than a model can gain that does not look at the context


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_pretraining_beats_guessing_by_frequency(family: Family, tmp_path) -> None:
    pytest.importorskip("gensim", reason="the demo text is part of gensim (extra `demo`)")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    training, _ = load_documents("demo").split(HELD_OUT)
    family.tokenizer.train(training.texts(), vocab_size=600).save_pretrained(tmp_path / "tokenizer")
    summary = pretrain(
        PretrainingArguments(
            family=family.name,
            tokenizer=str(tmp_path / "tokenizer"),
            dataset="demo",
            config="tiny",
            validation_fraction=HELD_OUT,
            max_length=64,
        ),
        LoopArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=250,
            per_device_batch_size=32,
            learning_rate=2e-3,
            warmup_steps=0.1,
            save_steps=0,
            seed=0,
            dataloader_workers=0,
        ),
    )
    judged = [name for name in summary.baselines if is_token_loss(name, summary.metrics)]
    assert judged
    for name in judged:
        loss, guess = summary.metrics[f"eval_{name}"], summary.baselines[name]
        assert loss < guess - MARGIN, f"{name} {loss:.3f}, guessing by frequency gets {guess:.3f}"
