"""`hf-ctxmodels finetune` as a user runs it, with a tiny model of every family and of an upstream peer."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from commands import run_command
from forked import run_forked
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from zoo import Case, tiny_config

from hf_ctxmodels.downstream.tasks import TASKS
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary

ROOT = Path(__file__).parents[2]
COMMAND = ("-m", "hf_ctxmodels", "finetune")
GOOD, BAD = ["lovely", "great", "splendid", "charming"], ["awful", "dreadful", "boring", "silly"]
PLACES, NAMES = ["Paris", "Rome", "Athens", "Lima"], ["Anna", "Boris", "Clara", "David"]
OTHERS = ["the", "film", "was", "in", "saw", "a", "story", "yesterday", "who", "where", "is"]
QUICK = ["--max_steps", "50", "--learning_rate", "5e-3", "--per_device_batch_size", "16", "--max_length", "24"]


def save_tiny(directory: Path, family, upstream: bool) -> str:
    """A tiny random model with a vocabulary of the words above."""
    tokenizer = family.tokenizer.train([" ".join(GOOD + BAD + PLACES + NAMES + OTHERS)] * 20, vocab_size=300)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.1}
    known = {name: size for name, size in sizes.items() if name in family.config.__dataclass_fields__}
    model = family.models["AutoModel"](tiny_config(family, num_labels=2, **known))
    tokenizer.save_pretrained(directory)
    if upstream:
        # The peer's own classes, as in a checkpoint that somebody else published.
        model.export_reference(directory)
        settings = directory / "tokenizer_config.json"
        peer_config = transformers.CONFIG_MAPPING[family.reference]
        peer = transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING[peer_config].__name__
        if peer == "XLMTokenizer":
            pytest.importorskip("sacremoses", reason="upstream's tokenizer needs sacremoses (extra `moses`)")
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": peer}))
    else:
        model.save_pretrained(directory)
    return str(directory)


ORIGINS = [(name, False) for name in FAMILIES] + [(name, True) for name, family in FAMILIES.items() if family.reference]


@pytest.fixture(scope="session")
def checkpoint(request, tmp_path_factory) -> str:
    name, upstream = request.param
    return save_tiny(tmp_path_factory.mktemp("checkpoint"), FAMILIES[name], upstream)


@pytest.fixture(scope="session")
def own_checkpoint(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("own"), next(iter(FAMILIES.values())), upstream=False)


def finetune(monkeypatch, *arguments: str) -> int:
    return run_command("finetune", *arguments)


def classification_files(directory: Path, label=lambda good: ["neg", "pos"][good]) -> list[str]:
    generator = random.Random(0)
    for name, size in (("train", 96), ("dev", 32)):
        goods = [generator.random() < 0.6 for _ in range(size)]
        rows = [f"the film was {generator.choice(GOOD if good else BAD)}\t{label(good)}" for good in goods]
        (directory / f"{name}.tsv").write_text("\n".join(["sentence\tgold", *rows]) + "\n")
    files = ["--train_file", str(directory / "train.tsv"), "--validation_file", str(directory / "dev.tsv")]
    return [*files, "--text_columns", "sentence", "--label_column", "gold"]


def regression_files(directory: Path) -> list[str]:
    return classification_files(directory, label=lambda good: 4.5 if good else 0.5)


def tagging_files(directory: Path) -> list[str]:
    generator = random.Random(0)
    for name, size in (("train", 96), ("dev", 32)):
        sentences = []
        for _ in range(size):
            words = [(generator.choice(NAMES), "I-PER"), ("saw", "O"), (generator.choice(PLACES), "I-LOC")]
            sentences.append("\n".join(f"{word} {tag}" for word, tag in words))
        (directory / f"{name}.conll").write_text("\n\n".join(sentences) + "\n")
    return ["--train_file", str(directory / "train.conll"), "--validation_file", str(directory / "dev.conll")]


def squad_files(directory: Path) -> list[str]:
    generator = random.Random(0)
    for name, size in (("train", 128), ("dev", 32)):
        paragraphs = []
        for number in range(size):
            place = generator.choice(PLACES)
            context = f"{generator.choice(NAMES)} saw a film in {place} yesterday"
            answer = {"text": place, "answer_start": context.index(place)}
            question = {"id": f"{number}", "question": "where", "answers": [answer]}
            paragraphs.append({"context": context, "qas": [question]})
        (directory / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return ["--train_file", str(directory / "train.json"), "--validation_file", str(directory / "dev.json")]


def choice_files(directory: Path) -> list[str]:
    generator = random.Random(0)
    for name, size in (("train", 96), ("dev", 32)):
        records = []
        for _ in range(size):
            choices = [generator.choice(BAD) for _ in range(3)]
            label = generator.randrange(3)
            choices[label] = generator.choice(GOOD)
            records.append(json.dumps({"text": "the film was", "choices": choices, "label": label}))
        (directory / f"{name}.jsonl").write_text("\n".join(records))
    return ["--train_file", str(directory / "train.jsonl"), "--validation_file", str(directory / "dev.jsonl")]


TASK_FILES = {
    "sequence-classification": (classification_files, "accuracy"),
    "regression": (regression_files, "pearsonr"),
    "token-classification": (tagging_files, "f1"),
    "question-answering": (squad_files, "f1"),
    "multiple-choice": (choice_files, "accuracy"),
}


def kind_of(origin: tuple[str, bool]) -> tuple:
    """What decides how the scripts meet a model: its encoder's kind, and whether the peer's classes saved it."""
    case = Case(FAMILIES[origin[0]], "AutoModel")
    return case.has_attention, case.is_recurrent, bool(case.token_id_axes), origin[1]


def learned() -> list:
    """Every family one task at least, the tasks in turn; an encoder of subwords and one of words all of them.

    Quick are all tasks of the first family, and the first family of each kind of encoder.
    """
    every, seen = [], set()
    for number, origin in enumerate(ORIGINS):
        kind, every_task = kind_of(origin), origin[0] in ("bert", "cvt") and not origin[1]
        for place, task in enumerate(TASK_FILES):
            if not every_task and place != number % 2:
                continue
            quick = origin == ORIGINS[0] or kind not in seen
            seen.add(kind)
            every.append(pytest.param(origin, task, marks=() if quick else pytest.mark.slow))
    return every


def recurs(checkpoint: str) -> bool:
    """Whether words are read one after the other, which takes more steps to learn; see `Case.is_recurrent`."""
    config = AutoConfig.from_pretrained(checkpoint)
    return any(Case(family, "AutoModel").is_recurrent for family in FAMILIES.values() if type(config) is family.config)


@pytest.mark.parametrize(("checkpoint", "task"), learned(), indirect=["checkpoint"], ids=str)
def test_every_task_is_learned_saved_and_recorded(checkpoint, task, tmp_path, monkeypatch, capsys):
    make_files, metric = TASK_FILES[task]
    files, out = make_files(tmp_path), tmp_path / "out"
    steps = 150 if recurs(checkpoint) else 50
    flags = [task, "--model", checkpoint, *files, *QUICK, "--max_steps", steps]
    status = finetune(
        monkeypatch, *flags, "--output_dir", out, "--predictions_file", tmp_path / "new" / "predictions.jsonl"
    )
    auto_class = TASKS[task].auto_class
    if type(AutoConfig.from_pretrained(checkpoint)) not in getattr(transformers, auto_class)._model_mapping:
        assert status == 2
        assert f"cannot be opened with {auto_class}" in capsys.readouterr().err
        return
    assert status == 0
    summary = TrainingSummary.load(out)
    score, baseline = summary.metrics[f"eval_{metric}"], summary.metrics[f"baseline_{metric}"]
    perfect = 100.0 if task == "question-answering" else 1.0
    # A tagger's baseline looks the word up, and these words have one tag each: there, reaching it is all.
    assert score > 0.9 * perfect
    assert score > baseline or baseline == perfect
    assert (summary.task, summary.steps, summary.dataset) == (task, steps, Path(files[1]).name)

    shown = capsys.readouterr().out
    assert f"{score:.4f}" in shown
    assert f"{baseline:.4f}" in shown
    predictions = [json.loads(line) for line in (tmp_path / "new" / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 32
    assert all("prediction" in prediction for prediction in predictions)

    auto_class = getattr(transformers, f"AutoModelFor{''.join(word.title() for word in task.split('-'))}", None)
    model = (auto_class or AutoModelForSequenceClassification).from_pretrained(out)
    assert type(model).__name__ == summary.model_class
    assert AutoTokenizer.from_pretrained(out)("the film")["input_ids"]


def pair_files(directory: Path) -> list[str]:
    generator = random.Random(0)
    for name, size in (("train", 96), ("dev", 32)):
        rows = [[generator.choice(GOOD + BAD) for _ in range(2)] for _ in range(size)]
        lines = [f"the {a}\tthe film was {b}\t{float((a in GOOD) == (b in GOOD))}" for a, b in rows]
        (directory / f"{name}.tsv").write_text("\n".join(["one\tother\tlabel", *lines]) + "\n")
    files = ["--train_file", str(directory / "train.tsv"), "--validation_file", str(directory / "dev.tsv")]
    return [*files, "--text_columns", "one,other", "--both_orders", "true"]


@pytest.mark.parametrize("checkpoint", [("gpt", False)], indirect=True, ids=str)
def test_tokens_of_tasks_are_added_and_pairs_are_read_in_both_orders(checkpoint, tmp_path, monkeypatch, capsys):
    """The rows of new tokens are drawn as in a new model, here with a standard deviation of 0.1."""
    before = AutoTokenizer.from_pretrained(checkpoint)
    flags = ["regression", "--model", checkpoint, *pair_files(tmp_path), *QUICK]
    flags += ["--max_steps", 1, "--learning_rate", 1e-9, "--output_dir", tmp_path / "out"]
    assert finetune(monkeypatch, *flags) == 0
    assert "the embeddings of 3 new tokens are initialised" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert len(tokenizer) == len(before) + 3 == model.config.vocab_size
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("good", "bad").input_ids)
    assert [token for token in tokens if token[0] == "_"] == ["_start_", "_delimiter_", "_classify_"]
    rows = model.get_input_embeddings().weight[-3:]
    assert 0.07 < rows.std() < 0.13
    assert rows.mean().abs() < 0.04
    pair, exchanged = tokenizer("lovely", "the film"), tokenizer("the film", "lovely")
    both = tokenizer.pad([pair, exchanged], return_tensors="pt")
    logits = [model(**{name: each[order][None] for name, each in both.items()}).logits for order in ([0, 1], [1, 0])]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("one,other", "ForSequenceClassification does not support reading a pair in both orders"),
        ("one", "Only pairs of texts have two orders"),
    ],
)
def test_both_orders_of_what_has_one_is_an_error(columns, says, own_checkpoint, tmp_path, monkeypatch, capsys):
    flags = ["regression", "--model", own_checkpoint, *pair_files(tmp_path), *QUICK]
    assert finetune(monkeypatch, *flags, "--text_columns", columns, "--output_dir", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert says in error
    assert "--both_orders" in error


def test_a_fine_tuned_model_serves_a_pipeline_with_its_labels(own_checkpoint, tmp_path, monkeypatch):
    flags = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path), *QUICK]
    assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "out") == 0
    classify = pipeline("text-classification", model=str(tmp_path / "out"))
    assert [result["label"] for result in classify(["the film was lovely", "the film was awful"])] == ["pos", "neg"]


def test_a_recipe_gives_defaults_and_flags_win(own_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text("max_steps: 3\nlearning_rate: 1e-3\n")
    flags = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path)]
    flags += ["--recipe", tmp_path / "recipe.yaml", "--max_steps", "2", "--max_length", "24"]
    assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "out") == 0
    summary = TrainingSummary.load(tmp_path / "out")
    assert (summary.steps, summary.hyperparameters["learning_rate"]) == (2, 1e-3)


def test_a_sample_of_the_examples(own_checkpoint, tmp_path, monkeypatch, capsys):
    flags = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path)]
    flags += ["--max_steps", "1", "--max_length", "24", "--output_dir", tmp_path / "out", "--train_examples"]
    assert finetune(monkeypatch, *flags, 5) == 0
    assert "5 training and" in capsys.readouterr().out
    assert finetune(monkeypatch, *flags, 5000) == 2
    assert "--train_examples 5000" in capsys.readouterr().err


def test_fields_of_the_configuration_can_be_changed(own_checkpoint, tmp_path, monkeypatch, capsys):
    flags = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path)]
    flags += ["--max_steps", "1", "--max_length", "24", "--output_dir", tmp_path / "out", "--config_options"]
    assert finetune(monkeypatch, *flags, "hidden_dropout_prob=0.25") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_dropout_prob"] == 0.25
    assert finetune(monkeypatch, *flags, "hiden_dropout_prob=0.25") == 2
    assert "has no field hiden_dropout_prob" in capsys.readouterr().err


def test_resuming_gives_the_weights_of_an_uninterrupted_run(own_checkpoint, tmp_path, monkeypatch):
    flags = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path)]
    flags += ["--max_steps", "6", "--save_steps", "2", "--max_length", "24", "--save_total_limit", "9"]
    assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "whole") == 0
    stopped = tmp_path / "stopped"
    assert finetune(monkeypatch, *flags, "--output_dir", stopped) == 0
    for step in (4, 6):  # as if the run had been killed after step 3
        (stopped / f"checkpoint-{step}").rename(tmp_path / f"gone-{step}")
    assert finetune(monkeypatch, *flags, "--output_dir", stopped, "--resume") == 0
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == resumed


def test_resuming_takes_the_same_data_from_elsewhere_and_no_other(own_checkpoint, tmp_path, monkeypatch, capsys):
    files = classification_files(tmp_path)
    flags = ["sequence-classification", "--model", own_checkpoint, "--max_length", "24", "--max_steps", "1"]
    flags += ["--output_dir", tmp_path / "out"]
    assert finetune(monkeypatch, *flags, *files) == 0
    (tmp_path / "moved").mkdir()
    moved = [each.replace(str(tmp_path), str(tmp_path / "moved")) for each in files]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert finetune(monkeypatch, *flags, *moved, "--resume", "--predictions_file", tmp_path / "predictions.jsonl") == 0
    changed = ["--config_options", "hidden_dropout_prob=0.25"]
    assert finetune(monkeypatch, *flags, *moved, "--resume", *changed) == 2
    assert "config.hidden_dropout_prob is 0.25, was" in capsys.readouterr().err
    train_file = tmp_path / "moved" / "train.tsv"
    train_file.write_text(train_file.read_text().replace(GOOD[0], GOOD[1]))
    assert finetune(monkeypatch, *flags, *moved, "--resume") == 2
    assert "train_file is" in capsys.readouterr().err


def _remove_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def _grow_vocabulary(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"new{i}" for i in range(500)])
    tokenizer.save_pretrained(model)


def _truncate_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _change_width(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_remove_tokenizer, "tokenizer"),
        (_grow_vocabulary, "embeddings"),
        (_truncate_weights, "weights"),
        (_change_width, "config.json"),
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config"),
    ],
)
def test_damaged_checkpoints_are_errors_on_one_screen(damage, says, own_checkpoint, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(own_checkpoint).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    damage(model)
    flags = ["sequence-classification", "--model", model, *classification_files(tmp_path), *QUICK]
    assert finetune(monkeypatch, *flags, "--output_dir", tmp_path / "out") == 2
    error = capsys.readouterr().err
    message = error[error.rindex("CtxError") :]
    assert says in message
    assert str(model) in message
    assert "Fix:" in message
    assert len(message.splitlines()) < 25
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_length_over_the_models_limit_is_an_error(own_checkpoint, tmp_path, monkeypatch, capsys):
    flags = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path)]
    assert finetune(monkeypatch, *flags, "--max_length", "65", "--output_dir", tmp_path / "out") == 2
    assert "the model's limit of 64 positions" in capsys.readouterr().err


def test_flags_of_another_task_are_errors(own_checkpoint, tmp_path, monkeypatch, capsys):
    """On the command line, and in a recipe; before the model is opened."""
    (tmp_path / "recipe.yaml").write_text("max_target_length: 20\n")
    common = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path), *QUICK]
    recipe = ["--recipe", tmp_path / "recipe.yaml"]
    for given, says in (
        (["--num_beams", "3"], "Unknown arguments: --num_beams 3"),
        (recipe, "Unknown key 'max_target_length' in the recipe"),
    ):
        assert finetune(monkeypatch, *common, *given, "--output_dir", tmp_path / "out") == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_label_stops_a_real_process_with_status_2(own_checkpoint, tmp_path):
    flags = ["sequence-classification", "--model", own_checkpoint, *classification_files(tmp_path), *QUICK]
    (tmp_path / "dev.tsv").write_text("sentence\tgold\nthe film was great\tneutral\n")
    result = run_forked(*COMMAND, *flags, "--output_dir", tmp_path / "out")
    assert result.returncode == 2
    assert "The label 'neutral' does not occur in the training file, whose labels are: 'neg', 'pos'." in result.stderr
    assert "dev.tsv:2" in result.stderr
    assert "Traceback" not in result.stderr


# Two processes that meet in a file; tests/training/test_faults.py starts two by `accelerate launch`.
TWO_PROCESSES = """
import sys
from accelerate import debug_launcher
from hf_ctxmodels_cli import run
sys.argv.insert(1, "finetune")
debug_launcher(run, num_processes=2)
"""


def test_two_processes_give_the_losses_of_one(own_checkpoint, tmp_path):
    flags = ["token-classification", "--model", own_checkpoint, *tagging_files(tmp_path)]
    flags += ["--max_length", 24, "--max_steps", 4, "--logging_steps", 1, "--learning_rate", 1e-3]
    logs = {}
    for processes, command in ((1, COMMAND), (2, ["-c", TWO_PROCESSES])):
        out, size = tmp_path / f"out{processes}", 16 // processes
        result = run_forked(*command, *flags, "--output_dir", out, "--per_device_batch_size", size, cwd=ROOT)
        assert result.returncode == 0, result.stderr[-3000:]
        logs[processes] = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    for one, two in zip(logs[1], logs[2], strict=True):
        for name in ("loss", "grad_norm", "eval_loss", "eval_f1"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-5)
    assert TrainingSummary.load(tmp_path / "out2").global_batch_size == 16
