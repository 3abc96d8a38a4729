"""The training loop in one process: losses, gradients, resuming, errors, data workers and memory."""

import copy
import ctypes
import json
import multiprocessing
import signal
import time
from functools import partialmethod
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from training_runs import arguments, new_model, run, stop_after
from transformers import AutoModelForPreTraining

from hf_ctxmodels import CtxBertForPreTraining, CtxError
from hf_ctxmodels.training import evaluation as evaluation_module
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.checkpoint_files import list_checkpoints
from hf_ctxmodels.training.distributed import InterruptionError, LostProcessError, detect_lost_processes
from hf_ctxmodels.training.evaluation import LossEvaluation
from hf_ctxmodels.training.freezing import GradualUnfreezing
from hf_ctxmodels.training.loop import retain_freed_memory
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.training_log import NonFiniteError, StepMetrics, read_log
from hf_ctxmodels.training.training_step import count_items, default_workers

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def with_uneven_targets(collate):
    """A collator that keeps all targets of every fourth example, and one target of the others."""

    def collate_uneven(examples):
        batch = collate(examples)
        for row, example in zip(batch["labels"], examples, strict=True):
            targets = (row != -100).nonzero().flatten()
            if example["example_index"] % 4:
                row[targets[1:]] = -100
        return batch

    return collate_uneven


