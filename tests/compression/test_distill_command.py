"""`distill` and `data augment` commands with tiny models."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from labeled_texts import BAD, FILLER_WORDS, GOOD, classification_files
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, DistilBertForMaskedLM

from hf_ctxmodels.cli.distill import flag_sections
from hf_ctxmodels.compression.distillation import Teacher, parse_losses
from hf_ctxmodels.compression.distillation.augmentation import Augmenter, Masking, Substitution, split_words
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import split_choice, typed_options
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary

ROOT = Path(__file__).parents[2]
TASK = "sequence-classification"
RECIPES = [path.stem for path in sorted(ROOT.glob("scripts/recipes/*.yaml")) if "\nlosses:" in path.read_text()]
COLUMNS = ["--text_columns", "sentence", "--label_column", "gold"]
QUICK = ["--num_train_epochs", "7", "--learning_rate", "5e-3", "--per_device_batch_size", "16", "--max_length", "24"]


@dataclass(frozen=True)
class Workspace:
    folder: Path

    @property
    def infersent_flags(self) -> list[str]:
        return ["--family", f"infersent:tokenizer={self.path('infersent-tokenizer')}"]

    @property
    def text_flags(self) -> list[str]:
        return ["--dataset", self.path("text.txt")]

    @property
    def file_flags(self) -> list[str]:
        return [f"--train_file={self.path('train.tsv')}", f"--validation_file={self.path('dev.tsv')}", *COLUMNS]

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def run(self, command: str, *flags: object) -> int:
        return run_command(*command.split(), *flags)

    def task_flags(self, output: str) -> list[str]:
        return [*self.file_flags, *QUICK, "--output_dir", self.path(output)]

    def train(self, command: str, output: str, *flags: object) -> TrainingSummary:
        assert self.run(f"{command} sequence-classification", *self.task_flags(output), *flags) == 0
        return TrainingSummary.load(self.folder / output)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A pretrained model, a fine-tuned teacher, files of a task, and text."""
    folder = tmp_path_factory.mktemp("workspace")
    generator = random.Random(0)
    classification_files(folder)
    words = GOOD + BAD + FILLER_WORDS
    text = "\n\n".join("\n".join(" ".join(generator.choices(words, k=6)) for _ in range(3)) for _ in range(20))
    (folder / "text.txt").write_text(text + "\n")
    for family in ("bert", "infersent"):
        tokenizer = FAMILIES[family].tokenizer.train([" ".join(words)] * 20, vocab_size=300)
        tokenizer.save_pretrained(folder / f"{family}-tokenizer")
        if family == "bert":
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4}
            torch.manual_seed(0)
            fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.1}
            model = FAMILIES["bert"].models["AutoModelForMaskedLM"](FAMILIES["bert"].config(**sizes, **fields))
            model.save_pretrained(folder / "pretrained")
            tokenizer.save_pretrained(folder / "pretrained")
    workspace = Workspace(folder)
    workspace.train("finetune", "teacher", "--model", folder / "pretrained")
    return workspace


def test_distilbert_recipe_exports_distilbert(workspace):
    flags = ["--recipe", "distilbert", *workspace.text_flags, "--teacher", workspace.path("pretrained")]
    flags += ["--student_layers", 0, 3, "--num_train_epochs", 8, "--gradient_accumulation_steps", 2, "--max_length", 24]
    flags += ["--validation_fraction", 0.2, "--logging_steps", 1, "--save_steps", 6, "--output_dir"]
    assert workspace.run("distill text", *flags, workspace.path("student")) == 0
    log_rows = [json.loads(line) for line in (workspace.folder / "student/training_log.jsonl").read_text().splitlines()]
    first, last = log_rows[0], next(row for row in reversed(log_rows) if "soft_targets_loss" in row)
    assert last["soft_targets_loss"] < first["soft_targets_loss"]
    for row in (first, last):
        expected_loss = 5 * row["soft_targets_loss"] + 2 * row["hard_targets_loss"] + row["cosine_loss"]
        assert row["loss"] == pytest.approx(expected_loss, rel=1e-4)
    summary = TrainingSummary.load(workspace.folder / "student")
    assert summary.model_class == "CtxBertForMaskedLM"
    assert {"eval_loss", "baseline_loss"} <= summary.metrics.keys()
    student = AutoModelForMaskedLM.from_pretrained(workspace.path("student"))
    assert (student.config.num_hidden_layers, student.config.type_vocab_size) == (2, 0)
    student.export_reference(workspace.path("exported"))
    _, report = DistilBertForMaskedLM.from_pretrained(workspace.path("exported"), output_loading_info=True)
    assert not any(report.values())


