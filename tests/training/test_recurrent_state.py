"""Recurrent states carried from step to step: per example, through evaluation and resume."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from training_runs import arguments
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from hf_ctxmodels import CtxError
from hf_ctxmodels.data import ExampleSet, ExampleStream
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.checkpoint_files import checkpoint_path
from hf_ctxmodels.training.evaluation import LossEvaluation
from hf_ctxmodels.training.loop import TrainingLoop
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

ROWS, WORDS, LENGTH = 90, 40, 6


class RecurrentConfig(PreTrainedConfig):
    model_type = "remembering"


@dataclass
class RecurrentOutput(ModelOutput):
    loss: torch.FloatTensor | None = None
    mems: list[torch.FloatTensor] | None = None


class RecurrentModel(PreTrainedModel):
    """Predicts the tokens of a row from the mean embedding of the previous row (its memory); records its inputs."""

    config_class = RecurrentConfig
    loss_targets = ("labels",)
    state_outputs = ("mems",)

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(WORDS, 8)
        self.dropout = nn.Dropout(0.1)
        self.guess = nn.Linear(8, WORDS)
        self.seen: list[tuple[torch.Tensor, list[torch.Tensor] | None]] = []
        self.post_init()

    def forward(self, input_ids, labels, mems=None, num_items_in_batch=None):
        self.seen.append((input_ids, mems))
        summary = self.words(input_ids).mean(dim=1)
        past = torch.zeros_like(summary) if mems is None else mems[0]
        logits = self.guess(self.dropout(past + mems[1] if mems else past))
        loss = nn.functional.cross_entropy(logits[:, None].expand(-1, LENGTH, -1).flatten(0, 1), labels.flatten())
        divisor = labels.numel() if num_items_in_batch is None else num_items_in_batch["labels"]
        return RecurrentOutput(loss=loss * labels.numel() / divisor, mems=[summary, past * 0.5])


def new_model(dropout: float = 0.0) -> RecurrentModel:
    torch.manual_seed(0)
    model = RecurrentModel(RecurrentConfig())
    model.dropout.p = dropout
    return model


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(WORDS, size=LENGTH)} for _ in range(ROWS)]


class RowStream(ExampleStream):
    """The rows as a stream."""

    def __init__(self, rows):
        self.rows = rows

    def one_pass(self, epoch):
        return ({**row, "example_index": index, "epoch": epoch} for index, row in enumerate(self.rows))


def collate(features):
    ids = torch.tensor(np.stack([feature["input_ids"] for feature in features]))
    return {"input_ids": ids, "labels": ids.clone()}


def run(model, rows, output_dir, streaming=False, evaluate=None, contiguous=True, **overrides):
    options = arguments(output_dir, **{"max_steps": 6, "learning_rate": 1e-2, **overrides})
    examples = RowStream(rows) if streaming else ExampleSet.build(rows)
    accelerator = make_accelerator(options)
    return TrainingLoop(model, examples, collate, options, accelerator, evaluate=evaluate, contiguous=contiguous).run()


def row_numbers(ids, rows):
    """Numbers of the rows with these ids."""
    return [next(n for n, row in enumerate(rows) if row["input_ids"].tolist() == row_ids) for row_ids in ids.tolist()]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_memory_is_from_previous_row(rows, tmp_path, streaming, accumulation):
    """With constant weights, the memory equals that row's; a row that continues no other has zeros."""
    model = new_model()
    run(model, rows, tmp_path, streaming, gradient_accumulation_steps=accumulation, learning_rate=1e-30, max_steps=25)
    num_continued = num_started = 0
    for call, (ids, mems) in enumerate(model.seen):
        if call < accumulation:
            assert mems is None
            continue
        last_ids, last_mems = model.seen[call - accumulation]
        for row, (number, previous) in enumerate(zip(row_numbers(ids, rows), row_numbers(last_ids, rows), strict=True)):
            assert not mems[0].requires_grad
            if number == previous + 1:
                num_continued += 1
                expected = model.words(last_ids)[row].mean(dim=0)
                assert (mems[0][row] - expected).abs().max() < 1e-5
                assert torch.equal(mems[1][row], last_mems[0][row] * 0.5 if last_mems else torch.zeros(8))
            else:
                num_started += 1
                assert not mems[0][row].any()
                assert not mems[1][row].any()
    assert num_continued > 10 * accumulation
    assert num_started, "an epoch ended"