@pytest.mark.slow
def test_compiled_losses_equal_eager(workspace, pretraining_setup, tmp_path, monkeypatch):
    """With the backend aot_eager, since code generation takes minutes."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compile_module, backend="aot_eager"))
    curves = [
        run(new_model(workspace), pretraining_setup, arguments(tmp_path / str(compiles), compile=compiles)).curve
        for compiles in (False, True)
    ]
    for uncompiled, compiled in zip(*curves, strict=True):
        for name in ("loss", "mlm_loss", "next_sentence_loss", "grad_norm"):
            assert compiled[name] == pytest.approx(uncompiled[name], rel=1e-5), name


def test_gradient_checkpointing(workspace, pretraining_setup, tmp_path, monkeypatch):
    """The losses are equal, with dropout; a model without support raises."""
    curves = []
    for checkpointing in (False, True):
        model = new_model(workspace, "dropout.json")
        options = arguments(tmp_path / str(checkpointing), gradient_checkpointing=checkpointing)
        curves.append(run(model, pretraining_setup, options).curve)
        assert model.is_activation_checkpointing == checkpointing
    for record in (*curves[0], *curves[1]):
        record.pop("tokens_per_second", None)
    assert curves[0] == curves[1]
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(CtxError, match="does not support gradient checkpointing"):
        run(model, pretraining_setup, arguments(tmp_path / "unsupported", gradient_checkpointing=True))


def test_accumulation_equals_large_batch(workspace, pretraining_setup, tmp_path):
    """1 x 16 = 4 x 4, with very different numbers of targets per micro-batch."""
    weights, records = [], []
    for name, size, accumulation in (("one", 16, 1), ("four", 4, 4)):
        model = new_model(workspace)
        options = arguments(
            tmp_path / name, per_device_batch_size=size, gradient_accumulation_steps=accumulation, max_grad_norm=0.0
        )
        result = run(model, pretraining_setup, options, collate=with_uneven_targets(pretraining_setup[1].collate))
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
        records.append(result.curve)
    for large, accumulated in zip(*records, strict=True):
        for name in ("loss", "mlm_loss", "next_sentence_loss", "next_sentence_accuracy", "grad_norm", "tokens"):
            assert accumulated[name] == pytest.approx(large[name], rel=1e-5), name
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().max() < 1e-5, name


def test_first_loss_and_gradient_norm(workspace, pretraining_setup, tmp_path):
    model = new_model(workspace)
    reference = copy.deepcopy(model)
    batches = []

    def collate(examples):
        batches.append(pretraining_setup[1].collate(examples))
        return {name: value.clone() for name, value in batches[-1].items()}

    result = run(model, pretraining_setup, arguments(tmp_path, max_steps=1), collate=collate)
    reference(**batches[0]).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    record = result.curve[0]
    assert record["loss"] == pytest.approx(reference(**batches[0]).loss.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert record["tokens"] == int(batches[0]["attention_mask"].sum()) == result.tokens


def test_lr_reference_targets(workspace, pretraining_setup, tmp_path):
    """The learning rate of a step is proportional to its number of targets."""
    target_counts, updates = [], []

    def collate(examples):
        batch = pretraining_setup[1].collate(examples)
        target_counts.append(int((batch["labels"] != -100).sum()))
        return batch

    for reference in (0.0, 10.0, 40.0):
        model = new_model(workspace)
        initial = model.mlm_head.dense.weight.detach().clone()
        common = {"max_steps": 1, "optimizer": "sgd", "learning_rate": 0.1}
        options = arguments(tmp_path / str(reference), lr_reference_targets=reference, **common)
        run(model, pretraining_setup, options, collate)
        updates.append(model.mlm_head.dense.weight.detach() - initial)
    for reference, update in zip((10.0, 40.0), updates[1:], strict=True):
        torch.testing.assert_close(update, updates[0] * target_counts[0] / reference, rtol=1e-3, atol=1e-7)


def test_saved_model(workspace, pretraining_setup, tmp_path):
    model = new_model(workspace)
    result = run(model, pretraining_setup, arguments(tmp_path), evaluate=lambda model, accelerator: {"eval_x": 1.0})
    saved = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert type(saved) is CtxBertForPreTraining
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved.state_dict()[name])
    assert len(load_tokenizer(tmp_path)) == 80
    summary = result.summary(task="pretraining", dataset="text.txt", objective="mlm+nsp")
    summary.save(tmp_path)
    assert type(summary).load(tmp_path) == summary
    assert summary.metrics == {"eval_x": 1.0}
    assert summary.parameters == model.num_parameters()
    assert read_log(tmp_path) == result.curve


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_resumed_run_equals_uninterrupted_run(workspace, pretraining_setup, tmp_path, dtype):
    """In the middle of an epoch and of a logging interval, with dropout, shuffling and workers."""
    common = {"logging_steps": 4, "dataloader_workers": 1, "dtype": dtype}
    uninterrupted = run(
        new_model(workspace, "dropout.json"), pretraining_setup, arguments(tmp_path / "a", max_steps=7, **common)
    )
    run(
        new_model(workspace, "dropout.json"),
        pretraining_setup,
        arguments(tmp_path / "b", max_steps=3, save_steps=3, **common),
    )
    model = new_model(workspace, "dropout.json")
    resumed = run(model, pretraining_setup, arguments(tmp_path / "b", max_steps=7, resume=True, **common))
    assert resumed.steps == uninterrupted.steps == 7
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert resumed.tokens == uninterrupted.tokens


def check_resumed_run(pretraining_setup, tmp_path, run_once, batches: int, save_steps: int, **common) -> None:
    """Check that a run that is stopped after some batches and resumed equals an uninterrupted one."""
    run_once(arguments(tmp_path / "a", **common))
    stopped = arguments(tmp_path / "b", save_steps=save_steps, **common)
    with pytest.raises(InterruptedError):
        run_once(stopped, collate=stop_after(pretraining_setup[1].collate, batches))
    run_once(arguments(tmp_path / "b", resume=True, **common))
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_identity_is_copied_at_the_start(workspace, pretraining_setup, tmp_path):
    """Later changes do not matter, and a value that a checkpoint cannot contain is an error before the first step."""
    identity = {"files": ["a.txt"]}

    def collate(examples):
        identity["files"].append("b.txt")
        return pretraining_setup[1].collate(examples)

    run(new_model(workspace), pretraining_setup, arguments(tmp_path / "run"), collate, identity=identity)
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["identity"]["files"] == ["a.txt"]
    identity = {"files": tmp_path}
    with pytest.raises(TypeError, match="not JSON serializable"):
        run(new_model(workspace), pretraining_setup, arguments(tmp_path / "other"), identity=identity)
    assert not (tmp_path / "other" / "training_log.jsonl").exists()


def test_resume_with_gradual_unfreezing(workspace, pretraining_setup, tmp_path):
    """The run is stopped before lower layers are unfrozen."""

    def run_once(options, **kwargs):
        model = new_model(workspace)
        run(model, pretraining_setup, options, callbacks=[GradualUnfreezing(model, 2)], **kwargs)

    schedule = {"layerwise_lr_decay": 2.6, "lr_scheduler": "slanted-triangular", "warmup_steps": 2, "max_steps": 7}
    check_resumed_run(pretraining_setup, tmp_path, run_once, 3, save_steps=1, **schedule)
    initial, stopped = new_model(workspace).state_dict(), load_file(tmp_path / "b/checkpoint-2/model.safetensors")
    trained = {name for name, weight in stopped.items() if not torch.equal(weight, initial[name])}
    assert trained
    assert not {name for name in trained if name.startswith(("bert.embeddings", "bert.layers"))}


@pytest.mark.parametrize("regional", [False, True])
def test_resume_of_model_compiled_by_accelerate(workspace, pretraining_setup, tmp_path, monkeypatch, regional):
    """`accelerate launch --dynamo_backend`: the saved names are those of the model, not of the compiled module."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(regional).lower())

    def run_once(options, **kwargs):
        run(new_model(workspace, "dropout.json"), pretraining_setup, options, **kwargs)

    check_resumed_run(pretraining_setup, tmp_path, run_once, 2, save_steps=2, max_steps=4)
    expected = {name for name, _ in new_model(workspace).named_parameters()}
    assert load_file(tmp_path / "b/model.safetensors").keys() <= expected


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "muon"])
def test_resume_with_other_optimizers(workspace, pretraining_setup, tmp_path, optimizer):
    common = {"optimizer": optimizer, "learning_rate": 1e-2, "lr_scheduler": "linear", "max_steps": 6}

    def run_once(options, **kwargs):
        run(new_model(workspace, "dropout.json"), pretraining_setup, options, **kwargs)

    check_resumed_run(pretraining_setup, tmp_path, run_once, 3, save_steps=2, **common)
    with pytest.raises(CtxError, match=f"optimizer is adamw, was {optimizer}"):
        run_once(arguments(tmp_path / "b", resume=True, **{**common, "optimizer": "adamw"}))


