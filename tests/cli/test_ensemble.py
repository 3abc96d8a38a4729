"""`hf-ctxmodels evaluate ensemble` and `score_ensemble`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command_output, save, save_summary, tiny_pair

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.tasks import SequenceClassification, TaskArguments
from hf_ctxmodels.inference import Predictor, score_ensemble

TEXTS = ["one cat", "two dogs run", "no cat runs", "two", "a dog and a cat", "cats run", "one dog", "run two dogs"]
NAMES = ["bad", "good", "worse"]


def classifier(family: str, labels: list[str], seed: int, max_length: int = 128) -> Predictor:
    auto_class = "AutoModelForSequenceClassification"
    model, tokenizer = tiny_pair(family, auto_class, TEXTS, vocab_size=60, seed=seed, id2label=dict(enumerate(labels)))
    task = SequenceClassification(TaskArguments(max_length=max_length))
    task.load_labels(model.config)
    return Predictor(task, model, tokenizer)


@pytest.fixture
def task_data(tmp_path: Path) -> tuple[list, Path]:
    file = tmp_path / "texts.tsv"
    rows = [f"{text}\t{NAMES[number % 3]}" for number, text in enumerate(TEXTS)]
    file.write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    task = SequenceClassification(TaskArguments())
    return task.read(str(file), "validation"), file


def test_ensemble_averages_probabilities_by_label(task_data: tuple) -> None:
    """Two families with different label ids, against a loop over the texts."""
    members = [classifier("ulmfit", NAMES, 1), classifier("bert", NAMES[::-1], 2)]
    scores = score_ensemble(members, task_data[0], batch_size=3)
    num_correct = np.zeros(3)
    for example in task_data[0]:
        probabilities = []
        for index, (model, tokenizer) in enumerate((member.model, member.tokenizer) for member in members):
            with torch.no_grad():
                logits = model(**tokenizer(example.texts[0], return_tensors="pt")).logits[0]
            probabilities.append(dict(zip(model.config.id2label.values(), logits.softmax(0).tolist(), strict=True)))
            num_correct[index] += max(probabilities[-1], key=probabilities[-1].get) == example.label
        summed = {name: sum(probability[name] for probability in probabilities) for name in NAMES}
        num_correct[2] += max(summed, key=summed.get) == example.label
    accuracies = [metrics["accuracy"] for metrics in [*scores.members, scores.ensemble]]
    assert accuracies == pytest.approx((num_correct / len(TEXTS)).tolist())


def test_different_labels_raise(task_data: tuple) -> None:
    members = [classifier("ulmfit", NAMES, 1), classifier("ulmfit", [*NAMES[:2], "best"], 2)]
    for pair in (members, members[::-1]):
        with pytest.raises(CtxError, match=r"different labels.*best"):
            score_ensemble(pair, task_data[0])
    with pytest.raises(CtxError, match="0 classifiers"):
        score_ensemble([], task_data[0])


def test_evaluate_ensemble_command(task_data: tuple, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("forward", "backward")]
    members = [classifier("ulmfit", NAMES, seed, max_length) for seed, max_length in ((1, 128), (4, 3))]
    for folder, member in zip(folders, members, strict=True):
        save(Path(folder), member.model, member.tokenizer)
    save_summary(Path(folders[1]), "sequence-classification", max_length=3)
    flags = {"models": folders, "validation_file": task_data[1]}
    scores = score_ensemble(members, task_data[0])
    *lines, total_line = command_output("evaluate ensemble", **flags).strip().splitlines()[-4:]
    for line, expected in zip(lines, [*scores.members, scores.ensemble], strict=True):
        assert f"accuracy {expected['accuracy']:.4f}" in line
    assert total_line.startswith(f"{len(TEXTS)} examples; range: accuracy 0 to 1, ")
    assert "Unknown flag --doc_stride" in command_output("evaluate ensemble", **flags, doc_stride=3, fails=True)