@pytest.mark.slow
def test_task_distillation_beats_baseline(workspace, subtests, capsys):
    """With each recipe, a new student, and a student of another family with a separate tokenizer."""
    teacher = ["--teacher", workspace.path("teacher")]
    new_bert = ["--family", f"bert:config=tiny,tokenizer={workspace.path('bert-tokenizer')}"]
    narrow_options = ["--config_options", "hidden_size=16", "intermediate_size=32", "max_position_embeddings=64"]
    two_layers = ["--student_layers", 0, 1]
    pretrained = ["--model", workspace.path("pretrained"), *two_layers]
    flags_by_run: dict[str, list[Any]] = {
        "pkd": ["--recipe", "bert_pkd", *pretrained],
        "step_1": ["--recipe", "tinybert_task_1", *new_bert, *narrow_options, "initializer_range=0.1"],
        "step_2": ["--recipe", "tinybert_task_2", "--model", workspace.path("step_1")],
        "of_the_teacher": [*two_layers, "--losses", "logits"],
        "of_a_reference": ["--teacher", workspace.path("reference"), *two_layers, "--losses", "logits"],
        "bilstm": ["--recipe", "bilstm_distilled", *workspace.infersent_flags],
    }
    AutoModelForSequenceClassification.from_pretrained(workspace.path("teacher")).export_reference(
        workspace.path("reference")
    )
    for file in (workspace.folder / "teacher").glob("tokenizer*"):
        (workspace.folder / "reference" / file.name).write_bytes(file.read_bytes())
    for name, flags in flags_by_run.items():
        with subtests.test(name):
            summary = workspace.train("distill", name, *teacher, *flags)
            assert summary.model_class.endswith("ForSequenceClassification")
            AutoModelForSequenceClassification.from_pretrained(workspace.path(name))
            if name != "step_1":  # it trains no predictions
                assert summary.metrics["eval_accuracy"] > summary.metrics["baseline_accuracy"] + 0.1
    assert (workspace.folder / "step_1" / "distillation.safetensors").is_file()
    with subtests.test("resume a finished run, and a run with another weight"):
        resume_flags = [*teacher, *two_layers, "--resume", "--losses"]
        assert workspace.train("distill", "of_the_teacher", *resume_flags, "logits:weight=1").steps == 42
        capsys.readouterr()
        flags = (*workspace.task_flags("of_the_teacher"), *resume_flags, "logits:weight=2")
        assert workspace.run("distill sequence-classification", *flags) == 2
        assert "'weight': 2.0" in capsys.readouterr().err


def test_invalid_flags_are_reported(workspace, subtests, capsys):
    teacher, pretrained = workspace.path("teacher"), workspace.path("pretrained")
    text, task = ["--teacher", pretrained, *workspace.text_flags], ["--teacher", teacher, *workspace.file_flags]
    soft = ["--losses", "soft-targets"]
    bert = ["--family", f"bert:tokenizer={workspace.path('bert-tokenizer')}"]
    cases: dict[str, tuple[str, list[Any], str]] = {
        "no teacher": ("text", [*text[2:], *soft], "required: --teacher"),
        "no text": ("text", [*text[:2], *soft], "required: --dataset"),
        "a flag of tasks": ("text", [*text, *soft, "--train_file", "a"], "--train_file"),
        "a flag of pretraining": (TASK, [*task, *soft, "--objective", "mlm"], "--objective"),
        "a flag of another task": (TASK, [*task, *soft, "--num_beams", 2], "--num_beams"),
        "no loss": ("text", text, "required: --losses"),
        "an unknown loss": ("text", [*text, "--losses", "hard"], "use one of"),
        "too long for the teacher": ("text", [*text, *soft, "--max_length", 65], "limit of 64"),
        "a negative weight": ("text", [*text, "--losses", "cosine:weight=-1"], "cosine has the weight -1"),
        "no such layer": ("text", [*text, *soft, "--student_layers", 1, 4], "There is no layer 4"),
        "no masked LM": ("text", [*text, *soft, "--family", "infersent"], "no masked language model"),
        "not fine-tuned": (TASK, ["--teacher", pretrained, *task[2:], *soft, *bert], "no trained head"),
        "tokens of another vocabulary": (TASK, [*task, *workspace.infersent_flags, "--losses", "cosine"], "cosine"),
    }
    for name, (command, flags, message) in cases.items():
        with subtests.test(name):
            flags = ["--max_length", 24, *flags, "--max_steps", 1, "--output_dir", workspace.path(f"wrong {name}")]
            assert workspace.run(f"distill {command}", *flags) == 2
            assert message in capsys.readouterr().err
    assert Teacher.open(teacher).digest != Teacher.open(pretrained).digest