def test_resume_with_averaged_weights(workspace, pretraining_setup, tmp_path):
    """Averaging starts at the third step, since the held-out loss rises; the run is stopped after that step."""

    def run_once(options, **kwargs):
        losses = map(float, count(3 if options.resume else 0))
        run(new_model(workspace), pretraining_setup, options, evaluate=lambda *_: {"eval_loss": next(losses)}, **kwargs)

    common = {"optimizer": "nt-asgd:patience=1", "learning_rate": 0.1, "eval_steps": 1, "max_steps": 6}
    check_resumed_run(pretraining_setup, tmp_path, run_once, 4, save_steps=3, **common)


def test_resume_of_finished_run(workspace, pretraining_setup, tmp_path):
    first = run(new_model(workspace), pretraining_setup, arguments(tmp_path))
    weights = (tmp_path / "model.safetensors").read_bytes()
    resumed = run(new_model(workspace), pretraining_setup, arguments(tmp_path, resume=True))
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert resumed.curve == first.curve
    assert resumed.tokens_per_second is None


def test_signal_saves_checkpoint(workspace, pretraining_setup, tmp_path):
    def collate(examples):
        signal.raise_signal(signal.SIGINT)
        return pretraining_setup[1].collate(examples)

    previous_handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(InterruptionError, match="SIGINT after step 1") as error:
            run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=9), collate=collate)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    assert error.value.exit_code == 130
    assert (tmp_path / "checkpoint-1" / "model.safetensors").is_file()

    # finishing takes no step, evaluates, and keeps the weights of the checkpoint
    finished = run(
        new_model(workspace),
        pretraining_setup,
        arguments(tmp_path, max_steps=9, resume="finish"),
        evaluate=lambda *_: {"eval_loss": 5.0},
    )
    assert (finished.steps, finished.metrics) == (1, {"eval_loss": 5.0})
    training, evaluation = finished.curve
    assert (training["step"], evaluation) == (1, {"step": 1, "eval_loss": 5.0})
    assert "loss" in training
    assert finished.tokens == finished.summary(task="pretraining", dataset="demo").tokens > 0
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "checkpoint-1/model.safetensors").read_bytes()
    with pytest.raises(CtxError, match="no checkpoint to finish"):
        run(new_model(workspace), pretraining_setup, arguments(tmp_path / "new", resume="finish"))


