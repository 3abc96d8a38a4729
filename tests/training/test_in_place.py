"""Heads with in-place optimizers in the training loop."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from commands import flag_list
from safetensors.torch import load_file
from training_runs import reset_accelerate

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.static_embeddings import supports_compiled_updates
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain

TEXT = "\n\n".join(
    f"the cat {a} sat on the {b} mat and the dog {b} ran to a {a} house" for a in "abcde" for b in "vwxyz"
)


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path: Path) -> FamilySpec:
    family = FAMILIES[getattr(request, "param", "word2vec")]
    (tmp_path / "text.txt").write_text(TEXT)
    family.tokenizer.train([TEXT], vocab_size=50, min_count=1).save_pretrained(tmp_path / "tokenizer")
    return family


def run(family: FamilySpec, folder: Path, output: str, steps: int, *extra_flags: str) -> dict[str, torch.Tensor]:
    reset_accelerate()
    flags = {"family": family.name, "tokenizer": folder / "tokenizer", "dataset": folder / "text.txt"}
    flags |= {"output_dir": folder / output, "max_steps": steps, "optimizer": "sgd", "learning_rate": 0.05}
    flags |= {"lr_scheduler": "constant", "per_device_batch_size": 4, "save_steps": 3, "max_length": 20}
    argv = [*flag_list(**flags, dataloader_workers=0), *extra_flags]
    pretrain(*parse_arguments(PretrainingArguments, LoopArguments, argv=argv))
    return load_file(folder / output / "model.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--objective", "cbow"), marks=pytest.mark.slow),
        ("--objective", "skip-gram:output=hierarchical-softmax"),
        pytest.param(("--objective", "skip-gram:output=softmax"), marks=pytest.mark.slow),
        ("--streaming", "true"),
    ],
    ids=["skip-gram", "cbow", "tree", "softmax", "stream"],
)
def test_resumed_run_equals_uninterrupted_run(family: FamilySpec, options: tuple[str, ...], tmp_path: Path) -> None:
    uninterrupted = run(family, tmp_path, "whole", 7, *options)
    run(family, tmp_path, "parts", 4, *options)
    resumed = run(family, tmp_path, "parts", 7, "--resume", "true", *options)
    assert uninterrupted.keys() == resumed.keys()
    for name, value in uninterrupted.items():
        assert torch.equal(value, resumed[name]), name
    assert uninterrupted["outputs.weight"].any()


@pytest.mark.parametrize(("family", "optimizer"), [("word2vec", "sgd"), ("glove", "adagrad")], indirect=["family"])
def test_no_backward_pass(family: FamilySpec, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "backward", lambda *args: pytest.fail("the update is not in place"))
    assert run(family, tmp_path, "in-place", 3, "--optimizer", optimizer)


def test_adamw_and_weight_decay(family: FamilySpec, tmp_path: Path) -> None:
    weights = run(family, tmp_path, "adamw", 3, "--optimizer", "adamw", "--learning_rate", "0.01")
    assert weights["outputs.weight"].any()
    with pytest.raises(CtxError, match="Weight decay does not support"):
        run(family, tmp_path, "decayed", 3, "--optimizer", "sgd:weight_decay=0.1")


def test_update_threads(family: FamilySpec, tmp_path: Path) -> None:
    model_class = family.models["AutoModelForPreTraining"]
    ids = torch.randint(2, 40, (8, 32), generator=torch.Generator().manual_seed(0))
    losses = {}
    for threads in (1, 3):
        torch.manual_seed(0)
        model = model_class(family.config(vocab_size=40, hidden_size=16, update_threads=threads, update_blocks=2))
        num_threads = torch.get_num_threads()
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids, learning_rate=0.02).loss
            assert not loss.requires_grad
        assert torch.get_num_threads() == num_threads
        losses[threads] = float(loss)
    assert losses[3] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("word2vec", "hf_ctxmodels.models.word2vec.sgd_kernel.word2vec_sgd_kernel"),
        ("glove", "hf_ctxmodels.models.glove.adagrad_kernel.glove_adagrad_kernel"),
    ],
    ids=["word2vec", "glove"],
)
def test_updates_of_a_compiled_model_are_not_traced(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile fails to trace numba's compiler, which runs at the first call of a kernel."""
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(kernel, numba.njit(lambda *arguments: 1.0))
    torch._dynamo.reset()
    model = FAMILIES[name].models["AutoModelForPreTraining"](FAMILIES[name].config(vocab_size=40, hidden_size=16))
    ids = torch.randint(2, 40, (2, 8))
    inputs = {"input_ids": ids, "labels": ids, "learning_rate": 0.02}
    if name == "glove":
        inputs["squares"] = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    assert float(torch.compile(model, backend="eager")(**inputs).loss) == pytest.approx(1 / ids.numel())


def test_compiled_updates_need_numba_and_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    table = torch.zeros(2, 2)
    assert supports_compiled_updates(table)
    assert not supports_compiled_updates(table.double())
    assert not supports_compiled_updates(table.bfloat16())
    assert not supports_compiled_updates(table.to("meta"))
    monkeypatch.setattr("hf_ctxmodels.architectures.static_embeddings.find_spec", lambda name: None)
    assert not supports_compiled_updates(table)
    model = FAMILIES["glove"].models["AutoModelForPreTraining"](FAMILIES["glove"].config(vocab_size=5, hidden_size=4))
    assert not model.supports_inplace_optimizer(torch.optim.Adagrad(model.parameters()))
