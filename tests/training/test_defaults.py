"""Defaults derived from the model and the data, and the dry run."""

import pytest
from training_runs import arguments, new_model, run

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningLoopArguments
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.defaults import finetuning_epochs, with_default_rates

UNSET = {"learning_rate": None, "max_steps": None, "lr_scheduler": "linear", "warmup_steps": None}


@pytest.mark.parametrize(
    ("family", "size", "is_finetuning", "rate"),
    [
        ("bert", "base", False, 1.4e-4),
        ("bert", "tiny", False, 2.1e-3),
        ("bert", "mini", False, 7.3e-4),
        ("bert", "base", True, 5e-5),
        ("bert", "large", True, 2.7e-5),
        ("t5", "base", False, 1e-2),
        ("t5", "base", True, 1e-3),
        ("word2vec", "small", False, 0.025),
        ("glove", "small", False, 0.05),
    ],
)
def test_default_learning_rate_by_family_and_size(tmp_path, family, size, is_finetuning, rate) -> None:
    spec, options = FAMILIES[family], FinetuningLoopArguments if is_finetuning else LoopArguments
    resolved = with_default_rates(options(output_dir=str(tmp_path)), spec.config(**spec.sizes[size]))
    assert resolved.learning_rate == pytest.approx(rate)
    assert resolved.optimizer is not None
    assert resolved.warmup(1000) == (0 if family in ("word2vec", "glove") else 100)
    assert resolved.warmup(10**6) <= 10_000


def test_default_learning_rate_by_architecture(tmp_path) -> None:
    """word2vec.c has a rate of 0.025, and 0.05 for the continuous bag of words."""
    for architecture, rate in (("skip-gram", 0.025), ("cbow", 0.05)):
        config = FAMILIES["word2vec"].config(architecture=architecture)
        assert with_default_rates(LoopArguments(output_dir=str(tmp_path)), config).learning_rate == rate


def test_explicit_learning_rates(tmp_path) -> None:
    config, values = FAMILIES["t5"].config(), {"optimizer": "adamw", "learning_rate": 3e-4, "warmup_steps": 7}
    resolved = with_default_rates(LoopArguments(output_dir=str(tmp_path), **values), config)
    assert (resolved.learning_rate, resolved.warmup(100)) == (3e-4, 7)
    assert not resolved.optimizer.scale_by_size
    for loop_arguments in (
        LoopArguments(output_dir=str(tmp_path), optimizer="sgd"),
        FinetuningLoopArguments(output_dir=str(tmp_path), optimizer="muon"),
    ):
        with pytest.raises(CtxError, match="no default learning rate") as error:
            with_default_rates(loop_arguments, config)
        assert "--learning_rate" in error.value.hint


def test_default_learning_rate_of_muon(tmp_path) -> None:
    spec = FAMILIES["bert"]
    resolved = with_default_rates(
        LoopArguments(output_dir=str(tmp_path), optimizer="muon"), spec.config(**spec.sizes["tiny"])
    )
    assert (resolved.learning_rate, resolved.warmup(1000)) == (4.1e-3, 100)


@pytest.mark.parametrize(("examples", "epochs"), [(701, 20), (4000, 4), (67_349, 3)])
def test_small_datasets_get_more_epochs(examples, epochs) -> None:
    assert finetuning_epochs(examples, batch_size=32) == epochs


def test_narrow_sizes_have_wider_initialization() -> None:
    for name in ("bert", "gpt2", "bart", "electra", "xlnet"):
        ranges = [get_family(name).sizes[size]["initializer_range"] for size in ("tiny", "mini", "base")]
        assert ranges == [0.049, 0.035, 0.02], name


def test_default_steps_by_parameters_and_examples(workspace, pretraining_setup, tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setattr("hf_ctxmodels.training.defaults.MAX_PRETRAINING_EPOCHS", 4)
    model = new_model(workspace)
    result = run(model, pretraining_setup, arguments(tmp_path, **UNSET, per_device_batch_size=64))
    examples = len(pretraining_setup[2])
    tokens_by_rule, tokens_per_epoch = 20 * model.num_parameters(), result.tokens / result.steps / 64 * examples
    expected = min(tokens_by_rule, 4 * tokens_per_epoch) / tokens_per_epoch * examples / 64
    assert result.steps == pytest.approx(expected, rel=0.1)
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("defaults:"))
    assert all(
        text in line
        for text in ("learning rate", "warm-up", f"{result.steps} steps", "width 32", "(10%)", "linear schedule")
    )
    assert "initializer_range" not in line, "the test sets another value"


@pytest.mark.parametrize("optimizer", ["adamw", "nt-asgd"])
def test_dry_run_saves_nothing(optimizer, workspace, tmp_path, capfd, monkeypatch) -> None:
    """The dry run trains without evaluations, which start the averaging of nt-asgd."""
    extra_flags = ["--max_steps", 100_000, "--dry_run", "--optimizer", optimizer, "--eval_steps", 10]
    monkeypatch.setattr("sys.argv", ["pretrain", *workspace.flags(tmp_path / "run", *extra_flags)])
    monkeypatch.setattr("hf_ctxmodels.training.dry_run.MAX_SECONDS", 0.5)
    monkeypatch.setattr("hf_ctxmodels.data.document_sources.guess_separator", lambda *args: "line")
    from hf_ctxmodels.cli import pretrain

    pretrain.main()
    output, errors = capfd.readouterr()
    assert errors.count("--document_separator changes this") == 1
    num_words = len((workspace.folder / "text.txt").read_text().split())
    assert f"{num_words:,} words" in output
    assert "100,000 of 32 examples" in output
    assert "duration" in output
    assert not (tmp_path / "run").exists()