@pytest.mark.parametrize(("recipe", "heads"), [("minilm", 2), ("minilmv2", 4)])
def test_minilm_recipes_train_narrow_student(recipe, heads, workspace):
    flags = ["--recipe", recipe, *workspace.text_flags, "--teacher", workspace.path("pretrained"), "--config", "tiny"]
    flags += ["--config_options", "hidden_size=16", "intermediate_size=32", f"num_attention_heads={heads}"]
    flags += ["--losses", "minilm" if recipe == "minilm" else "minilmv2:relation_heads=8,teacher_layer=3"]
    flags += ["--max_length", 24, "--max_steps", 30, "--warmup_steps", 3, "--learning_rate", 5e-3]
    flags += ["--gradient_accumulation_steps", 1, "--logging_steps", 1, "--save_steps", 30, "--dtype", "float32"]
    output = workspace.folder / recipe
    assert workspace.run("distill text", *flags, "--output_dir", output) == 0
    log_rows = [json.loads(line) for line in (output / "training_log.jsonl").read_text().splitlines()]
    losses = [row[f"{recipe}_loss"] for row in log_rows if f"{recipe}_loss" in row]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    student = AutoModelForMaskedLM.from_pretrained(output)
    assert (student.config.hidden_size, student.config.num_attention_heads) == (16, heads)
    assert not (output / "distillation.safetensors").exists(), "there are no projections"


def test_recipes_name_existing_losses_and_sizes(subtests):
    assert {"distilbert", "bert_pkd", "tinybert_task_2"} <= set(RECIPES)
    for name in RECIPES:
        with subtests.test(name):
            is_text_recipe = "distill text" in (ROOT / f"scripts/recipes/{name}.yaml").read_text()
            data = ["--dataset", "d"] if is_text_recipe else ["--train_file", "f", "--validation_file", "v"]
            flags = ["--recipe", name, "--teacher", "t", "--output_dir", "o", *data]
            arguments, *_, loop = parse_arguments(*flag_sections("text" if is_text_recipe else TASK), argv=flags)
            assert sum(term.weight for term in parse_losses(arguments.losses)) > 0
            assert (loop.num_train_epochs is None) != (loop.max_steps is None)
            if is_text_recipe:
                assert arguments.family is None or arguments.config in FAMILIES[arguments.family].sizes
                objective, options = split_choice(arguments.objective or "mlm")
                objective_class = FAMILIES["bert"].objectives[objective]
                typed_options(objective_class, options, location=name, names=objective_class.option_help())
            else:
                family = arguments.family
                assert family is None or family.config in FAMILIES[family.family].sizes


