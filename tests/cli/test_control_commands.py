"""Control codes in pretraining, generation and evaluation; options of controlled generation."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from commands import command_output, run_command, save, tiny_pair
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

SOURCES = {"News": ["court", "mayor", "vote", "law"], "Farm": ["cow", "rain", "wheat", "barn"]}


def documents(source: str, count: int, seed: int) -> list[str]:
    rng = random.Random(f"{source} {seed}")
    return [" ".join(rng.choices([*SOURCES[source], "the", "a"], k=30)) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control")
    records = []
    for source in SOURCES:
        texts = documents(source, 60, 0)
        (folder / f"{source}.txt").write_text("\n\n".join(texts) + "\n")
        records += [{"text": text, "domain": source} for text in texts]
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    files = [folder / f"{source}.txt" for source in SOURCES]
    tokenizer = {"family": "gpt2", "vocab_size": 300, "output_dir": folder / "tokenizer"}
    assert run_command("data", "tokenizer", dataset=files, **tokenizer) == 0
    return folder


def flags(corpus: Path, output_dir: Path, **overrides: Any) -> dict[str, Any]:
    files = [corpus / f"{source}.txt" for source in SOURCES]
    sizes = ["hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2", "max_position_embeddings=64"]
    common = {
        "dataset": files,
        "control_codes": list(SOURCES),
        "validation_fraction": 0.1,
        "document_separator": "blank",
    }
    training = {"max_length": 32, "per_device_batch_size": 16, "learning_rate": 1e-2, "dataloader_workers": 0}
    training |= {"family": "gpt2", "tokenizer": corpus / "tokenizer", "config_options": sizes, "max_steps": 40}
    return common | training | {"save_steps": 0, "output_dir": output_dir} | overrides


@pytest.fixture(scope="module")
def model(corpus: Path) -> Path:
    folder = corpus / "model"
    assert run_command("pretrain", **flags(corpus, folder)) == 0
    return folder


def test_pretraining_with_control_codes(corpus: Path, model: Path, tmp_path: Path) -> None:
    """Codes are saved in configuration and tokenizer; a control column gives the same codes, also with prepared
    examples; a resumed run equals an uninterrupted one."""
    codes, tokenizer = AutoConfig.from_pretrained(model).control_codes, AutoTokenizer.from_pretrained(model)
    assert codes == {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in SOURCES}
    assert sorted(codes.values()) == [len(tokenizer) - 2, len(tokenizer) - 1]
    assert AutoConfig.from_pretrained(model).vocab_size == len(tokenizer)
    column = {"dataset": corpus / "all.jsonl", "control_column": "domain", "control_codes": []}
    column = flags(corpus, tmp_path / "column", max_steps=2) | column
    del column["control_codes"], column["document_separator"]
    assert run_command("pretrain", **column) == 0
    assert set(AutoConfig.from_pretrained(tmp_path / "column").control_codes) == set(SOURCES)
    names = ("dataset", "control_column", "validation_fraction", "max_length", "family", "tokenizer")
    prepare_flags = {name: column[name] for name in names} | {"num_proc": 1, "output_dir": tmp_path / "prepared"}
    assert run_command("data", "prepare", **prepare_flags) == 0
    pretrain_flags = {"dataset": tmp_path / "prepared", "output_dir": tmp_path / "from_prepared"}
    names = (
        "per_device_batch_size",
        "learning_rate",
        "dataloader_workers",
        "config_options",
        "max_steps",
        "save_steps",
    )
    assert run_command("pretrain", **{name: column[name] for name in names}, max_length=32, **pretrain_flags) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("column", "from_prepared")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert AutoConfig.from_pretrained(tmp_path / "from_prepared").control_codes

    training_flags = flags(corpus, tmp_path / "whole", max_steps=6, lr_scheduler="constant", save_steps=3)
    assert run_command("pretrain", **training_flags) == 0
    training_flags |= {"output_dir": tmp_path / "resumed"}
    assert run_command("pretrain", **training_flags | {"max_steps": 3}) == 0
    assert run_command("pretrain", "--resume", **training_flags) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_evaluate_control(corpus: Path, model: Path, capsys: pytest.CaptureFixture) -> None:
    """Short held-out windows are attributed to their code; generated texts contain the words of their code."""
    options = flags(corpus, model)
    names = ("dataset", "control_codes", "validation_fraction", "document_separator")
    options = {name: options[name] for name in names} | {"model": model, "length": 12}
    printed = command_output("evaluate control", **options, generated_texts=10)
    perplexities = {name: float(value) for name, value in re.findall(r"(right|wrong|none) ([\d.]+)", printed)}
    assert perplexities["right"] < 0.9 * perplexities["wrong"]
    accuracy, chance, baseline = map(
        float, re.search(r"accuracy ([\d.]+)  chance ([\d.]+)  naive Bayes ([\d.]+)", printed).groups()
    )
    assert accuracy > 0.9
    assert baseline > 0.9
    assert chance < 0.6
    assert float(re.search(r"generated texts, naive Bayes: accuracy ([\d.]+)", printed)[1]) > 0.8
    assert "trained" not in printed
    training_texts = options | {"validation_fraction": 0, "texts_per_code": 2}
    assert run_command("evaluate", "control", **training_texts) == 0
    assert "these are training texts" in capsys.readouterr().err
    assert "--generated_texts 100" in command_output("evaluate control", **training_texts, classifier="x", fails=True)
    del options["control_codes"]
    assert "no control codes" in command_output("evaluate control", **options, fails=True)


def test_generation_with_control_codes(model: Path, tmp_path: Path) -> None:
    texts = {}
    for code in SOURCES:
        sampled = {"decoding": "sample:top_p=0.9", "num_texts": 6, "max_new_tokens": 12}
        output_file = tmp_path / f"{code}.txt"
        command_output("generate", model=model, control=code, output_file=output_file, **sampled)
        texts[code] = output_file.read_text()
        assert len(texts[code].splitlines()) == 6
    for code, other_code in (("News", "Farm"), ("Farm", "News")):
        counts = [sum(texts[code].count(word) for word in SOURCES[name]) for name in (code, other_code)]
        assert counts[0] > 3 * counts[1]
    (tmp_path / "prompts.txt").write_text("the\na cow\n")
    files = {"model": model, "input": tmp_path / "prompts.txt", "max_new_tokens": 12}
    unpenalized = command_output("generate", **files, control="Farm")
    assert command_output("generate", **files, control="Farm", repetition_penalty=5.0) != unpenalized
    (tmp_path / "words.txt").write_text("vote\n")
    assert (
        command_output("generate", **files, control="Farm", bag_of_words=f"{tmp_path}/words.txt:bias=50").count("vote")
        > 10
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control": "Sport"}, r"no control code 'Sport'[\s\S]*Farm, News"),
        ({}, "no prompt"),
        ({"control": "News", "num_texts": 2}, "without sampling"),
        ({"control": "News", "fudge": "MODEL"}, "needs label"),
        ({"control": "News", "fudge": "MODEL:weight=2"}, "needs label"),
        ({"control": "News", "fudge": "MODEL:label=x,candidates=2"}, "Unknown option 'candidates'"),
        ({"control": "News", "fudge": "MODEL:label=x"}, "no labels"),
        ({"control": "News", "bag_of_words": "words.txt:weight=2"}, "Unknown option 'weight'"),
        ({"control": "News", "lower_case": True}, "pass --references"),
        ({"control": "News", "metrics": "rouge"}, "pass --references"),
        ({"fields": ["title"]}, "NAME=TEXT"),
        ({"fields": ["title=A cat"], "control": "News"}, "without --references and --control"),
        ({"fields": ["title=A cat"]}, "no field tokens"),
    ],
)
def test_invalid_generate_options(options: dict[str, Any], message: str, model: Path) -> None:
    options = {
        name: value.replace("MODEL", str(model)) if isinstance(value, str) else value for name, value in options.items()
    }
    assert re.search(message, command_output("generate", model=model, **options, fails=True))


def test_invalid_pretraining_options(corpus: Path, tmp_path: Path) -> None:
    error = command_output("pretrain", **flags(corpus, tmp_path / "out") | {"family": "bert"}, fails=True)
    assert "has no control codes" in error
    changed_flags = flags(corpus, tmp_path / "out", control_codes=["News"])
    assert "1 control codes" in command_output("pretrain", **changed_flags, fails=True)
    model_and_tokenizer = tiny_pair("gpt2", "AutoModelForCausalLM", ["a cat"], vocab_size=270)
    source = save(tmp_path / "pair", *model_and_tokenizer)
    changed_flags = flags(corpus, tmp_path / "out") | {"tokenizer": source, "model": source}
    del changed_flags["config_options"], changed_flags["family"]
    assert "'News' is not one token" in command_output("pretrain", **changed_flags, fails=True)


def test_generation_of_article_fields(tmp_path: Path) -> None:
    """Generates fields of one article, and human and machine-written texts of a file to train a detector."""
    texts = ["A cat sat on a mat in the rain.", "Rain in the north"]
    fields = {"max_position_embeddings": 64, "initializer_range": 0.3}
    model = save(tmp_path / "model", *tiny_pair("grover", "AutoModelForCausalLM", texts, **fields))
    options = {"model": model, "decoding": "sample:top_p=0.9", "max_new_tokens": 6}
    printed = command_output("generate", **options, fields=["title=Rain, rain", "date=2019-04-06"], num_texts=2)
    assert "2 texts generated" in printed
    row = {"domain": "a.org", "date": None, "authors": [], "title": texts[1], "article": texts[0] * 3, "summary": None}
    (tmp_path / "news.jsonl").write_text((json.dumps(row) + "\n") * 2)
    table = tmp_path / "detection.jsonl"
    command_output("generate", **options, input=tmp_path / "news.jsonl", target="article", output_file=table)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [row["label"] for row in rows] == ["human", "generated"] * 2
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert texts[0].startswith(rows[0]["text"])
    assert len(tokenizer.encode_text(rows[0]["text"])) == 6
    human_fields = {"domain": "a.org", "title": texts[1], "article": rows[0]["text"]}
    assert tokenizer(rows[0]["marked_text"]).input_ids == tokenizer.encode_fields(human_fields)
    assert rows[1]["text"] in rows[1]["marked_text"]
    files = {"train_file": table, "validation_file": table, "text_columns": "marked_text", "max_length": 48}
    loop = {
        "max_steps": 1,
        "per_device_batch_size": 4,
        "dataloader_workers": 0,
        "output_dir": tmp_path / "detector",
    }
    assert run_command("finetune", "sequence-classification", model=model, **files, **loop) == 0
    detector = AutoTokenizer.from_pretrained(tmp_path / "detector")
    marked_ids = detector(rows[0]["marked_text"]).input_ids
    assert marked_ids == [*tokenizer.encode_fields(human_fields), tokenizer.field_ids("summary")[0]]
    assert AutoConfig.from_pretrained(tmp_path / "detector").id2label == {0: "generated", 1: "human"}
    command_output(
        "generate", **options, input=tmp_path / "news.jsonl", target="title", output_file=tmp_path / "titles.txt"
    )
    assert len((tmp_path / "titles.txt").read_text().splitlines()) == 2
    (tmp_path / "untitled.jsonl").write_text((json.dumps(row | {"title": None}) + "\n") * 2)
    untitled = {"input": tmp_path / "untitled.jsonl", "target": "title"}
    assert "2 texts generated" in command_output("generate", **options, **untitled)
    error = command_output("generate", **options, **untitled, output_file=tmp_path / "titles.jsonl", fails=True)
    assert "No article has the field 'title'" in error
