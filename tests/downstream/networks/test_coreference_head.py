"""Coreference networks on features of tiny models: training, loading and prediction."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from commands import command_output, run_command
from transformers import AutoModel, AutoTokenizer
from zoo import tiny_config

from hf_ctxmodels import AutoModelForCoreference, CtxError, CtxTaskNetworkForCoreference
from hf_ctxmodels.data.coreference_files import read_coreference
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.downstream.networks.creation import new_network
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.inference.task_heads import run_head
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.model_loading import new_model

PEOPLE = {"the old sailor": "he", "Ann": "she", "the cat": "it"}
OPTIONS = {"hidden_size": 12, "scorer_size": 24, "dropout": 0, "max_span_width": 4, "spans_per_word": 1}


def write_documents(file: Path, number: int, seed: int) -> Path:
    """Texts in which a pronoun follows its antecedent."""
    rng = random.Random(seed)
    lines = []
    for _ in range(number):
        sentences, clusters, start = [], [], 0
        for name in rng.sample([*PEOPLE], 2):
            words = [*name.split(), rng.choice(["saw", "left"]), "a", rng.choice(["garden", "letter"]), "."]
            pronoun = [PEOPLE[name], "slept", "."]
            clusters.append([[start, start + len(name.split()) - 1], [start + len(words), start + len(words)]])
            start += len(words) + len(pronoun)
            sentences += [words, pronoun]
        lines.append(json.dumps({"sentences": sentences, "clusters": clusters}))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny BERT and GloVe."""
    folders = {}
    for name in ("bert", "glove"):
        family = FAMILIES[name]
        texts = [*PEOPLE, *PEOPLE.values(), "saw left a garden letter slept ."] * 5
        tokenizer = family.tokenizer.train(texts, vocab_size=120)
        torch.manual_seed(0)
        folders[name] = str(tmp_path_factory.mktemp(name))
        for component in (family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer))), tokenizer):
            component.save_pretrained(folders[name])
    return folders