def test_accumulation_equals_large_batch(rows, tmp_path):
    """1 x 12 = 3 x 4: each micro-batch has its own rows and memory."""
    results = []
    for name, size, accumulation in (("one", 12, 1), ("three", 4, 3)):
        model = new_model()
        options = {"per_device_batch_size": size, "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.0}
        results.append((model, run(model, rows, tmp_path / name, **options)))
    (large, large_run), (accumulated, accumulated_run) = results
    for expected, actual in zip(large_run.curve, accumulated_run.curve, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, weight in large.state_dict().items():
        assert (weight - accumulated.state_dict()[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("streaming", [False, True])
def test_resumed_run_equals_uninterrupted_run(rows, tmp_path, streaming):
    """Losses and weights are equal, bit for bit, and differ without the memory."""
    options = {"streaming": streaming, "gradient_accumulation_steps": 2, "dataloader_workers": 1}
    uninterrupted = run(new_model(0.1), rows, tmp_path / "whole", max_steps=13, **options)
    for output in ("resumed", "forgotten"):
        run(new_model(0.1), rows, tmp_path / output, max_steps=6, **options)
    resumed = run(new_model(0.1), rows, tmp_path / "resumed", max_steps=13, resume=True, **options)
    assert [r["loss"] for r in resumed.curve] == [r["loss"] for r in uninterrupted.curve]
    weights = [(tmp_path / output / "model.safetensors").read_bytes() for output in ("whole", "resumed")]
    assert weights[0] == weights[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentStateCarrier, "load", lambda *_: None)
        without_memory = run(new_model(0.1), rows, tmp_path / "forgotten", max_steps=13, resume=True, **options)
    assert [r["loss"] for r in without_memory.curve] != [r["loss"] for r in uninterrupted.curve]


def test_evaluation_does_not_change_memory(rows, tmp_path):
    evaluated, reference = new_model(), new_model()
    held_out = ExampleSet.build(rows[:10])
    run(evaluated, rows, tmp_path / "a", evaluate=LossEvaluation(held_out, collate, 4), eval_steps=2)
    run(reference, rows, tmp_path / "b")
    for name, weight in reference.state_dict().items():
        assert torch.equal(weight, evaluated.state_dict()[name]), name
    training_calls = {id(ids) for ids, mems in evaluated.seen if mems is not None}
    assert len(training_calls) == 5, "all training steps except the first, and no evaluation"


def test_state_is_redistributed_over_processes(tmp_path):
    indices = torch.arange(4)
    memory = [torch.randn(4, 3, 2), *torch.randn(11, 4, 2)]  # more than ten layers, whose names sort differently
    for process in range(2):
        state, rows = RecurrentStateCarrier(RecurrentModel, 1), slice(2 * process, 2 * process + 2)
        state.update(0, indices[rows], RecurrentOutput(mems=[tensor[rows] for tensor in memory]))
        state.save(tmp_path, process)
    for processes in (1, 2, 4):
        size = 4 // processes
        for process in range(processes):
            state, rows = RecurrentStateCarrier(RecurrentModel, 1), slice(process * size, (process + 1) * size)
            state.load(tmp_path, process, processes, torch.device("cpu"))
            restored = state.inputs(0, indices[rows] + 1)["mems"]
            for tensor, expected in zip(restored, memory, strict=True):
                assert torch.equal(tensor, expected[rows])


def test_shuffled_examples_have_no_memory(rows, tmp_path):
    model = new_model()
    run(model, rows, tmp_path, contiguous=False)
    assert all(mems is None for _, mems in model.seen)
    assert not list(checkpoint_path(tmp_path, 6).glob("carried*"))


def test_model_without_memory_raises(rows, tmp_path):
    stateless_class = type("Forgetful", (RecurrentModel,), {"state_outputs": ()})
    with pytest.raises(CtxError, match="Forgetful has no recurrent state"):
        run(stateless_class(RecurrentConfig()), rows, tmp_path / "a")
    model = new_model()
    forward = model.forward

    def forward_without_memory(**inputs):
        return RecurrentOutput(loss=forward(**inputs).loss)

    model.forward = forward_without_memory
    with pytest.raises(CtxError, match="returned no 'mems' to carry"):
        run(model, rows, tmp_path / "b")


def test_resume_requires_contiguous_text(rows, tmp_path):
    run(new_model(), rows, tmp_path, max_steps=2)
    with pytest.raises(CtxError, match="contiguous is None, was True"):
        run(new_model(), rows, tmp_path, max_steps=3, resume=True, contiguous=False)