def test_non_finite_loss_raises(workspace, pretraining_setup, tmp_path):
    model = new_model(workspace)
    forward, calls = model.forward, []

    def non_finite_forward(**inputs):
        calls.append(None)
        output = forward(**inputs)
        if len(calls) == 3:
            output["loss"] = output.loss * float("nan")
        return output

    model.forward = non_finite_forward
    indices = []

    def collate(examples):
        indices.append([example["example_index"] for example in examples])
        return pretraining_setup[1].collate(examples)

    options = arguments(tmp_path, max_steps=9, save_steps=2, logging_steps=5)
    with pytest.raises(NonFiniteError, match="loss of step 3 is nan") as error:
        run(model, pretraining_setup, options, collate=collate)
    assert ", ".join(map(str, indices[2])) in str(error.value)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert all(w.isfinite().all() for w in load_file(tmp_path / "checkpoint-2/model.safetensors").values())


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt, CtxError])
def test_workers_end_with_run(workspace, pretraining_setup, tmp_path, error):
    """Otherwise the process would wait for workers, which ignore the first SIGTERM."""
    workers = []

    def evaluate(model, accelerator):
        workers.extend(multiprocessing.active_children())
        raise error("stop")

    with pytest.raises(error, match="stop") as error_info:  # its traceback holds the loader
        run(new_model(workspace), pretraining_setup, arguments(tmp_path, dataloader_workers=1), evaluate=evaluate)
    assert len(workers) == 1
    assert not multiprocessing.active_children(), error_info


def test_lost_process_raises():
    with pytest.raises(LostProcessError, match="Another process of this run has ended"), detect_lost_processes(2):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41613")
    with pytest.raises(RuntimeError, match="shapes"), detect_lost_processes(2):
        raise RuntimeError("shapes cannot be multiplied")


def test_evaluation_is_independent_of_batch_size(workspace, pretraining_setup, tmp_path):
    _, objective, examples = pretraining_setup
    accelerator = make_accelerator(arguments(tmp_path))
    model = accelerator.prepare(new_model(workspace)).eval()
    collate = with_uneven_targets(objective.collate)
    evaluations = [LossEvaluation(examples, collate, size)(model, accelerator) for size in (1, 7, len(examples))]
    names = {"eval_loss", "eval_mlm_loss", "eval_next_sentence_loss", "eval_next_sentence_accuracy"}
    assert evaluations[0].keys() == names
    for evaluation in evaluations[1:]:
        assert evaluation == pytest.approx(evaluations[0], rel=1e-5)
    batch = collate([examples[0, index] for index in range(len(examples))])
    predictions = model(**batch).seq_relationship_logits.argmax(-1)
    accuracy = (predictions == batch["next_sentence_label"]).float().mean().item()
    assert evaluations[0]["eval_next_sentence_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("save_steps", [0, 2])
def test_non_finite_loss_names_the_last_checkpoint(workspace, pretraining_setup, tmp_path, save_steps):
    checkpoint = tmp_path / "checkpoint-2"

    def evaluate(model, accelerator):
        while save_steps and not checkpoint.exists():  # it is completed in the background
            time.sleep(0.01)
        model.get_input_embeddings().weight.data.fill_(float("nan"))
        return {"eval_x": 1.0}

    options = arguments(tmp_path, max_steps=4, eval_steps=3, save_steps=save_steps)
    with pytest.raises(NonFiniteError, match="The loss of step 4 is nan") as error:
        run(new_model(workspace), pretraining_setup, options, evaluate=evaluate)
    assert error.value.hint.endswith(f"The last checkpoint is {checkpoint}." if save_steps else "--dtype.")


def test_logged_metrics(tmp_path):
    """A metric is the ratio of its counts over the interval; without cases it is omitted."""
    records = StepMetrics(make_accelerator(arguments(tmp_path)), str(tmp_path))
    for step, (correct, total) in enumerate([(1, 1), (0, 3), (0, 0)]):
        metrics = {"accuracy": torch.tensor([correct, total]), "recall": torch.zeros(2)}
        scalars = {"loss": torch.tensor(step), "grad_norm": torch.ones(()), "tokens": torch.tensor(5)}
        records.add(step, scalars | metrics, [])
    assert records.flush() == {"loss": 1.0, "grad_norm": 1.0, "tokens": 15.0, "accuracy": 0.25}


def test_count_items():
    batch = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "labels": torch.tensor([[-100, 5, -100], [7, 8, -100]]),
        "scores": torch.tensor([-100.0, 2.0]),
    }
    assert count_items([batch, batch], ("labels", "scores", "absent")).tolist() == [6, 4, 0, 6]
    batch["start_positions"] = torch.tensor([2, 3])  # a position outside the sequence is ignored
    batch["end_positions"] = torch.tensor([-1, -100])
    assert count_items([batch], ("start_positions", "end_positions")).tolist() == [1, 0, 3]