def test_finetune_and_predict(sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unseen texts are resolved, predictions are valid data files, and the loaded model predicts the same."""
    train, validation = write_documents(tmp_path / "a.jsonl", 24, 0), write_documents(tmp_path / "b.jsonl", 8, 1)
    flags = {
        "features": f"glove={sources['glove']}",
        "config_options": [f"network_options={json.dumps(OPTIONS)}", "feature_dropout=0"],
        "train_file": train, "validation_file": validation, "max_length": 40, "learning_rate": 0.02,
        "per_device_batch_size": 4, "max_steps": 60, "output_dir": tmp_path / "run",
        "predictions_file": tmp_path / "validation.jsonl",
    }  # fmt: skip
    assert run_command("finetune", "coreference", **flags) == 0, capsys.readouterr().err
    metrics = json.loads((tmp_path / "run" / "training_summary.json").read_text())["metrics"]
    assert metrics["eval_conll_f1"] > 0.7
    assert metrics["baseline_conll_f1"] < 0.1
    records = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert sum(record["label"] == record["prediction"] for record in records) >= 4

    file = tmp_path / "new.jsonl"
    command_output("predict", model=tmp_path / "run", input=validation, output=file, per_device_batch_size=3)
    predicted = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["clusters"] for record in predicted] == [record["prediction"] for record in records]
    assert ["Ann", "she"] in [texts for record in predicted for texts in record["texts"]]
    assert [document.words for document in read_coreference(file)] == [
        document.words for document in read_coreference(validation)
    ]
    (tmp_path / "new.txt").write_text("Ann saw a letter.\nshe slept.\n\nthe cat left .\n")
    lines = command_output("predict", model=tmp_path / "run", input=tmp_path / "new.txt").splitlines()
    assert [json.loads(line)["sentences"][-1] for line in lines] == [["she", "slept", "."], ["the", "cat", "left", "."]]

    command_output("push", model=tmp_path / "run", repo_id="org/net", output_dir=tmp_path / "repository")
    assert "from hf_ctxmodels import AutoModelForCoreference\n" in (tmp_path / "repository" / "README.md").read_text()


def test_finetune_adds_network_to_model_without_head(sources: dict[str, str], tmp_path: Path) -> None:
    """`--model` becomes the trainable encoder of a network, with a separate learning rate."""
    file = write_documents(tmp_path / "a.jsonl", 6, 0)
    flags = {
        "config_options": [f"network_options={json.dumps(OPTIONS)}"], "train_file": file, "validation_file": file,
        "max_length": 40, "max_steps": 3, "learning_rate": 1e-4, "output_dir": tmp_path / "run",
        "per_device_batch_size": 2,
    }  # fmt: skip
    output = command_output("finetune", "coreference", model=sources["bert"], **flags)
    assert "conll_f1" in output
    finetuned = AutoModelForCoreference.from_pretrained(tmp_path / "run")
    assert finetuned.config.trainable_encoders == ["encoder"]
    pretrained = AutoModel.from_pretrained(sources["bert"])
    [encoder] = finetuned.features.stack.encoders
    name = "embeddings.word_embeddings.weight"
    change = (encoder.state_dict()[name] - pretrained.state_dict()[name]).abs().max()
    assert 0 < change < 4e-4
    command_output("finetune", "coreference", model=tmp_path / "run", **{**flags, "output_dir": tmp_path / "run2"})


def test_batches_equal_single_texts(sources: dict[str, str], tmp_path: Path) -> None:
    """For both padding sides; the loss of a batch is the mean over its mentions."""
    config, tokenizer = new_network(
        {"bert": sources["bert"]}, {"network_options": OPTIONS, "trainable_encoders": ["bert"]}
    )
    torch.manual_seed(0)
    model = new_model("AutoModelForCoreference", config).eval()
    for parameter in model.network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForCoreference.from_pretrained(tmp_path).eval()
    assert isinstance(model, CtxTaskNetworkForCoreference)
    task = TASKS["coreference"](TaskArguments(max_length=30))
    examples = task.read_file(str(write_documents(tmp_path / "a.jsonl", 5, 2)))
    task.load_labels(model.config)
    for side in ("right", "left"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, padding_side=side)
        encoded = task.encode(examples, tokenizer)
        single, batched = (run_head(model, tokenizer, task, encoded, batch_size) for batch_size in (1, 5))
        clusters = task.decode(examples, encoded, batched)
        assert clusters == task.decode(examples, encoded, single)
        assert any(clusters)
        collate = task.collator(tokenizer)
        losses = [model(**collate([feature])).loss * 4 for feature in encoded.features]
        batch = collate(encoded.features)
        loss = model(**batch).loss
        torch.testing.assert_close(loss, sum(losses) / 20, rtol=1e-4, atol=1e-5)
        # spans of a text without clusters have a loss, but no target
        texts = [*examples[:2], replace(examples[2], clusters=[])]
        encoded = task.encode(texts, tokenizer)
        last = replace(encoded, features=encoded.features[2:])
        evaluations = [TaskEvaluation(task, texts, encoded, collate, size) for size in (1, 3)]
        evaluations.append(TaskEvaluation(task, texts[2:], last, collate, 1))
        by_text, together, without_targets = (
            evaluation(model, Accelerator(cpu=True))["eval_loss"] for evaluation in evaluations
        )
        assert by_text == pytest.approx(together, rel=1e-4)
        assert without_targets == pytest.approx(float(model(**collate(last.features)).loss.detach()), rel=1e-4)
    loss.backward()
    assert model.features.stack.encoders[0].embeddings.word_embeddings.weight.grad.any()


def test_output_features_raise(sources: dict[str, str]) -> None:
    config, _ = new_network({"glove": sources["glove"]}, {"output_features": True})
    with pytest.raises(CtxError, match="does not read vectors before its output"):
        new_model("AutoModelForCoreference", config)
