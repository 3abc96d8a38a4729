"""Adapters in transformers' own Trainer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from zoo import HEADS, Batch, assert_close, make_batch, make_targets

from hf_ctxmodels.core.adapter_files import is_adapter_parameter
from hf_ctxmodels.downstream.adapters import add_adapter, train_adapter


class Rows(torch.utils.data.Dataset):
    """The rows of a batch, over and over."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Batch:
        return {name: value[index % len(value)] for name, value in self.batch.items()}


def trained_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.filterwarnings("ignore")
def test_trainer_accumulates_and_resumes(tmp_path: Path) -> None:
    """transformers' own Trainer: two micro-batches are one batch of their sum, and a resumed run is the whole one."""
    case = next(case for case in HEADS if str(case) == "bert-AutoModelForMaskedLM")
    rows = Rows((batch := make_batch(case)) | make_targets(case, batch))

    def run(folder: str, *, micro: int, accumulate: int, resume: bool = False) -> PreTrainedModel:
        model = case.model()
        torch.manual_seed(3)
        add_adapter(model, "de", "madx-language")
        train_adapter(model, "de", freeze_head=True)
        if resume:  # nothing of the fresh weights may remain
            for name, parameter in model.named_parameters():
                if is_adapter_parameter(name):
                    parameter.data.normal_()
        arguments = TrainingArguments(
            str(tmp_path / folder),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulate,
            max_steps=4,
            save_steps=2,
            learning_rate=0.01,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2") if resume else None)
        return model

    whole = trained_weights(run("a", micro=4, accumulate=1))
    assert whole
    assert all(is_adapter_parameter(name) for name in whole)
    for name, value in trained_weights(run("a", micro=4, accumulate=1, resume=True)).items():
        assert torch.equal(value, whole[name]), name
    for name, value in trained_weights(run("b", micro=2, accumulate=2)).items():
        assert_close(value, whole[name], name, 1e-4)