LIBC = ctypes.CDLL(None)
BLOCK = 128 << 20

_COUNTERS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class MallInfo(ctypes.Structure):
    """Result of mallinfo2(3): `arena` is the size of the heap, `hblkhd` that of separately mapped blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTERS]


@pytest.mark.parametrize(
    ("cores", "processes", "device", "workers"),
    [(2, 1, "cpu", 0), (3, 1, "cpu", 0), (4, 1, "cpu", 1), (4, 2, "cpu", 0), (8, 2, "cpu", 1), (2, 1, "cuda", 1)],
)
def test_default_workers(cores, processes, device, workers, monkeypatch):
    monkeypatch.setattr("hf_ctxmodels.training.training_step.cpu_count", lambda: cores)
    accelerator = SimpleNamespace(num_processes=processes, device=torch.device(device))
    assert default_workers(accelerator) == workers


def freed_block() -> tuple[bool, bool]:
    """Whether a large block is mapped separately, and whether freeing it shrinks the heap."""
    initial = LIBC.mallinfo2()
    block = LIBC.malloc(BLOCK + initial.fordblks)  # larger than the free parts of the heap
    during = LIBC.mallinfo2()
    LIBC.free(ctypes.c_void_p(block))
    return during.hblkhd - initial.hblkhd >= BLOCK, LIBC.mallinfo2().arena < during.arena


@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="an allocator other than glibc 2.33 or later")
def test_freed_memory_is_retained():
    LIBC.mallinfo2.restype, LIBC.malloc.restype = MallInfo, ctypes.c_void_p
    LIBC.malloc.argtypes = [ctypes.c_size_t]
    with retain_freed_memory():
        assert freed_block() == (False, False)
    assert freed_block() == (True, False)
    with pytest.raises(ZeroDivisionError), retain_freed_memory():
        1 / 0  # noqa: B018
    assert freed_block() == (True, False)


def test_baselines_of_training_read_a_sample(workspace, pretraining_setup, monkeypatch):
    """Without held-out text the baselines of a large corpus do not read all of it."""
    _, objective, examples = pretraining_setup
    sizes, sample_batches = [], evaluation_module.sample_batches

    def record_sizes(examples, number, batch_size):
        batches = [*sample_batches(examples, number, batch_size)]
        sizes.append(sum(map(len, batches)))
        return batches

    monkeypatch.setattr(evaluation_module, "sample_batches", record_sizes)
    monkeypatch.setattr(evaluation_module, "_EXAMPLES_FOR_TRAINING_BASELINES", 8)
    monkeypatch.setattr(evaluation_module, "_BATCHES_FOR_CLASSES", 2)
    losses = {"mlm_loss": 3.0, "next_sentence_loss": 0.5}
    record = evaluation_module.training_baselines(objective, examples, new_model(workspace), losses, batch_size=4)
    assert {"baseline_mlm_loss", "baseline_next_sentence_loss"} <= record.keys()
    assert sizes == [8, 8, 8]
    assert len(examples) > 8