def test_augmentation_candidates_and_samples(workspace, capsys):
    """Candidates are predictions of the model at a mask in a text pair, or the nearest word vectors of split words."""
    saved_teacher = Teacher.open(workspace.path("pretrained"))
    model, tokenizer = saved_teacher.load("AutoModelForMaskedLM"), saved_teacher.tokenizer
    rule = Substitution(model, tokenizer, lambda word, number: ["near", "nearer"][:number], number=5, probability=0.4)
    text = "The film was lovely, lovelystory 1999!"
    words, candidates = rule.prepare(text)
    assert words == split_words(tokenizer, text) == ["the", "film", "was", "lovely", ",", "lovelystory", "1999", "!"]
    assert sorted(candidates) == [1, 3, 5], "neither function words nor word pieces"
    assert len(tokenizer.tokenize("lovelystory")) > 1
    assert candidates[5] == ["near", "nearer"]
    for masked_index in (1, 3):
        masked = [tokenizer.mask_token if index == masked_index else word for index, word in enumerate(words)]
        batch = tokenizer(" ".join(masked), " ".join(words), return_tensors="pt")
        with torch.no_grad():
            logits = model(**batch).logits[0, batch["input_ids"][0] == tokenizer.mask_token_id][0]
        predicted = tokenizer.convert_ids_to_tokens(logits.topk(5).indices.tolist())
        predicted = [word for word in predicted if word not in tokenizer.all_special_tokens]
        assert candidates[masked_index] == [word for word in predicted if not word.startswith("##")]
    augmenter = Augmenter(rule, copies=400, seed=1)
    copies = augmenter.augment([text], 0)
    assert copies[0] == (text,)
    assert copies == augmenter.augment([text], 0) != augmenter.augment([text], 1)
    assert len(set(copies)) == len(copies) > 5
    rng = np.random.default_rng(0)
    samples = [rule.sample((words, candidates), rng) for _ in range(400)]
    for position, word in enumerate(words):
        assert {sample[position] for sample in samples} == {word, *candidates.get(position, [])}
    assert 0.33 < sum(sample[5] != words[5] for sample in samples) / len(samples) < 0.47
    masking, rng = Masking(tokenizer, mask_probability=0.1, ngram_probability=0.25), np.random.default_rng(0)
    masked = [masking.sample((words, {}), rng) for _ in range(800)]
    full_length = [copy for copy in masked if len(copy) == len(words)]
    assert 0.2 < 1 - len(full_length) / len(masked) < 0.3
    assert 0.08 < sum(copy.count("[MASK]") for copy in full_length) / (len(words) * len(full_length)) < 0.12
    assert max(len(copy) for copy in masked if len(copy) < len(words)) == 5
    check_augment_command(workspace, capsys)


def check_augment_command(workspace, capsys):
    """`distill` reads the examples written by `augment`."""
    vectors = WordVectors([*GOOD, *BAD], torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).numpy())
    model, tokenizer = vectors.to_model("glove")
    model.save_pretrained(workspace.path("vectors"))
    tokenizer.save_pretrained(workspace.path("vectors"))
    flags = ["--model", workspace.path("pretrained"), "--copies", 3]
    substitution = ["--rule", f"substitution:vectors={workspace.path('vectors')}"]
    flags += ["--input", workspace.path("dev.tsv"), *COLUMNS]
    output = workspace.folder / "augmented.jsonl"
    assert workspace.run("data augment", *flags, *substitution, "--output", output) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert 32 < len(rows) <= 128
    assert {tuple(row) for row in rows} == {("sentence", "gold")}
    assert {row["gold"] for row in rows} == {"neg", "pos"}
    assert workspace.run("data augment", *flags, "--output", output) == 2
    assert "The file exists" in capsys.readouterr().err
    assert workspace.run("data augment", *flags, "--rule", "masking", "--overwrite", "--output", output) == 0
    assert "[MASK]" in output.read_text()
    teacher = ["--teacher", workspace.path("teacher"), "--recipe", "bilstm_distilled"]
    task = [*workspace.file_flags, "--train_file", output, "--num_train_epochs", 1, "--max_length", 24]
    student = [*workspace.infersent_flags, "--output_dir", workspace.path("augmented")]
    assert workspace.run("distill sequence-classification", *teacher, *task, *student) == 0
    saved_teacher = Teacher.open(workspace.path("teacher"))
    headless = saved_teacher.load("AutoModelForMaskedLM")
    with pytest.raises(CtxError, match=r"no trained masked-LM head: mlm_head"):
        Substitution(headless, saved_teacher.tokenizer, lambda word, number: [])
    with pytest.raises(CtxError, match="cannot replace words"):
        Substitution(saved_teacher.load("AutoModel"), tokenizer, lambda word, number: [])
